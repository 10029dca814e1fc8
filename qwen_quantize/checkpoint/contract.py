"""Will an engine load this folder and compute what was measured: every rule, on headers and small tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_quantize.checkpoint.contract_ascend import check_ascend
from qwen_quantize.checkpoint.contract_block_fp8 import check_block_fp8
from qwen_quantize.checkpoint.contract_compressed import check_compressed
from qwen_quantize.checkpoint.contract_engines import ENGINES, Engine
from qwen_quantize.checkpoint.contract_folder import ModelFolder, shown_json
from qwen_quantize.checkpoint.contract_general import (
    check_cache_scales,
    check_fused,
    check_side_files,
    check_tensor_scales,
)
from qwen_quantize.checkpoint.contract_ignored import check_ignored
from qwen_quantize.checkpoint.contract_linear import PLAIN, LayoutCheck
from qwen_quantize.checkpoint.contract_manifest import check_manifest
from qwen_quantize.checkpoint.contract_model import check_model, view_model
from qwen_quantize.checkpoint.contract_mx_oss import OTHER_FAMILY, check_mx_oss
from qwen_quantize.checkpoint.contract_parallel import check_heads, check_shards
from qwen_quantize.checkpoint.contract_plain import check_hif8, check_plain, check_tiles
from qwen_quantize.checkpoint.contract_support import check_support
from qwen_quantize.checkpoint.contract_weights import DEFAULT_LIMIT, check_weights
from qwen_quantize.checkpoint.contract_words import check_awq, check_gptq
from qwen_quantize.checkpoint.finding import Finding, Severity
from qwen_quantize.checkpoint.layouts import LAYOUTS
from qwen_quantize.errors import UserError

# quant_method -> the layout and its rules.
_METHODS: dict[str, tuple[str, Callable[[ModelFolder, Mapping[str, Any]], LayoutCheck]]] = {
    "fp8": ("deepseek-fp8", check_block_fp8),
    "compressed-tensors": ("compressed-tensors", check_compressed),
    "awq": ("awq", check_awq),
    "gptq": ("gptq", check_gptq),
    "hif8": ("hif8-plain", check_hif8),
    "mxfp4": ("mx-oss", check_mx_oss),
    "qwen_quantize-tiles": ("tiles", check_tiles),
}
_AUTO_ROUND = {"auto_round:auto_awq": "awq", "auto_round:awq": "awq"}
# Readers of layouts that this program may not write itself.
_READERS: dict[str, tuple[str, ...]] = {
    "ascend": ("vllm-ascend",),
    "gguf": ("llama.cpp",),
}


@dataclass(frozen=True, slots=True)
class Served:
    """How the folder will be served. engine: None for the readers of its layout; shards: devices that share it.

    chip, family: the device, by the name and family of its profile; weights_limit: bytes of codes that are read,
    None for all of them.
    """

    engine: str | None = None
    shards: int = 1
    chip: str | None = None
    family: str | None = None
    weights_limit: int | None = DEFAULT_LIMIT


@dataclass(frozen=True, slots=True)
class CheckReport:
    """engines: those whose contract was held against the folder; asked: whether the user named the engine."""

    findings: tuple[Finding, ...]
    engines: tuple[Engine, ...]
    asked: bool
    layout: str
    tensors: int
    weight_bytes: int
    weight_bytes_read: int

    @property
    def errors(self) -> int:
        return sum(finding.severity is Severity.ERROR for finding in self.findings)

    def record(self) -> dict[str, Any]:
        """What scripts and the manifest read."""
        return {
            "findings": [finding.record() for finding in self.findings],
            "engines": [
                {"name": engine.name, "tested": engine.tested, "asked": self.asked} for engine in self.engines
            ],
            "layout": self.layout,
            "tensors": self.tensors,
            "errors": self.errors,
            "weight_bytes": self.weight_bytes,
            "weight_bytes_read": self.weight_bytes_read,
        }


def check_folder(path: Path, served: Served | None = None) -> CheckReport:
    """Every breach of the contracts. UserError where there is no model folder, or its config.json is none."""
    served = served or Served()
    if served.engine is not None and served.engine not in ENGINES:
        raise UserError(f"--engine {served.engine!r} is not one of the engines: {', '.join(ENGINES)}")
    file = _gguf_file(path)
    if file is not None:
        return _check_gguf(file, served)
    folder = ModelFolder(path)
    layout, check = _by_layout(folder)
    settings = _settings(folder)
    cache = check_cache_scales(folder, settings, check)
    view = view_model(folder)
    linears = list(view.linears)
    codes, read, there = check_weights(folder, check.known, served.weights_limit)
    findings = [
        *check.findings,
        *view.findings,
        *([] if view.blueprint is None else check_model(folder, view.blueprint, check)),
        *check_ignored(folder, settings, linears, check),
        *check_fused(linears, folder, check),
        *check_tensor_scales(check),
        *cache,
        *codes,
        *check_side_files(folder, str(settings.get("quant_method") or "")),
        *check_manifest(folder, layout, check),
        *_changed_codes(path, path, served),
    ]
    if served.shards > 1:
        findings += [
            *check_heads(folder.config, served.shards),
            *check_shards(check.linears, folder.config, served.shards),
        ]
    ours = any(
        linear.kind == OTHER_FAMILY for linear in check.linears.values()
    )  # no engine's, as its plan said
    engines = () if ours and served.engine is None else _engines(layout, served)
    for engine in engines:
        findings += _softened(
            check_support(engine, layout, check.linears, served.chip, served.family),
            served.engine is not None,
        )
    return CheckReport(
        # What opening found comes first: whatever follows may come of it.
        tuple(dict.fromkeys([*folder.findings, *findings])),
        engines,
        served.engine is not None,
        layout,
        len(folder.tensors),
        there,
        read,
    )


def _gguf_file(path: Path) -> Path | None:
    """The GGUF that is meant by itself or as the only weights of a folder."""
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    if not path.is_dir():
        return None
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError:
        return None
    found = [name for name in names if name.lower().endswith(".gguf")]
    if found and not any(".safetensors" in name for name in names):
        if len(found) > 1:
            raise UserError(f"{path} holds {len(found)} GGUF files; give the path of one")
        return path / found[0]
    return None


def _check_gguf(file: Path, served: Served) -> CheckReport:
    from qwen_quantize.checkpoint.contract_gguf import check_gguf  # its package takes time to import

    findings, tensors, weights = check_gguf(file, served.weights_limit)
    findings += _changed_codes(file.parent, file, served)
    engines = _engines("gguf", served)
    for engine in engines:
        findings += _softened(
            check_support(engine, "gguf", {}, served.chip, served.family), served.engine is not None
        )
    return CheckReport(
        tuple(dict.fromkeys(findings)),
        engines,
        served.engine is not None,
        "gguf",
        tensors,
        weights.get("there", 0),
        weights.get("read", 0),
    )


def _changed_codes(folder: Path, weights: Path, served: Served) -> list[Finding]:
    """Only where all weights are asked for, since it reads and unpacks each of them."""
    if served.weights_limit is not None:
        return []
    from qwen_quantize.checkpoint.contract_codes import (
        check_codes,  # it opens GGUFs too, whose package takes time
    )

    return check_codes(folder, weights)


def _settings(folder: ModelFolder) -> Mapping[str, Any]:
    found = folder.config.get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def _by_layout(folder: ModelFolder) -> tuple[str, LayoutCheck]:
    """The layout by what the folder says of itself, and what its rules found."""
    if folder.description is not None:
        return "ascend", check_ascend(folder, folder.description)
    settings = folder.config.get("quantization_config")
    if settings is None:
        return "plain", check_plain(folder)
    if not isinstance(settings, Mapping):
        check = check_plain(folder)
        check.add(
            "config.json",
            "config-value",
            f"quantization_config is {shown_json(settings)} and must be an object; engines stop at it",
            "write the quantization_config of the layout, or remove it",
        )
        return "unknown", check
    method = settings.get("quant_method")
    if method == "auto-round":
        method = _AUTO_ROUND.get(str(settings.get("packing_format")), "gptq")
    if not isinstance(method, str) or method not in _METHODS:
        check = LayoutCheck()
        check.known |= set(folder.tensors)
        check.add(
            "config.json",
            "method-unknown",
            f"quant_method is {shown_json(method)}, whose tensors have no rules here ({', '.join(_METHODS)} have); "
            "only the "
            "general rules were applied",
            "correct quant_method if it is misspelt",
        )
        return "unknown", check
    layout, rules = _METHODS[method]
    check = rules(folder, settings)
    narrow = any(stored.info.dtype not in PLAIN for stored in folder.tensors.values())
    if not check.linears and not narrow and folder.tensors:
        check.add(
            "config.json",
            "config-unused",
            f"it says quant_method {method!r} and no tensor is quantized; engines look for scales that do not exist",
            "remove quantization_config, or write the quantized weights",
        )
    return layout, check


def readers_of(layout: str) -> tuple[str, ...]:
    """The engines, by our names, that a layout says it is read by."""
    known = LAYOUTS.get(layout)
    if known is None:
        return _READERS.get(layout, ())
    named = {_engine_of(reader) for reader in known.readers}
    return tuple(name for name in ENGINES if name in named)


def _engine_of(reader: str) -> str | None:
    """Our name of the engine in a layout's words, such as "transformers with the package compressed-tensors"."""
    text = reader.lower().replace("vllm ascend", "vllm-ascend")
    return max((name for name in ENGINES if text.startswith(name)), key=len, default=None)


def _engines(layout: str, served: Served) -> tuple[Engine, ...]:
    names = readers_of(layout) if served.engine is None else (served.engine,)
    return tuple(ENGINES[name] for name in names)


def _softened(findings: list[Finding], asked: bool) -> list[Finding]:
    """An engine that nobody asked for cannot make a folder wrong: what it refuses is said as a warning."""
    if asked:
        return findings
    return [
        Finding(one.tensor, one.rule, one.message, one.remedy, Severity.WARNING, one.engine)
        for one in findings
    ]
