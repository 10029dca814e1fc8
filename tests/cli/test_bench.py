"""`bench`: its loads, its bounds and its page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.cli.bench import LOADS, BenchRequest
from qwen_quantize.cli.cache import CacheRequest
from qwen_quantize.engine.cache_pages import CacheLayout
from qwen_quantize.engine.device import find_device, moved
from qwen_quantize.engine.fast_linear import native_library
from qwen_quantize.engine.fast_load import load_fast
from qwen_quantize.engine.generate import Speed, measure_speed
from qwen_quantize.engine.kv_cache import KVCache
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.roofline import Roofline, token_operations
from qwen_quantize.errors import UserError
from tests.tiny_models import make_tiny

Run = Callable[..., Result]
SPEED = Speed(2, 10, 4, 0.5, (0.1, 0.2, 0.4, 0.3), 1000, 900, 200)


def test_speeds_are_those_of_all_texts() -> None:
    assert SPEED.prefill_tokens_per_second == pytest.approx(40)
    assert SPEED.decode_tokens_per_second == pytest.approx(8)
    assert [SPEED.percentile(share) for share in (0.0, 0.5, 0.99)] == [0.1, 0.3, 0.4]


def test_bounds_are_of_what_a_step_reads_and_computes() -> None:
    roof = Roofline(5000.0, 600.0)
    assert roof.decode_bound(SPEED) == pytest.approx(2 * 5000 / 1000)
    assert roof.prefill_bound(3) == pytest.approx(200)
    assert Roofline(None, None).decode_bound(SPEED) is None


def test_operations_count_every_weight_that_a_token_meets(tmp_path: Path) -> None:
    make_tiny(tmp_path / "dense", "llama")
    # q and o: 64 x 64, k and v: 32 x 64, three of 96 x 64; two layers
    wanted = 2 * 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
    assert token_operations(ModelReader(open_source(tmp_path / "dense")).blueprint) == wanted
    make_tiny(tmp_path / "sparse", "mixtral")
    wanted = 2 * 2 * (2 * 64 * 64 + 2 * 32 * 64 + 2 * 3 * 96 * 64)
    assert token_operations(ModelReader(open_source(tmp_path / "sparse")).blueprint) == wanted


def test_loads_scale_down() -> None:
    assert LOADS["A"].scaled(0.25) == type(LOADS["A"])("A", 4, 512, 32)
    assert LOADS["B"].scaled(1e-3).batch == 1
    with pytest.raises(UserError, match="none of A, B, C"):
        BenchRequest(1, 1, ("D",)).chosen()


def test_loads_a_page_and_a_chips_bound(model: Path, tmp_path: Path, run: Run) -> None:
    page = tmp_path / "bench.html"
    loads = ("--load", "A,C", "--scale", 0.03, "--model-of", "amd-mi300x", "--html", page)
    result = run("bench", model, *loads, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert [load["load"] for load in record["loads"]] == ["A", "C"]
    load = record["loads"][1]
    assert record["decode_tokens_per_second"] == load["decode_tokens_per_second"]
    assert len(load["step_seconds"]) == load["new_tokens"] == 2
    assert load["step_p50_seconds"] <= load["step_p99_seconds"]
    assert record["bound_of_chip"]["bandwidth_bytes_per_second"] == 5300e9
    assert "bound on amd-mi300x, load C" in result.stderr
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 4  # of each load, for wide and for narrow screens
    assert "http" not in text.replace("http-equiv", "")
    assert "What amd-mi300x could do at most" in text
    layout = record["cache_layout"]
    assert f"keys {layout['keys']}: {layout['why']}." in text


@pytest.mark.skipif(native_library() is None, reason="no C compiler")
def test_plain_weights_take_the_fast_path(model: Path, run: Run) -> None:
    record = json.loads(run("bench", model, "--prompt-tokens", 8, "--new-tokens", 2, "--json").stdout)
    assert record["engine"] == "fast linears"
    smaller = run("bench", model, "--prompt-tokens", 8, "--new-tokens", 2, "--json", "--head", "int8")
    assert json.loads(smaller.stdout)["bandwidth_bound_fraction"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "no-such-thing"), "torch has no device 'no-such-thing'"),
        (("--load", "B"), "make it smaller with --scale"),
        (("--load", "X"), "--load 'X' is none of"),
        (("--head", "int3"), "--head 'int3' is none of"),
        (("--cache-memory", "much"), "--cache-memory 'much' is not a size"),
        (("--cache-memory", "100"), "--cache-memory 100 bytes is too little"),
        (("--cache-layout", "heap"), "--cache-layout 'heap' is none of head-major, interleaved"),
        (("--context", "9"), "8 + 2 tokens are more than --context 9"),
    ],
)
def test_refusals(model: Path, run: Run, arguments: tuple[str, ...], words: str) -> None:
    result = run("bench", model, "--prompt-tokens", 8, "--new-tokens", 2, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize("family", ["qwen2-sliding", "llama3-rope", "gemma2"])
def test_a_moved_model_mixes_no_devices(tmp_path: Path, family: str) -> None:
    make_tiny(tmp_path, family)
    device = find_device("meta")  # holds no numbers, and refuses to compute with those of another device
    model = moved(load_model(ModelReader(open_source(tmp_path))), device)
    with device:
        speed = measure_speed(model, torch.zeros(1, 12, dtype=torch.int64), 3)
    assert len(speed.step_seconds) == 3


def test_a_long_context_runs_with_its_cache_in_a_file(model: Path, run: Run) -> None:
    load = ("bench", model, "--load", "B", "--scale", 0.012, "--json")
    assert "--context N goes beyond it" in run(*load).stderr
    usual = run(*load, "--context", 1000)
    spilled = run(*load, "--context", 1000, "--cache-memory", "800KB")
    assert spilled.exit_code == 0, spilled.stderr
    (first,), (second,) = (json.loads(done.stdout)["loads"] for done in (usual, spilled))
    assert second["cache_bytes"] == first["cache_bytes"]
    assert first["cache_file_bytes"] == 0
    assert second["cache_bytes"] - second["cache_file_bytes"] <= 800_000
    assert "of the newest in memory" in spilled.stderr
    assert "was made for" in spilled.stderr
    assert "in a file" in spilled.stderr


def test_generated_text_is_the_same_whatever_the_cache(model: Path, run: Run) -> None:
    prompt = " ".join(f"w{n % 9}" for n in range(600))
    asked = ("generate", model, prompt, "--max-new-tokens", 8, "--context", 700)
    usual, *others = [
        run(*asked, *more)
        for more in ((), ("--cache-memory", "800KB"), *(("--cache-layout", name) for name in CacheLayout))
    ]
    assert usual.exit_code == 0, usual.stderr
    assert "in a temporary file" in others[0].stderr
    assert {other.stdout for other in others} == {usual.stdout}


def test_the_cache_has_the_layout_asked_for_or_else_the_one_that_the_chip_prefers(model: Path) -> None:
    example, cpu = load_profile("example"), load_profile("cpu")
    loaded = load_fast(open_source(model), None)
    cases = (
        (CacheRequest(), example, CacheLayout.HEAD_MAJOR, "preferred by example, vendor-doc (EXAMPLE)"),
        (CacheRequest(layout="interleaved"), example, CacheLayout.INTERLEAVED, "asked for"),
        (CacheRequest(), cpu, loaded.fastest_layout, "the fastest here; what cpu prefers is unknown"),
    )
    for request, chip, layout, why in cases:
        cache = loaded.new_cache(1, 8, None, request.options(chip))
        assert isinstance(cache, KVCache)
        assert cache.interleaved == (layout is CacheLayout.INTERLEAVED)
        assert request.why_layout(chip) == why


def test_commands_say_which_layout_was_taken_and_why(model: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    done = run("--model-path", model, "--device", "example", "--quant-method", "ue8m0", "--output-path", out,
               "--no-validate", "--quiet")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    size = ("--prompt-tokens", 8, "--new-tokens", 2, "--json")
    preferred = {"keys": "head-major", "why": "preferred by example, vendor-doc (EXAMPLE)"}
    shown = run("bench", out, *size)
    assert json.loads(shown.stdout)["cache_layout"] == preferred
    assert "cache:   keys head-major, preferred by example, vendor-doc (EXAMPLE)\n" in shown.stderr
    asked = run("bench", out, *size, "--cache-layout", "interleaved")
    assert json.loads(asked.stdout)["cache_layout"] == {"keys": "interleaved", "why": "asked for"}
    packed = run("bench", out, *size, "--kv-cache", "int8")
    assert json.loads(packed.stdout)["cache_layout"] is None
    own = json.loads(run("bench", model, *size).stdout)["cache_layout"]
    assert own["why"] == "the fastest here; what cpu prefers is unknown"
    said = "key-value cache: keys head-major, preferred by example"
    assert said in run("generate", out, "w1 w2", "--max-new-tokens", 1).stderr
    assert (
        said
        not in run("generate", out, "w1 w2", "--max-new-tokens", 1, "--cache-layout", "head-major").stderr
    )
