"""A device that torch drives, with the switches that would falsify a probe held in place."""

from __future__ import annotations

import importlib
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from qwen_quantize.chip_profiles.probe_device import Pair, Unavailable
from qwen_quantize.errors import UserError

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "int8": torch.int8,
    "int32": torch.int32,
}
# The package that teaches torch a vendor's device string.
PLUGINS = {"npu": "torch_npu", "mlu": "torch_mlu", "musa": "torch_musa", "gcu": "torch_gcu"}
_CASTS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "fp16", "bf16", "int8")
# Words with which a device says that the host did the work.
_HOST_WORDS = ("fall back", "fallback", "falling back", "not implemented on", "run on the cpu", "on cpu")
_CUDA_SWITCHES = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


class TorchDevice:
    """`device` as torch spells it; UserError when this torch or this machine has no such device."""

    def __init__(self, device: str) -> None:
        kind = device.partition(":")[0]
        plugin = PLUGINS.get(kind)
        if plugin is not None:
            try:
                importlib.import_module(plugin)
            except ImportError as error:
                raise UserError(
                    f"--on {device}: the device needs {plugin}, which is not installed"
                ) from error
        try:
            self._device = torch.device(device)
            torch.ones(2, device=self._device).sum().item()
        except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"--on {device}: torch cannot use this device here: {first}") from error
        self._name = device

    @property
    def name(self) -> str:
        return self._name

    def pairs(self) -> tuple[Pair, ...]:
        offered = [Pair("fp32", "fp32"), Pair("bf16", "bf16"), Pair("fp16", "fp16")]
        if self._device.type == "cuda":
            offered += [Pair("bf16", "fp32"), Pair("fp16", "fp32"), Pair("tf32", "fp32")]
            offered += [Pair("e4m3fn+fast", "fp32")]
        eights = [Pair(name, "fp32") for name in ("e4m3fn", "e5m2", "e4m3fnuz")]
        return (*offered, *eights, Pair("int8", "int32"))

    def casts(self) -> tuple[str, ...]:
        return _CASTS

    def matmul(self, a: Tensor, b: Tensor, pair: Pair) -> Tensor:
        operands = pair.operands.partition("+")[0]
        with _pinned(tf32=operands == "tf32"), _heard() as said:
            try:
                left = a.to(self._device).to(DTYPES[operands])
                right = b.to(self._device).to(DTYPES[operands])
                out = self._product(left, right, operands, pair)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                raise Unavailable(_first_line(error)) from error
        self._not_the_host(out, said)
        return out.cpu() if pair.output == "int32" else out.to(torch.float32).cpu()

    def cast(self, x: Tensor, target: str) -> Tensor:
        with _heard() as said:
            try:
                out = x.to(self._device).to(DTYPES[target])
            except (RuntimeError, NotImplementedError, TypeError) as error:
                raise Unavailable(_first_line(error)) from error
        self._not_the_host(out, said)
        if target == "int8":
            return out.cpu()
        return out.cpu().view(torch.int16 if target in ("fp16", "bf16") else torch.uint8)

    def about(self) -> Mapping[str, str]:
        found = {"torch": str(torch.__version__), "device": self._name, "machine": platform.machine()}
        if self._device.type == "cpu":
            found["processor"] = _processor()
            found["kernel"] = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
            return found
        module = getattr(torch, self._device.type, None)
        if module is not None and hasattr(module, "get_device_name"):
            found["processor"] = str(module.get_device_name(self._device))
        if self._device.type == "cuda":
            found["toolkit"] = str(torch.version.cuda or torch.version.hip)
        plugin = PLUGINS.get(self._device.type)
        if plugin is not None:
            found[plugin] = str(getattr(importlib.import_module(plugin), "__version__", "unknown"))
        return found

    def _product(self, left: Tensor, right: Tensor, operands: str, pair: Pair) -> Tensor:
        output = DTYPES[pair.output]
        if operands == "int8":
            return torch._int_mm(left, right.T)
        if operands.startswith("e"):
            one = torch.ones((), device=self._device)
            fast = pair.operands.endswith("+fast")
            return torch._scaled_mm(
                left, right.T, scale_a=one, scale_b=one, out_dtype=output, use_fast_accum=fast
            )
        if left.dtype != output:
            return torch.mm(left, right.T, out_dtype=output)
        return torch.matmul(left, right.T)

    def _not_the_host(self, out: Tensor, said: list[str]) -> None:
        if out.device.type != self._device.type:
            raise Unavailable(f"the result came back on {out.device}: the host computed it")
        if self._device.type != "cpu":
            for line in said:
                if any(word in line.lower() for word in _HOST_WORDS):
                    raise Unavailable(f"the host computed it: {line}")


@contextmanager
def _heard() -> Iterator[list[str]]:
    """The warnings that torch gave meanwhile."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield said
        finally:
            said += [str(item.message) for item in caught]


@contextmanager
def _pinned(tf32: bool) -> Iterator[None]:
    """float32 stays float32 (or becomes TF32 where asked), and nothing is reduced in a narrower type."""
    matmul = torch.backends.cuda.matmul
    mkldnn = getattr(torch.backends.mkldnn, "matmul", None)
    settings: list[tuple[object, str, object]] = [
        (matmul, name, False) for name in _CUDA_SWITCHES if hasattr(matmul, name)
    ]
    if hasattr(matmul, "fp32_precision"):
        settings.append((matmul, "fp32_precision", "tf32" if tf32 else "ieee"))
    else:
        settings.append((matmul, "allow_tf32", tf32))
    if mkldnn is not None and hasattr(mkldnn, "fp32_precision"):
        settings.append((mkldnn, "fp32_precision", "ieee"))
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in settings]
    try:
        for holder, name, value in settings:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            for line in file:
                if line.startswith(("model name", "Hardware", "cpu model")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
