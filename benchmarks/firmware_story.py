"""Three firmware updates that change a chip's arithmetic: noticed, measured, and made up for as far as can be.

    python benchmarks/firmware_story.py [--json] [--cache F] [--tokens N] [--narrow-tokens N] [--stories rtz,narrow]

SmolLM2-135M-Instruct is calibrated for `example@1.2`, whose casts round to nearest and saturate and whose sums are
float32. `regress` is asked three times what a new firmware changes, and calibrates again where it hurts:

- rtz: `example@1.3`, whose casts cut off;
- narrow: sums that keep 13 bits and never leave their register, which costs eight times the time to emulate;
- overflow: casts that no longer saturate, while activations have the scale rule `floor` of the OCP MX text, which
  relies on saturation. (Under the rule `rceil`, which `ue8m0` prefers, that update changes nothing.)

All read a novel that no calibration saw. `recovered_fraction` is the share of the perplexity added by the new
firmware that calibrating again takes back; where the old model's answers are no numbers any more, a perplexity of
null means infinite. The figures of the first story stand at the top, all under `stories`. Writes --results after
every story and goes on from there, unless a story was told on other numbers of tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_quantize.chip_profiles.arithmetic import resolve_arithmetic
from qwen_quantize.chip_profiles.devices import resolve_device
from qwen_quantize.formats.schemes import SCHEMES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "firmware_story.json"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
OLD, NEW = "example@1.2", "example@1.3"


@dataclass(frozen=True, slots=True)
class Story:
    """An update. assume: of the old firmware beside its profile; change: what the new one does otherwise.

    Without a change the new firmware is a version that the profile knows.
    """

    name: str
    assume: tuple[tuple[str, str], ...]
    change: tuple[tuple[str, str], ...]


STORIES = (
    Story("rtz", (), ()),
    Story("narrow", (), (("accumulator.fraction_bits", "13"),)),
    Story("overflow", (("scale.rule", "floor"),), (("cast.overflow", "nonsaturate"),)),
)


def run(*arguments: str, allowed: tuple[int, ...] = (0,)) -> dict[str, Any]:
    command = [sys.executable, "-m", "qwen_quantize", *arguments, "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in allowed:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def side(story: Story, name: str, work: Path, changed: bool) -> str:
    """What `--before` or `--after` names: a version of the chip, or a file that states all of its arithmetic."""
    if not story.assume and not story.change:
        return NEW if changed else OLD
    if not story.assume and not changed:
        return OLD
    profile = resolve_device(OLD, SCHEMES["ue8m0"]).profile
    fields = resolve_arithmetic(profile, SCHEMES["ue8m0"]).fields() | dict(story.assume)
    if changed:
        fields |= dict(story.change)
    file = work / f"{name}.json"
    chip = {"chip": profile.name, "versions": dict(profile.versions), "arithmetic": fields}
    file.write_text(json.dumps(chip))
    return str(file)


def calibrate(story: Story, cache: Path, work: Path) -> Path:
    """The model as it was calibrated for the old firmware; the first two stories share it."""
    output = work / ("first-" + "-".join(value for _, value in story.assume)).rstrip("-")
    if not output.exists():
        assumed = [word for field, value in story.assume for word in ("--assume", f"{field}={value}")]
        run(
            "--model-path", str(cache / MODEL), "--output-path", str(output), "--device", OLD, *assumed,
            "--calibration-dataset", str(cache / "calib.jsonl"), "--no-validate",
        )  # fmt: skip
    return output


def tell(story: Story, cache: Path, tokens: int, work: Path) -> dict[str, Any]:
    first = calibrate(story, cache, work)
    before, after = side(story, "before", work, False), side(story, "after", work, True)
    answer = run(
        "regress", str(first), "--before", before, "--after", after, "--text", str(cache / "heldout.txt"),
        "--max-tokens", str(tokens), "--recalibrate", str(work / f"again-{story.name}"),
        "--calibration-dataset", str(cache / "calib.jsonl"),
        allowed=(0, 1),
    )  # fmt: skip
    again = answer.get("recalibrated") or {}
    return {
        "story": story.name,
        "model": MODEL,
        "before": before if before == OLD else f"{OLD}, {_listed(story.assume)}",
        "after": after if after == NEW else _listed((*story.assume, *story.change)),
        "asked_tokens": tokens,
        "tokens": answer["tokens"],
        "verdict": answer["verdict"],
        "conclusive": answer["conclusive"],
        "advice": answer["advice"],
        "changed": answer["changed"],
        "tests": answer["tests"],
        "perplexity_before": answer["perplexity_before"],
        "perplexity_after": answer["perplexity_after"],
        "unquantized_perplexity": again.get("unquantized_perplexity"),
        "rows": {row["name"]: row for row in again.get("rows", ())},
        "conditions": again.get("conditions", []),
        "recovered_fraction": again.get("recovered_fraction"),
    }


def _listed(fields: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{field}={value}" for field, value in fields)


def record_of(stories: list[dict[str, Any]]) -> dict[str, Any]:
    """All stories; the first one's keys at the top as well."""
    order = [story.name for story in STORIES]
    told = sorted(stories, key=lambda found: order.index(found["story"]))
    return {**told[0], "stories": told}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "real-model")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--narrow-tokens", type=int, default=28672, help="of the story with narrow sums")
    parser.add_argument(
        "--stories", default=",".join(story.name for story in STORIES), help="comma separated"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not (options.cache / MODEL).is_file():
        tool = ROOT / "tools" / "real_model.py"
        subprocess.run(
            [sys.executable, str(tool), "--cache", str(options.cache)], check=True, stdout=sys.stderr
        )
    told: list[dict[str, Any]] = []
    if options.results.is_file():
        told = json.loads(options.results.read_text())["stories"]
    with tempfile.TemporaryDirectory() as work:
        for story in (one for one in STORIES if one.name in options.stories.split(",")):
            tokens = options.narrow_tokens if story.name == "narrow" else options.tokens
            if any(old["story"] == story.name and old["asked_tokens"] == tokens for old in told):
                continue
            found = tell(story, options.cache, tokens, Path(work))
            told = [old for old in told if old["story"] != story.name] + [found]
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(record_of(told), indent=1) + "\n")
    record = record_of(told)
    if options.json:
        print(json.dumps(record, indent=1))
        return
    for found in record["stories"]:
        for change in found["changed"]:
            print(change["text"])
        for name, row in found["rows"].items():
            print(f"  {name}: perplexity {row['perplexity'] or 'infinite'}, KL {row['kl_mean']}")
        for condition in found["conditions"]:
            print(f"  {condition}")
        share = found["recovered_fraction"]
        print(f"  verdict: {found['verdict']}" + ("" if share is None else f"; {share:.0%} taken back"))


if __name__ == "__main__":
    main()
