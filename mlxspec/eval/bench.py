"""What was measured, and on what: figures that a report needs to be understood elsewhere."""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlxspec

from ..engine.costs import machine_identity, model_identity
from ..engine.params import SamplingParams
from ..engine.positions import context_length
from ..errors import PromptError
from ..loading.chat_template import apply_template
from ..loading.model import encode_prompt
from .backends import CONTESTANTS, PLAIN, Clock, Turn, play
from .bench_prompts import BenchPrompt
from .equality import Difference, first_difference


def machine_figures() -> dict[str, Any]:
    """The machine and the versions of what ran on it; no name of host or user."""
    return {
        **machine_identity(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "mlxspec": mlxspec.__version__,
        "mlx_lm": version("mlx-lm"),
    }


def model_figures(model: nn.Module, name: str) -> dict[str, Any]:
    """What the model is.

    Args:
        model: the loaded model.
        name: what the user called it; of a directory only the last part is given.
    """
    return {
        "name": Path(name).resolve().name if Path(name).is_dir() else name,
        **model_identity(model),
        "dtype": str(_computing_dtype(model)).removeprefix("mlx.core."),
    }


def _computing_dtype(model: nn.Module) -> mx.Dtype:
    """The data type of most floating-point weights: packed ones are computed in their scales'."""
    nbytes: dict[mx.Dtype, int] = {}
    for _, weight in tree_flatten(model.parameters()):
        if mx.issubdtype(weight.dtype, mx.floating):
            nbytes[weight.dtype] = nbytes.get(weight.dtype, 0) + weight.nbytes
    return max(nbytes, key=lambda dtype: nbytes[dtype])


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
