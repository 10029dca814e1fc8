"""The page: well formed, self-contained, escaped, repeatable, and honest about what is missing."""

from __future__ import annotations

import copy
import json
import math
import re
import time
from html.parser import HTMLParser
from typing import Any

import pytest

from qwen_quantize.errors import UserError
from qwen_quantize.report.page import render_page
from tests.report.sample import KINDS, manifest, mixture

VOID = {"meta", "br", "hr", "img", "input", "link", "col"}
HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }}</style>"


class Outline(HTMLParser):
    """Fails on a tag that closes another one; keeps tags, ids, attributes and words."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing, line {self.getpos()[0]}"
        assert self.open.pop() == tag, f"</{tag}> closes another tag, line {self.getpos()[0]}"

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def outline(page: str) -> Outline:
    parsed = Outline()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids)), "an id stands twice"
    return parsed


def words(page: str) -> str:
    return " ".join("".join(outline(page).words).split())


def bare() -> dict[str, Any]:
    made = manifest(1)
    made |= {"validation": None, "calibration": None, "assumptions": [], "notes": []}
    made["layers"][0]["streams"] = []
    return made


def without_reference() -> dict[str, Any]:
    made = manifest(2)
    kept = ("text", "text_sha256", "tokens", "windows", "window_tokens", "perplexity")
    made["validation"] = {key: made["validation"][key] for key in kept}
    return made


def all_exact() -> dict[str, Any]:
    made = manifest(3)
    for layer in made["layers"]:
        for linear in layer["linears"]:
            linear |= {"error": 0.0, "baseline_error": 0.0, "weight_sqnr_db": 999.0}
    for layer in made["validation"]["layers"]:
        layer["sqnr_db"] = None
    made["validation"] |= {
        "rise": 0.0, "rise_standard_error": 0.0, "kl_mean": 0.0, "kl_p50": 0.0, "kl_p90": 0.0, "kl_p99": 0.0,
        "top1_agreement": 1.0, "kl_counts": [4088] + [0] * 47,
    }  # fmt: skip
    return made


@pytest.mark.parametrize(
    "made",
    [
        manifest(30),
        manifest(60),
        manifest(1),
        manifest(0),
        bare(),
        without_reference(),
        all_exact(),
        {},
        mixture(),
    ],
    ids=[
        "30 layers",
        "60 layers",
        "one layer",
        "no layer",
        "bare",
        "no reference",
        "exact",
        "empty",
        "mixture",
    ],
)
def test_well_formed_and_self_contained(made: dict[str, Any]) -> None:
    page = render_page(made)
    parsed = outline(page)
    assert page.startswith("<!DOCTYPE html>")
    assert ("lang", "en") in parsed.attributes
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in parsed.attributes}
    for name, value in parsed.attributes:
        if name == "aria-labelledby" and value:
            assert set(value.split()) <= set(parsed.ids)
    assert not re.search(r"\d\.\d{9}", page), "a number has too many digits"
    assert "nan" not in re.findall(r"[a-z]+", words(page).replace("cast.nan", ""))
    assert "None" not in words(page)


def test_the_numbers_are_there() -> None:
    shown = words(render_page(manifest()))
    for number in ("31.42", "31.02", "+1.29%", "± 0.10%", "0.00421", "0.0317", "95.38%", "596 million"):
        assert number in shown
    assert "1.11 GiB → 716 MiB" in shown
    assert "1.59 times smaller" in shown
    assert "2 values of the chip's arithmetic do not come from its documents" in shown
    assert "(7 linears, first model.layers.7.self_attn.q_proj)" in shown


def test_plots_are_named_for_screen_readers() -> None:
    page = render_page(manifest(4))
    drawings = re.findall(r"<svg [^>]*viewBox[^>]*>", page)
    informative = [tag for tag in drawings if 'aria-hidden="true"' not in tag]
    assert len(informative) == 4 * 2 + 7  # four plots in two widths, one panel a kind
    assert all('role="img"' in tag and "aria-labelledby" in tag for tag in informative)


def test_every_string_is_escaped() -> None:
    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: poison(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [poison(item, key) for item in value]
        return value + HOSTILE if isinstance(value, str) else value

    page = render_page(poison(mixture(2, 4)))
    parsed = outline(page)
    assert "script" not in parsed.tags
    assert parsed.tags.count("style") == 1
    assert HOSTILE in "".join(parsed.words)
    assert "{{ 7 * 7 }}" in page  # data is no template


def test_control_characters_and_surrogates_do_not_reach_the_page() -> None:
    made = manifest(1)
    made["notes"] = ["a\x00b\ud800c\u202ed"]
    page = render_page(made)
    assert "a\ufffdb\ufffdc\ufffdd" in page
    page.encode()


def test_same_manifest_same_bytes() -> None:
    made = manifest(3)
    again = json.loads(json.dumps(made, sort_keys=True))
    untouched = copy.deepcopy(made)
    assert render_page(made) == render_page(again)
    assert made == untouched


def test_infinity_before_and_after_json_is_the_same_page() -> None:
    made, stored = manifest(3), manifest(3)
    made["validation"]["layers"][0]["sqnr_db"] = math.inf
    made["validation"]["rise_standard_error"] = math.nan
    stored["validation"]["layers"][0]["sqnr_db"] = None
    stored["validation"]["rise_standard_error"] = None
    assert render_page(made) == render_page(stored)
    assert "one window: no standard error" in render_page(stored)


def test_missing_parts_are_sentences() -> None:
    shown = words(render_page(bare()))
    assert "This model was not measured" in shown
    assert "hidden states were not compared" in shown
    assert "quantized without calibration data" in shown
    assert "No data was used" in shown
    assert "Relative squared weight error" in shown  # without inputs there is no output error
    assert "Nothing had to be assumed" in shown
    assert "no original to compare with" in words(render_page(without_reference()))


def test_an_exact_model() -> None:
    shown = words(render_page(all_exact()))
    assert "No linear has an error other than zero" in shown
    assert "equal the original's exactly" in shown
    assert "100.00%" in shown
    assert "The first bar also holds all that is smaller." in shown


def test_a_great_many_linears_are_cut_with_a_word() -> None:
    made = manifest(1)
    one = made["layers"][0]["linears"][0]
    made["layers"][0]["linears"] = [
        one | {"name": f"model.layers.0.mlp.experts.{n}.up_proj", "error": 1e-4 + n * 1e-9}
        for n in range(2100)
    ]
    shown = words(render_page(made))
    assert "All 2,100 quantized linears The 2,000 with the largest error" in shown
    assert "Of a layer's experts the worst is shown." in shown


def test_the_full_table_keeps_the_order_of_the_model() -> None:
    page = render_page(manifest(2))
    rows = re.findall(r'<td class="n">(\d+)</td><th scope="row">([^<]+)', page[page.index("<details>") :])
    assert rows == [(str(layer), kind) for layer in range(2) for kind, _, _ in KINDS]


def test_arithmetic_says_what_was_assumed_and_what_was_set() -> None:
    made = manifest(1)
    made["assumptions"][0]["why"] = "set by the user"
    made["chip"]["arithmetic"] = {
        "cast.subnormals": "keep",
        "accumulator.format": "fp32",
        "scale.rule": "rceil",
    }
    shown = words(render_page(made))
    assert "cast.subnormalskeepset by hand set by the user" in shown
    assert "accumulator.formatfp32assumed only press" in shown


def experts_section(page: str) -> str:
    found = re.search(r'<section aria-labelledby="experts">.*?</section>', page, re.DOTALL)
    return found[0] if found else ""


def test_experts_of_a_mixture() -> None:
    section = experts_section(render_page(mixture(4, 16)))
    shown = words(section)
    assert "Experts: 48 routed in 3 layers; 6 starved, 2 of them without a token" in shown
    assert "shrink: its own tokens; those that are missing are made up" in shown
    assert "On the bottom axis there is none at all." in shown
    rows = re.findall(r'<tr><td class="n">(\d+)</td><th scope="row" class="n">(\d+)</th>', section)
    assert sorted(rows) == [(str(layer), expert) for layer in (1, 2, 3) for expert in ("14", "15")]
    errors = re.findall(r'<td>down_proj</td><td class="n">([^<]+)</td>', section)
    assert [float(error) for error in errors] == sorted(map(float, errors), reverse=True)
    assert len(re.findall('<svg class="plot" role="img"', section)) == 2 * 2


def test_no_experts_no_section() -> None:
    assert experts_section(render_page(manifest(3))) == ""


def test_routers_without_calibration() -> None:
    made = mixture(3, 8)
    made["calibration"] = None
    for layer in made["layers"]:
        layer.pop("experts", None)
    shown = words(experts_section(render_page(made)))
    assert "quantized without calibration data" in shown
    assert "starved" not in shown
    assert "Do routers still choose the same experts?" in shown


def test_experts_that_were_not_quantized() -> None:
    made = mixture(2, 8)
    made["layers"][1]["linears"] = made["layers"][1]["linears"][:4]
    made["validation"] = None
    shown = words(experts_section(render_page(made)))
    assert "not quantized" in shown
    assert "the choices of the routers were not compared" in shown


def test_many_experts_stay_small() -> None:
    section = experts_section(render_page(mixture(59, 48)))
    assert "A line spans a layer's experts" in words(section)
    assert "The 40 starved experts with the largest error" in section
    assert "308 more are starved" in section
    assert section.count('<th scope="row" class="n">') == 40
    assert len(section) < 150_000


@pytest.mark.slow
def test_a_page_of_45000_linears() -> None:
    made = mixture(61, 256, 3, 8192)
    began = time.process_time()
    page = render_page(made)
    assert time.process_time() - began < 10
    assert len(page.encode()) < 2_000_000
    outline(page)


def test_a_great_many_notes_are_cut_with_a_word() -> None:
    shown = words(render_page(manifest(1) | {"notes": [f"note {n}." for n in range(100)]}))
    assert "note 39. 60 more stand in qwen_quantize.json." in shown
    assert "note 40" not in shown


def test_weights_only() -> None:
    made = manifest(1)
    made["validation"]["weights_only"] = {"perplexity": 31.1, "rise": 0.0027, "rise_standard_error": 0.0004}
    assert "activations in full precision: perplexity 31.10 (+0.27% ± 0.04%)" in words(render_page(made))


def test_a_broken_manifest_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"validation\.tokens"):
        render_page(manifest(1) | {"validation": {"tokens": "many"}})
