"""The measurement: contestants take turns on the same prompts, and their outputs are compared."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding import SamplingParams
from ..errors import PromptError
from ..models.chat_template import apply_template
from ..models.loading import encode_prompt
from ..models.positions import context_length
from .contestants import CONTESTANTS, PLAIN
from .equality import Difference, first_difference
from .prompts import BenchPrompt
from .turn import Clock, Turn, play

ShareDone = Callable[[float], None]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class MeasuredPrompt:
    """All turns on one prompt.

    Attributes:
        category: the prompt's.
        messages: the conversation that was answered.
        reference: what a good answer looks like, if that is known.
        prompt_tokens: how many tokens the conversation has.
        turns: by contestant, one per repeat.
        differences: by contestant, how its outputs differ from plain decoding's first one;
            empty where all are equal, None where they cannot be compared because the
            contestant draws other random numbers.
    """

    category: str
    messages: Messages
    reference: str | None
    prompt_tokens: int
    turns: dict[str, list[Turn]]
    differences: dict[str, list[Difference] | None]


class Measurement:
    """Lets contestants take turns on prompts, in one process on one loaded model.

    Args:
        model, tokenizer: as :func:`mlxspec.load` returns them.
        names: of the contestants; plain decoding among them.
        max_tokens: per answer.
        repeats: how often each contestant answers each prompt.
        sampling: how the target picks tokens.
        clock: in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        names: Sequence[str],
        *,
        max_tokens: int,
        repeats: int,
        sampling: SamplingParams,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._contestants = {name: CONTESTANTS[name](model, tokenizer) for name in names}
        self._max_tokens = max_tokens
        self._repeats = repeats
        self._sampling = sampling
        self._clock = clock
        self._warm = False
        self.skipped = 0
        """Conversations left out, or cut short, that are longer than the model's context."""

    def run(
        self, prompts: Sequence[BenchPrompt], on_progress: ShareDone = lambda share: None
    ) -> Iterator[MeasuredPrompt]:
        """Measure prompt by prompt; before the first one, everyone warms up on it.

        Args:
            prompts: the questions.
            on_progress: called after every turn with the share that is done.

        Raises:
            PromptError: the model's chat template refuses a prompt.
        """
        answers = sum(1 + len(prompt.follow_ups) for prompt in prompts)
        turns = len(self._contestants) * (1 + answers * self._repeats)
        done = itertools.count(1)
        self._on_turn = lambda: on_progress(next(done) / turns)
        for prompt in prompts:
            yield from self._converse(prompt)

    def _converse(self, prompt: BenchPrompt) -> Iterator[MeasuredPrompt]:
        """Measure the first answer and, with plain decoding's answers between, the others."""
        messages = list(prompt.messages)
        follow_ups, references = iter(prompt.follow_ups), iter(prompt.references)
        while True:
            tokens = self._encode(prompt, messages)
            longest = context_length(self._model)
            if longest is not None and len(tokens) > longest:
                self.skipped += 1
                return
            measured = self._measure(prompt.category, messages, next(references, None), tokens)
            yield measured
            question = next(follow_ups, None)
            if question is None:
                return
            answer = measured.turns[PLAIN][0].text.strip()
            messages = [*messages, _message("assistant", answer), _message("user", question)]

    def _measure(
        self, category: str, messages: Messages, reference: str | None, tokens: list[int]
    ) -> MeasuredPrompt:
        if not self._warm:
            self._round(tokens, list(self._contestants))
            self._warm = True
        names = list(self._contestants)
        turns: dict[str, list[Turn]] = {name: [] for name in names}
        for repeat in range(self._repeats):
            # Everyone is first in turn, and follows now the one before, now the one behind:
            # a wide step leaves a hotter machine.
            first = repeat % len(names)
            order = names[first:] + names[:first]
            for name, turn in self._round(tokens, order[:: (-1) ** repeat]).items():
                turns[name].append(turn)
        differences = {name: self._compare(name, tokens, turns) for name in names}
        return MeasuredPrompt(category, messages, reference, len(tokens), turns, differences)

    def _round(self, tokens: list[int], names: Sequence[str]) -> dict[str, Turn]:
        turns = {}
        for name in names:
            contestant = self._contestants[name]
            turns[name] = play(contestant, tokens, self._max_tokens, self._sampling, self._clock)
            self._on_turn()
        return turns

    def _compare(
        self, name: str, prompt: list[int], turns: dict[str, list[Turn]]
    ) -> list[Difference] | None:
        """How the distinct outputs of a contestant differ from plain decoding's first one."""
        if self._sampling.temp > 0 and not self._contestants[name].draws_by_position:
            return None
        expected = turns[PLAIN][0].tokens
        outputs = dict.fromkeys(turn.tokens for turn in turns[name])
        compared = (
            first_difference(self._model, prompt, expected, output, self._sampling)
            for output in outputs
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


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
