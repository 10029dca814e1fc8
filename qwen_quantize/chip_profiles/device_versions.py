"""Versions of everything below torch that may change a device's bits, as far as torch or its vendor's package tells.

Nothing here fails: what a package does not tell is left out. The names `driver`, `firmware` and `toolkit` are those of
the components that a profile's facts may depend on.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from qwen_quantize.chip_profiles.probe_torch import PLUGINS

_EMULATED = "emulated"
# Where the kernel says which driver it has loaded.
_DRIVER_FILES = {"cuda": "/sys/module/nvidia/version", "hip": "/sys/module/amdgpu/version"}
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12", "nvidia-cublas-cu11")
# What a version of CANN's parts is called there.
_CANN_PARTS = {
    "toolkit": "CANN",
    "driver": "DRIVER",
    "operators": "OPP",
    "kernels of operators": "OPP_KERNEL",
}
_CPU_LIBRARIES = {
    "blas library": r"Math Kernel Library Version (\S+)|OpenBLAS (\S+)",
    "onednn": r"(?:MKL-DNN|oneDNN) v(\S+)",
    "openmp": r"OpenMP (\d+)",
}
_LONGEST = 200


def device_versions(device: str) -> dict[str, str]:
    """By name, for a device as `--on` takes it; nothing for one that is emulated."""
    kind, _, index = device.partition(":")
    if kind == _EMULATED:
        return {}
    found = dict(_cpu() if kind == "cpu" else _accelerator(kind, int(index) if index.isdigit() else 0))
    return {name: text for name, value in found.items() if (text := _line(value))}


def _cpu() -> Iterator[tuple[str, object]]:
    """Which libraries torch multiplies matrices with on the host."""
    about = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=([^,\s]+)", about)
    if blas is not None:
        yield "blas", blas[1]
    for name, pattern in _CPU_LIBRARIES.items():
        match = re.search(pattern, about)
        if match is not None:
            yield name, next(group for group in match.groups() if group)
    capability = getattr(getattr(torch.backends, "cpu", None), "get_cpu_capability", None)
    if capability is not None:
        yield "cpu capability", capability()
    yield "threads", torch.get_num_threads()


def _accelerator(kind: str, index: int) -> Iterator[tuple[str, object]]:
    if kind == "cuda":
        yield from _cuda()
    version = getattr(torch.version, kind, None)  # torch_musa sets torch.version.musa
    if version and kind != "cuda":
        yield "toolkit", version
    module = getattr(torch, kind, None)
    properties = _asked(module, "get_device_properties", index)
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    if major is not None and minor is not None:
        yield "compute capability", f"{major}.{minor}"
    architecture = getattr(properties, "gcnArchName", None)
    if architecture and torch.version.hip:
        yield "architecture", architecture
    package = _package(PLUGINS.get(kind))
    if package is not None:
        yield package.__name__, getattr(package, "__version__", None)
    if kind == "npu" and package is not None:
        yield from _npu(package)


def _cuda() -> Iterator[tuple[str, object]]:
    hip = torch.version.hip
    yield "toolkit", hip or torch.version.cuda
    driver = Path(_DRIVER_FILES["hip" if hip else "cuda"])
    if driver.is_file():
        yield "driver", driver.read_text(encoding="utf-8", errors="replace")
    yield "cudnn", _asked(torch.backends.cudnn, "version")
    for name in () if hip else _CUBLAS:
        try:
            yield "cublas", importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return


def _npu(package: ModuleType) -> Iterator[tuple[str, object]]:
    """torch_npu tells the versions of CANN from 8.1.RC1 on, and an empty one before."""
    inner = getattr(package, "npu", None)
    yield "soc", _asked(inner, "get_soc_version")
    holders = (getattr(package, "utils", None), getattr(inner, "utils", None))
    holder = next((item for item in holders if hasattr(item, "get_cann_version")), None)
    for name, part in _CANN_PARTS.items():
        yield name, _asked(holder, "get_cann_version", part)


def _asked(holder: object, name: str, *arguments: object) -> object:
    """What a function that may not be there, or may not work here, says; else None."""
    function = getattr(holder, name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except (RuntimeError, AssertionError, ValueError, TypeError, AttributeError, OSError, ImportError):
        return None


def _package(name: str | None) -> ModuleType | None:
    if name is None:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _line(value: object) -> str:
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() else " " for char in text).strip()[:_LONGEST]
