"""HQQ: half-quadratic zero points, without calibration data; it has no symmetric form."""

from __future__ import annotations

from typing import Any

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from job import Job, peak_memory_bytes, run, write_weights
from transformers import AutoModelForCausalLM


def quantize(job: Job) -> dict[str, Any]:
    if job.symmetric or job.method != "rtn":
        raise ValueError("HQQ has zero points always, and one method")
    with job.clock("load"):
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    config = BaseQuantizeConfig(nbits=4, group_size=job.group_size, axis=1)
    with job.clock("quantize"):
        AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=torch.float32, device="cpu")
    peak = peak_memory_bytes()
    state, size = dict(model.state_dict()), 0
    for name, module in model.named_modules():
        if isinstance(module, HQQLinear):
            state[f"{name}.weight"] = module.dequantize()
            meta = (module.meta["scale"], module.meta["zero"])
            size += module.W_q.nbytes + sum(part.nbytes for part in meta)
    write_weights(job, state)
    return {"peak_memory_bytes": peak, "calibrated": False, "linear_bytes": size}


if __name__ == "__main__":
    run("hqq", quantize)
