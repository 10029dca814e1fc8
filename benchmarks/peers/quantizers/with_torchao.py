"""torchao: weight-only int4 in the packings that ask for no other package, and int8 or fp8 with cast activations."""

from __future__ import annotations

from typing import Any

import torch
from job import Job, peak_memory_bytes, run, write_weights
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    IntxWeightOnlyConfig,
    PerRow,
    quantize_,
)
from torchao.quantization.granularity import PerGroup
from torchao.quantization.quant_primitives import MappingType
from transformers import AutoModelForCausalLM


def config_of(job: Job) -> Any:
    match job.method:
        case "rtn":
            mapping = MappingType.SYMMETRIC if job.symmetric else MappingType.ASYMMETRIC
            return IntxWeightOnlyConfig(
                weight_dtype=torch.int4,  # type: ignore[attr-defined]  # which torch's own stubs do not know
                granularity=PerGroup(job.group_size),
                mapping_type=mapping,
            )
        case "w8a8":
            return Int8DynamicActivationInt8WeightConfig()
        case "fp8":
            return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    raise ValueError(f"no method {job.method!r} here")


def _in_layers(_: torch.nn.Module, name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj")


def quantize(job: Job) -> dict[str, Any]:
    with job.clock("load"):
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    with job.clock("quantize"):
        quantize_(model, config_of(job), filter_fn=_in_layers)
    peak = peak_memory_bytes()
    state = {name: _plain(tensor) for name, tensor in model.state_dict().items()}
    write_weights(job, state)
    return {"peak_memory_bytes": peak, "calibrated": False}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if type(tensor).__module__.startswith("torchao") else tensor


if __name__ == "__main__":
    run("torchao", quantize)
