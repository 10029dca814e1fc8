"""Writing a conversion linear by linear, reading it back, and the record of where it came from."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qwen_quantize
from qwen_quantize.checkpoint.compressed_tensors import CompressedTensorsLayout
from qwen_quantize.checkpoint.gguf_layout import GgufLayout
from qwen_quantize.checkpoint.json_file import RECORD_BYTES, read_object
from qwen_quantize.checkpoint.kv_side import KV_FILE, compressed_kv_scheme, engine_scales, read_kv_plan
from qwen_quantize.checkpoint.layouts import LAYOUTS
from qwen_quantize.checkpoint.source import CheckpointSource, open_source
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.checkpoint.writer import OutputFolder, filling, require_free_space
from qwen_quantize.errors import UserError
from qwen_quantize.formats.activation_form import ActivationForm
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.models.lookup import architecture_of
from qwen_quantize.pipeline.conversion import Conversion, StoredCodes, fit_codes, requantize_linear
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.kv_tensors import is_kv_scale
from qwen_quantize.pipeline.manifest import MANIFEST_NAME
from qwen_quantize.pipeline.output_files import (
    OutputFiles,
    gguf_file,
    is_reordered,
    safetensors_files,
    write_in_order,
)
from qwen_quantize.pipeline.recipe import Output
from qwen_quantize.pipeline.records import EXACT_DB
from qwen_quantize.pipeline.tensors import Action

_ROWS = 4096  # of a kept tensor that are copied together
_SYNC_LINEARS = 64

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Converted:
    """losses: relative squared error of each linear that was quantized again; all others are exact. codes: SHA-256 of
    its codes.

    input_scales_changed: modules whose inputs are cast with scales of another format, for the layout has no word for
    the old one: powers of two become any numbers or the other way round.
    """

    folder: OutputFolder
    losses: Mapping[str, float]
    codes: Mapping[str, str]
    input_scales_changed: tuple[str, ...]

    @property
    def largest_loss(self) -> float:
        return max(self.losses.values(), default=0.0)


def convert(
    conversion: Conversion,
    source: CheckpointSource,
    output: Output,
    request: Mapping[str, Any],
    progress: Progress,
) -> Converted:
    """Write all into the staging folder and read it back; a UserError leaves nothing behind unless resumable."""
    files = _files(conversion, source)
    if not output.resume:
        require_free_space(output.path.parent, sum(file.nbytes for file in files.shards))
    folder = files.open(output.path, resume=output.resume, overwrite=output.overwrite)
    with filling(folder):
        journal = Journal(
            folder.staging / "journal.jsonl",
            {"version": qwen_quantize.__version__, "request": dict(request), "source": source.fingerprint()},
            output.resume,
        )
        losses, hashes = _write(conversion, StoredCodes(source), folder, journal, progress)
        folder.add_file("config.json", _config(conversion, source))
        for name, content in source.side_files().items():
            folder.add_file(name, content)
        cache = _folder_of(source) / KV_FILE
        if cache.is_file():  # what it says of keys and values is the same in every layout
            folder.add_file(KV_FILE, cache)
        for name, described in conversion.layout.side_files(conversion.schemes, conversion.outputs).items():
            folder.add_file(name, described)
        folder.sync()
        folder.write_index()
        changed = _verify(conversion, StoredCodes(source), StoredCodes(open_source(folder.staging)), progress)
    return Converted(folder, losses, hashes, changed)


def _files(conversion: Conversion, source: CheckpointSource) -> OutputFiles:
    layout = conversion.layout
    if isinstance(layout, GgufLayout):
        file = gguf_file(layout, conversion.tensors, conversion.schemes, conversion.shapes, source)
        return OutputFiles((file,), {})
    return safetensors_files(layout, conversion.outputs)


def _write(
    conversion: Conversion, stored: StoredCodes, folder: OutputFolder, journal: Journal, progress: Progress
) -> tuple[dict[str, float], dict[str, str]]:
    """(losses, SHA-256 of the codes) of the linears that are quantized again."""
    losses: dict[str, float] = {}
    hashes: dict[str, str] = {}
    for record in journal.units.values():
        losses |= record["losses"]
        hashes |= record["codes"]
    fresh: dict[str, float] = {}
    codes: dict[str, str] = {}
    count = len(journal.units)
    for number, tensor in enumerate(conversion.tensors, start=1):
        if not all(folder.is_written(output.name) for output in tensor.outputs):
            if is_reordered(conversion.layout, tensor):
                assert isinstance(conversion.layout, GgufLayout)
                write_in_order(conversion.layout, tensor, stored.linears, folder)
            elif tensor.action is Action.KEEP:
                _copy(tensor.name, tensor.outputs[0].dtype, stored.source, folder)
            else:
                assert tensor.module is not None
                packed, again = _packed(conversion, stored, tensor.module)
                for name, part in packed.items():
                    folder.write(name, part)
                if again is not None:
                    fresh[tensor.module], codes[tensor.module] = again
        if number % _SYNC_LINEARS == 0 or number == len(conversion.tensors):
            # First the losses: of a tensor on record as written nobody would measure the loss again.
            journal.finish(f"tensors.{count}", {"losses": fresh, "codes": codes})
            folder.sync()
            losses |= fresh
            hashes |= codes
            count, fresh, codes = count + 1, {}, {}
            progress("tensors", number, len(conversion.tensors))
    return {module: losses[module] for module in conversion.schemes if module in losses}, hashes


def _packed(
    conversion: Conversion, stored: StoredCodes, module: str
) -> tuple[dict[str, Tensor], tuple[float, str] | None]:
    """(the linear's tensors, its loss and the SHA-256 of its codes where it was quantized again)."""
    if module in conversion.requantized:
        scheme = conversion.schemes[module]
        quantized, loss = requantize_linear(stored, module, scheme)
        sha256 = hashlib.sha256(quantized.codes.numpy().tobytes()).hexdigest()
        return conversion.layout.pack(module, quantized, scheme), (loss, sha256)
    return fit_codes(stored, conversion.layout, module, zero_points=conversion.zero_points).tensors, None


def _copy(name: str, dtype: str, source: CheckpointSource, folder: OutputFolder) -> None:
    kind, shape = DTYPES[dtype].torch, source.info(name).shape
    assert kind is not None
    if not shape:
        folder.write(name, source.read(name).to(kind))
        return
    for start in range(0, shape[0], _ROWS):
        stop = min(start + _ROWS, shape[0])
        folder.write_rows(name, start, source.read_rows(name, start, stop).to(kind))


def _config(conversion: Conversion, source: CheckpointSource) -> bytes:
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    described = conversion.layout.quantization_config(conversion.schemes, conversion.kept)
    if described:
        kv_scheme = _kv_scheme(conversion, source)
        if kv_scheme is not None:
            described["kv_cache_scheme"] = kv_scheme
        config["quantization_config"] = described
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _kv_scheme(conversion: Conversion, source: CheckpointSource) -> Mapping[str, Any] | None:
    """`kv_cache_scheme` where scales of keys and values come along: the source's own, or of the file beside it."""
    if not isinstance(conversion.layout, CompressedTensorsLayout) or not any(
        is_kv_scale(output.name) for output in conversion.outputs
    ):
        return None
    own = source.config.get("quantization_config")
    if isinstance(own, Mapping) and isinstance(own.get("kv_cache_scheme"), Mapping):
        return dict(own["kv_cache_scheme"])
    plan = read_kv_plan(_folder_of(source))
    return None if plan is None or not engine_scales(plan.scheme) else compressed_kv_scheme(plan.scheme)


def _folder_of(source: CheckpointSource) -> Path:
    return source.path if source.path.is_dir() else source.path.parent


def _verify(
    conversion: Conversion, before: StoredCodes, after: StoredCodes, progress: Progress
) -> tuple[str, ...]:
    """The modules whose inputs get scales of another format; UserError where anything else is not as it was."""
    exact = [module for module in conversion.schemes if module not in conversion.requantized]
    dropped, changed = set(conversion.casts_dropped), []
    for number, module in enumerate(exact, start=1):
        if not torch.equal(before.linears.read(module), after.linears.read(module)):
            raise UserError(
                f"{module!r} does not read back as it was; the conversion is not exact, please report it"
            )
        old, new = _inputs(before, module), _inputs(after, module)
        if new != (None if module in dropped else old):
            if old is None or new is None or old[1:] != new[1:]:
                raise UserError(
                    f"layout {conversion.layout.name} would treat the inputs of {module!r} otherwise than the source "
                    "does; choose another --layout"
                )
            changed.append(module)
        if number % _SYNC_LINEARS == 0 or number == len(exact):
            progress("linears read back", number, len(exact))
    return tuple(changed)


def _inputs(stored: StoredCodes, module: str) -> tuple[object, ...] | None:
    """(format of the scales, all else that is done to inputs), without the names of tensors."""
    if stored.source.kind == "gguf":
        return None
    form: ActivationForm | None = stored.linears.describe(module).activation
    if form is None:
        return None
    static = None if form.input_scale is None else float(stored.source.read(form.input_scale).float())
    second = None if form.global_scale is None else float(stored.source.read(form.global_scale).float())
    return form.scale_format, form.format, form.granularity, form.dynamic, form.symmetric, static, second


def conversion_manifest(
    conversion: Conversion, converted: Converted, source: CheckpointSource, request: Mapping[str, Any]
) -> dict[str, Any]:
    """The source's own manifest where it has one, with the new layout and what the conversion did to each linear."""
    own = _folder_of(source) / MANIFEST_NAME
    data = own.read_bytes() if own.is_file() else None
    manifest: dict[str, Any] = (
        read_object(own, RECORD_BYTES) if data is not None else _bare(conversion, source)
    )
    path = source.path.resolve()
    manifest.pop("check", None)  # it was of the source's files
    return _described(manifest, conversion, converted) | {
        "layout": conversion.layout.name,
        "output_bytes": sum(output.nbytes for output in conversion.outputs),
        "converted_from": {
            "path": str(path),
            "kind": source.kind,
            "layout": manifest.get("layout") or layout_of(source),
            "fingerprint": source.fingerprint(),
            "manifest_sha256": None if data is None else hashlib.sha256(data).hexdigest(),
        },
        "conversion": {
            "tool": {"name": "qwen_quantize", "version": qwen_quantize.__version__},
            "request": dict(request),
            "exact": not conversion.requantized,
            "linears": len(conversion.schemes),
            "requantized": len(conversion.requantized),
            "largest_relative_squared_error": converted.largest_loss,
            "relative_squared_errors": dict(converted.losses),
            "input_casts_dropped": len(conversion.casts_dropped),
            "input_scales_changed": len(converted.input_scales_changed),
        },
    }


def _described(manifest: dict[str, Any], conversion: Conversion, converted: Converted) -> dict[str, Any]:
    """The source's manifest with what each linear is now; what was measured of it stands where it still holds."""

    def linear(record: dict[str, Any]) -> dict[str, Any]:
        module = record.get("name")
        scheme = conversion.schemes.get(str(module))
        if module is None or scheme is None:
            return record
        outputs = conversion.layout.outputs(module, conversion.shapes[module], scheme)
        now = {
            "scheme": scheme.name,
            "region": scheme.weight.granularity.describe(),
            "symmetric": scheme.weight.symmetric,
            "bits": 8 * sum(output.nbytes for output in outputs),
        }
        if module not in conversion.requantized:
            return record | now
        loss = converted.losses[module]
        return {
            "name": module,
            "shape": list(conversion.shapes[module]),
            **now,
            "method": "conversion",
            "error": loss,
            "weight_sqnr_db": -10 * math.log10(loss) if loss > 0 else EXACT_DB,
            "sha256": converted.codes[module],
            "notes": [
                "quantized again by a conversion; the error is that of its weights against the source's"
            ],
        }

    def linears(records: object) -> list[Any]:
        found = records if isinstance(records, list) else []
        return [linear(one) if isinstance(one, dict) else one for one in found]

    schemes = list(conversion.schemes.values())
    principal = max(dict.fromkeys(schemes), key=schemes.count)
    grid = principal.weight.granularity
    found = manifest | {"scheme": _scheme_record(principal), "block": [max(grid.rows, 1), grid.cols]}
    if isinstance(manifest.get("layers"), list):
        found["layers"] = [
            one | {"linears": linears(one.get("linears"))} if isinstance(one, dict) else one
            for one in manifest["layers"]
        ]
    if isinstance(manifest.get("head"), list):
        found["head"] = linears(manifest["head"])
    return found


def _scheme_record(scheme: Scheme) -> dict[str, Any]:
    grid, activation = scheme.weight.granularity, scheme.activation
    return {
        "name": scheme.name,
        "region": grid.describe(),
        "group_size": grid.cols,
        "symmetric": scheme.weight.symmetric,
        "weight": scheme.weight.format.name,
        "activation": None if activation is None else activation.format.name,
        "scale": scheme.weight.scale_format.name,
    }


def _bare(conversion: Conversion, source: CheckpointSource) -> dict[str, Any]:
    actions = [tensor.action for tensor in conversion.tensors]
    return {
        "tool": {"name": "qwen_quantize", "version": qwen_quantize.__version__},
        "source": {
            "path": str(source.path.resolve()),
            "kind": source.kind,
            "architecture": architecture_of(source.config),
            "fingerprint": source.fingerprint(),
        },
        "request": {},
        "chip": {"name": "cpu", "why": "the source names no chip"},
        "method": "conversion",
        "tensors": {
            "quantized": actions.count(Action.QUANTIZE),
            "kept": actions.count(Action.KEEP),
            "dropped": 0,
        },
        "source_bytes": sum(source.info(name).nbytes for name in source.names()),
    }


def layout_of(source: CheckpointSource) -> str:
    """The name of the layout that a checkpoint without a manifest is in."""
    if source.kind == "gguf":
        return "gguf"
    found = source.config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    names = {"fp8": "deepseek-fp8", "hif8": "hif8-plain"}
    name = names.get(str(method), str(method))
    return name if name in LAYOUTS else str(method)
