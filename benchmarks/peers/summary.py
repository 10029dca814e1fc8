"""From the rows to the lines that the comparison is about: each says what was compared, and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.evaluation import paired_difference
from benchmarks.peers.rows import ASYMMETRIC, FP8, MXFP4, MXFP8, OURS, SYMMETRIC, W8A8, Task

Record = Mapping[str, Any]
RISE_SHARE, COST_SHARE = 0.85, 0.5


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """`lines`, and `ahead`: whether all of them hold. A line without a row of ours does not hold."""
    texts = list(next((r["texts"] for r in records if "texts" in r), {}))
    lines = [_rise(records, task, texts) for task in (SYMMETRIC, ASYMMETRIC)]
    lines += [
        _cost(records, task, field)
        for task in (SYMMETRIC, ASYMMETRIC)
        for field in ("seconds", "cpu_seconds", "peak_memory_bytes")
    ]
    lines += [_not_worse_than_rtn(records, task) for task in (SYMMETRIC, ASYMMETRIC, W8A8, FP8, MXFP4, MXFP8)]
    lines += [_never_worse(records, task, text) for task in (W8A8, FP8, MXFP4, MXFP8) for text in texts]
    return {"ahead": all(line["holds"] for line in lines), "lines": lines}


def _of(records: Sequence[Record], task: Task, ours: bool) -> list[Record]:
    measured = [r for r in records if r["task"] == task.name and "texts" in r]
    return [r for r in measured if (r["tool"] == OURS) is ours]


def _named(record: Record) -> str:
    return f"{record['tool']} {record['method']}"


def _missing(line: str, what: str, holds: bool = False) -> dict[str, Any]:
    return {"line": line, "holds": holds, "reason": f"no row of {what} ran"}


def _rise(records: Sequence[Record], task: Task, texts: Sequence[str]) -> dict[str, Any]:
    """One method of ours is to be far enough ahead of the best peer of each text, on all texts at once."""
    line = f"{task.name}: rise of our best method at most {RISE_SHARE} of the best peer's, on each text"
    ours, peers = _of(records, task, True), _of(records, task, False)
    if not ours or not peers:
        return _missing(line, "ours" if not ours else "the peers")
    best = {text: min(peers, key=lambda r: r["texts"][text]["rise"]) for text in texts}
    limits = {text: RISE_SHARE * float(best[text]["texts"][text]["rise"]) for text in texts}

    def worst(record: Record) -> float:
        return max(float(record["texts"][text]["rise"]) - limits[text] for text in texts)

    chosen = min(ours, key=worst)
    return {
        "line": line,
        "holds": worst(chosen) <= 0,
        "ours": _named(chosen),
        "texts": {
            text: {
                "peer": _named(best[text]),
                "peer_rise": best[text]["texts"][text]["rise"],
                "our_rise": chosen["texts"][text]["rise"],
                "share": chosen["texts"][text]["rise"] / best[text]["texts"][text]["rise"],
            }
            for text in texts
        },
    }


def _cost(records: Sequence[Record], task: Task, field: str) -> dict[str, Any]:
    """awq's cost against that of the calibrated peer that is fastest."""
    line = f"{task.name}: {field} of awq at most {COST_SHARE} of the fastest calibrated peer's"
    awq = [r for r in _of(records, task, True) if r["method"] == "awq" and field in r]
    peers = [r for r in _of(records, task, False) if r["calibrated"] and field in r]
    if not awq or not peers:
        return _missing(line, "awq" if not awq else "a calibrated peer")
    fastest = min(peers, key=lambda r: float(r["seconds"]))
    share = awq[0][field] / fastest[field]
    return {
        "line": line,
        "holds": share <= COST_SHARE,
        "peer": _named(fastest),
        "peer_value": fastest[field],
        "our_value": awq[0][field],
        "share": share,
    }


def _difference(record: Record, other: Record, text: str) -> dict[str, float]:
    """Of the mean losses in nats a token, window by window; positive: `record` is worse."""
    mean, error = paired_difference(
        record["texts"][text]["window_losses"], other["texts"][text]["window_losses"]
    )
    return {"nats": mean, "standard_error": error}


def _not_worse_than_rtn(records: Sequence[Record], task: Task) -> dict[str, Any]:
    line = f"{task.name}: on unlike text no calibrated method of ours is worse than our rtn"
    ours = _of(records, task, True)
    plain = [r for r in ours if r["method"] == "rtn"]
    calibrated = [r for r in ours if r["calibrated"]]
    if not plain or not calibrated:
        return _missing(line, "our rtn" if not plain else "a calibrated method of ours")
    found = {r["method"]: _difference(r, plain[0], "unlike") for r in calibrated}
    return {"line": line, "holds": all(d["nats"] <= 0 for d in found.values()), "against_rtn": found}


def _never_worse(records: Sequence[Record], task: Task, text: str) -> dict[str, Any]:
    """Ours is the method of the task's name, so that none is picked after the fact; holds where no peer runs."""
    line = f"{task.name}, {text} text: never worse than the best peer"
    ours = [r for r in _of(records, task, True) if r["method"] == task.name]
    peers = _of(records, task, False)
    if not ours or not peers:
        return _missing(line, "ours" if not ours else "a peer", holds=bool(ours))
    best = min(peers, key=lambda r: r["texts"][text]["rise"])
    difference = _difference(ours[0], best, text)
    return {
        "line": line,
        "holds": difference["nats"] <= 0,
        "peer": _named(best),
        "peer_rise": best["texts"][text]["rise"],
        "our_rise": ours[0]["texts"][text]["rise"],
        "difference": difference,
    }
