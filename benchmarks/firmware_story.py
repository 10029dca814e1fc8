"""A firmware whose FP8 unit truncates where it used to round: noticed, measured, and made up for.

    python benchmarks/firmware_story.py [--json] [--cache build/real-model] [--tokens 20480]

SmolLM2-135M-Instruct is calibrated for `example@1.2`, whose casts round to nearest. `regress` then asks what
`example@1.3` changes, whose casts cut off, and calibrates again. Both read a novel that no calibration saw.
`recovered_fraction` is the share of the perplexity added by the new firmware that recalibration takes back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def run(*arguments: str, allowed: tuple[int, ...] = (0,)) -> dict[str, Any]:
    command = [sys.executable, "-m", "qwen_quantize", *arguments, "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in allowed:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def tell(cache: Path, tokens: int, before: str, after: str, work: Path) -> dict[str, Any]:
    first, again = work / "first", work / "again"
    calibration = str(cache / "calib.jsonl")
    run(
        "--model-path", str(cache / MODEL), "--output-path", str(first), "--device", before,
        "--calibration-dataset", calibration, "--no-validate",
    )  # fmt: skip
    answer = run(
        "regress", str(first), "--before", before, "--after", after, "--text", str(cache / "heldout.txt"),
        "--max-tokens", str(tokens), "--recalibrate", str(again), "--calibration-dataset", calibration,
        allowed=(0, 1),
    )  # fmt: skip
    again_rows = {row["name"]: row for row in (answer.get("recalibrated") or {}).get("rows", ())}
    return {
        "model": MODEL,
        "before": before,
        "after": after,
        "tokens": answer["tokens"],
        "verdict": answer["verdict"],
        "changed": answer["changed"],
        "tests": answer["tests"],
        "unquantized_perplexity": (answer.get("recalibrated") or {}).get("unquantized_perplexity"),
        "rows": again_rows,
        "recovered_fraction": (answer.get("recalibrated") or {}).get("recovered_fraction"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "real-model")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--before", default="example@1.2")
    parser.add_argument("--after", default="example@1.3")
    options = parser.parse_args()
    if not (options.cache / MODEL).is_file():
        tool = ROOT / "tools" / "real_model.py"
        subprocess.run(
            [sys.executable, str(tool), "--cache", str(options.cache)], check=True, stdout=sys.stderr
        )
    with tempfile.TemporaryDirectory() as work:
        record = tell(options.cache, options.tokens, options.before, options.after, Path(work))
    if options.json:
        print(json.dumps(record, indent=1))
        return
    for change in record["changed"]:
        print(change["text"])
    for name, row in record["rows"].items():
        print(f"{name}: perplexity {row['perplexity']:.3f}, KL {row['kl_mean']:.5f}")
    recovered = record["recovered_fraction"]
    print(f"verdict: {record['verdict']}" + ("" if recovered is None else f"; {recovered:.0%} taken back"))


if __name__ == "__main__":
    main()
