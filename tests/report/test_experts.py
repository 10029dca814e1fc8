"""Coverage of experts: the summary in words and numbers, and both plots with coordinates worked out by hand."""

from __future__ import annotations

import pytest

from qwen_quantize.report.expert_plots import router_agreement, spread, tokens_per_expert
from qwen_quantize.report.experts import coverage_words, summarize_experts
from qwen_quantize.report.record import Expert, LayerFidelity, read_manifest
from tests.report.sample import manifest, mixture


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (
            [
                Expert(0, 0, 12, 1024, "shrink"),
                Expert(1, 0, 2000, 1024, "own"),
                Expert(1, 1, 40, 1024, "shrink"),
            ],
            "3 routed in 2 layers; 2 starved (fewest 12 tokens, 1,024 needed; policy shrink)",
        ),
        ([Expert(0, 0, 64, 64, "own")], "1 routed in 1 layer; none starved (fewest 64 tokens, 64 needed)"),
        (
            [Expert(0, 0, 1, 64, "round"), Expert(0, 1, 0, 64, "forced")],
            "2 routed in 1 layer; 2 starved, 1 of them without a token (64 needed; policy forced and round)",
        ),
    ],
)
def test_coverage_in_words(experts: list[Expert], words: str) -> None:
    assert coverage_words(experts) == words


def test_an_expert_answers_with_its_worst_linear() -> None:
    made = mixture(2, 4)
    linears = made["layers"][1]["linears"]
    for linear in linears:
        linear |= {"error": 0.1, "baseline_error": 0.2}
    of_last = {it["name"].rpartition(".")[2]: it for it in linears if ".experts.3." in it["name"]}
    of_last["up_proj"] |= {"error": 0.3, "baseline_error": 0.4}
    made["layers"][1]["experts"] = [
        {"expert": e, "tokens": 10 * (3 - e), "needed": 15, "policy": "own" if e < 2 else "shrink"}
        for e in range(4)
    ]
    summary = summarize_experts(read_manifest(made))
    assert summary is not None
    assert [(it.coverage.expert, it.worst and it.worst.last_name) for it in summary.starved] == [
        (3, "up_proj"),
        (2, "gate_proj"),
    ]
    own, shrink = summary.policies
    assert (own.policy, own.count, own.fewest_tokens, own.mean_error) == ("own", 2, 20, 0.1)
    assert (shrink.policy, shrink.count, shrink.fewest_tokens) == ("shrink", 2, 0)
    assert (shrink.mean_error, shrink.mean_baseline_error) == pytest.approx((0.2, 0.3))
    assert shrink.mean_saving == pytest.approx((0.25 + 0.5) / 2)


def test_no_experts_no_summary() -> None:
    assert summarize_experts(read_manifest(manifest(2))) is None
    assert tokens_per_expert((), 340, "k") is None


def test_an_unknown_policy_is_only_named() -> None:
    made = mixture(2, 4)
    made["layers"][1]["experts"][0]["policy"] = "guess"
    summary = summarize_experts(read_manifest(made))
    assert summary is not None
    assert [(it.policy, bool(it.meaning)) for it in summary.policies][-1] == ("guess", False)


def test_each_expert_is_a_mark_and_a_starved_one_has_another_shape() -> None:
    drawing = tokens_per_expert([Expert(5, 0, 1000, 100, "own"), Expert(5, 1, 10, 100, "shrink")], 340, "k")
    assert drawing is not None
    # x: 4.5..5.5 over 52..328, two marks 0.4 of 276 apart around 190; y: 10..1000 over 220..46
    assert '<circle class="mark s0" cx="134.8" cy="46" r="3">' in drawing
    assert 'class="mark s1 hollow" points="245.2,216 ' in drawing
    assert '<polyline class="needed" points="52,133 328,133"/>' in drawing
    assert "layer 5, expert 1: 10 tokens, 100 needed (shrink)" in drawing
    assert "100 needed</text>" in drawing


def test_an_expert_without_a_token_lies_on_the_axis_below_one_with_a_token() -> None:
    drawing = tokens_per_expert([Expert(0, 0, 0, 100, "shrink"), Expert(0, 1, 1, 100, "shrink")], 340, "k")
    assert drawing is not None
    tips = [float(part.split(",")[1].split(" ")[0]) for part in drawing.split('hollow" points="')[2:]]
    assert tips[0] == 216  # the tip of a triangle is 4 above its place, the axis
    assert tips[1] < 200


def test_the_needed_line_has_steps() -> None:
    drawing = tokens_per_expert([Expert(0, 0, 100, 10, "own"), Expert(1, 0, 100, 1000, "shrink")], 340, "k")
    assert drawing is not None
    assert '<polyline class="needed" points="52,220 190,220 190,46 328,46"/>' in drawing
    assert "10 to 1,000 needed" in drawing


def test_of_many_experts_a_layer_shows_its_spread() -> None:
    experts = [Expert(layer, e, 10 * (e + 1), 25, "own") for layer in (3, 4) for e in range(201)]
    found = spread(experts[:201])
    assert (found.fewest, found.lower, found.median, found.upper, found.most) == (10, 510, 1010, 1510, 2010)
    assert (found.experts, found.starved) == (201, 2)
    drawing = tokens_per_expert(experts, 340, "k")
    assert drawing is not None
    assert drawing.count("<title>layer ") == 2
    assert "layer 4: 10 to 2,010 tokens, median 1,010; 2 of 201 experts starved, 25 needed" in drawing
    assert drawing.count("hollow") == 3  # one a layer, and the legend's
    assert "4 of 402 experts in 2 layers are starved" in drawing


def test_router_agreement() -> None:
    layers = [
        LayerFidelity(0, 30.0, 1.0),  # dense
        LayerFidelity(1, 30.0, 1.0, 1.0),
        LayerFidelity(2, 30.0, 1.0, 0.9),
    ]
    drawing = router_agreement(layers, 340, "k")
    assert drawing is not None
    # x: 0.5..2.5 over 52..328; y: 89.2..100 over 220..28, nothing above 100 %
    assert '<polyline class="line s0" points="121,28 259,205.8"/>' in drawing
    assert "Lowest 90.00% in layer 2, of 2 layers with a router." in drawing
    assert router_agreement(layers[:1], 340, "k") is None
    assert router_agreement(layers[1:2], 340, "k") is not None  # all alike
