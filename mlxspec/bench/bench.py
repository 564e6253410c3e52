"""The measuring: backends take turns on prompts, in one process on one loaded model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.model_sizes import context_length
from ..engine.params import SamplingParams
from ..errors import PromptError
from ..generation.response import SpeculationStats
from ..models.chat_template import apply_template
from ..models.model import encode_prompt
from .backends import PLAIN, Backend, MakeBackend
from .equality import Difference, first_difference
from .prompts import BenchPrompt, Messages, message

Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclass(frozen=True)
class Run:
    """One answer of a backend, and how long it took.

    Attributes:
        tokens: the output, its end token included.
        text: the output as text.
        prefill_seconds: from the call to the first token's forward.
        seconds: from there to the last token.
        stats: what speculation did; None without speculation.
        predicted_speed: what the planner expected, against plain decoding; None without one.
    """

    tokens: tuple[int, ...]
    text: str
    prefill_seconds: float
    seconds: float
    stats: SpeculationStats | None
    predicted_speed: float | None

    @property
    def rate(self) -> float:
        """Tokens per second, the prefill not counted."""
        return len(self.tokens) / self.seconds


def run(
    backend: Backend,
    prompt: list[int],
    max_tokens: int,
    sampling: SamplingParams,
    clock: Clock = time.perf_counter,
) -> Run:
    """Let a backend answer a prompt."""
    tokens, texts, stats = list[int](), list[str](), None
    started = prefilled = ended = clock()

    def on_progress(done: int, total: int) -> None:
        nonlocal prefilled
        prefilled = clock()

    for response in backend.stream(
        prompt, max_tokens=max_tokens, sampling=sampling, on_progress=on_progress
    ):
        ended = clock()  # what happens after the last token keeps nobody waiting
        tokens.append(response.token)
        texts.append(response.text)
        stats = getattr(response, "stats", None)
    cost, predicted_speed = backend.expected_cost(), None
    if stats and cost is not None:
        predicted_speed = stats.emitted / cost if cost else 1.0
    return Run(
        tokens=tuple(tokens),
        text="".join(texts),
        prefill_seconds=prefilled - started,
        seconds=ended - prefilled,
        stats=stats,
        predicted_speed=predicted_speed,
    )


@dataclass(frozen=True)
class MeasuredPrompt:
    """All runs on one prompt.

    Attributes:
        category: the prompt's.
        messages: the conversation that was answered.
        reference: what a good answer looks like, if that is known.
        prompt_tokens: how many tokens the conversation has.
        runs: by backend, one per repeat.
        differences: by backend, how its distinct outputs differ from plain decoding's first
            one; empty where all are equal, None where they cannot be compared because the
            backend draws other random numbers.
    """

    category: str
    messages: Messages
    reference: str | None
    prompt_tokens: int
    runs: dict[str, list[Run]]
    differences: dict[str, list[Difference] | None]


class Measurement:
    """Measures backends on prompts.

    Args:
        model, tokenizer: as :func:`mlxspec.load` returns them.
        backends: by name; plain decoding among them.
        max_tokens: per answer.
        repeats: how often each backend answers each prompt.
        sampling: how the target picks tokens.
        clock: in seconds.

    Attributes:
        skipped: conversations left out, or cut short, that are longer than the model's context.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        backends: Mapping[str, MakeBackend],
        *,
        max_tokens: int,
        repeats: int,
        sampling: SamplingParams,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.skipped = 0
        self._model = model
        self._tokenizer = tokenizer
        self._backends = {name: make(model, tokenizer) for name, make in backends.items()}
        self._repeats = repeats
        self._sampling = sampling
        self._run = partial(run, max_tokens=max_tokens, sampling=sampling, clock=clock)
        self._warm = False

    def measure(
        self,
        prompts: Sequence[BenchPrompt],
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> Iterator[MeasuredPrompt]:
        """Measure prompt by prompt; every backend warms up on the first one.

        Args:
            prompts: the questions.
            on_progress: called after every run with the share that is done.

        Raises:
            PromptError: the model's chat template refuses a prompt.
        """
        answers = sum(1 + len(prompt.follow_ups) for prompt in prompts)
        total = len(self._backends) * (1 + answers * self._repeats)
        done = itertools.count(1)
        self._on_run = lambda: on_progress(next(done) / total)
        for prompt in prompts:
            yield from self._converse(prompt)

    def _converse(self, prompt: BenchPrompt) -> Iterator[MeasuredPrompt]:
        """Measure the first answer, then each follow-up after plain decoding's answer."""
        messages, references = list(prompt.messages), iter(prompt.references)
        longest = context_length(self._model)
        for question in (*prompt.follow_ups, None):
            tokens = self._encode(prompt, messages)
            if longest is not None and len(tokens) > longest:
                self.skipped += 1
                return
            measured = self._measure(prompt.category, messages, next(references, None), tokens)
            yield measured
            if question is not None:
                answer = measured.runs[PLAIN][0].text.strip()
                messages = [*messages, message("assistant", answer), message("user", question)]

    def _measure(
        self, category: str, messages: Messages, reference: str | None, tokens: list[int]
    ) -> MeasuredPrompt:
        names = list(self._backends)
        order = [] if self._warm else names.copy()
        for repeat in range(self._repeats):
            # Each backend is first in turn, and its neighbours change: a wide step leaves a
            # hotter machine.
            first = repeat % len(names)
            order += (names[first:] + names[:first])[:: (-1) ** repeat]
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for name in order:
            runs[name].append(self._run(self._backends[name], tokens))
            self._on_run()
        runs = {name: warm[-self._repeats :] for name, warm in runs.items()}
        self._warm = True
        differences = {name: self._compare(name, tokens, runs) for name in names}
        return MeasuredPrompt(category, messages, reference, len(tokens), runs, differences)

    def _compare(
        self, name: str, prompt: list[int], runs: dict[str, list[Run]]
    ) -> list[Difference] | None:
        """How the distinct outputs of a backend differ from plain decoding's first one."""
        if self._sampling.temp > 0 and not self._backends[name].same_samples:
            return None
        expected = runs[PLAIN][0].tokens
        compared = (
            first_difference(self._model, prompt, expected, output, self._sampling)
            for output in dict.fromkeys(one.tokens for one in runs[name])
        )
        return [difference for difference in compared if difference]

    def _encode(self, prompt: BenchPrompt, messages: Messages) -> list[int]:
        """The conversation's tokens; without a chat template its texts, a blank line between."""
        if prompt.raw or not self._tokenizer.has_chat_template:
            return encode_prompt(self._tokenizer, "\n\n".join(m["content"] for m in messages))
        try:
            return apply_template(self._tokenizer, messages, add_generation_prompt=True)
        except PromptError as error:
            raise PromptError(
                f"a prompt of the category {prompt.category!r}: {error}: change its messages"
            ) from error
