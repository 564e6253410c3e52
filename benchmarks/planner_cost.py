"""The Python cost of the planner itself: time per drafted step and token, memory, start.

    python benchmarks/planner_cost.py [TEXT_FILE …]

Without files, the text is words drawn by Zipf's law, with passages that recur now and then, so
drafts are always possible. The time of a drafted step covers its proposal and learning from it,
including the costs of rows. Updates are medians.
"""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

from mlxspec.bench.replay import replay
from mlxspec.corpus.suffix_index import SuffixIndex
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.chips import known_chip
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.cost_file import Calibration, StepTime
from mlxspec.drafting.costs import FixedCosts, LiveCosts
from mlxspec.drafting.planner import Planner, trees_pay
from mlxspec.drafting.suffix_source import SuffixSource
from mlxspec.drafting.tree import DraftTree

_OUTPUT = 10_000  # tokens decoded after the context
_CONTEXTS = (2_000, 32_000, 100_000)
_CHIPS = ("M2 Pro", "M4 Pro", "M3 Ultra", "H200-like")
_PLAIN_STEP = 0.02  # seconds
_MEDIAN, _MOST = 150, 400  # µs that a drafted step may take, the latter in 99 of 100


def main() -> None:
    """Print the times of drafted steps, then those of the index and its memory."""
    print(f"{'context':>8} {'chip':>10} {'drafted':>8} {'median µs':>10} {'99 % µs':>8}")
    for context in _CONTEXTS:
        for chip in _CHIPS:
            times = _drafted_steps(context, chip)
            middle, most = (quantiles(times, n=100)[percent - 1] * 1e6 for percent in (50, 99))
            print(f"{context:8} {chip:>10} {len(times):8} {middle:10.0f} {most:8.0f}")
    print(f"{'at most':>8} {'':>10} {'':>8} {_MEDIAN:10} {_MOST:8}")
    print(
        f"\n{'context':>8} {'update µs/token':>16} {'memory B/token':>15} {'begin µs':>9} "
        f"{'index ms':>9}"
    )
    for context in _CONTEXTS:
        print(
            f"{context:8} {_update(context) * 1e6:16.2f} {_memory(context):15.1f} "
            f"{_begin(context) * 1e6:9.0f} {_index(context) * 1e3:9.1f}"
        )


def _drafted_steps(context: int, chip: str) -> list[float]:
    """The planner's seconds for each step with a draft."""
    tokens = made_up_text(context + _OUTPUT)
    curve = known_chip(chip).curve
    drafter = _TimedPlanner(curve)
    replay(tokens[:context], tokens[context:], drafter)
    return drafter.times[1:]  # the first one waits for the index, which prefill hides


def _update(context: int) -> float:
    """Median seconds of one token's update, with four tokens per step, as in a good step."""
    tokens = made_up_text(context + _OUTPUT)
    index = SuffixIndex(tokens[:context])
    starts = range(context, context + _OUTPUT, 4)
    return median(_seconds(index.extend, tokens[start : start + 4]) for start in starts) / 4


def _memory(context: int) -> float:
    """An index's bytes per token."""
    tokens = made_up_text(context + _OUTPUT)
    tracemalloc.start()
    index = SuffixIndex(tokens[:context])
    index.extend(tokens[context:])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept / len(index)


def _begin(context: int) -> float:
    """Seconds that the prefill waits; a thread builds the index during it."""
    tokens = made_up_text(context)
    drafter = Planner(FixedCosts(known_chip("M4 Pro").curve), [SuffixSource()])
    seconds = _seconds(drafter.begin, tokens)
    drafter.end()
    return seconds


def _index(context: int) -> float:
    """Seconds to build a prompt's index."""
    return _seconds(SuffixIndex, made_up_text(context))


class _TimedPlanner(Planner):
    """Records the planner's time for each drafted step; steps take the time of the curve."""

    def __init__(self, curve: CostCurve) -> None:
        self._of_rows = curve
        known = [StepTime(rows, _PLAIN_STEP * curve(rows), 0.03) for rows in curve.rows]
        costs = LiveCosts({1024: Calibration(known)})
        super().__init__(costs, [SuffixSource()], branching=trees_pay(curve))
        self.times: list[float] = []

    def propose(self, max_depth: int) -> DraftTree:
        started = time.perf_counter()
        tree = super().propose(max_depth)
        self._taken = time.perf_counter() - started
        return tree

    def observe(self, step: VerifiedStep) -> None:
        rows = len(step.tree)
        step = replace(step, rows=rows, seconds=_PLAIN_STEP * self._of_rows(rows))
        started = time.perf_counter()
        super().observe(step)
        if rows > 1:
            self.times.append(self._taken + time.perf_counter() - started)


def _seconds(call: Callable[[list[int]], object], tokens: list[int]) -> float:
    started = time.perf_counter()
    call(tokens)
    return time.perf_counter() - started


def made_up_text(length: int) -> list[int]:
    """Token ids of the files' words, or synthetic ones without files."""
    if sys.argv[1:]:
        words = " ".join(Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]).split()
        ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
        repeated = [ids[word] for word in words] * (length // len(words) + 1)
        return repeated[:length]
    source = random.Random(0)
    weights = [1 / rank for rank in range(1, 8001)]
    tokens: list[int] = source.choices(range(8000), weights, k=200)
    while len(tokens) < length:
        if source.random() < 0.3:
            start = source.randrange(len(tokens) - 60)
            tokens += tokens[start : start + source.randrange(5, 60)]
        else:
            tokens += source.choices(range(8000), weights, k=source.randrange(1, 40))
    return tokens[:length]


if __name__ == "__main__":
    main()
