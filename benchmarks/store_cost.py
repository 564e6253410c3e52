"""The cost of a store: building it, opening it, a look-up, and adding a text.

    python benchmarks/store_cost.py [TOKENS ...]

The text consists of random phrases that recur in new orders, as in code and prose. The contexts to
look up end in such phrases but are not in the store as a whole. A look-up copies the continuations,
as a step needs them. The target is below 100 µs per look-up.
"""

from __future__ import annotations

import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from mlxspec.corpus.store import Store, add_to_store, build_store, open_store

VOCABULARY = 32_000
LOOKUPS = 5000
LIMIT = 8
TEXT = 8192  # tokens


class Words:
    """The tokenizer of the synthetic texts."""

    name_or_path = "benchmark"

    def get_vocab(self) -> dict[str, int]:
        return {f"w{index}": index for index in range(VOCABULARY)}


def texts(pick: random.Random, tokens: int) -> Iterator[list[int]]:
    """Texts of 8,192 tokens each, with recurring phrases of 1 to 12 tokens."""
    phrases = [
        [int(VOCABULARY * pick.random() ** 3) for _ in range(pick.randrange(1, 13))]
        for _ in range(max(2000, tokens // 50))
    ]
    for _ in range(tokens // TEXT):
        text: list[int] = []
        while len(text) < TEXT:
            text += phrases[int(len(phrases) * pick.random() ** 2)]
        yield text[:TEXT]


def lookup_costs(store: Store, contexts: list[list[int]]) -> list[float]:
    """Seconds of each look-up, in ascending order."""
    costs = []
    for context in contexts:
        started = time.perf_counter()
        store.look_up(context, LIMIT)
        costs.append(time.perf_counter() - started)
    return sorted(costs)


def report(tokens: int, directory: Path) -> None:
    pick = random.Random(0)
    *known, other = texts(pick, tokens + TEXT)
    contexts = [other[at - 64 : at] for at in (pick.randrange(64, TEXT) for _ in range(LOOKUPS))]
    path = directory / "store"
    started = time.perf_counter()
    size = build_store(path, known, Words()).nbytes
    built = time.perf_counter()
    store = open_store(path, Words())
    opened = time.perf_counter()
    costs = lookup_costs(store, contexts)
    adding = time.perf_counter()
    add_to_store(path, [other], Words())
    added = time.perf_counter()
    path.unlink()
    print(
        f"{tokens:>12,} {built - started:>8.2f} s {size / 1e6:>8.1f} MB"
        f" {(opened - built) * 1e3:>7.0f} ms {median(costs) * 1e6:>8.1f} µs"
        f" {costs[LOOKUPS * 95 // 100] * 1e6:>8.1f} µs {(added - adding) * 1e3:>7.0f} ms"
    )


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}, {LOOKUPS} look-ups each")
    columns = ("tokens", "build", "size", "open", "look-up", "95 %", "add")
    print("{:>12} {:>10} {:>11} {:>10} {:>11} {:>11} {:>10}".format(*columns))
    with tempfile.TemporaryDirectory() as directory:
        for tokens in map(int, sys.argv[1:] or ("100000", "1000000", "10000000")):
            report(tokens, Path(directory))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory {peak / (1e6 if platform.system() == 'Linux' else 1e9):.2f} GB")


if __name__ == "__main__":
    main()
