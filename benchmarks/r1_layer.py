"""One DeepSeek-R1 layer at real size: the seconds that `ue8m0` takes, and those that `cp` takes for the same files.

Makes a checkpoint of one mixture-of-experts layer (256 routed experts and a shared one of 7168 x 2048, multi-head
latent attention; 11.5 GB in block FP8, 23 GB in BF16) from a few random buffers, copies it with cp, removes the copy,
and runs the command line on it under `--max-memory 4GiB`. Before each the files are written back and dropped from the
page cache, so both read from the disk; both are timed until their output is durable, and until they return.

    python benchmarks/r1_layer.py [--json] [--input fp8|bf16] [--calibrated] [--experts N] [--work-dir D] [--keep]

--calibrated takes a tenth of the experts and calibrates on 4 windows of 512 random tokens. The folder given as
--work-dir needs room for the checkpoint and one copy of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwen_quantize.checkpoint.shards import OutputTensor, ShardPlan, index_bytes, plan_shards

HIDDEN, INNER, BLOCK = 7168, 2048, 128
VOCABULARY = 1024
SHARD_BYTES = 4_300_000_000
BUFFER_BYTES = 96 << 20  # larger than the largest matrix of an expert, so that no two experts are alike
MAX_MEMORY = "4GiB"

ATTENTION = {
    "q_a_proj": (1536, HIDDEN),
    "q_b_proj": (24576, 1536),
    "kv_a_proj_with_mqa": (576, HIDDEN),
    "kv_b_proj": (32768, 512),
    "o_proj": (HIDDEN, 16384),
}
EXPERT = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": INNER,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 1,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": VOCABULARY,
}


def tensors(experts: int, fp8: bool) -> Iterator[OutputTensor]:
    """Every tensor of the checkpoint, in the model's order."""
    layer = "model.layers.0."
    matrices = {f"{layer}self_attn.{name}": shape for name, shape in ATTENTION.items()}
    places = [f"mlp.experts.{expert}" for expert in range(experts)] + ["mlp.shared_experts"]
    matrices |= {f"{layer}{place}.{name}": shape for place in places for name, shape in EXPERT.items()}
    yield OutputTensor("model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN))
    yield OutputTensor(f"{layer}input_layernorm.weight", "BF16", (HIDDEN,))
    yield OutputTensor(f"{layer}post_attention_layernorm.weight", "BF16", (HIDDEN,))
    yield OutputTensor(f"{layer}self_attn.q_a_layernorm.weight", "BF16", (1536,))
    yield OutputTensor(f"{layer}self_attn.kv_a_layernorm.weight", "BF16", (512,))
    yield OutputTensor(f"{layer}mlp.gate.weight", "BF16", (experts, HIDDEN))
    yield OutputTensor(f"{layer}mlp.gate.e_score_correction_bias", "F32", (experts,))
    for module, (rows, columns) in matrices.items():
        yield OutputTensor(f"{module}.weight", "F8_E4M3" if fp8 else "BF16", (rows, columns))
        if fp8:
            grid = (-(-rows // BLOCK), -(-columns // BLOCK))
            yield OutputTensor(f"{module}.weight_scale_inv", "F32", grid)
    yield OutputTensor("model.norm.weight", "BF16", (HIDDEN,))
    yield OutputTensor("lm_head.weight", "BF16", (VOCABULARY, HIDDEN))


class Buffers:
    """A few random numbers, from which every tensor takes a stretch that begins somewhere else."""

    def __init__(self, fp8: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(BUFFER_BYTES // 2, generator=generator)
        self._floats = (normal * 0.02).bfloat16().view(torch.int16).numpy()
        self._codes = np.zeros(0, np.uint8)
        if fp8:  # four standard deviations at the largest code: every block reaches it or comes near
            codes = torch.cat([normal, normal.flip(0)]).mul_(110).clamp_(-448, 448)
            self._codes = codes.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        scales = 0.08 / 448 * (0.5 + torch.rand(1 << 16, generator=generator))
        self._scales = scales.numpy()
        self._random = random.Random(0)

    def content(self, tensor: OutputTensor) -> Iterator[memoryview]:
        """The bytes of a tensor."""
        count = int(np.prod(tensor.shape))
        if "layernorm" in tensor.name or tensor.name == "model.norm.weight":
            yield np.full(count, 0x3F80, np.int16).data.cast("B")  # ones
            return
        pool = {"F8_E4M3": self._codes, "BF16": self._floats, "F32": self._scales}[tensor.dtype]
        while count:
            begin = self._random.randrange(len(pool) - min(count, len(pool) // 2))
            part = pool[begin : begin + count]
            yield part.data.cast("B")
            count -= len(part)


def make_checkpoint(folder: Path, experts: int, fp8: bool) -> int:
    """Write the checkpoint and return the bytes of its shards."""
    folder.mkdir(parents=True)
    plan = plan_shards(list(tensors(experts, fp8)), SHARD_BYTES)
    config = CONFIG | {"n_routed_experts": experts}
    if experts % CONFIG["n_group"]:
        config |= {"n_group": 2, "topk_group": 1}
    if fp8:
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer()))
    if len(plan) > 1:
        (folder / "model.safetensors.index.json").write_bytes(index_bytes(plan))
    buffers = Buffers(fp8)
    for shard in plan:
        write_shard(folder / shard.file, shard, buffers)
    return sum(shard.nbytes for shard in plan)


def write_shard(path: Path, shard: ShardPlan, buffers: Buffers) -> None:
    with path.open("wb") as file:
        file.write(shard.header)
        for tensor in shard.tensors.values():
            for part in buffers.content(tensor):
                file.write(part)
        file.flush()
        os.fsync(file.fileno())


def word_tokenizer() -> dict[str, Any]:
    """A tokenizer with one token for each of the words w0, w1, ..."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{index}": index for index in range(VOCABULARY)},
            "unk_token": "w0",
        },
    }


def write_text(path: Path) -> None:
    """Words at random, enough for the calibration windows."""
    draw = random.Random(1)
    lines = [" ".join(f"w{draw.randrange(VOCABULARY)}" for _ in range(600)) for _ in range(16)]
    path.write_text("\n\n".join(lines) + "\n")


def drop_from_cache(folder: Path) -> None:
    """Write everything back and forget the folder's files, so that the next reader goes to the disk."""
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def timed(command: list[str]) -> tuple[float, float, str]:
    """Seconds until the command returns, seconds until its output is durable, and its stdout."""
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    returned = time.perf_counter() - start
    os.sync()
    return returned, time.perf_counter() - start, done.stdout


def measure(work: Path, experts: int, fp8: bool, calibrated: bool) -> dict[str, Any]:
    source, copy, output = work / "source", work / "copy", work / "output"
    source_bytes = make_checkpoint(source, experts, fp8)
    drop_from_cache(source)
    copy_returned, copy_durable, _ = timed(["cp", "-r", str(source), str(copy)])
    shutil.rmtree(copy)
    command = [
        *(sys.executable, "-m", "qwen_quantize", "--json", "--quiet", "--no-validate"),
        *("--model-path", str(source), "--output-path", str(output)),
        *("--device", "ascend", "--quant-method", "ue8m0", "--max-memory", MAX_MEMORY),
    ]
    if calibrated:
        write_text(work / "text.txt")
        command += ["--calibration-dataset", str(work / "text.txt")]
        command += ["--calibration-samples", "4", "--calibration-length", "512"]
    drop_from_cache(source)
    returned, durable, stdout = timed(command)
    record = json.loads(stdout)
    return {
        "input": "fp8" if fp8 else "bf16",
        "calibrated": calibrated,
        "experts": experts,
        "caches": "cold for both: files synced and dropped from the page cache before each",
        "source_bytes": source_bytes,
        "output_bytes": record["output_bytes"],
        "seconds": durable,
        "copy_seconds": copy_durable,
        "ratio": durable / copy_durable,
        "seconds_without_sync": returned,
        "copy_seconds_without_sync": copy_returned,
        "ratio_without_sync": returned / copy_returned,
        "peak_memory_bytes": record["peak_memory_bytes"],
        "max_memory": MAX_MEMORY,
    }


def show(record: dict[str, Any]) -> None:
    gigabytes = record["source_bytes"] / 1e9
    print(f"one DeepSeek-R1 layer, {record['experts']} routed experts, {record['input']}, {gigabytes:.1f} GB")
    print(f"caches {record['caches']}")
    for name, suffix in (("until durable", ""), ("until it returns", "_without_sync")):
        print(
            f"{name}: ue8m0 {record['seconds' + suffix]:.1f} s, cp {record['copy_seconds' + suffix]:.1f} s, "
            f"ratio {record['ratio' + suffix]:.2f}"
        )
    print(f"peak resident memory {record['peak_memory_bytes'] / 2**30:.2f} GiB of {record['max_memory']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--input", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--calibrated", action="store_true")
    parser.add_argument("--experts", type=int, help="routed experts (default: 256, calibrated 26)")
    parser.add_argument("--work-dir", type=Path, help="where the folders go (default: the temporary folder)")
    parser.add_argument("--keep", action="store_true", help="leave the folders there")
    arguments = parser.parse_args()
    experts = arguments.experts or (26 if arguments.calibrated else CONFIG["n_routed_experts"])
    if arguments.work_dir is not None:
        arguments.work_dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="r1_layer-", dir=arguments.work_dir))
    try:
        record = measure(work, experts, arguments.input == "fp8", arguments.calibrated)
    finally:
        if arguments.keep:
            print(f"kept: {work}", file=sys.stderr)
        else:
            shutil.rmtree(work)
    if arguments.json:
        print(json.dumps(record, indent=2))
    else:
        show(record)


if __name__ == "__main__":
    main()
