"""What every row of the comparison starts from: the model in float32, the calibration windows, the two texts.

The calibration windows are those that the command line draws from the same file with the same seed, so that all
tools see the same tokens. The text unlike them is the language reference that every Python carries for `help()`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
from safetensors.torch import save_file
from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.pipeline.run import source_tokenizer
from qwen_quantize.pipeline.texts import calibration_batches, evaluation_windows, load_documents

SAMPLES, LENGTH, SEED = 32, 512, 0
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Inputs:
    """model: a Hugging Face folder in float32; windows: each text's token ids, int64 [n, 512]."""

    model: Path
    dataset: Path
    calibration: Path
    windows: Mapping[str, Tensor]
    samples: int

    def sha256(self) -> str:
        """Names the model, the calibration windows and the texts; rows with another one are made anew."""
        digest = hashlib.sha256(open_source(self.model).fingerprint().encode())
        digest.update(self.calibration.read_bytes())
        for name, windows in self.windows.items():
            digest.update(f"{name}{tuple(windows.shape)}".encode() + windows.numpy().tobytes())
        return digest.hexdigest()


def prepare(real_model: Path, folder: Path, tokens: int, trial: bool) -> Inputs:
    """Make in `folder` whatever is not there yet; a trial has the first two layers and four windows only."""
    if not list(real_model.glob("*.gguf")):
        tool = ROOT / "tools" / "real_model.py"
        subprocess.run([sys.executable, str(tool), "--cache", str(real_model)], check=True, stdout=sys.stderr)
    (gguf,) = real_model.glob("*.gguf")
    whole = folder / "model"
    if not (whole / "config.json").is_file():
        _convert(gguf, whole)
    model = _shortened(whole, folder / "model-trial", layers=2) if trial else whole
    tokenizer = source_tokenizer(open_source(whole))
    dataset = real_model / "calib.jsonl"
    samples = 4 if trial else SAMPLES
    drawn = calibration_batches(load_documents(dataset), tokenizer, samples, LENGTH, SEED).tokens
    calibration = folder / ("calibration-trial.safetensors" if trial else "calibration.safetensors")
    save_file({"input_ids": drawn}, calibration)
    texts = {"like": (real_model / "heldout.txt").read_text(encoding="utf-8"), "unlike": reference_text()}
    windows = {
        name: evaluation_windows(text, tokenizer, LENGTH, tokens).windows for name, text in texts.items()
    }
    return Inputs(model, dataset, calibration, windows, samples)


def reference_text() -> str:
    """Prose paragraphs of Python's language reference, topics in alphabetical order; no code, no grammar."""
    kept = []
    for _, topic in sorted(topics.topics.items()):
        for paragraph in re.split(r"\n\s*\n", topic):
            lines = paragraph.splitlines()
            prose = all(line and not line.startswith((" ", "*", "+", "|")) for line in lines)
            signs = sum(not (sign.isalpha() or sign in " \n.,;:") for sign in paragraph)
            if prose and paragraph[-1] in ".:" and len(paragraph) > max(200, 20 * signs):
                kept.append(" ".join(lines))
    return "\n\n".join(dict.fromkeys(kept))


def _convert(gguf: Path, folder: Path) -> None:
    """The GGUF as transformers reads it, in a folder that has never heard of GGUF."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # transformers refuses to save a model that came from a GGUF file: its tensors go into a fresh one.
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = read.config.to_dict()
    kind = fields.pop("model_type")
    fields.pop("quantization_config", None)
    fresh = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32)
    fresh.load_state_dict(read.state_dict())
    partial = folder.with_suffix(".unfinished")
    shutil.rmtree(partial, ignore_errors=True)
    fresh.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    partial.rename(folder)


def _shortened(whole: Path, folder: Path, layers: int) -> Path:
    """A copy of the model with its first layers only."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    source = open_source(whole)
    kept = {}
    for name in source.names():
        found = re.match(r"model\.layers\.(\d+)\.", name)
        if found is None or int(found[1]) < layers:
            kept[name] = source.read(name)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for path in whole.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    config = {**source.config, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder
