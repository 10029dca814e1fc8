"""Whether the codes of every linear are those that the manifest was written for, which takes reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor

from qwen_quantize.checkpoint.contract_manifest import MANIFEST, MAX_MANIFEST_BYTES, recorded_linears
from qwen_quantize.checkpoint.finding import Finding
from qwen_quantize.checkpoint.gguf import GgufSource
from qwen_quantize.checkpoint.json_file import read_object
from qwen_quantize.checkpoint.source import CheckpointSource, open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.errors import UserError

_REMEDY = "copy the folder again, or quantize again; remove qwen_quantize.json if the weights were changed on purpose"
_MOST = 40


def check_codes(folder: Path, weights: Path) -> list[Finding]:
    """A finding for each linear whose codes have another SHA-256 than its record; [] without a readable manifest.

    weights: what is opened, the folder or a GGUF in it. What cannot be read at all is for other rules to say.
    """
    if not (folder / MANIFEST).is_file():
        return []
    try:
        manifest = read_object(folder / MANIFEST, MAX_MANIFEST_BYTES)
        source = open_source(weights, allow_download=False)
    except UserError:
        return []
    linears = LinearReader(source)
    found: list[Finding] = []
    for module, record in recorded_linears(manifest).items():
        sha256 = record.get("sha256")
        if not isinstance(sha256, str) or len(found) >= _MOST:
            continue
        codes = _codes(source, linears, module)
        if codes is None:
            continue
        if hashlib.sha256(codes.contiguous().numpy().tobytes()).hexdigest() != sha256:
            found.append(
                Finding(
                    module,
                    "codes-changed",
                    f"its codes are not those that {MANIFEST} has the SHA-256 of; engines compute with other weights "
                    "than were measured, and no error tells",
                    _REMEDY,
                )
            )
    return found


def _codes(source: CheckpointSource, linears: LinearReader, module: str) -> Tensor | None:
    """The elements as they were hashed; None for a linear that is not there, or cannot be read."""
    try:
        if isinstance(source, GgufSource):
            found = source.read_quantized(f"{module}.weight")
            return None if found is None else found.codes
        if not linears.is_quantized(module):
            return None
        return linears.read_elements(module)
    except (UserError, ValueError):
        return None
