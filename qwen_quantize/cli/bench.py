"""`qwen_quantize bench`: how fast the bundled engine runs a model here, against what the machine allows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.cli.cache import NOTHING_ASKED, CacheRequest, plan_words
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
from qwen_quantize.engine.compute import Compute
from qwen_quantize.engine.device import find_device, moved
from qwen_quantize.engine.fast_load import FastOptions, HeadForm, load_fast
from qwen_quantize.engine.generate import Speed, measure_speed
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.model import Model
from qwen_quantize.engine.roofline import Roofline, measured_flops, measured_read_bandwidth, token_operations
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.kv_cache import kv_record
from qwen_quantize.report.bench_page import render_bench
from qwen_quantize.report.numbers import human_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """batch prompts of `prompt_tokens` each, continued by `new_tokens`."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int

    def scaled(self, by: float) -> Load:
        """All three sizes times `by`, none below one; a batch of one stays."""
        batch, prompt, new = (
            max(1, round(by * n)) for n in (self.batch, self.prompt_tokens, self.new_tokens)
        )
        return Load(self.name, batch, prompt, new)


LOADS = {"A": Load("A", 16, 2048, 128), "B": Load("B", 1, 65536, 512), "C": Load("C", 1, 512, 64)}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What `bench` is asked for. loads: names of LOADS; without any, one load of the two sizes."""

    prompt_tokens: int
    new_tokens: int
    loads: tuple[str, ...] = ()
    scale: float = 1.0
    fast: bool = False
    head: str = "stored"
    device: str = "cpu"
    model_of: str | None = None
    html: Path | None = None
    kv_cache: str | None = None
    cache: CacheRequest = NOTHING_ASKED

    def chosen(self) -> list[Load]:
        unknown = [name for name in self.loads if name not in LOADS]
        if unknown:
            raise UserError(f"--load {unknown[0]!r} is none of {', '.join(LOADS)}")
        named = [LOADS[name].scaled(self.scale) for name in self.loads]
        return named or [Load("asked", 1, self.prompt_tokens, self.new_tokens)]


def load_for_speed(reader: ModelReader, chip: Compute | None, fast: bool, head: str) -> tuple[Model, str]:
    """The model with packed linears where nothing is to be emulated, or if asked for; and in words which it is."""
    if head not in list(HeadForm):
        raise UserError(f"--head {head!r} is none of {', '.join(HeadForm)}")
    if chip is not None and not fast:
        return load_model(reader, chip), "emulating the chip's arithmetic"
    model = load_fast(reader.source, chip, FastOptions(head=HeadForm(head)))
    kept = ", inputs cast as on the chip, sums in float32" if chip is not None else ""
    return model, f"fast linears{kept}"


def run_bench(
    path: str | None, request: BenchRequest, *, threads: int | None, as_json: bool, quiet: bool
) -> None:
    use_threads(threads)
    speaker = Speaker(as_json, quiet)
    path = path or str(embedded_model_path())
    loads = request.chosen()
    reader = open_reader(path)
    chip = folder_chip(ChipQuestion(None), read_manifest(path), reader)
    config = reader.blueprint.config
    for load in loads:
        hint = "" if load.name == "asked" else f", load {load.name}: make it smaller with --scale"
        request.cache.check_length(load.prompt_tokens, load.new_tokens, config, hint)
    options, warning = request.cache.options(chip.profile), request.cache.warning(config)
    if warning is not None:
        speaker.say(warning)
    profile = None if request.model_of is None else load_profile(request.model_of)
    device = find_device(request.device)
    on_cpu = device.type == "cpu"
    roof = Roofline(measured_read_bandwidth(), measured_flops()) if on_cpu else Roofline(None, None)
    if on_cpu:
        model, engine = load_for_speed(reader, chip.compute, request.fast, request.head)
    else:
        model, engine = moved(load_model(reader, chip.compute), device), "torch"
    kv_plan = folder_kv_plan(request.kv_cache, path, reader, chip, None)
    operations = token_operations(reader.blueprint)
    speeds = []
    for load in loads:
        generator = torch.Generator().manual_seed(0)
        tokens = load.prompt_tokens + load.new_tokens
        if request.cache.memory is not None:
            speaker.say(plan_words(model.plan_cache(load.batch, tokens, kv_plan, options), tokens))
        prompt = torch.randint(config.vocab_size, (load.batch, load.prompt_tokens), generator=generator)
        with contextlib.nullcontext() if on_cpu else device:
            speeds.append(measure_speed(model, prompt.to(device), load.new_tokens, kv_plan, options))
    records = [_record(load, speed, roof, operations) for load, speed in zip(loads, speeds, strict=True)]
    main = next((record for record in records if record["load"] == "C"), records[0])
    same = (
        "prompt_tokens",
        "new_tokens",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "weight_bytes",
    )
    record: dict[str, Any] = {
        "model": path,
        "emulated_chip": chip.words if chip.compute is not None else None,
        "engine": engine,
        "device": request.device,
        "threads": torch.get_num_threads(),
        **{key: main[key] for key in (*same, "cache_bytes", "bandwidth_bound_fraction")},
        "kv_cache": None
        if kv_plan is None
        else kv_record(kv_plan, main["prompt_tokens"] + main["new_tokens"]),
        "cache_layout": None
        if kv_plan is not None
        else {
            "keys": options.layout or model.fastest_layout,
            "why": request.cache.why_layout(chip.profile),
        },
        "peak_memory_bytes": peak_memory_bytes(),
        "read_bandwidth_bytes_per_second": roof.bandwidth,
        "flops_per_second": roof.flops,
        "loads": records,
    }
    if profile is not None:
        record["bound_of_chip"] = _chip_bounds(profile.name, profile.facts, loads, speeds, operations)
    if request.html is not None:
        request.html.write_text(render_bench(record), encoding="utf-8")
    _say(speaker, record)
    speaker.result(record)


def _record(load: Load, speed: Speed, roof: Roofline, operations: int) -> dict[str, Any]:
    bound = roof.decode_bound(speed)
    return {
        "load": load.name,
        "batch": speed.batch,
        "prompt_tokens": speed.prompt_tokens,
        "new_tokens": speed.new_tokens,
        "time_to_first_token_seconds": speed.prefill_seconds,
        "prefill_tokens_per_second": speed.prefill_tokens_per_second,
        "decode_tokens_per_second": speed.decode_tokens_per_second,
        "step_p50_seconds": speed.percentile(0.5),
        "step_p95_seconds": speed.percentile(0.95),
        "step_p99_seconds": speed.percentile(0.99),
        "step_seconds": list(speed.step_seconds),
        "weight_bytes": speed.weight_bytes,
        "cache_bytes": speed.cache_bytes,
        "cache_file_bytes": speed.cache_file_bytes,
        "decode_bound_tokens_per_second": bound,
        "prefill_bound_tokens_per_second": roof.prefill_bound(operations),
        "bandwidth_bound_fraction": None if bound is None else speed.decode_tokens_per_second / bound,
    }


def _chip_bounds(
    name: str, facts: Any, loads: list[Load], speeds: list[Speed], operations: int
) -> dict[str, Any]:
    """Bounds from a profile; None for what it does not state."""
    bandwidth = 1e9 * facts.memory.bandwidth.value if facts.memory.bandwidth.known else None
    rates = [
        peak.dense.value
        for dtype, peak in facts.peaks.items()
        if peak.dense.known and dtype in ("fp16", "bf16")
    ]
    roof = Roofline(bandwidth, 1e12 * max(rates) if rates else None)
    bounds = [
        {
            "load": load.name,
            "decode_bound_tokens_per_second": roof.decode_bound(speed),
            "prefill_bound_tokens_per_second": roof.prefill_bound(operations),
        }
        for load, speed in zip(loads, speeds, strict=True)
    ]
    return {
        "chip": name,
        "bandwidth_bytes_per_second": roof.bandwidth,
        "flops_per_second": roof.flops,
        "loads": bounds,
    }


def _say(speaker: Speaker, record: Mapping[str, Any]) -> None:
    speaker.say(f"engine:  {record['engine']}")
    if record["cache_layout"] is not None:
        speaker.say("cache:   keys {keys}, {why}".format(**record["cache_layout"]))
    for load in record["loads"]:
        name = "" if load["load"] == "asked" else f"load {load['load']}, batch {load['batch']}: "
        share = load["bandwidth_bound_fraction"]
        of_bound = "" if share is None else f", {100 * share:.0f} % of the bound by memory bandwidth"
        speaker.say(
            f"{name}prefill: {load['prefill_tokens_per_second']:.0f} tokens/s ({load['prompt_tokens']} tokens, the "
            f"first after {load['time_to_first_token_seconds']:.3f} s)"
        )
        speaker.say(
            f"{name}decode:  {load['decode_tokens_per_second']:.1f} tokens/s ({load['new_tokens']} tokens{of_bound}; "
            f"a step takes {1000 * load['step_p50_seconds']:.1f} ms, 99 % at most "
            f"{1000 * load['step_p99_seconds']:.1f} ms)"
        )
    chip = record.get("bound_of_chip", {"loads": []})
    for load in chip["loads"]:
        decode, prefill = (
            "unknown" if load[key] is None else f"{load[key]:.0f} tokens/s"
            for key in ("decode_bound_tokens_per_second", "prefill_bound_tokens_per_second")
        )
        speaker.say(
            f"bound on {chip['chip']}, load {load['load']}: decode {decode}, prefill {prefill}; from its "
            "profile's bandwidth and peak, measured nowhere"
        )
    speaker.say(
        f"memory:  weights {human_bytes(record['weight_bytes'])}, cache {human_bytes(record['cache_bytes'])}"
        f"{_in_file(record['loads'])}, "
        f"peak {human_bytes(record['peak_memory_bytes'])}"
    )


def _in_file(loads: list[dict[str, Any]]) -> str:
    most = max(load["cache_file_bytes"] for load in loads)
    return f" (up to {human_bytes(most)} in a file)" if most else ""
