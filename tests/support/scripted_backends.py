"""Contestants that say what a test tells them, and a clock that runs as they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlxspec.engine.sampling import SamplingParams
from mlxspec.engine.target import Progress
from mlxspec.eval.backends import Response
from mlxspec.generation.response import SpeculationStats


class ManualClock:
    """Stands still until it is moved on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Token:
    token: int
    text: str = "x"


class Scripted:
    """Says ``tokens`` in turns of ``seconds`` each, the prefill taking ten times as long."""

    def __init__(
        self,
        clock: ManualClock,
        tokens: Sequence[int],
        seconds: Sequence[float],
        *,
        draws_by_position: bool = True,
        predicted: float | None = None,
        log: list[object] | None = None,
    ) -> None:
        self.draws_by_position = draws_by_position
        self._clock = clock
        self._tokens = tokens
        self._seconds = list(seconds)
        self._predicted = predicted
        self._log = [] if log is None else log

    def stream(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        on_progress: Progress,
    ) -> Iterator[Response]:
        self._log.append(self)
        seconds = self._seconds.pop(0)
        on_progress(0, len(prompt))
        self._clock.now += 10 * seconds
        on_progress(len(prompt), len(prompt))
        for token in self._tokens[:max_tokens]:
            self._clock.now += seconds / len(self._tokens[:max_tokens])
            yield Token(token)

    def stats(self, last: Response) -> SpeculationStats:
        emitted = len(self._tokens)
        return SpeculationStats(steps=2, rows=8, drafted=6, accepted=emitted - 2, emitted=emitted)

    def predicted_speed(self) -> float | None:
        return self._predicted
