"""Made-up but plausible records for the report's tests; a function of their arguments, nothing random."""

from __future__ import annotations

import hashlib
import math
from typing import Any

KINDS = (
    ("self_attn.q_proj", (2048, 1024), 1.0),
    ("self_attn.k_proj", (1024, 1024), 1.1),
    ("self_attn.v_proj", (1024, 1024), 0.9),
    ("self_attn.o_proj", (1024, 2048), 1.6),
    ("mlp.gate_proj", (3072, 1024), 1.2),
    ("mlp.up_proj", (3072, 1024), 1.15),
    ("mlp.down_proj", (1024, 3072), 2.4),
)
STREAMS = (("attention_input", 14.0), ("attention_output", 22.0), ("mlp_input", 9.0), ("mlp_hidden", 80.0))


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def wave(seed: int) -> float:
    """A fixed number in 0..1 that looks irregular."""
    return (math.sin(seed * 12.9898) * 43758.5453) % 1.0


def linear(layer: int, kind: str, shape: tuple[int, int], factor: float) -> dict[str, Any]:
    noise = wave(layer * 31 + len(kind) + shape[0])
    error = 3.4e-4 * factor * (0.8 + 0.5 * noise + (3 if kind == "mlp.down_proj" and layer == 2 else 0))
    blocks = math.ceil(shape[0] / 128) * math.ceil(shape[1] / 128)
    split = int(blocks * (0.2 + 0.5 * noise))
    base = -11 + round(2 * wave(layer))
    return {
        "name": f"model.layers.{layer}.{kind}",
        "shape": list(shape),
        "error": error,
        "baseline_error": error * (1.35 + 0.6 * noise),
        "weight_sqnr_db": 31.4 - 2 * noise,
        "searched_blocks": blocks // 3,
        "zero_blocks": 0,
        "partial_blocks": 0,
        "exponents": {str(base): split, str(base + 1): blocks - split - 2, str(base + 2): 2},
        "sha256": digest(f"{layer}{kind}"),
        "notes": ["Hessian damped by 0.01 of its mean diagonal"] if layer == 7 else [],
    }


def stream(layer: int, name: str, factor: float) -> dict[str, Any]:
    rms = 0.8 + 0.05 * layer
    loud = (
        factor
        * (1 + 1.5 * wave(layer + len(name)))
        * (12 if layer in (2, 28) and name == "mlp_hidden" else 1)
    )
    return {
        "stream": name,
        "tokens": 8192,
        "amax": rms * loud,
        "rms": rms,
        "outlier_ratio": 3 * loud,
        "exponents": {},
    }


def validation(layers: int) -> dict[str, Any]:
    edges = [10 ** (-9 + index * 9.4 / 48) for index in range(49)]
    counts = [round(420 * math.exp(-(((index - 33) / 5) ** 2))) for index in range(48)]
    return {
        "text": "heldout.txt (embedded)",
        "text_sha256": digest("text"),
        "tokens": sum(counts),
        "windows": 8,
        "window_tokens": 511,
        "perplexity": 31.4172839,
        "reference_perplexity": 31.0173,
        "rise": 0.012895,
        "rise_standard_error": 0.00104,
        "kl_mean": 0.004213,
        "kl_p50": 0.0021,
        "kl_p90": 0.0094,
        "kl_p99": 0.0317,
        "kl_max": 0.41,
        "top1_agreement": 0.95377,
        "layers": [
            {
                "layer": n,
                "sqnr_db": 38.0 - 9 * (n / max(layers, 2)) ** 0.5 - wave(n),
                "cosine": 0.99991 - n * 1e-5,
            }
            for n in range(layers)
        ],
        "kl_edges": edges,
        "kl_counts": counts,
        "weights_only": None,
    }


def manifest(layers: int = 30) -> dict[str, Any]:
    return {
        "tool": {"name": "qwen_quantize", "version": "0.1.0"},
        "source": {
            "path": "/models/Qwen3-0.6B",
            "kind": "safetensors",
            "architecture": "Qwen3ForCausalLM",
            "fingerprint": digest("source"),
            "parameters": 596_049_920,
        },
        "chip": {
            "name": "ascend-950",
            "vendor": "Huawei",
            "asked": "ascend",
            "why": "ascend means ascend-950: ascend-910b and ascend-910c have no FP8 units",
            "versions": {"firmware": "1.2"},
            "fingerprint": digest("chip"),
            "activation_cast": {
                "rounding": "rne",
                "overflow": "saturate",
                "subnormals": "keep",
                "nan": "propagate",
            },
            "activation_scale_rule": "rceil",
            "accumulator": "fp32",
        },
        "method": "ue8m0",
        "layout": "deepseek-fp8",
        "block": [128, 128],
        "scheme": {"weight": "e4m3fn", "activation": "e4m3fn", "scale": "e8m0"},
        "calibration": {
            "dataset": "novels.jsonl",
            "windows": 16,
            "length": 512,
            "tokens": 8192,
            "sha256": digest("calibration"),
            "note": "the last window was dropped: it was shorter than 512 tokens",
        },
        "assumptions": [
            {
                "field": "cast.subnormals",
                "assumed": "keep",
                "why": "the profile marks it unknown; nothing says that the cast flushes its results",
            },
            {
                "field": "accumulator.format",
                "assumed": "fp32",
                "why": "only press evidence says fp22, too weak to decide bits; the usual width",
            },
        ],
        "notes": ["lm_head.weight is tied to the embedding and is stored once"],
        "tensors": {"quantized": 7 * layers, "kept": 4 * layers + 2, "dropped": 1},
        "output_bytes": 751_000_000,
        "source_bytes": 1_192_000_000,
        "layers": [
            {
                "layer": layer,
                "linears": [linear(layer, *kind) for kind in KINDS],
                "streams": [stream(layer, *one) for one in STREAMS],
            }
            for layer in range(layers)
        ],
        "head": [],
        "validation": validation(layers),
    }


def expert_tokens(layer: int, expert: int, experts: int, needed: int) -> int:
    """Most experts get some multiple of what they need; the last eighth starves, the very last sees nothing."""
    if expert == experts - 1 and layer % 2:
        return 0
    share = wave(layer * 97 + expert * 7)
    return round(needed * (share / 4 if expert >= experts - experts // 8 else 1 + 12 * share**3))


def mixture(layers: int = 4, experts: int = 16, dense: int = 1, needed: int = 1024) -> dict[str, Any]:
    """A mixture of experts whose first `dense` layers have none; starved experts are calibrated by shrinking."""
    made = manifest(layers)
    made["source"] |= {"path": "/models/DeepSeek-small", "architecture": "DeepseekV3ForCausalLM"}
    sizes = (
        ("gate_proj", (2048, 7168), 1.2),
        ("up_proj", (2048, 7168), 1.1),
        ("down_proj", (7168, 2048), 2.0),
    )
    for layer in made["layers"][dense:]:
        index = layer["layer"]
        layer["linears"] = layer["linears"][:4]
        layer["experts"] = []
        for expert in range(experts):
            tokens = expert_tokens(index, expert, experts, needed)
            starved = tokens < needed
            layer["experts"].append(
                {
                    "expert": expert,
                    "tokens": tokens,
                    "needed": needed,
                    "policy": "shrink" if starved else "own",
                }
            )
            for name, shape, factor in sizes:
                more = (2 if starved else 1) * (0.7 + 0.6 * wave(index * 53 + expert))
                one = linear(index, f"mlp.experts.{expert}.{name}", shape, factor * more)
                layer["linears"].append(one)
        layer["streams"].append(stream(index, "expert_input", 11.0))
    made["tensors"]["quantized"] = sum(len(layer["linears"]) for layer in made["layers"])
    for layer in made["validation"]["layers"][dense:]:
        layer["router_agreement"] = 0.993 - 0.02 * wave(layer["layer"]) - 0.0004 * layer["layer"]
    shares = [layer["router_agreement"] for layer in made["validation"]["layers"][dense:]]
    made["validation"]["router_agreement"] = sum(shares) / len(shares)
    return made


def bench() -> dict[str, Any]:
    """What `bench --load A,B --json` prints."""
    loads = [
        {
            "load": name,
            "batch": batch,
            "prompt_tokens": prompt,
            "new_tokens": 64,
            "time_to_first_token_seconds": 12.5,
            "prefill_tokens_per_second": 2621.44,
            "decode_tokens_per_second": 123.4,
            "step_p50_seconds": 0.05,
            "step_p95_seconds": 0.09,
            "step_p99_seconds": 0.1,
            "step_seconds": [0.05 + 0.04 * wave(step) for step in range(64)],
            "cache_bytes": 4 << 30,
            "bandwidth_bound_fraction": fraction,
        }
        for name, batch, prompt, fraction in (("A", 16, 2048, 0.72), ("B", 1, 65536, None))
    ]
    return {
        "model": "out/a-model",
        "engine": "fast linears",
        "device": "cpu",
        "threads": 2,
        "weight_bytes": 1 << 30,
        "peak_memory_bytes": 6 << 30,
        "kv_cache": None,
        "cache_layout": {"keys": "interleaved", "why": "the fastest here"},
        "loads": loads,
        "bound_of_chip": {
            "chip": "a-chip",
            "loads": [
                {
                    "load": name,
                    "decode_bound_tokens_per_second": 1234.5,
                    "prefill_bound_tokens_per_second": None,
                }
                for name in "AB"
            ],
        },
    }
