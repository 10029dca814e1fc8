"""The small models and the texts that ship with the package; LICENSE-DATA.md says where they come from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from qwen_quantize.errors import UserError


def embedded_model_path() -> Path:
    """The Hugging Face folder of the dense Qwen3-style model: bfloat16 weights, tokenizer, configs."""
    return _path("dense")


def embedded_moe_path() -> Path:
    """The Hugging Face folder of the DeepSeek-V3-style model: latent attention, 16 experts, an MTP layer.

    bfloat16 weights (the routers' correction biases float32), the dense model's tokenizer, configs.
    """
    return _path("moe")


def embedded_by_name(name: str) -> Path | None:
    """The folder that `embedded:dense` or `embedded:moe` means; None for any other text."""
    match name:
        case "embedded:dense":
            return embedded_model_path()
        case "embedded:moe":
            return embedded_moe_path()
    return None


def calibration_text_path() -> Path:
    """JSON lines, each `{"text": passage}`; none of them was trained on or is held out."""
    return _path("calibration.jsonl")


def heldout_text_path() -> Path:
    """UTF-8 text from a novel that neither training nor calibration sees."""
    return _path("heldout.txt")


def local_tasks_path() -> Path:
    """A folder of small tasks made from the held-out text: for each a .jsonl of items and lm_eval's .yaml."""
    return _path("tasks")


def _path(name: str) -> Path:
    found = files(__name__) / name
    # A package imported from a zip archive has no paths to hand to readers that map files into memory.
    if not isinstance(found, Path):
        raise UserError(f"{found} lies in an archive: install qwen-quantize unpacked, for example with pip")
    if not found.exists():
        raise UserError(f"{found} is missing from the installation: install qwen-quantize again")
    return found
