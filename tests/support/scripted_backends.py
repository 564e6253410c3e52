"""Backends with scripted outputs and durations, and the clock that they advance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlxspec.bench.measure import Stream
from mlxspec.engine.sampling import SamplingParams
from mlxspec.engine.target import Progress
from mlxspec.generation.response import SpeculationStats


class ManualClock:
    """A clock that only moves when ``now`` is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Token:
    token: int
    stats: SpeculationStats
    text: str = "x"


class Scripted:
    """Makes a backend that generates ``tokens``.

    Each run takes the next of ``seconds``, and its prefill ten times as long. Each run appends the
    maker to ``log``.
    """

    def __init__(
        self,
        clock: ManualClock,
        tokens: Sequence[int],
        seconds: Sequence[float],
        log: list[object] | None = None,
    ) -> None:
        self._clock = clock
        self._tokens = tokens
        self._seconds = list(seconds)
        self._log = [] if log is None else log

    def __call__(self, model: object, tokenizer: object) -> Stream:
        return self._stream

    def _stream(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams,
        on_progress: Progress,
    ) -> Iterator[Token]:
        self._log.append(self)
        seconds = self._seconds.pop(0)
        on_progress(0, len(prompt))
        self._clock.now += 10 * seconds
        on_progress(len(prompt), len(prompt))
        tokens = self._tokens[:max_tokens]
        for count, token in enumerate(tokens, start=1):
            self._clock.now += seconds / len(tokens)
            yield Token(token, SpeculationStats(steps=2, rows=8, drafted=6, emitted=count))
