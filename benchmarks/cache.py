"""Decoding behind a long float32 cache: layouts of its keys, and what it costs to have most of it in a file.

    python benchmarks/cache.py [--contexts 512 4096 16384] [--steps 8] [--rounds 3] [--threads N] [--json]

The model is Qwen-shaped with random weights, small beside its cache, so that attention is most of a step. The cache
is filled with random keys and values; each way then decodes the same tokens, in turns, and the fastest round counts.
The script ends with an error if any two ways give other tokens, or the file other logits than memory.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.cache_pages import PAGE_TOKENS, CacheLayout, CacheOptions
from qwen_quantize.engine.fast_load import load_fast
from qwen_quantize.engine.model import Model


def long_model(folder: Path) -> Model:
    """Four layers, 14 query heads on 2 key heads of 64, as in Qwen2.5-0.5B; a vocabulary of 512."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=896, intermediate_size=896, num_hidden_layers=4, num_attention_heads=14, num_key_value_heads=2,
        head_dim=64, vocab_size=512, max_position_embeddings=65536,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return load_fast(open_source(str(folder)))


@torch.inference_mode()
def decode(model: Model, context: int, steps: int, options: CacheOptions) -> tuple[float, Tensor, int]:
    """(median seconds of a step, logits of all steps, bytes in the file) behind `context` random tokens."""
    config = model.blueprint.config
    cache = model.new_cache(1, context + steps, None, options)
    generator = torch.Generator().manual_seed(1)
    for begin in range(0, context, PAGE_TOKENS):
        tokens = min(PAGE_TOKENS, context - begin)
        for layer in range(config.num_layers):
            shape = (1, config.num_kv_heads, tokens, config.head_dim)
            cache.append(
                layer, torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
            )
        cache.advance(tokens)
    token, seconds, logits = torch.zeros(1, 1, dtype=torch.int64), [], []
    for _ in range(steps):
        started = time.perf_counter()
        logits.append(model.forward(token, cache))
        seconds.append(time.perf_counter() - started)
        token = logits[-1].argmax(-1)
    return sorted(seconds)[len(seconds) // 2], torch.cat(logits, dim=1), cache.file_bytes


def measure(model: Model, context: int, steps: int, rounds: int) -> dict[str, float | int]:
    options = {layout.value: CacheOptions(layout=layout) for layout in CacheLayout}
    page = model.plan_cache(1, PAGE_TOKENS).total
    if context > PAGE_TOKENS:
        options["file"] = CacheOptions(memory=page)
    found: dict[str, float | int] = {"context": context}
    answers: dict[str, Tensor] = {}
    for _ in range(rounds):
        for name, one in options.items():
            seconds, answers[name], in_file = decode(model, context, steps, replace(one))
            found[name] = min(seconds, found.get(name, seconds))
            found["file_bytes"] = in_file
    tokens = answers["interleaved"].argmax(-1)
    if not all(torch.equal(logits.argmax(-1), tokens) for logits in answers.values()):
        raise SystemExit("the layouts disagree")
    if "file" in answers and not torch.equal(answers["file"], answers["interleaved"]):
        raise SystemExit("the file answers otherwise than memory")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with TemporaryDirectory() as folder:
        model = long_model(Path(folder))
        rows = [measure(model, n, arguments.steps, arguments.rounds) for n in arguments.contexts]
    if arguments.json:
        print(json.dumps({"threads": torch.get_num_threads(), "rows": rows}))
        return
    for row in rows:
        ways = ", ".join(
            f"{name} {1000 * row[name]:.2f} ms" for name in (*CacheLayout, "file") if name in row
        )
        print(f"{row['context']} tokens: a step takes {ways}")


if __name__ == "__main__":
    main()
