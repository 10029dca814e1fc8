"""A linear as a contract sees it, and the tensors of one module held against what its layout demands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qwen_quantize.checkpoint.contract_folder import ModelFolder
from qwen_quantize.checkpoint.finding import Finding, Severity
from qwen_quantize.checkpoint.tensor_info import TensorInfo

PLAIN = ("F32", "BF16", "F16", "F64")
FLOATS = ("F32", "BF16", "F16")
_AGAIN = "quantize the model again, or download the folder again"
_SMALLEST_HALF = 2.0**-14


@dataclass(frozen=True, slots=True)
class CheckedLinear:
    """A quantized linear.

    kind: a key of the engines' tables. shape: (out, in), None where its tensors do not tell. region: output and
    input features that no shard may cut. group: input features that share a scale, 0 for the whole row. form: all
    that linears which engines fuse must share. tensor_scales: values of scales of the whole tensor, by suffix.
    """

    module: str
    kind: str
    shape: tuple[int, int] | None
    region: tuple[int, int] = (1, 1)
    group: int = 0
    symmetric: bool = True
    casts_inputs: bool = False
    form: str = ""
    parts: frozenset[str] = frozenset()
    tensor_scales: tuple[tuple[str, float], ...] = ()

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.module


@dataclass(slots=True)
class LayoutCheck:
    """What the rules of a layout found: the quantized linears by module, the tensors that belong to them."""

    linears: dict[str, CheckedLinear] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def add(
        self, tensor: str, rule: str, message: str, remedy: str, severity: Severity = Severity.ERROR
    ) -> None:
        self.findings.append(Finding(tensor, rule, message, remedy, severity))

    def take(self, linear: CheckedLinear) -> None:
        self.linears[linear.module] = linear
        self.known |= linear.parts


class ModuleParts:
    """The tensors of one module; what is missing or wrong becomes a finding of `check`."""

    def __init__(self, folder: ModelFolder, module: str, check: LayoutCheck) -> None:
        self.folder = folder
        self.module = module
        self.check = check
        self.suffixes = frozenset(folder.modules.get(module, ()))
        self.parts: set[str] = set()
        self.scales: list[tuple[str, float]] = []

    def name(self, suffix: str) -> str:
        return f"{self.module}.{suffix}"

    def info(self, suffix: str) -> TensorInfo | None:
        return self.folder.info(self.name(suffix)) if suffix in self.suffixes else None

    def part(
        self,
        suffix: str,
        dtypes: Collection[str],
        shapes: Collection[Sequence[int]] | None,
        *,
        rule: str = "scale",
        beside: str = "weight",
        wrong_dtype: str = "engines read its bytes as other numbers, or stop",
    ) -> TensorInfo | None:
        """A tensor that must be there; None, with a finding, unless it is and fits.

        rule: the findings are `<rule>-missing`, `<rule>-dtype` and `<rule>-shape`.
        """
        name, info = self.name(suffix), self.info(suffix)
        if info is None:
            self.check.add(
                name,
                f"{rule}-missing",
                f"{self.name(beside)!r} is there without it; engines stop, or take 1 or random values in its place",
                _AGAIN,
            )
            return None
        self.parts.add(name)
        fits = True
        if info.dtype not in dtypes:
            self.check.add(
                name,
                f"{rule}-dtype",
                f"it is {info.dtype} and must be {' or '.join(dtypes)}; {wrong_dtype}",
                "store it in that dtype (the same values; bytes of exponents are moved by a view, never cast)",
            )
            fits = False
        if shapes is not None and tuple(info.shape) not in {tuple(shape) for shape in shapes}:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(map(tuple, shapes)))
            self.check.add(
                name,
                f"{rule}-shape",
                f"its shape is {list(info.shape)}; the weight and the quantization config make it {wanted}, and "
                "engines "
                "stop at the difference",
                f"correct the group or block size in config.json if the tensors are right; else {_AGAIN}",
            )
            fits = False
        return info if fits else None

    def matrix(self, suffix: str, dtypes: Collection[str]) -> TensorInfo | None:
        info = self.part(suffix, dtypes, None, rule="weight", beside=suffix)
        if info is not None and (len(info.shape) != 2 or 0 in info.shape):
            self.check.add(
                info.name,
                "weight-shape",
                f"its shape is {list(info.shape)}; the weight of a linear has two dimensions",
                _AGAIN,
            )
            return None
        return info

    def read(self, suffix: str) -> Tensor | None:
        """The values; None, with a finding, where the file is cut."""
        found = self.folder.read(self.name(suffix))
        if found is None:
            self.check.add(self.name(suffix), "header", "its bytes cannot be read; the file is cut", _AGAIN)
        return found

    def positive(self, suffix: str, *, rule: str = "scale-value", signed: bool = False) -> Tensor | None:
        """float32 values of scales, which must be positive and finite; None with a finding where they are not.

        signed: they may be negative, as those of symmetric integers, whose range has one step more below zero.
        """
        stored = self.read(suffix)
        if stored is None:
            return None
        values = stored.float()
        if not values.numel():
            return None
        low, high = (float(bound) for bound in torch.aminmax(values.abs() if signed else values))
        if not (low > 0 and high < float("inf")):
            self.check.add(
                self.name(suffix),
                rule,
                f"it holds {_first_bad(values, signed)}; a scale is "
                f"{'finite and not 0' if signed else 'positive and finite'}, and whatever this one multiplies or "
                "divides comes out as zeros, with the wrong sign or as NaN",
                "quantize the linear again; a block of zeros has any positive scale",
            )
            return None
        if stored.dtype == torch.float16 and low < _SMALLEST_HALF:
            self.check.add(
                self.name(suffix),
                "scale-subnormal",
                f"its smallest value, {low:.3g}, is subnormal in FP16; it has lost digits, and kernels that flush "
                "subnormals take 0",
                "scale the model's weights up, or take a layout whose scales are float32 or bfloat16",
                Severity.WARNING,
            )
        return values

    def exponents(self, suffix: str) -> None:
        """Bytes of E8M0 scales: 0xFF is NaN."""
        stored = self.read(suffix)
        if stored is not None and bool((stored.view(torch.uint8) == 0xFF).any()):
            self.check.add(
                self.name(suffix),
                "scale-nan",
                "it holds the exponent byte 0xFF, which is NaN; every product with its block is NaN",
                "quantize the linear again",
            )

    def single(self, suffix: str, *, missing: str = "input-scale", shared: bool = False) -> None:
        """A float32 scale of one value, which must be there and be positive."""
        info = self.part(suffix, ("F32", "BF16", "F16"), [(1,), ()], rule=missing)
        if info is None:
            return
        values = self.positive(suffix, rule=f"{missing}-value")
        if values is not None and shared:
            self.scales.append((suffix, float(values.reshape(()))))

    def take(self, linear: CheckedLinear) -> None:
        """Note the module as a quantized linear, with the parts and tensor scales seen so far."""
        self.check.take(replace(linear, parts=frozenset(self.parts), tensor_scales=tuple(self.scales)))


def _first_bad(values: Tensor, signed: bool) -> str:
    flat = values.flatten()
    bad = flat[~(torch.isfinite(flat) & ((flat != 0) if signed else (flat > 0)))]
    return f"{float(bad[0]):g} at {bad.numel()} of {flat.numel()} places"
