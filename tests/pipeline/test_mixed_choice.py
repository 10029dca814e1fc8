"""How a limit of loss is met when predictions are wrong, and how solved linears are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from qwen_quantize.calibrators.allocation import Option
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.tables import INT4
from qwen_quantize.pipeline.mixed import _under_loss, _Unit
from qwen_quantize.pipeline.mixed_effects import EffectMeter
from qwen_quantize.pipeline.solved import SolvedStore, SolvedStream


class FakeMeter:
    """Measures a loss for each number of linears with 4 bits."""

    def __init__(self, losses: Mapping[int, float]) -> None:
        self.losses = losses
        self.asked: list[int] = []

    def divergences(self, chosen: Sequence[Mapping[str, str]]) -> list[float]:
        self.asked += [sum(name == "4" for name in one.values()) for one in chosen]
        return [self.losses[count] for count in self.asked[-len(chosen) :]]


def limited(losses: Mapping[int, float], may_stay: bool = False) -> tuple[int, FakeMeter]:
    """(linears with 4 bits, the meter) for at most 1 % with three linears, each predicted to lose 0.1 % with 4 bits."""
    options = {"4": Option(4, 0.001), "8": Option(8, 0.0001)}
    table = [_Unit((f"m{number}",), options) for number in range(3)]
    meter = FakeMeter(losses)
    found, loss = _under_loss(
        0.01, table, [["4", "8"]] * 3, [list(options.values())] * 3, may_stay, cast(EffectMeter, meter)
    )
    assert loss <= math.log1p(0.01)
    return found.chosen.count(0), meter


def test_the_least_loss_is_tried_before_a_limit_is_refused() -> None:
    """Everything but 8 bits everywhere loses ten times what was predicted."""
    fours, meter = limited({3: 0.5, 2: 0.5, 1: 0.5, 0: 0.004})
    assert fours == 0
    assert meter.asked[0] == 3
    assert meter.asked[-1] == 0


def test_a_refusal_names_what_was_measured_and_no_candidate_that_is_there() -> None:
    losses = {3: 0.5, 2: 0.4, 1: 0.3, 0: 0.2}
    with pytest.raises(UserError, match=r"22\.1 % on the calibration text") as refused:
        limited(losses)
    assert "or 16" in str(refused.value)
    with pytest.raises(UserError) as refused:
        limited(losses, may_stay=True)
    assert "16" not in str(refused.value)


def stream(zero_point: bool) -> SolvedStream:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: QuantizedTensor(
            torch.randint(0, 8, (4, 64), generator=generator).to(torch.int8),
            torch.rand(4, 2, generator=generator),
            torch.ones(4, 2) if zero_point else None,
            INT4,
            Granularity.group(32),
            (4, 64),
            2.0,
        )
        for name in ("a", "b")
    }
    return SolvedStream(weights, 3.5)


@pytest.mark.parametrize("zero_point", [True, False])
def test_solved_streams_come_back_as_they_were(zero_point: bool, tmp_path: Path) -> None:
    store, kept = SolvedStore(tmp_path / "solved"), stream(zero_point)
    store.put("w4a16:32", "a", kept)
    found = store.get("w4a16:32", "a")
    assert found is not None
    assert found.input_amax == 3.5
    for name, weight in kept.weights.items():
        assert torch.equal(found.weights[name].dequantize(), weight.dequantize())
    assert store.get("w8a16", "a") is None


def test_a_full_disk_keeps_nothing_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    store = SolvedStore(tmp_path / "solved")
    monkeypatch.setattr("qwen_quantize.pipeline.solved.save_file", failing)
    store.put("w4a16:32", "a", stream(False))
    monkeypatch.undo()
    store.put("w4a16:32", "a", stream(False))
    assert store.get("w4a16:32", "a") is None
    assert not list((tmp_path / "solved").iterdir())
