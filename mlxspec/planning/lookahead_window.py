"""What a lookahead window earns, and which size of it is worth its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_RATE = 0.05
_RELAXATION = 0.003
_MOST = 3.0
_TRIAL_STEPS = 12
_NOTICEABLE = 0.05  # tokens per step


class WindowSize(NamedTuple):
    """A window's number of columns W and its n-gram size N."""

    columns: int
    ngram_size: int

    @property
    def rows(self) -> int:
        """Rows that it adds to a step; that of column 0, level 0 is there in any case."""
        return (self.ngram_size - 1) * self.columns - 1


# Tokens per step that a window adds to a pool of the text's own n-grams.
_USUAL_GAINS = {
    WindowSize(3, 3): 0.08,
    WindowSize(5, 4): 0.2,
    WindowSize(7, 5): 0.3,
    WindowSize(10, 5): 0.36,
    WindowSize(15, 5): 0.42,
}


class WindowGain:
    """How many tokens per step a window adds, learned while one is on.

    What is learned is one factor on the gains that windows of each size have on average. While
    there is no window it slowly returns to 1, so that one is tried again.
    """

    def __init__(self) -> None:
        self._factor = 1.0

    def of(self, size: WindowSize) -> float:
        """Tokens per step."""
        return self._factor * _USUAL_GAINS[size]

    def learn(self, size: WindowSize, tokens: int) -> None:
        """A step has emitted so many tokens that it would not have without the window."""
        factor = self._factor + _RATE * (tokens / _USUAL_GAINS[size] - self._factor)
        self._factor = min(factor, _MOST)

    def relax(self) -> None:
        """A step ran without a window."""
        self._factor += _RELAXATION * (1 - self._factor)


def best_window(
    gain: WindowGain,
    expected: Sequence[float],
    costs: Sequence[float],
    price: float,
    max_ngram_size: int,
    bank: float,
    now: WindowSize | None,
) -> WindowSize | None:
    """The window that is worth most beside the guesses at hand; None where none is.

    Args:
        gain: what windows earn.
        expected: E(w), the tokens that a step without a window emits with w guess nodes.
        costs: ``costs[rows]`` is T(rows) / T(1).
        price: of a plain token's time, in tokens.
        max_ngram_size: the longest n-grams.
        bank: the time, in plain tokens, that the first steps with a window may cost.
        now: the window at hand, which stays while it pays, unless another is worth noticeably
            more: a new one takes N - 2 steps until it earns.
    """
    worths: dict[WindowSize | None, float] = {None: _worth(expected, costs, price, 0)}
    for size in _USUAL_GAINS:
        if size.ngram_size > max_ngram_size or size.rows + 1 >= len(costs):
            continue
        if size == now or _TRIAL_STEPS * (costs[1 + size.rows] - costs[1]) <= bank:
            worths[size] = gain.of(size) + _worth(expected, costs, price, size.rows)
    best = max(worths, key=worths.__getitem__)
    pays = now is None or (now in worths and worths[now] > worths[None])
    return now if pays and worths[best] < worths[now] + _NOTICEABLE else best


def _worth(expected: Sequence[float], costs: Sequence[float], price: float, rows: int) -> float:
    """Tokens less the price of the time at the best number of guesses beside further rows."""
    return max(
        tokens - price * cost for tokens, cost in zip(expected, costs[1 + rows :], strict=False)
    )
