"""Write the tables of docs/how-to/rotate.md from benchmarks/results; with --check only say whether they are fresh."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how-to" / "rotate.md"
RESULTS = ROOT / "benchmarks" / "results"
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)
_TEXTS = ("like", "unlike")


def table(record: Mapping[str, Any]) -> str:
    """A row for each method and copy: KL on both texts, the mean over seeds, and its change against no rotation."""
    tokens = record["tokens"]
    lines = [
        f"KL in nats a token on {tokens['like']} tokens like the calibration text and {tokens['unlike']} unlike it, "
        f"groups of {record['group_size']} where the method has groups, {record['calibration_tokens']} calibration "
        "tokens:",
        "",
        "| method | `--rotate` | KL, like | KL, unlike | perplexity, like | perplexity, unlike | bytes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = record["rows"]
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        plain = next(row for row in mine if row["copy"] == "none")
        for copy in dict.fromkeys(row["copy"] for row in mine):
            seeds = [row for row in mine if row["copy"] == copy]
            cells = [_cell(seeds, text, plain) for text in _TEXTS]
            cells += [f"{_mean(seeds, text, 'rise'):+.1%}" for text in _TEXTS]
            lines.append(f"| {method} | `{copy}` | {' | '.join(cells)} | {seeds[0]['output_bytes']:,} |")
    return "\n".join(lines) + "\n"


def _mean(rows: list[dict[str, Any]], text: str, key: str) -> float:
    return sum(float(row[text][key]) for row in rows) / len(rows)


def _cell(rows: list[dict[str, Any]], text: str, plain: Mapping[str, Any]) -> str:
    kl = _mean(rows, text, "kl_mean")
    change = "" if rows[0] is plain else f" ({kl / plain[text]['kl_mean'] - 1:+.0%})"
    return f"{kl:.4f}{change}"


def fresh(page: str) -> str:
    """The page with every generated part made anew from the results file that it names."""

    def part(match: re.Match[str]) -> str:
        record = json.loads((RESULTS / f"{match[2]}.json").read_text(encoding="utf-8"))
        return f"{match[1]}{table(record)}{match[4]}"

    return _PART.sub(part, page)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 for an old page")
    options = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = fresh(old)
    if options.check:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
