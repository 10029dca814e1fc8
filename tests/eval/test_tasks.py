"""The task adapter: its likelihoods are those of the scorer, its windows and answers those of a plain decoder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.generate import greedy_tokens
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.model import Model
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.engine.tokenizer import load_tokenizer
from qwen_quantize.errors import UserError
from qwen_quantize.eval.compare import evaluate
from qwen_quantize.eval.continuations import Continuation, score_continuations
from qwen_quantize.eval.tasks import Question, TaskModel
from qwen_quantize.eval.token_scores import ScoreRecorder
from tests.tiny_models import make_tiny, make_tokenizer, words

CONTEXT = 24


@pytest.fixture(scope="module", params=["qwen3-tied", "qwen3-moe"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelReader:
    folder = tmp_path_factory.mktemp("tasks") / request.param
    make_tiny(folder, request.param, num_hidden_layers=2)
    make_tokenizer(folder)
    return ModelReader(open_source(str(folder)))


@pytest.fixture
def whole(reader: ModelReader) -> Model:
    return load_model(reader)


@pytest.fixture
def tasks(reader: ModelReader) -> TaskModel:
    return TaskModel(
        StreamedModel(reader),
        load_tokenizer(Path(reader.source.path)),
        CONTEXT,
        lambda: load_model(reader),
        lambda _what, _done, _total: None,
    )


def ids_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def direct(model: Model, context: list[int], target: list[int]) -> tuple[float, bool]:
    """One text alone through the loaded model."""
    logits = model.forward(torch.tensor([context + target[:-1]]))[0, len(context) - 1 :]
    scores = logits.log_softmax(-1)
    wanted = torch.tensor(target)
    return float(scores.gather(1, wanted[:, None]).sum()), bool((scores.argmax(-1) == wanted).all())


def test_likelihoods_are_those_of_each_text_alone(whole: Model, tasks: TaskModel) -> None:
    pairs = [(words(length, length), " " + words(1 + length % 4, 50 + length)) for length in range(2, 20)]
    pairs += [(words(6, 1), f" w{choice}") for choice in (3, 4, 5)]  # one input, three answers
    likeliest = int(whole.forward(torch.tensor([ids_of(words(6, 1))]))[0, -1].argmax())
    pairs += [(words(6, 1), f" w{likeliest}"), ("", words(3, 9))]
    found = tasks.loglikelihood(pairs)
    for (context, target), likelihood in zip(pairs, found, strict=True):
        expected, greedy = direct(whole, ids_of(context) or [0], ids_of(target))
        assert likelihood.log_probability == pytest.approx(expected, abs=2e-4)
        assert likelihood.greedy == greedy
    assert found[-2].greedy
    assert tasks.shortened == 0


def test_likelihoods_are_those_of_the_scorer(reader: ModelReader, tasks: TaskModel) -> None:
    texts = [words(12, seed) for seed in range(5)]
    recorder = ScoreRecorder()
    evaluate(StreamedModel(reader), torch.tensor([ids_of(text) for text in texts]), watch=recorder.add)
    expected = recorder.scores(["one"] * 5).log_probability.view(5, 11).double().sum(1)
    pairs = [(text.split()[0], " " + text.split(maxsplit=1)[1]) for text in texts]
    found = torch.tensor([each.log_probability for each in tasks.loglikelihood(pairs)], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_passes_change_nothing(reader: ModelReader) -> None:
    requests = [
        Continuation(tuple(ids_of(words(length, length))), (5, 6)) for length in (3, 9, 4, 15, 8, 16, 3)
    ]
    steps: list[tuple[int, int]] = []
    found = [
        score_continuations(StreamedModel(reader), requests, lambda _what, *at: steps.append(at), tokens)
        for tokens in (1 << 16, 20)
    ]
    assert [each.greedy for each in found[0]] == [each.greedy for each in found[1]]
    assert [each.log_probability for each in found[0]] == pytest.approx(
        [each.log_probability for each in found[1]], abs=1e-4
    )
    assert steps[1] == (2, 2)  # all in one pass of two layers
    assert steps[-1][1] > 4
    assert steps[-1][0] == steps[-1][1]


def test_rolling_predicts_each_token_once_with_all_the_context_there_is(
    whole: Model, tasks: TaskModel
) -> None:
    short, long = words(10, 2), words(2 * CONTEXT + 7, 3)
    found = tasks.loglikelihood_rolling([short, long])
    assert found[0] == pytest.approx(direct(whole, [0], ids_of(short))[0], abs=2e-4)
    ids = [0, *ids_of(long)]
    pieces = [(0, 1, CONTEXT + 1), (CONTEXT, CONTEXT + 1, 2 * CONTEXT + 1)]
    pieces.append(
        (len(ids) - 1 - CONTEXT, 2 * CONTEXT + 1, len(ids))
    )  # moved back, so that the window is full
    expected = sum(direct(whole, ids[first:begin], ids[begin:end])[0] for first, begin, end in pieces)
    assert found[1] == pytest.approx(expected, abs=5e-4)


def test_answers_are_greedy_and_end_before_a_stop_text(whole: Model, tasks: TaskModel) -> None:
    prompt = words(5, 4)
    expected = list(greedy_tokens(whole, ids_of(prompt), 8, stop=(0,)))
    free, stopped = tasks.generate_until(
        [Question(prompt, max_new_tokens=8), Question(prompt, (f"w{expected[2]}",), 8)]
    )
    assert ids_of(free) == [token for token in expected if token != 0]
    assert ids_of(stopped) == expected[: expected.index(expected[2])]


def test_long_prompts_lose_their_beginning(whole: Model, tasks: TaskModel) -> None:
    text = words(CONTEXT + 10, 5)
    (found,) = tasks.loglikelihood([(text, " w7 w8")])
    kept = ids_of(text)[-(CONTEXT - 1) :]
    assert found.log_probability == pytest.approx(direct(whole, kept, [7, 8])[0], abs=2e-4)
    assert tasks.shortened == 1
    (answer,) = tasks.generate_until([Question(text, max_new_tokens=CONTEXT * 2)])
    assert 0 < len(answer.split()) <= CONTEXT // 2
    assert tasks.shortened == 2
    with pytest.raises(UserError, match="more than the model's context"):
        tasks.loglikelihood([("w1", " " + words(CONTEXT + 1, 1))])


def test_no_number_is_impossible(reader: ModelReader) -> None:
    class Overflowing(StreamedModel):
        def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.full_like(super().log_probabilities(hidden), torch.nan)

    (found,) = score_continuations(
        Overflowing(reader), [Continuation((1, 2), (0,))], lambda _what, _done, _total: None
    )
    assert (found.log_probability, found.greedy) == (-math.inf, False)


def test_ids_beyond_the_model_are_refused(reader: ModelReader, tasks: TaskModel) -> None:
    tasks.tokenizer._encode = lambda _text, _special: [1, reader.blueprint.config.vocab_size]
    with pytest.raises(UserError, match="do not belong together"):
        tasks.loglikelihood([("", "w1")])
