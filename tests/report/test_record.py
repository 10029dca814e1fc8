"""Reading a manifest: what it becomes, and what a wrong value says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qwen_quantize.errors import UserError
from qwen_quantize.report.fields import Fields, printable
from qwen_quantize.report.linears import linear_kind, read_linear
from qwen_quantize.report.record import Expert, read_manifest, read_measured
from tests.report.sample import manifest, mixture, validation


def test_kinds_forget_the_layer_and_the_expert() -> None:
    assert linear_kind("model.layers.3.self_attn.q_proj") == "self_attn.q_proj"
    assert linear_kind("model.layers.61.mlp.experts.17.up_proj") == "mlp.experts.*.up_proj"
    assert linear_kind("lm_head") == "lm_head"


def test_a_linear_knows_its_expert() -> None:
    names = ("model.layers.3.mlp.experts.17.up_proj", "model.layers.3.mlp.shared_experts.up_proj", "lm_head")
    linears = [read_linear(Fields({"name": name}), None) for name in names]
    assert [it.expert for it in linears] == [17, None, None]
    assert [it.place for it in linears] == ["mlp.experts.17.up_proj", "mlp.shared_experts.up_proj", "lm_head"]
    assert [it.last_name for it in linears] == ["up_proj", "up_proj", "lm_head"]


def test_experts_are_read_and_absent_in_older_manifests() -> None:
    made = mixture(2, 4)
    assert read_manifest(made).layers[0].experts == ()
    assert read_manifest(made).experts[-1] == Expert(1, 3, 0, 1024, "shrink")
    assert read_manifest(manifest(2)).experts == ()
    made["layers"][1]["experts"] = None
    assert read_manifest(made).experts == ()


def test_the_least_agreeing_router() -> None:
    record = validation(3)
    assert read_measured(Fields(record)).least_agreeing is None
    record["layers"][1]["router_agreement"], record["layers"][2]["router_agreement"] = 0.9, 0.0
    least = read_measured(Fields(record)).least_agreeing
    assert least is not None
    assert (least.layer, least.router_agreement) == (2, 0.0)


def test_an_empty_manifest_is_readable() -> None:
    record = read_manifest({})
    assert (record.validation, record.calibration, record.linears, record.compression) == (
        None,
        None,
        (),
        None,
    )
    assert record.model_name == "embedded model"


def test_worst_first_by_error_then_name() -> None:
    made = manifest(2)
    first, second, third = made["layers"][0]["linears"][:3]
    first["error"], second["error"], third["error"] = None, 0.5, 0.5
    names = [linear.name for linear in read_manifest(made).worst_first]
    assert names[:2] == sorted([second["name"], third["name"]])
    assert names[-1] == first["name"]


def test_saving_needs_a_baseline() -> None:
    made = manifest(1)
    linears = made["layers"][0]["linears"]
    linears[0] |= {"error": 0.25, "baseline_error": 1.0}
    linears[1] |= {"error": 0.0, "baseline_error": 0.0}
    record = read_manifest(made).linears
    assert (record[0].saving, record[1].saving) == (0.75, None)


def test_null_and_999_mean_without_error() -> None:
    made = manifest(1)
    made["layers"][0]["linears"][0]["weight_sqnr_db"] = 999.0
    made["validation"]["layers"][0]["sqnr_db"] = None
    record = read_manifest(made)
    assert record.linears[0].weight_sqnr_db == math.inf
    assert record.validation is not None
    assert record.validation.layers[0].sqnr_db == math.inf


@pytest.mark.parametrize(
    ("rise", "error", "words"),
    [
        (0.05, 0.01, "The rise is more than two"),
        (-0.05, 0.01, "The fall is more than two"),
        (0.02, 0.01, "cannot be told from zero"),
        (0.0, 0.0, "the same as before"),
        (0.05, None, ""),
        (None, 0.01, ""),
    ],
)
def test_verdict(rise: float | None, error: float | None, words: str) -> None:
    record = validation(1) | {"rise": rise, "rise_standard_error": error}
    verdict = read_measured(Fields(record)).verdict
    assert words in verdict
    assert bool(words) == bool(verdict)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"chip": "ascend"}, "chip"),
        ({"layers": {}}, "layers"),
        ({"layers": [3]}, "layers[0]"),
        ({"layers": [{}]}, "layers[0].layer"),
        ({"layers": [{"layer": 0, "linears": [{"error": "small"}]}]}, "layers[0].linears[0].error"),
        ({"layers": [{"layer": 0, "linears": [{"exponents": {"1000": 1}}]}]}, "linears[0].exponents.1000"),
        ({"layers": [{"layer": 0, "linears": [{"exponents": {"x": 1}}]}]}, "linears[0].exponents.x"),
        ({"layers": [{"layer": 0, "experts": [{"expert": 0}]}]}, "layers[0].experts[0].tokens"),
        ({"validation": {"router_agreement": "most"}}, "validation.router_agreement"),
        ({"output_bytes": -1}, "output_bytes"),
        ({"output_bytes": True}, "output_bytes"),
        ({"notes": [["nested"]]}, "notes.0"),
        ({"validation": {"kl_edges": [None]}}, "validation.kl_edges.0"),
        ({"validation": {"perplexity": 10**400}}, "validation.perplexity"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], place: str) -> None:
    with pytest.raises(UserError) as caught:
        read_manifest(manifest(1) | change)
    assert place in str(caught.value)
    assert len(str(caught.value)) < 250


def test_printable() -> None:
    assert printable("a\x1b[31mb") == "a\ufffd[31mb"  # no colour codes into a terminal
    assert printable("line\nnext\ttab") == "line next tab"
    assert printable("\u202egnp.exe") == "\ufffdgnp.exe"  # no right-to-left override
    assert printable("\ud800").encode() == "\ufffd".encode()
    assert printable("模型 ∞") == "模型 ∞"
