"""Mixed precision on the command line: the request, the first pass over the model, and what was chosen, in words."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_quantize.errors import UserError

if TYPE_CHECKING:
    from qwen_quantize.checkpoint.source import CheckpointSource
    from qwen_quantize.cli.console import Speaker
    from qwen_quantize.pipeline.choosable import MixedRequest
    from qwen_quantize.pipeline.mixed import MixedChoice
    from qwen_quantize.pipeline.recipe import Recipe


def mixed_request(
    target_bits: float | None, max_loss: str | None, candidates: str | None
) -> MixedRequest | None:
    """What --target-bits, --max-loss and --candidates ask for; None where they do not."""
    from qwen_quantize.pipeline.choosable import MixedRequest

    if target_bits is None and max_loss is None:
        if candidates is not None:
            raise UserError(
                "--candidates are what --target-bits or --max-loss chooses from; give one of these"
            )
        return None
    if target_bits is not None and max_loss is not None:
        raise UserError("--target-bits and --max-loss each decide what is chosen; give one of them")
    if target_bits is not None and not (math.isfinite(target_bits) and target_bits > 0):
        raise UserError(f"--target-bits must be a positive number of bits, found {target_bits}")
    names = () if candidates is None else tuple(name.strip() for name in candidates.split(","))
    if len(set(names)) != len(names):
        raise UserError(f"--candidates {candidates!r} names one twice")
    return MixedRequest(target_bits, None if max_loss is None else _share(max_loss), names)


def _share(text: str) -> float:
    digits = text.strip().removesuffix("%")
    try:
        value = float(digits)
    except ValueError:
        value = math.nan
    value /= 100 if text.strip().endswith("%") else 1
    if not 0 < value < 1:
        raise UserError(f"--max-loss {text!r}: write the rise of perplexity as 0.5% or 0.005")
    return value


def choose(
    recipe: Recipe, request: MixedRequest, source: CheckpointSource, target: Path, speaker: Speaker
) -> MixedChoice:
    """Weigh the candidates on statistics that are collected now, in a folder beside the target, or were before."""
    from qwen_quantize.engine.load import ModelReader
    from qwen_quantize.pipeline.choosable import weigh_request
    from qwen_quantize.pipeline.collect import collect
    from qwen_quantize.pipeline.mixed import MixedText, choose_mixed
    from qwen_quantize.pipeline.recipe import Output
    from qwen_quantize.pipeline.run import read_calibration
    from qwen_quantize.pipeline.statistics_folder import read_statistics

    choosable = weigh_request(recipe, request, source)
    for name, why in choosable.left_out.items():
        speaker.say(f"note: {name} is not chosen from: {why}")
    reader = ModelReader(source)
    if recipe.statistics is not None:
        folder = read_statistics(recipe.statistics)
        with speaker.progress("choose") as progress:
            return choose_mixed(recipe, request, choosable, reader, folder, None, progress)
    calibration = read_calibration(recipe, reader)
    assert calibration is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-statistics-", dir=target.parent) as name:
        with speaker.progress("collect") as progress:
            folder = collect(recipe, reader, Output(Path(name) / "statistics"), progress)
        with speaker.progress("choose") as progress:
            text = MixedText(calibration.tokens, Path(name) / "solved")
            return choose_mixed(recipe, request, choosable, reader, folder, text, progress)


def mixed_lines(record: dict[str, Any]) -> list[str]:
    """What was chosen, in a few lines."""
    counts: dict[str, int] = {}
    for linear in record["linears"]:
        counts[linear["candidate"]] = counts.get(linear["candidate"], 0) + 1
    words = ", ".join(f"{count} x {name}" for name, count in counts.items())
    lines = [f"mixed:  {record['bits_per_weight']:.4f} bits for each of {record['weights']} weights: {words}"]
    if record["predicted_rise"] is None:
        lines.append(
            "mixed:  chosen by the share of errors in the residual; without text no loss is predicted"
        )
    else:
        lines.append(
            f"mixed:  predicted from the calibration text, before scales are moved: KL {record['predicted_kl']:.3g}, "
            f"perplexity up by {100 * record['predicted_rise']:.3g} %; other text may lose more or less"
        )
    return lines


def prediction_line(record: dict[str, Any], validation: dict[str, Any]) -> str:
    """The prediction beside what was measured on other text."""
    return (
        f"mixed:  KL predicted {record['predicted_kl']:.3g}, measured {validation['kl_mean']:.3g}; perplexity up by "
        f"{100 * record['predicted_rise']:.3g} % predicted, {100 * validation['rise']:.3g} % measured "
        f"(standard error {100 * validation['rise_standard_error']:.2g} %)"
    )
