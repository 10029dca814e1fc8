"""`qwen_quantize bench` and `qwen_quantize generate`: the bundled engine at work."""

from __future__ import annotations

import sys
import time

import torch

from qwen_quantize.cli.console import Speaker
from qwen_quantize.cli.session import (
    ChipQuestion,
    folder_chip,
    folder_kv_plan,
    open_reader,
    peak_memory_bytes,
    read_manifest,
    use_threads,
)
from qwen_quantize.embedded import embedded_model_path
from qwen_quantize.engine.generate import greedy_tokens, measure_speed
from qwen_quantize.engine.load import load_model
from qwen_quantize.engine.tokenizer import Message
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.kv_cache import kv_record
from qwen_quantize.pipeline.run import check_token_ids, source_tokenizer
from qwen_quantize.report.numbers import human_bytes


def measured_read_bandwidth() -> float:
    """Bytes per second that this machine reads from memory in one pass of a sum, threads as set."""
    data = torch.ones(64 * 2**20)
    data.sum()
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best


def run_bench(
    path: str | None,
    prompt_tokens: int,
    new_tokens: int,
    *,
    kv_cache: str | None = None,
    threads: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    use_threads(threads)
    speaker = Speaker(as_json, quiet)
    path = path or str(embedded_model_path())
    reader = open_reader(path)
    chip = folder_chip(ChipQuestion(None), read_manifest(path), reader)
    compute = chip.compute
    config = reader.blueprint.config
    if prompt_tokens + new_tokens > config.max_position:
        raise UserError(
            f"{prompt_tokens} + {new_tokens} tokens are more than this model's context of {config.max_position}"
        )
    bandwidth = measured_read_bandwidth()
    model = load_model(reader, compute)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (prompt_tokens,), generator=generator).tolist()
    kv_plan = folder_kv_plan(kv_cache, path, reader, chip, None)
    speed = measure_speed(model, prompt, new_tokens, kv_plan)
    # Every decoded token reads every weight once: what memory alone would allow.
    bound = bandwidth / (speed.weight_bytes + speed.cache_bytes / 2)
    record = {
        "model": path,
        "emulated_chip": chip.words if compute is not None else None,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "prefill_tokens_per_second": speed.prefill_tokens_per_second,
        "decode_tokens_per_second": speed.decode_tokens_per_second,
        "weight_bytes": speed.weight_bytes,
        "cache_bytes": speed.cache_bytes,
        "kv_cache": None if kv_plan is None else kv_record(kv_plan, prompt_tokens + new_tokens),
        "peak_memory_bytes": peak_memory_bytes(),
        "read_bandwidth_bytes_per_second": bandwidth,
        "bandwidth_bound_fraction": speed.decode_tokens_per_second / bound,
    }
    speaker.say(f"prefill: {speed.prefill_tokens_per_second:.0f} tokens/s ({prompt_tokens} tokens)")
    speaker.say(
        f"decode:  {speed.decode_tokens_per_second:.1f} tokens/s ({new_tokens} tokens, "
        f"{100 * record['bandwidth_bound_fraction']:.0f} % of the bound by memory bandwidth)"  # type: ignore[operator]
    )
    speaker.say(
        f"memory:  weights {human_bytes(speed.weight_bytes)}, cache {human_bytes(speed.cache_bytes)}, "
        f"peak {human_bytes(peak_memory_bytes())}"
    )
    speaker.result(record)


def run_generate(
    path: str,
    prompt: str,
    max_new_tokens: int,
    *,
    chat: bool,
    threads: int | None,
    kv_cache: str | None = None,
) -> None:
    use_threads(threads)
    reader = open_reader(path)
    tokenizer = source_tokenizer(reader.source)
    chip = folder_chip(ChipQuestion(None), read_manifest(path), reader)
    if chat:
        prompt = tokenizer.apply_chat_template([Message("user", prompt)], add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=not chat)
    check_token_ids(torch.tensor(ids, dtype=torch.int64), reader)
    context = reader.blueprint.config.max_position
    if len(ids) + max_new_tokens > context:
        raise UserError(
            f"{len(ids)} + {max_new_tokens} tokens are more than this model's context of {context}"
        )
    if not ids:
        raise UserError("the prompt is empty")
    model = load_model(reader, chip.compute)
    kv_plan = folder_kv_plan(kv_cache, path, reader, chip, None)
    stop = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    new: list[int] = []
    shown = ""
    for token in greedy_tokens(model, ids, max_new_tokens, stop, kv_plan):
        new.append(token)
        text = tokenizer.decode(new)
        if not text.endswith("�"):  # half of a character that several tokens make up
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write("\n")
