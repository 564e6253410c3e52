"""One generation, timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..decoding import SamplingParams
from ..response import SpeculationStats
from .contestants import Contestant, Response

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
