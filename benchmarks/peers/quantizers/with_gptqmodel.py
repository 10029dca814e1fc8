"""GPTQModel: GPTQ and plain rounding."""

from __future__ import annotations

import os
from typing import Any

# Its loader asks for two workers and by default has one on two cores; it reads this while it is imported.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from job import Job, peak_memory_bytes, run, write_weights


def quantize(job: Job) -> dict[str, Any]:
    config = QuantizeConfig(bits=4, group_size=job.group_size, sym=job.symmetric, device="cpu")
    with job.clock("load"):
        model = GPTQModel.load(str(job.model), config)
    windows = job.windows()
    rows = [{"input_ids": ids.tolist(), "attention_mask": [1] * ids.numel()} for ids in windows]
    with job.clock("quantize"):
        model.quantize(rows, batch_size=1)
    peak = peak_memory_bytes()
    with job.clock("save"):
        model.save(str(job.quantized))
    # Its linears decode to 16 bits only.
    loaded = GPTQModel.load(str(job.quantized), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
    state = dict(loaded.model.state_dict())
    for name, module in loaded.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            state[f"{name}.weight"] = module.dequantize_weight().T
    write_weights(job, state)
    return {"peak_memory_bytes": peak, "calibrated": True}


if __name__ == "__main__":
    run("gptqmodel", quantize)
