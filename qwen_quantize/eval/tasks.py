"""A model as tasks see it: text in, log-likelihoods or text out; needs no lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from qwen_quantize.engine.generate import greedy_tokens
from qwen_quantize.engine.model import Model
from qwen_quantize.engine.tokenizer import Message, Tokenizer
from qwen_quantize.errors import UserError
from qwen_quantize.eval.continuations import Continuation, Likelihood, Progress, score_continuations
from qwen_quantize.eval.scorer import LayeredScorer
from qwen_quantize.formats.kv_plan import KvPlan

DEFAULT_NEW_TOKENS = 256  # of a task that names no limit
_BYTES_OF_CHARACTER = 4  # of UTF-8, at most


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to continue. until: texts, none of them empty, before the first of which the answer ends."""

    context: str
    until: tuple[str, ...] = ()
    max_new_tokens: int = DEFAULT_NEW_TOKENS


class TaskModel:
    """Continuations are scored layer by layer and need no whole model; `load` is called for the first generation.

    kv_plan: the key-value cache while generating; `scorer` has its own. chat: contexts are rendered conversations,
    so that the tokenizer adds nothing in front. `shortened` counts the requests whose beginning did not fit into
    the model's context and was cut off.
    """

    def __init__(
        self,
        scorer: LayeredScorer,
        tokenizer: Tokenizer,
        context: int,
        load: Callable[[], Model],
        progress: Progress,
        *,
        kv_plan: KvPlan | None = None,
        chat: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.context = context
        self.chat = chat
        self.shortened = 0
        self._scorer = scorer
        self._load = load
        self._progress = progress
        self._kv_plan = kv_plan

    @cached_property
    def _model(self) -> Model:
        return self._load()

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Of the second text of each pair, right behind the first one, which may be empty."""
        return self._score([self._continuation(context, target) for context, target in requests])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Of whole texts, in nats; each token is predicted once, from as much before it as the model can hold."""
        windows = [self._windows(self._ids(text)) for text in texts]
        scores = iter(self._score([window for each in windows for window in each]))
        return [sum(next(scores).log_probability for _ in each) for each in windows]

    def generate_until(self, questions: Sequence[Question]) -> list[str]:
        """The likeliest continuations, token by token; a stop text is not part of the answer."""
        answers = []
        for done, question in enumerate(questions):
            answers.append(self._generate(question))
            self._progress("answers", done + 1, len(questions))
        return answers

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """A conversation by the model's chat template."""
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt)

    def _score(self, requests: list[Continuation]) -> list[Likelihood]:
        self._check_ids(max((max(*r.context, *r.target) for r in requests), default=0))
        return score_continuations(self._scorer, requests, self._progress)

    def _check_ids(self, largest: int) -> None:
        if largest >= self._scorer.vocab_size:
            raise UserError(
                f"the tokenizer gives id {largest}, the model knows {self._scorer.vocab_size} tokens; tokenizer and "
                "model do not belong together"
            )

    def _continuation(self, context: str, target: str) -> Continuation:
        # Most tokenizers keep a space with the word behind it.
        kept = context.rstrip()
        target, context = context[len(kept) :] + target, kept
        if context:
            before = self._ids(context)
            whole = self._ids(context + target)
            # Where the border vanishes inside a token, that token is what the target has of its own.
            border = min(len(before), len(whole) - 1)
            before, ids = whole[:border], whole[border:]
        else:
            before, ids = [], self.tokenizer.encode(target, add_special_tokens=False)
        if not ids:
            raise UserError(f"a task asks for the likelihood of {target!r:.40}, which has no token")
        return self._fitting(before or [self._first_id], ids)

    def _fitting(self, before: list[int], ids: list[int]) -> Continuation:
        if len(ids) > self.context:
            raise UserError(
                f"a task's answer of {len(ids)} tokens is more than the model's context of {self.context}"
            )
        room = self.context + 1 - len(ids)
        self.shortened += len(before) > room
        return Continuation(tuple(before[-room:]), tuple(ids))

    def _windows(self, ids: list[int]) -> list[Continuation]:
        sequence = [self._first_id, *ids]
        windows = []
        for begin in range(1, len(sequence), self.context):
            end = min(begin + self.context, len(sequence))
            first = max(0, end - 1 - self.context)
            windows.append(Continuation(tuple(sequence[first:begin]), tuple(sequence[begin:end])))
        return windows

    @property
    def _first_id(self) -> int:
        """What stands before a text's first token, so that it is predicted from something."""
        tokenizer = self.tokenizer
        found = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if found is None:
            raise UserError(
                "this model's tokenizer names neither a first nor a last token to begin a text with"
            )
        return found

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=not self.chat)

    def _generate(self, question: Question) -> str:
        prompt = self._ids(question.context) or [self._first_id]
        self._check_ids(max(prompt))
        # Long answers may have half of the context, where the question leaves no more.
        room = max(self.context - question.max_new_tokens, self.context // 2, 1)
        self.shortened += len(prompt) > room
        prompt = prompt[-room:]
        limit = min(question.max_new_tokens, self.context - len(prompt))
        stop = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        # A stop text is over within this many tokens of at least a byte each, and so need not be sought before.
        tail = max((len(end.encode()) for end in question.until), default=0) + _BYTES_OF_CHARACTER
        new: list[int] = []
        for token in greedy_tokens(self._model, prompt, limit, stop, self._kv_plan):
            if token in stop:
                break
            new.append(token)
            if question.until and _first_stop(self.tokenizer.decode(new[-tail:]), question.until) is not None:
                break
        text = self.tokenizer.decode(new)
        return text[: _first_stop(text, question.until)]


def _first_stop(text: str, until: Sequence[str]) -> int | None:
    return min((place for place in (text.find(end) for end in until) if place >= 0), default=None)
