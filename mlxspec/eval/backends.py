"""What is measured against each other: plain decoding, mlx-lm, and the drafters.

A further decoder takes part with one line in ``CONTESTANTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..draft.drafter import Drafter, NoDraft
from ..draft.prompt_lookup import PromptLookupDrafter
from ..engine.params import SamplingParams
from ..engine.target import Progress
from ..errors import OptionError
from ..generation.decoder import Decoder
from ..generation.decoders import AutoDecoder, LookaheadDecoder
from ..generation.response import SpeculationStats

PLAIN = "plain"
"""The contestant whose output is the truth."""


class Response(Protocol):
    """One generated token, as mlx-lm and mlxspec report it."""

    @property
    def text(self) -> str:
        """The next segment of text."""

    @property
    def token(self) -> int:
        """The token's id."""


class Contestant(Protocol):
    """Generates the same as all others, in its own time."""

    draws_by_position: bool
    """Whether above temperature 0 its tokens are those of plain decoding too."""

    def stream(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        on_progress: Progress,
    ) -> Iterator[Response]:
        """Generate; ``on_progress`` is last called when the first token's forward begins."""

    def stats(self, last: Response) -> SpeculationStats | None:
        """What speculation did, from the last response; None without speculation."""

    def predicted_speed(self) -> float | None:
        """The last generation's speed against plain decoding as its planner foresaw it.

        Its tokens over the costs that were expected of its steps. None without a planner.
        """


class Drafting:
    """mlxspec's loop with a drafter.

    Args:
        make_drafter: gives a drafter that knows nothing of earlier turns. One that remembers
            would find each repeated prompt's answer ready.
    """

    draws_by_position = True

    def __init__(
        self, make_drafter: Callable[[], Drafter], model: nn.Module, tokenizer: TokenizerWrapper
    ) -> None:
        self._decoder = Decoder(model, tokenizer)
        self._make_drafter = make_drafter

    def stream(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        on_progress: Progress,
    ) -> Iterator[Response]:
        return self._decoder.decode(
            prompt,
            self._make_drafter(),
            max_tokens=max_tokens,
            sampling=sampling,
            on_progress=on_progress,
        )

    def stats(self, last: Response) -> SpeculationStats | None:
        return getattr(last, "stats", None)

    def predicted_speed(self) -> None:
        return None


class Planned:
    """A decoder whose drafts follow their measured costs.

    Args:
        make_decoder: gives one that remembers no outputs: a repeated prompt's answer would be
            among them.
    """

    draws_by_position = True

    def __init__(
        self,
        make_decoder: Callable[..., AutoDecoder | LookaheadDecoder],
        model: nn.Module,
        tokenizer: TokenizerWrapper,
    ) -> None:
        self._decoder = make_decoder(model, tokenizer)

    def stream(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        on_progress: Progress,
    ) -> Iterator[Response]:
        self._emitted = 0
        for response in self._decoder.stream(
            prompt, max_tokens, sampling=sampling, on_progress=on_progress
        ):
            self._emitted = response.stats.emitted
            yield response

    def stats(self, last: Response) -> SpeculationStats | None:
        return getattr(last, "stats", None)

    def predicted_speed(self) -> float:
        # Nothing is foreseen for a model that can only decode plainly.
        return self._emitted / (self._decoder.foreseen_cost or self._emitted)


class MlxLm:
    """mlx-lm's own generation. Above temperature 0 it draws other random numbers than ours."""

    draws_by_position = False

    def __init__(self, model: nn.Module, tokenizer: TokenizerWrapper) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def stream(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        on_progress: Progress,
    ) -> Iterator[Response]:
        def before_first_token(done: int, total: int) -> None:
            if done < total:  # it reports the whole prompt only behind the first token
                on_progress(done, total)

        if sampling.seed is not None:
            mx.random.seed(sampling.seed)
        return mlx_lm.stream_generate(
            self._model,
            self._tokenizer,
            list(prompt),
            max_tokens=max_tokens,
            sampler=make_sampler(sampling.temp),
            prompt_progress_callback=before_first_token,
        )

    def stats(self, last: Response) -> None:
        return None

    def predicted_speed(self) -> None:
        return None


CONTESTANTS: dict[str, Callable[[nn.Module, TokenizerWrapper], Contestant]] = {
    PLAIN: partial(Drafting, NoDraft),
    "mlx-lm": MlxLm,
    "lookup": partial(Drafting, PromptLookupDrafter),
    "auto": partial(Planned, partial(AutoDecoder, memory_tokens=0)),
    "lookahead": partial(Planned, LookaheadDecoder),
}
"""By name; each is made from a loaded model and its tokenizer."""


def chosen_names(names: str | None) -> list[str]:
    """The contestants that a comma-separated list names, all without one; plain comes first.

    Raises:
        OptionError: one of them is unknown.
    """
    chosen = names.split(",") if names is not None else list(CONTESTANTS)
    chosen = list(dict.fromkeys([PLAIN, *(name.strip() for name in chosen)]))
    for name in chosen:
        if name not in CONTESTANTS:
            raise OptionError(
                f"no decoder is named {name!r}: choose among {', '.join(CONTESTANTS)}"
            )
    return chosen


Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclass(frozen=True)
class Turn:
    """What a contestant generated, and how long it took.

    Attributes:
        tokens: the output, its end token included.
        text: the output as text.
        prefill_seconds: from the call to the first token's forward.
        seconds: from there to the last token.
        stats: what speculation did; None without speculation.
        predicted_speed: what the contestant's planning promised, against plain decoding.
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


def play(
    contestant: Contestant,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams,
    clock: Clock,
) -> Turn:
    """Let a contestant answer a prompt."""
    responses: list[Response] = []
    tokens: list[int] = []
    texts: list[str] = []
    started = prefilled = ended = clock()

    def on_progress(done: int, total: int) -> None:
        nonlocal prefilled
        prefilled = clock()

    for response in contestant.stream(prompt, max_tokens, sampling, on_progress):
        ended = clock()  # what the contestant does behind its last token is nobody's wait
        tokens.append(response.token)
        texts.append(response.text)
        responses = [response]
    return Turn(
        tokens=tuple(tokens),
        text="".join(texts),
        prefill_seconds=prefilled - started,
        seconds=ended - prefilled,
        stats=contestant.stats(responses[0]),
        predicted_speed=contestant.predicted_speed(),
    )
