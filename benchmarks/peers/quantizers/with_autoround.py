"""AutoRound. A method is SCHEME-ALGORITHM.

An algorithm that is a number is that many steps of signed gradients (0: searched ranges weighted by an importance
matrix); `awq` and `awqclip` are its AWQ before that, `neuqi` its search of scales and zero points together.
"""

from __future__ import annotations

from typing import Any

import torch
from auto_round import AutoRound
from auto_round.algorithms.quantization.rtn.config import OptimizedRTNConfig
from auto_round.algorithms.transforms.awq.config import AWQConfig
from job import Job, peak_memory_bytes, run, write_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

SCHEMES = {"w8a8": "INT8", "mxfp4": "MXFP4", "mxfp8": "MXFP8"}


def algorithm_of(name: str, integers: dict[str, Any]) -> dict[str, Any]:
    """The arguments of AutoRound that choose it."""
    match name:
        case "awq" | "awqclip":
            return {"alg_configs": AWQConfig(apply_clip=name == "awqclip", **integers)}
        case "neuqi":
            return {"alg_configs": OptimizedRTNConfig(enable_neuqi=True, **integers)}
    return {"iters": int(name), **integers}


def quantize(job: Job) -> dict[str, Any]:
    scheme, _, algorithm = job.method.partition("-")
    with job.clock("load"):
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(job.model)
    windows = job.windows()
    integers = {} if scheme in SCHEMES else {"bits": 4, "group_size": job.group_size, "sym": job.symmetric}
    with job.clock("quantize"):
        rounder = AutoRound(
            model,
            tokenizer,
            scheme=SCHEMES.get(scheme, "W4A16"),
            dataset=[window.unsqueeze(0) for window in windows],
            nsamples=windows.shape[0],
            seqlen=windows.shape[1],
            device_map="cpu",
            amp=False,  # float32 as for all others; with bf16 it would round the whole model to it
            **algorithm_of(algorithm, integers),
        )
        model, _ = rounder.quantize()
    peak = peak_memory_bytes()
    if scheme not in SCHEMES:  # of those it has packed the weights by now: they are read from its checkpoint
        write_weights(job, model.state_dict())
    # Its own layout for zero points asks for a class of another package, which has changed since.
    with job.clock("save"):
        rounder.save_quantized(str(job.quantized), format=_format(scheme, job.symmetric))
    return {"peak_memory_bytes": peak, "calibrated": True}


def _format(scheme: str, symmetric: bool) -> str:
    if scheme in SCHEMES:
        return "llm_compressor"
    return "auto_round" if symmetric else "auto_round:auto_gptq"


if __name__ == "__main__":
    run("auto-round", quantize)
