"""What a replay says: speed against plain decoding, per set and over all sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import fmean, geometric_mean
from typing import Any

from .replay import ReplayedCompletion

_SLOW = 0.98


@dataclass(frozen=True)
class SetReport:
    """The figures of one set of completions.

    Attributes:
        completions: how many were replayed.
        tokens: how many tokens they have.
        speedup: time of plain decoding / time of the steps.
        share_below_098: the share of completions that run below 0.98 of plain decoding's speed.
        tokens_per_step: tokens / steps.
        rows_per_step: verified rows / steps.
    """

    completions: int
    tokens: int
    speedup: float
    share_below_098: float
    tokens_per_step: float
    rows_per_step: float


@dataclass(frozen=True)
class ReplayReport:
    """The figures over all sets.

    Attributes:
        speedup: the geometric mean of the sets' speed-ups.
        worst: the lowest of them.
        share_below_098: the mean of the sets' shares.
        tokens_per_step: over all steps.
        rows_per_step: over all steps.
        sets: by name, in the order of their appearance.
    """

    speedup: float
    worst: float
    share_below_098: float
    tokens_per_step: float
    rows_per_step: float
    sets: dict[str, SetReport]

    def as_json(self) -> dict[str, Any]:
        """The same as plain dictionaries."""
        return asdict(self)


def report(
    replayed: Iterable[tuple[str, ReplayedCompletion]], curve: Callable[[int], float]
) -> ReplayReport:
    """Sum up what was replayed.

    Args:
        replayed: set and completion.
        curve: T(rows) / T(1).

    Raises:
        ValueError: nothing was replayed.
    """
    by_set: dict[str, list[ReplayedCompletion]] = {}
    for name, completion in replayed:
        by_set.setdefault(name, []).append(completion)
    if not by_set:
        raise ValueError("nothing was replayed")
    sets = {name: _set_report(completions, curve) for name, completions in by_set.items()}
    everything = _set_report([c for completions in by_set.values() for c in completions], curve)
    return ReplayReport(
        speedup=geometric_mean([one.speedup for one in sets.values()]),
        worst=min(one.speedup for one in sets.values()),
        share_below_098=fmean(one.share_below_098 for one in sets.values()),
        tokens_per_step=everything.tokens_per_step,
        rows_per_step=everything.rows_per_step,
        sets=sets,
    )


def _set_report(completions: list[ReplayedCompletion], curve: Callable[[int], float]) -> SetReport:
    costs = [completion.cost(curve) for completion in completions]
    tokens = sum(completion.tokens for completion in completions)
    steps = sum(len(completion.rows) for completion in completions)
    slow = sum(c.tokens / cost < _SLOW for c, cost in zip(completions, costs, strict=True))
    return SetReport(
        completions=len(completions),
        tokens=tokens,
        speedup=tokens / sum(costs),
        share_below_098=slow / len(completions),
        tokens_per_step=tokens / steps,
        rows_per_step=sum(sum(completion.rows) for completion in completions) / steps,
    )
