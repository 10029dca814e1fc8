"""Whose fault a loss is: against single runs of the ordinary comparison, switch by switch."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.attribute import chip_with, parts_of, rule_with
from qwen_quantize.engine.linear import ChipCompute
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.attribution import Attribution, Part, Setting, attribute, settings_of
from qwen_quantize.eval.compare import evaluate
from qwen_quantize.formats.tables import FP32
from tests.engine.test_experts import store_as_block_fp8
from tests.engine.test_narrow_sums import CAST, NARROW
from tests.tiny_models import make_tiny

W, A, S, C = Part.WEIGHTS, Part.ACTIVATIONS, Part.SCALES, Part.SUMS
CHIP = ChipCompute(CAST, NARROW)
WINDOWS = torch.randint(160, (4, 12), generator=torch.Generator().manual_seed(8))


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def readers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelReader, ModelReader]:
    """(quantized, as it was): a dense model and a mixture of experts."""
    folder = tmp_path_factory.mktemp("attributed")
    make_tiny(folder / "was", request.param)
    shutil.copytree(folder / "was", folder / "is")
    kept = (
        "model.layers.1.mlp.experts.5.up_proj"
        if request.param == "deepseek-v3"
        else "model.layers.0.self_attn.k_proj"
    )
    store_as_block_fp8(folder / "is", (kept,))
    return ModelReader(open_source(folder / "is")), ModelReader(open_source(folder / "was"))


class Bench:
    """Counts what is built, and builds as the command line does."""

    def __init__(self, readers: tuple[ModelReader, ModelReader], chip: ChipCompute | None) -> None:
        self.quantized, self.reference = readers
        self.original = ModelReader(self.reference.source, quantized_as=self.quantized)
        self.chip = chip
        self.built: list[Setting] = []

    def build(self, setting: Setting) -> StreamedModel:
        self.built.append(setting)
        weights = self.quantized if W in setting else self.original
        return StreamedModel(weights, rule_with(self.chip, setting))

    def attribute(self) -> Attribution:
        return attribute(
            lambda: StreamedModel(self.reference),
            self.build,
            parts_of([] if self.chip is None else [self.chip]),
            WINDOWS,
        )

    def measured(self, *parts: Part) -> tuple[float, float]:
        """(log of the perplexity ratio, mean KL) of one setting, from the ordinary comparison."""
        found = evaluate(self.build(frozenset(parts)), WINDOWS, StreamedModel(self.reference))
        assert found.rise is not None
        assert found.kl_mean is not None
        return math.log1p(found.rise), found.kl_mean


def test_settings_that_exist() -> None:
    assert settings_of((W,)) == (frozenset(), frozenset({W}))
    assert len(settings_of((W, A, S))) == 6
    found = settings_of((W, A, S, C))
    assert len(found) == len(set(found)) == 12
    assert all(A in setting for setting in found if S in setting)


def test_shares_are_differences_of_runs_and_add_up(readers: tuple[ModelReader, ModelReader]) -> None:
    bench = Bench(readers, CHIP)
    found = bench.attribute()
    assert sorted(map(sorted, bench.built)) == sorted(map(sorted, settings_of((W, A, S, C))))
    assert found.restored
    assert [share.parts for share in found.parts] == [(W,), (A,), (S,), (C,)]
    assert len(found.interactions) == 7
    whole = evaluate(StreamedModel(bench.quantized, CHIP), WINDOWS, StreamedModel(bench.reference))
    assert found.perplexity == whole.perplexity
    assert found.reference_perplexity == whole.reference_perplexity
    assert found.total.kl_mean == pytest.approx(whole.kl_mean, rel=1e-9)
    shares = [*found.parts, *found.interactions]
    assert math.fsum(share.effect.nats for share in shares) == pytest.approx(found.total.nats, abs=1e-12)
    assert math.fsum(share.effect.kl_mean for share in shares) == pytest.approx(
        found.total.kl_mean, abs=1e-12
    )

    runs = {name: torch.tensor(bench.measured(*parts)) for name, parts in {
        "": (), "W": (W,), "A": (A,), "AS": (A, S), "C": (C,), "WAS": (W, A, S), "WA": (W, A), "ASC": (A, S, C),
        "WASC": (W, A, S, C), "WAC": (W, A, C), "WC": (W, C), "AC": (A, C),
    }.items()}  # fmt: skip
    assert runs[""].tolist() == [0, 0]
    by_parts = {share.parts: share for share in shares}
    expected = {
        (W,): runs["W"], (A,): runs["A"], (S,): runs["AS"] - runs["A"], (C,): runs["C"],
        (W, A): runs["WA"] - runs["W"] - runs["A"],
        (W, S): runs["WAS"] - runs["WA"] - runs["AS"] + runs["A"],
        (W, S, C): (runs["WASC"] - runs["WAC"] - runs["WAS"] + runs["WA"])
        - (runs["ASC"] - runs["AC"] - runs["AS"] + runs["A"]),
    }  # fmt: skip
    for parts, effect in expected.items():
        share = by_parts[parts].effect
        torch.testing.assert_close(torch.tensor([share.nats, share.kl_mean]), effect, rtol=1e-4, atol=1e-8)
    recovered = by_parts[(A,)].recovered
    assert recovered is not None  # without the cast there are no scales either
    assert recovered.nats == pytest.approx(float(runs["WASC"][0] - runs["WC"][0]), rel=1e-4, abs=1e-8)
    assert all(abs(share.effect.nats) > 0 for share in shares)


def test_standard_errors_are_those_of_window_means(readers: tuple[ModelReader, ModelReader]) -> None:
    bench = Bench(readers, None)
    found = bench.attribute()
    assert [share.parts for share in found.parts] == [(W,)]
    assert found.interactions == ()
    assert found.parts[0].effect == found.total == found.parts[0].recovered
    whole = evaluate(StreamedModel(bench.quantized), WINDOWS, StreamedModel(bench.reference))
    assert whole.rise is not None
    assert whole.rise_standard_error is not None
    assert found.total.standard_error == pytest.approx(whole.rise_standard_error / (1 + whole.rise))


def test_an_off_switch_that_leaks_is_noticed(readers: tuple[ModelReader, ModelReader]) -> None:
    bench = Bench(readers, CHIP)

    class Leaking(StreamedModel):
        def run_layer(self, hidden: Tensor) -> Tensor:
            after = super().run_layer(hidden)
            after[0, 0, 0] = torch.nextafter(after[0, 0, 0], torch.tensor(math.inf))
            return after

    def build(setting: Setting) -> StreamedModel:
        return bench.build(setting) if setting else Leaking(bench.original)

    assert not attribute(lambda: StreamedModel(bench.reference), build, (W,), WINDOWS).restored


def test_what_is_no_code_any_more_enters_the_unit_as_float32() -> None:
    assert chip_with(CHIP, frozenset((W, A, S, C))) == CHIP
    assert chip_with(CHIP, frozenset((W, C))) == ChipCompute(None, replace(NARROW, a_format=FP32))
    assert chip_with(CHIP, frozenset((A, C))) == ChipCompute(
        replace(CAST, unrounded_scales=True), replace(NARROW, a_format=FP32, b_format=FP32)
    )
    assert chip_with(CHIP, frozenset()).changes_nothing


def test_one_window_has_no_standard_error(readers: tuple[ModelReader, ModelReader]) -> None:
    bench = Bench(readers, None)
    found = attribute(lambda: StreamedModel(bench.reference), bench.build, (W,), WINDOWS[:1])
    assert math.isnan(found.total.standard_error)
    with pytest.raises(ValueError, match="windows must be"):
        attribute(lambda: StreamedModel(bench.reference), bench.build, (W,), WINDOWS[:, :1])
