"""Several folders of one model's statistics, of different texts, as the folder of all the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import qwen_quantize
from qwen_quantize.errors import ResumableError, UserError
from qwen_quantize.pipeline.collect import publish, statistics_staging, write_manifest
from qwen_quantize.pipeline.recipe import Output
from qwen_quantize.pipeline.run import Progress
from qwen_quantize.pipeline.statistics_folder import (
    StatisticsFolder,
    StreamStatistics,
    merge_streams,
    read_statistics,
    write_unit,
)


def merge_folders(folders: Sequence[Path], output: Output, progress: Progress) -> StatisticsFolder:
    """Merge unit by unit; memory holds one of each folder. UserError for what does not belong together.

    Integers, amax and sampled tokens come out as if all text had been collected at once, sums within the rounding
    of float64 of that; only what an average token looks like inside a starved expert is that of the parts.
    """
    found = [read_statistics(folder) for folder in folders]
    first = _require_mergeable(found)
    staging = statistics_staging(output)
    try:
        units = {}
        for done, unit in enumerate(first.manifest.units, 1):
            streams: dict[str, StreamStatistics] = {}
            for folder in found:
                for name, stream in folder.read(unit).items():
                    held = streams.get(name)
                    streams[name] = stream if held is None else _merged(folder, unit, held, stream)
            units[unit] = write_unit(staging.path, unit, streams)
            progress("files", done, len(first.manifest.units))
        manifest = replace(
            first.manifest,
            version=qwen_quantize.__version__,
            data=tuple(one for folder in found for one in folder.manifest.data),
            layers=reduce(_added, (folder.manifest.layers for folder in found)),
            units=units,
        )
        write_manifest(staging.path, manifest)
        publish(staging)
    except ResumableError as error:
        staging.remove()
        raise UserError(str(error).replace("run again with --resume", "run again")) from error
    except UserError:
        staging.remove()
        raise
    finally:
        staging.release()
    return read_statistics(staging.target)


def _require_mergeable(found: Sequence[StatisticsFolder]) -> StatisticsFolder:
    if len(found) < 2:
        raise UserError("merging takes at least two folders of statistics")
    first = found[0]
    seen: dict[str, StatisticsFolder] = {}
    for folder in found:
        mine, theirs = first.manifest, folder.manifest
        for same, what in (
            (mine.fingerprint == theirs.fingerprint, "models"),
            (mine.tokenizer == theirs.tokenizer, "tokenizers"),
            (mine.units.keys() == theirs.units.keys(), "layers"),
            (
                [len(one["experts"]) for one in mine.layers]
                == [len(one["experts"]) for one in theirs.layers],
                "layers",
            ),
        ):
            if not same:
                raise UserError(
                    f"{first.path} and {folder.path} are of different {what}, so they cannot be merged"
                )
        for one in theirs.data:
            if one.sha256 in seen:
                raise UserError(
                    f"{seen[one.sha256].path} and {folder.path} hold the same text, which would count twice; "
                    "collect from another text, or with another --seed"
                )
            seen[one.sha256] = folder
    return first


def _merged(
    folder: StatisticsFolder, unit: str, a: StreamStatistics, b: StreamStatistics
) -> StreamStatistics:
    try:
        return merge_streams(a, b)
    except UserError as error:
        raise UserError(f"{folder.path}, {unit}: {error}") from error


def _added(a: Sequence[Any], b: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "layer": mine["layer"],
            "tokens": mine["tokens"] + theirs["tokens"],
            "experts": [x + y for x, y in zip(mine["experts"], theirs["experts"], strict=True)],
        }
        for mine, theirs in zip(a, b, strict=True)
    )
