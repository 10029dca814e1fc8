"""`qwen_quantize doctor`: whether this machine can do the main job, and what is missing for the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

import qwen_quantize
from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import Json

# As in pyproject.toml, which a test compares: what is installed may have been put there by other means than pip.
_NEEDED = {
    "torch": "2.8",
    "numpy": "1.26",
    "safetensors": "0.6",
    "tokenizers": "0.21",
    "transformers": "5.0",
    "gguf": "0.17",
    "jinja2": "3.1",
    "pyarrow": "15",
    "rich": "13",
    "typer": "0.15",
}
_SMALL_DISK = 1 << 30  # below this not even a small model and its staging folder fit
_SMALL_MEMORY = 2 << 30
# The packages that teach torch a vendor's device, and the device's name there; as `probe --on` takes it.
_PLUGINS = {"npu": "torch_npu", "mlu": "torch_mlu", "musa": "torch_musa", "gcu": "torch_gcu"}
_PREFIXES = ("cuda", *_PLUGINS)


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing that was looked at. needed: the main job cannot run without it; remedy: what to do, or ""."""

    name: str
    value: str
    good: bool
    needed: bool = False
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """A device that torch names. chip: the profile that its name matches, or "unknown"."""

    device: str
    title: str
    chip: str
    memory_bytes: int | None


def doctor_command(
    as_json: Json = False,
) -> None:
    """Versions, kernels, devices, room, and what is missing. Exit code 1: the main job cannot run here."""
    with guard(as_json):
        from qwen_quantize.cli.console import Speaker

        speaker = Speaker(as_json, quiet=False)
        packages = found_packages()
        findings = [*packages, *_kernels(packages), *_room(), *_extras()]
        torch_here = all(it.good for it in packages if it.name == "torch")
        devices = torch_devices() if torch_here else []
        able = all(it.good for it in findings if it.needed)
        _say(speaker, findings, devices, able)
        speaker.result(
            {
                "able": able,
                "qwen_quantize": qwen_quantize.__version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
                "findings": [asdict(it) for it in findings],
                "devices": [asdict(it) for it in devices],
            }
        )
        if not able:
            raise typer.Exit(1)


def found_packages() -> list[Observation]:
    """Python and every package that the program cannot do without, by what is installed; nothing is imported."""
    found = [
        Observation(
            "python", platform.python_version(), sys.version_info >= (3, 11), True, "use Python 3.11 or newer"
        )
    ]
    for name, least in _NEEDED.items():
        version = _version(name)
        good = version is not None and _numbers(version) >= _numbers(least)
        found.append(
            Observation(name, version or "not installed", good, True, f'pip install "{name}>={least}"')
        )
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels(packages: list[Observation]) -> list[Observation]:
    """The C kernels of each room, which are built here if they were not; results are the same without them."""
    if not all(it.good for it in packages if it.name in ("torch", "numpy")):
        return []
    from qwen_quantize.formats.native import native_status

    room = Path(qwen_quantize.__file__).parent
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    found = [
        Observation("C compiler", compiler or "none", compiler is not None, remedy="install gcc or clang")
    ]
    for source in sorted(room.glob("*/*.c")):
        status = native_status(source)
        good = status == "native"
        remedy = "until then slower torch code computes the same results"
        found.append(Observation(f"kernels of {source.relative_to(room)}", status, good, remedy=remedy))
    return found


def _room() -> list[Observation]:
    from qwen_quantize.report.numbers import human_bytes

    memory, free = memory_bytes(), shutil.disk_usage(Path.cwd()).free
    scratch = shutil.disk_usage(tempfile.gettempdir()).free
    enough = memory is None or memory >= _SMALL_MEMORY
    plan = "give --max-memory, and see --dry-run for what a model needs"
    return [
        Observation("processors", str(_processors()), True),
        Observation(
            "memory available", "not known" if memory is None else human_bytes(memory), enough, remedy=plan
        ),
        Observation(
            "disk free here", human_bytes(free), free >= _SMALL_DISK, remedy="write to a larger disk"
        ),
        Observation(
            "disk free for temporary files", human_bytes(scratch), scratch >= _SMALL_DISK, remedy="set TMPDIR"
        ),
    ]


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """What Linux calls MemAvailable; None elsewhere."""
    table = Path("/proc/meminfo")
    found = (
        re.search(r"^MemAvailable:\s+(\d+) kB$", table.read_text(), re.MULTILINE) if table.is_file() else None
    )
    return int(found[1]) * 1024 if found else None


def _extras() -> list[Observation]:
    extras = (
        ("datasets", "to calibrate on data sets of the hub"),
        ("lm-eval", "to ask tasks of lm-evaluation-harness"),
        ("compressed-tensors", "to load that layout in transformers"),
        ("accelerate", "to load FP8 folders in transformers"),
    )
    found = []
    for name, use in extras:
        version = _version(name)
        words = f"{version or 'not installed'} ({use})"
        found.append(Observation(name, words, version is not None, remedy=f"pip install {name}"))
    return found


def torch_devices() -> list[Device]:
    """The accelerators that torch sees here. A vendor's plug-in is imported only where it is installed."""
    import importlib

    import torch

    for plugin in _PLUGINS.values():
        if importlib.util.find_spec(plugin) is not None:
            try:
                importlib.import_module(plugin)
            except (ImportError, OSError, RuntimeError):
                continue  # installed, but its driver is not: then there is no such device here
    found = []
    for kind in _PREFIXES:
        module = getattr(torch, kind, None)
        try:
            count = module.device_count() if module is not None and module.is_available() else 0
        except (RuntimeError, OSError, AttributeError):
            count = 0
        for index in range(count):
            title = str(module.get_device_name(index))  # type: ignore[union-attr]
            found.append(Device(f"{kind}:{index}", title, chip_named(title), _device_memory(module, index)))
    return found


def _device_memory(module: Any, index: int) -> int | None:
    try:
        return int(module.get_device_properties(index).total_memory)
    except (AttributeError, RuntimeError):
        return None


def chip_named(title: str) -> str:
    """The one profile whose name, or alias of at least three characters, is a word of a device's name; else "unknown".

    Words are compared without their punctuation: `NVIDIA H100 80GB HBM3` has `h100`, `Ascend910B3` has `910b3`.
    """
    from qwen_quantize.chip_profiles.loader import chip_names

    words = re.findall(r"[a-z0-9]+", title.lower())
    joined = {
        "".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, min(i + 4, len(words)) + 1)
    }
    joined |= {word.removeprefix(prefix) for word in joined for prefix in ("ascend", "mlu", "mtt")}
    matches: dict[str, int] = {}
    for chip in chip_names():
        for name in (chip.name, *chip.aliases):
            plain = re.sub(r"[^a-z0-9]", "", name)
            if len(plain) >= 3 and plain in joined:
                matches[chip.name] = max(matches.get(chip.name, 0), len(plain))
    longest = [name for name, length in matches.items() if length == max(matches.values())]
    return longest[0] if len(longest) == 1 else "unknown"


def _say(speaker: Any, findings: list[Observation], devices: list[Device], able: bool) -> None:
    speaker.say(f"qwen_quantize {qwen_quantize.__version__} on {platform.platform()}")
    for it in findings:
        mark = "ok" if it.good else "MISSING" if it.needed else "less"
        speaker.say(
            f"{mark:8}{it.name}: {it.value}" + ("" if it.good or not it.remedy else f" -> {it.remedy}")
        )
    for device in devices:
        known = (
            "unknown chip: name its profile yourself, or measure it with `qwen_quantize probe`"
            if device.chip == "unknown"
            else f"by its name probably {device.chip}"
        )
        speaker.say(f"device  {device.device}: {device.title}; {known}")
    if not devices:
        speaker.say("device  none that torch sees; none is needed: all but `probe` computes on the CPU")
    speaker.say("the main job can run here" if able else "the main job cannot run here: see MISSING above")
