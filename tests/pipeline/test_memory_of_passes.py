"""What looking at keys, measuring variants and gathering moments is expected to take, and what it comes to under a
ceiling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qwen_quantize.checkpoint.source import CheckpointSource, open_source
from qwen_quantize.cli.quantize import Validation, with_validation
from qwen_quantize.embedded import calibration_text_path, embedded_model_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_scheme import parse_kv_scheme
from qwen_quantize.models.blueprint import Half
from qwen_quantize.pipeline.kv_observe import Room, observe
from qwen_quantize.pipeline.memory import (
    BASE,
    divergence_memory,
    half_memory,
    observed_windows,
    observing_memory,
    variants_at_once,
)
from qwen_quantize.pipeline.plan import make_plan
from qwen_quantize.pipeline.recipe import Recipe, Rule


@pytest.fixture(scope="module")
def source() -> CheckpointSource:
    return open_source(embedded_model_path())


@pytest.fixture(scope="module")
def reader(source: CheckpointSource) -> ModelReader:
    return ModelReader(source)


def recipe(method: str, **more: object) -> Recipe:
    asked = Recipe(str(embedded_model_path()), "cpu", method, dataset=str(calibration_text_path()))
    return replace(asked, **more)  # type: ignore[arg-type]


def test_windows_come_in_batches_that_fit(reader: ModelReader) -> None:
    blueprint = reader.blueprint
    assert observed_windows(None, blueprint, 512) == 8
    for windows in (1, 3, 5):
        needed = observing_memory(blueprint, 512, windows)
        assert observed_windows(needed, blueprint, 512) == windows
    with pytest.raises(UserError, match=r"--max-memory .* --kv-cache"):
        observed_windows(observing_memory(blueprint, 512, 1) - 1, blueprint, 512)


def test_variants_come_in_batches_that_fit(reader: ModelReader) -> None:
    blueprint, solving = reader.blueprint, BASE + 10**8
    assert variants_at_once(None, blueprint, solving, 1024, 256, 20) == 20
    for variants in (1, 4):
        needed = divergence_memory(blueprint, solving, 1024, 256, variants)
        assert variants_at_once(needed, blueprint, solving, 1024, 256, 20) == variants
    with pytest.raises(UserError, match="--from-statistics"):
        variants_at_once(solving, blueprint, solving, 1024, 256, 20)


def test_states_between_layers_do_not_depend_on_the_batches(reader: ModelReader, tmp_path: Path) -> None:
    windows = torch.arange(3 * 40).reshape(3, 40) % reader.blueprint.config.vocab_size
    scheme = parse_kv_scheme("mixed:7")
    together = observe(reader, windows, scheme, room=Room(3))
    apart = observe(reader, windows, scheme, room=Room(1, tmp_path / "states"))
    assert together.keys() == apart.keys()
    for layer, found in together.items():
        for ours, theirs in zip(
            (apart[layer].keys, apart[layer].values), (found.keys, found.values), strict=True
        ):
            assert ours is not None
            assert theirs is not None
            torch.testing.assert_close(ours.damages[0], theirs.damages[0], rtol=2e-2, atol=0)
            torch.testing.assert_close(ours.largest, theirs.largest, rtol=1e-4, atol=0)
    assert not list((tmp_path / "states").iterdir())


def test_the_plan_counts_the_cache(source: CheckpointSource, reader: ModelReader) -> None:
    asked = recipe("awq", kv_cache="int8", length=1024, samples=4)
    needed = observing_memory(reader.blueprint, 1024, 1)
    with pytest.raises(UserError, match="--kv-cache"):
        make_plan(replace(asked, max_memory=needed - 1), source)
    plan = make_plan(asked, source)
    assert plan.peak_memory_bytes >= observing_memory(reader.blueprint, 1024, 4)
    validated = with_validation(plan, Validation(True, None, 20480))
    plain = with_validation(replace(plan, kv_scheme=None), Validation(True, None, 20480))
    assert validated.peak_memory_bytes >= plain.peak_memory_bytes


def test_only_methods_that_gather_moments_count_them(source: CheckpointSource, reader: ModelReader) -> None:
    blueprint = reader.blueprint
    with_moments = half_memory(blueprint, 0, Half.MLP, None)
    without = half_memory(blueprint, 0, Half.MLP, None, moments=False)
    widest = max(blueprint.linear_shape(site, 0)[1] for site in blueprint.sites(0, Half.MLP))
    assert with_moments - without >= 16 * widest**2
    plans = {method: make_plan(recipe(method), source).memory for method in ("awq", "gptq")}
    assert plans["awq"].peak <= plans["gptq"].peak


def test_every_scheme_of_a_mixture_says_what_the_chip_does(source: CheckpointSource) -> None:
    """The scheme that the request names is run by the chip, the one of a rule is not."""
    plain = Recipe(str(embedded_model_path()), "ascend-910b", "rtn", scheme="w8a8")
    rule = Rule("*.down_proj", method="rtn", scheme="mxfp8")
    found = make_plan(replace(plain, rules=(rule,), allow_unsupported=True), source).notes
    assert any("cannot run mxfp8 natively" in note for note in found)
    assert not any("natively" in note for note in make_plan(plain, source).notes)
