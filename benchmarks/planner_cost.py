"""What the planner itself costs, in plain Python: time per proposal and token, memory, begin.

    python benchmarks/planner_cost.py [TEXT_FILE …]

Without files the text is words drawn by Zipf's law, with passages that are repeated now and
then, so that there is always something to draft. Times of proposals and updates are medians.
"""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median

from mlxspec.draft.drafter import DraftTree
from mlxspec.draft.suffix_index import SuffixIndex
from mlxspec.eval.replay import replay
from mlxspec.plan.chips import chip_curve
from mlxspec.plan.cost_curve import FixedCosts
from mlxspec.plan.planner import Planner
from mlxspec.plan.suffix_source import SuffixSource

_OUTPUT = 1000  # tokens decoded behind the context
_CONTEXTS = (32_000, 100_000)


def main() -> None:
    """Print the times of a proposal, then those of the index and its memory."""
    print(f"{'context':>8} {'draft':>6} {'chip':>10} {'proposal µs':>12} {'limit':>6}")
    for context in _CONTEXTS:
        for chip in ("M4 Pro", "H200-like"):
            for kind, limit in (("chain", 100), ("tree", 250)):
                microseconds = _proposal(context, chip, branching=kind == "tree") * 1e6
                print(f"{context:8} {kind:>6} {chip:>10} {microseconds:12.1f} {limit:6}")
    print(
        f"\n{'context':>8} {'update µs/token':>16} {'memory B/token':>15} {'begin µs':>9} "
        f"{'index ms':>9}"
    )
    for context in _CONTEXTS:
        print(
            f"{context:8} {_update(context) * 1e6:16.2f} {_memory(context):15.1f} "
            f"{_begin(context) * 1e6:9.0f} {_index(context) * 1e3:9.1f}"
        )


def _proposal(context: int, chip: str, branching: bool) -> float:
    """Median seconds of a proposal."""
    tokens = made_up_text(context + _OUTPUT)
    drafter = _TimedDrafter(chip, branching)
    replay(tokens[:context], tokens[context:], drafter)
    return median(drafter.times)


def _update(context: int) -> float:
    """Median seconds of one token's update, tokens coming four at a time as in a good step."""
    tokens = made_up_text(context + _OUTPUT)
    index = SuffixIndex(tokens[:context])
    starts = range(context, context + _OUTPUT, 4)
    return median(_seconds(index.extend, tokens[start : start + 4]) for start in starts) / 4


def _memory(context: int) -> float:
    """Bytes per token that an index keeps."""
    tokens = made_up_text(context + _OUTPUT)
    tracemalloc.start()
    index = SuffixIndex(tokens[:context])
    index.extend(tokens[context:])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept / len(index)


def _begin(context: int) -> float:
    """Seconds for which the prefill waits: the index is built beside it."""
    tokens = made_up_text(context)
    drafter = Planner(FixedCosts(chip_curve("M4 Pro")), [SuffixSource()], guarded=False)
    seconds = _seconds(drafter.begin, tokens)
    drafter.end()
    return seconds


def _index(context: int) -> float:
    """Seconds for building the index of a prompt."""
    return _seconds(SuffixIndex, made_up_text(context))


class _TimedDrafter(Planner):
    """Records what each proposal takes, and never pipelines, so that each step proposes."""

    pipelined = False

    def __init__(self, chip: str, branching: bool) -> None:
        super().__init__(FixedCosts(chip_curve(chip)), [SuffixSource()], branching=branching)
        self.times: list[float] = []

    def propose(self, max_depth: int) -> DraftTree:
        started = time.perf_counter()
        tree = super().propose(max_depth)
        self.times.append(time.perf_counter() - started)
        return tree


def _seconds(call: Callable[[list[int]], object], tokens: list[int]) -> float:
    started = time.perf_counter()
    call(tokens)
    return time.perf_counter() - started


def made_up_text(length: int) -> list[int]:
    """Token ids: those of the files' words if there are any, otherwise made up."""
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
