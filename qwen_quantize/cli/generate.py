"""`qwen_quantize generate`: what a model says."""

from __future__ import annotations

import sys

import torch

from qwen_quantize.cli.bench import load_for_speed
from qwen_quantize.cli.cache import NOTHING_ASKED, CacheRequest, plan_words
from qwen_quantize.cli.session import (
    ChipQuestion,
    folder_chip,
    folder_kv_plan,
    open_reader,
    read_manifest,
    use_threads,
)
from qwen_quantize.engine.cache_pages import CacheOptions
from qwen_quantize.engine.generate import greedy_tokens
from qwen_quantize.engine.model import Model
from qwen_quantize.engine.tokenizer import Message
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.pipeline.run import check_token_ids, source_tokenizer


def run_generate(
    path: str,
    prompt: str,
    max_new_tokens: int,
    *,
    chat: bool,
    threads: int | None,
    fast: bool = False,
    kv_cache: str | None = None,
    cache: CacheRequest = NOTHING_ASKED,
) -> None:
    use_threads(threads)
    reader = open_reader(path)
    tokenizer = source_tokenizer(reader.source)
    chip = folder_chip(ChipQuestion(None), read_manifest(path), reader)
    if chat:
        prompt = tokenizer.apply_chat_template([Message("user", prompt)], add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=not chat)
    check_token_ids(torch.tensor(ids, dtype=torch.int64), reader)
    options, config = cache.options(chip.profile), reader.blueprint.config
    cache.check_length(len(ids), max_new_tokens, config)
    if not ids:
        raise UserError("the prompt is empty")
    model, _ = load_for_speed(reader, chip.compute, fast, "stored")
    kv_plan = folder_kv_plan(kv_cache, path, reader, chip, None)
    for line in _notes(cache, options, model, len(ids) + max_new_tokens, kv_plan):
        sys.stderr.write(f"{line}\n")
    if kv_plan is None and cache.layout is None and options.layout is not None:
        sys.stderr.write(f"key-value cache: keys {options.layout}, {cache.why_layout(chip.profile)}\n")
    stop = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    new: list[int] = []
    shown = ""
    for token in greedy_tokens(model, ids, max_new_tokens, stop, kv_plan, options):
        new.append(token)
        text = tokenizer.decode(new)
        if not text.endswith("�"):  # half of a character that several tokens make up
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write("\n")


def _notes(
    cache: CacheRequest, options: CacheOptions, model: Model, tokens: int, kv_plan: KvPlan | None
) -> list[str]:
    warning = cache.warning(model.blueprint.config)
    notes = [] if warning is None else [warning]
    if cache.memory is not None:
        notes.append(plan_words(model.plan_cache(1, tokens, kv_plan, options), tokens))
    return notes
