"""Whether a folder is still the one that its `qwen_quantize.json` was written for."""

from __future__ import annotations

from collections.abc import Mapping

from qwen_quantize.checkpoint.contract_folder import ModelFolder, shown_json
from qwen_quantize.checkpoint.contract_linear import LayoutCheck
from qwen_quantize.checkpoint.finding import Finding, warning
from qwen_quantize.checkpoint.mx_oss_layout import stack_of

MANIFEST = "qwen_quantize.json"
MAX_MANIFEST_BYTES = 512_000_000  # a record per linear, of which a big model has 50,000
_REMEDY = "quantize again, or remove qwen_quantize.json if the folder was changed on purpose"


def check_manifest(folder: ModelFolder, layout: str, check: LayoutCheck) -> list[Finding]:
    if MANIFEST not in folder.files:
        return []
    manifest = folder.json_file(MANIFEST, MAX_MANIFEST_BYTES)
    if manifest is None:
        return []
    found = []
    if manifest.get("layout") != layout:
        found.append(
            Finding(
                MANIFEST,
                "manifest-layout",
                f"it says layout {shown_json(manifest.get('layout'))} and the folder is {layout}; its measurements "
                "are of "
                "other files",
                _REMEDY,
            )
        )
    stored = sum(tensor.info.nbytes for tensor in folder.tensors.values())
    if manifest.get("output_bytes") != stored:
        found.append(
            Finding(
                MANIFEST,
                "manifest-bytes",
                f"it says {shown_json(manifest.get('output_bytes'))} bytes of tensors and the files hold {stored}; "
                "tensors "
                "were added or lost since",
                _REMEDY,
            )
        )
    named = {module: record.get("error", 0) for module, record in recorded_linears(manifest).items()}
    lost = next(
        (module for module in named if not {module, stack_of(module)} & check.linears.keys()),
        None,
    )
    if lost is not None and check.linears:
        found.append(
            Finding(
                lost,
                "manifest-linear",
                f"{MANIFEST} says that it was quantized and the folder has no quantized linear of that name",
                _REMEDY,
            )
        )
    for module, error in named.items():
        if not isinstance(error, int | float) or error < 0:
            found.append(
                warning(
                    module,
                    "manifest-linear",
                    f"{MANIFEST} records the error {shown_json(error)} for it",
                    _REMEDY,
                )
            )
            break
    return found


def recorded_linears(manifest: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Module -> its record, of the linears that the manifest names."""
    found: dict[str, Mapping[str, object]] = {}
    layers, head = manifest.get("layers"), manifest.get("head")
    for record in [*(layers if isinstance(layers, list) else ()), {"linears": head}]:
        linears = record.get("linears") if isinstance(record, Mapping) else None
        for linear in linears if isinstance(linears, list) else ():
            if isinstance(linear, Mapping) and isinstance(linear.get("name"), str):
                found[linear["name"]] = linear
    return found
