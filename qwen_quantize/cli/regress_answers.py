"""Whether a model's answers change: it is run under both arithmetics on one text, or two recorded runs are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qwen_quantize.chip_profiles.arithmetic import Arithmetic
from qwen_quantize.chip_profiles.difference import EMULATED, Difference
from qwen_quantize.cli.console import Speaker, StageProgress
from qwen_quantize.cli.regress_sides import Side, arithmetic_of
from qwen_quantize.cli.session import chip_compute, read_text
from qwen_quantize.engine.compute import Compute, FolderCompute
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.errors import UserError
from qwen_quantize.eval.compare import evaluate
from qwen_quantize.eval.perplexity import targets_of
from qwen_quantize.eval.recording import check_comparable
from qwen_quantize.eval.regression import Judgement, Limits, judge
from qwen_quantize.eval.token_scores import ScoreRecorder, TokenScores
from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.pipeline.texts import EvaluationTokens

_NOT_REPEATABLE = (Rounding.STOCHASTIC, Rounding.HYBRID)


@dataclass(frozen=True, slots=True)
class TextChoice:
    """What to measure on, as the options say; text None is the shipped novel."""

    text: str | None
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answers:
    """Level 2: the two runs and what the tests say of them; `windows` None where both runs were recorded."""

    before: TokenScores
    after: TokenScores
    judgement: Judgement
    text: str
    text_sha256: str
    windows: EvaluationTokens | None


def compare_answers(
    reader: ModelReader,
    sides: tuple[Side, Side],
    found: Difference,
    scheme: Scheme,
    choice: TextChoice,
    limits: Limits,
    speaker: Speaker,
) -> Answers | None:
    """None where nothing changed that the answers could depend on, or that the engine can compute."""
    before, after = sides
    if before.run is not None and after.run is not None:
        check_comparable(before.run, after.run, (before.name, after.name))
        first, second = before.run.scores, after.run.scores
        if not found.changed and _same(first, second):
            return None
        about = after.run.about
        return Answers(first, second, judge(first, second, limits), about.text, about.text_sha256, None)
    if not before.fields.keys() & after.fields.keys():
        raise UserError(
            f"{before.name} and {after.name} state nothing in common: there is nothing to compare"
        )
    if not any(change.field in EMULATED for change in found.changed):
        return None
    casts = [chip_cast(reader, arithmetic_of(*pair, scheme)) for pair in (sides, sides[::-1])]
    windows, text = text_windows(reader, choice, sides)
    scores = []
    for side, cast, stage in zip(sides, casts, ("before", "after"), strict=True):
        if side.run is not None:
            scores.append(side.run.scores)
            continue
        with speaker.progress(f"regress, {stage}") as progress:
            scores.append(run_scores(reader, cast, windows, progress))
    judgement = judge(scores[0], scores[1], limits)
    return Answers(scores[0], scores[1], judgement, text, windows.text_sha256, windows)


def _same(first: TokenScores, second: TokenScores) -> bool:
    ours, theirs = first.log_probability, second.log_probability
    return torch.equal(ours.nan_to_num(nan=1.0), theirs.nan_to_num(nan=1.0)) and torch.equal(
        first.top_ids, second.top_ids
    )


def chip_cast(reader: ModelReader, arithmetic: Arithmetic) -> FolderCompute:
    """The cast of the model's activations; UserError where there is none, or none that repeats."""
    rounding = arithmetic.activation_cast.rounding
    if rounding in _NOT_REPEATABLE:
        raise UserError(f"a cast that rounds {rounding} is not emulated here; compare recorded runs instead")
    chip = chip_compute(reader, arithmetic)
    if chip is None:
        raise UserError(
            f"{reader.source.path} has no linears whose activations a chip casts; quantize it first, with a method "
            "that casts them"
        )
    return chip


def text_windows(
    reader: ModelReader, choice: TextChoice, sides: tuple[Side, Side]
) -> tuple[EvaluationTokens, str]:
    """The text and its name, cut as the recorded run cut it where one of the sides is one."""
    run = next((side.run for side in sides if side.run is not None), None)
    if run is None:
        return read_text(choice.text, reader, None, choice.max_tokens)
    # The text that the file names is not opened: nobody vouches for the file.
    about = run.about
    windows, name = read_text(choice.text, reader, run.scores.window_tokens + 1, about.max_tokens)
    same = torch.equal(targets_of(windows.windows), run.scores.targets)
    if windows.text_sha256 != about.text_sha256 or not same:
        raise UserError(
            f"the recorded run is of another text than {name}: it was {about.text} (SHA-256 {about.text_sha256}); "
            "name that with --text"
        )
    return windows, name


def run_scores(
    reader: ModelReader, chip: Compute | None, windows: EvaluationTokens, progress: StageProgress
) -> TokenScores:
    """What the model says of every token under a cast of its activations."""
    recorder = ScoreRecorder()
    evaluate(StreamedModel(reader, chip), windows.windows, None, progress, recorder.add)
    return recorder.scores(windows.document_ids)
