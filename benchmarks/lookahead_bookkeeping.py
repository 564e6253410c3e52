"""The Python time of lookahead decoding itself, per step: pool, window and tree.

    python benchmarks/lookahead_bookkeeping.py

The text is the one of ``planner_cost.py``: words drawn by Zipf's law, with repeated passages. The
target is simulated: it continues the text, and off the text its argmaxes are random tokens of it.
"""

from __future__ import annotations

import random
import time
from statistics import median, quantiles

from planner_cost import made_up_text

from mlxspec.drafting.drafter import DraftTree, VerifiedStep, accept
from mlxspec.drafting.lookahead import LookaheadDrafter

_PROMPT, _OUTPUT = 2000, 2000
_SIZES = ((5, 3, 5), (10, 5, 8), (15, 5, 15), (30, 5, 30))


def main() -> None:
    """Print a line for each size."""
    print(f"{'W, N, G':>12} {'rows':>6} {'tokens/step':>12} {'µs/step':>8} {'95 %':>6}")
    for size in _SIZES:
        rows, tokens, times = _decode(*size)
        name = ", ".join(map(str, size))
        print(
            f"{name:>12} {rows:6.1f} {tokens:12.2f} {median(times) * 1e6:8.0f} "
            f"{quantiles(times, n=20)[-1] * 1e6:6.0f}"
        )


def _decode(width: int, ngram: int, guesses: int) -> tuple[float, float, list[float]]:
    """Mean rows and tokens per step, and the seconds of each step's bookkeeping."""
    text, source = made_up_text(_PROMPT + _OUTPUT), random.Random(1)
    drafter = LookaheadDrafter(width, ngram, guesses)
    drafter.begin(text[:_PROMPT])
    end, rows, times = _PROMPT, 0, []
    while end < len(text) - 30:
        started = time.perf_counter()
        tree = drafter.propose(100)
        proposed = time.perf_counter()
        choices = tuple(_choices(tree, text, end, source))
        accepted, tokens = accept(tree, choices)
        step = VerifiedStep(tree, choices, choices, accepted, tokens)
        verified = time.perf_counter()
        drafter.observe(step)
        times.append(time.perf_counter() - verified + proposed - started)
        end += len(tokens)
        rows += len(tree)
    return rows / len(times), (end - _PROMPT) / len(times), times


def _choices(tree: DraftTree, text: list[int], end: int, source: random.Random) -> list[int]:
    """The text's next token after nodes that agree with it, a random one after the others."""
    agreeing = {0}
    for node in range(1, len(tree)):
        parent, token = tree.parents[node], tree.tokens[node]
        if parent in agreeing and token == text[end + tree.depths[parent]]:
            agreeing.add(node)
    depths = tree.depths
    return [
        text[end + depths[node]] if node in agreeing else source.choice(text)
        for node in range(len(tree))
    ]


if __name__ == "__main__":
    main()
