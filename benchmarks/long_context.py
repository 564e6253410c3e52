"""The cost of a drafted step beside the model's forward, by the length of the context.

    python benchmarks/long_context.py [CONTEXT …]

Drafting is a whole proposal of the planner, over text with repeated passages. The mask is for a
tree of 16 rows after the context. The commit moves 5 accepted rows together in the caches of 4
layers and cuts the rest. Mask and commit are evaluated. The figures are medians in microseconds,
and should not grow with the context, although a step's attention has to read the whole cache.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from statistics import median

import mlxspec  # noqa: F401  (before mlx.core, for OpenBLAS)

# isort: split
import mlx.core as mx

from mlxspec.drafting.chips import known_chip
from mlxspec.drafting.costs import FixedCosts
from mlxspec.drafting.drafter import DraftTree, VerifiedStep
from mlxspec.drafting.planner import Planner
from mlxspec.drafting.suffix_source import SuffixSource
from mlxspec.engine.caches import (
    TreeKVCache,
    TreeQuantizedKVCache,
    TreeRows,
    cut,
    move_rows,
)

_CONTEXTS = (1_000, 10_000, 100_000)
_STEPS = 200
_LAYERS, _HEADS, _HEAD_DIM = 4, 2, 64
_TREE = DraftTree.from_branches(1, [range(5), range(10, 15), range(20, 25)])
_ACCEPTED = (0, 6, 7, 8, 9)  # the second branch: rows have to move


def main() -> None:
    """Print one line a context."""
    contexts = [int(argument) for argument in sys.argv[1:]] or _CONTEXTS
    print(f"{'context':>8} {'drafting':>9} {'mask':>6} {'commit':>7} {'commit, 8 bits':>15}")
    for context in contexts:
        plain, quantised = _caches(context)
        print(
            f"{context:8} {_drafting(context):9.0f} {_mask(context):6.0f} "
            f"{_commit(plain, context):7.0f} {_commit(quantised, context):15.0f}"
        )


def _drafting(context: int) -> float:
    text = _text(context + _STEPS)
    drafter = Planner(FixedCosts(known_chip("M4 Pro").curve), [SuffixSource()])
    drafter.begin(text[:context])
    drafter.policy.bank = math.inf  # the guard allows everything
    drafter.propose(1)  # waits for the index, which is built during the prefill
    drafter.observe(VerifiedStep(DraftTree.chain(0), (), (), (), (text[context],)))
    rest = iter(text[context + 1 :])

    def step() -> None:
        drafter.propose(64)
        drafter.observe(VerifiedStep(DraftTree.chain(0), (), (), (), (next(rest),)))

    return _median_time(step, _STEPS - 1)


def _mask(context: int) -> float:
    length = context

    def step() -> None:
        nonlocal length
        mx.eval(TreeRows(_TREE).mask(length, None))
        length += 1

    return _median_time(step, _STEPS)


def _commit(caches: list[TreeKVCache] | list[TreeQuantizedKVCache], context: int) -> float:
    def step() -> None:
        move_rows([(caches, context, _ACCEPTED)])
        cut(caches, context + len(_ACCEPTED))
        mx.eval([cache.state[:2] for cache in caches])

    return _median_time(step, _STEPS)


def _caches(context: int) -> tuple[list[TreeKVCache], list[TreeQuantizedKVCache]]:
    rows = mx.random.normal((1, _HEADS, context + len(_TREE), _HEAD_DIM))
    plain = [TreeKVCache() for _ in range(_LAYERS)]
    for cache in plain:
        cache.update_and_fetch(rows, rows)
    mx.eval([cache.state[:2] for cache in plain])
    quantised = [cache.to_quantized(64, 8) for cache in plain]
    mx.eval([cache.state[:2] for cache in quantised])
    return plain, quantised


def _median_time(step: Callable[[], None], count: int) -> float:
    """Microseconds."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return median(times) * 1e6


def _text(length: int) -> list[int]:
    """Words drawn by Zipf's law, with passages that are repeated now and then."""
    pick = random.Random(0)
    words = range(1, 4000)
    weights = [1 / word for word in words]
    text = pick.choices(words, weights, k=200)
    while len(text) < length:
        if pick.random() < 0.5:
            start = pick.randrange(len(text) - 40)
            text += text[start : start + pick.randint(5, 40)]
        else:
            text += pick.choices(words, weights, k=20)
    return text[:length]


if __name__ == "__main__":
    main()
