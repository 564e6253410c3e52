"""The Python time of prompt lookup per step, for growing contexts.

    python benchmarks/lookup_cost.py

Each step is one proposal and the update with three emitted tokens, on a text of random tokens from
a vocabulary of 2,000, in which many n-grams recur. The target is below 20 µs per step, whatever the
context.
"""

from __future__ import annotations

import platform
import random
import time
from statistics import median

from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.drafting.tree import DraftTree

STEPS = 2000
EMITTED = 3


def microseconds_per_step(context: int) -> tuple[float, float]:
    """Median cost of one step after ``context`` tokens, and of indexing one prompt token."""
    pick = random.Random(0)
    text = [pick.randrange(2000) for _ in range(context + STEPS * EMITTED)]
    drafter = PromptLookupDrafter()
    started = time.perf_counter()
    drafter.begin(text[:context])
    per_token = (time.perf_counter() - started) / context
    costs = []
    for position in range(context, len(text), EMITTED):
        emitted = tuple(text[position : position + EMITTED])
        step = VerifiedStep(DraftTree.chain(0), (), (), (), emitted)
        started = time.perf_counter()
        drafter.propose(250)
        drafter.observe(step)
        costs.append(time.perf_counter() - started)
    return median(costs) * 1e6, per_token * 1e6


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}, {STEPS} steps each")
    print(f"{'context':>10} {'µs a step':>12} {'µs a prompt token':>20}")
    for context in (1_000, 8_000, 32_000, 128_000):
        step, token = microseconds_per_step(context)
        print(f"{context:>10,} {step:>12.2f} {token:>20.2f}")


if __name__ == "__main__":
    main()
