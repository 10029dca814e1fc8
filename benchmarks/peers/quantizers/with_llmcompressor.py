"""llm-compressor: rtn, gptq, awq, SmoothQuant with W8A8, FP8_DYNAMIC, MXFP4, MXFP8."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from job import Job, peak_memory_bytes, run, write_weights
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

PRESETS = {"fp8": "FP8_DYNAMIC", "mxfp4": "MXFP4", "mxfp8": "MXFP8"}


def recipe_of(job: Job) -> list[Any]:
    """The modifiers of a method, each as its documentation's examples have it."""
    if job.method in PRESETS:
        return [QuantizationModifier(targets="Linear", scheme=PRESETS[job.method], ignore=["lm_head"])]
    if job.method.startswith("smoothquant"):
        quantizer = GPTQModifier if job.method == "smoothquant_gptq" else QuantizationModifier
        smooth = SmoothQuantModifier(smoothing_strength=0.8)
        return [smooth, quantizer(targets="Linear", scheme="W8A8", ignore=["lm_head"])]
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=job.symmetric, strategy="group", group_size=job.group_size
    )
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    match job.method:
        case "rtn":
            return [QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
        case "gptq":
            return [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
        case "awq":
            return [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
    raise ValueError(f"no method {job.method!r} here")


def quantize(job: Job) -> dict[str, Any]:
    with job.clock("load"):
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    recipe = recipe_of(job)
    calibrated = len(recipe) > 1 or isinstance(recipe[0], GPTQModifier)
    options: dict[str, Any] = {}
    if calibrated:
        windows = job.windows()
        # A list is as good as a data set to torch, though its types do not say so.
        rows: Any = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in windows]
        options = {
            "dataset": DataLoader(rows, batch_size=1),
            "num_calibration_samples": windows.shape[0],
            "max_seq_length": windows.shape[1],
        }
    with job.clock("quantize"):
        oneshot(model=model, recipe=recipe, **options)
    peak = peak_memory_bytes()
    compressor = ModelCompressor.from_pretrained_model(model)
    with job.clock("save"):
        model.save_pretrained(job.quantized, save_compressed=True)
    compressor.decompress_model(model)
    write_weights(job, model.state_dict())
    return {"peak_memory_bytes": peak, "calibrated": calibrated}


if __name__ == "__main__":
    run("llmcompressor", quantize)
