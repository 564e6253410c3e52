"""The cost of a memory of earlier answers: learning, opening, look-ups, memory and disk.

    SHORT=1000000 python benchmarks/memory_cost.py [TOKENS ...]

The answers have 200 to 8,000 tokens each, of random phrases that recur in new orders, as in code
and prose. The contexts to look up end in such phrases but are not in the memory as a whole.
Learning is everything that happens after an answer ends, including merging. Learning and look-ups
are given in CPU time, which other programs affect less. The targets are below 20 µs per token
learned, 14 bytes per token on disk, 50 ms to open, 100 µs per look-up (99 %: 300 µs) and 200 MB of
resident memory with ten million tokens.

The last line is for very short answers of 5 to 20 tokens, a million of them unless SHORT says
otherwise. It shows the time to rebuild the index, with a target below a minute, and the time to
find an answer that another process has added, with a target of milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np

from mlxspec.corpus.answer_index import AnswerIndex
from mlxspec.corpus.answers import KeptAnswers, identify

VOCABULARY = 32_000
LOOKUPS = 5000
LEAST, MOST = 200, 8000  # tokens of an answer


class Words:
    """The tokenizer of the synthetic answers."""

    name_or_path = "benchmark"

    def get_vocab(self) -> dict[str, int]:
        return {f"w{index}": index for index in range(VOCABULARY)}


class Answers:
    """Synthetic answers from phrases of 1 to 12 tokens; their number suits the text's size."""

    def __init__(self, tokens: int, seed: int) -> None:
        phrases = np.random.default_rng(0)
        self._lengths = phrases.integers(1, 13, max(2000, tokens // 50))
        self._starts = np.append(0, np.cumsum(self._lengths)[:-1])
        self._tokens = (VOCABULARY * phrases.random(self._lengths.sum()) ** 3).astype(np.int32)
        self._pick = np.random.default_rng(seed)

    def answer(self, length: int) -> list[int]:
        chosen = (len(self._lengths) * self._pick.random(length // 3) ** 2).astype(np.int64)
        lengths = self._lengths[chosen]
        shifts = self._starts[chosen] - np.append(0, np.cumsum(lengths)[:-1])
        places = np.arange(lengths.sum()) + np.repeat(shifts, lengths)
        tokens: list[int] = self._tokens[places[:length]].tolist()
        return tokens

    def up_to(self, tokens: int) -> Iterator[list[int]]:
        while tokens > 0:
            length = int(LEAST * (MOST / LEAST) ** self._pick.random())
            yield self.answer(length)
            tokens -= length


def resident() -> float:
    """The peak memory of this process, in megabytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e3 if platform.system() == "Linux" else 1e6)


def in_process_of_its_own(function, *arguments):  # type: ignore[no-untyped-def]
    """A function's result, and its peak memory."""
    context = multiprocessing.get_context("spawn")
    results: SimpleQueue = context.SimpleQueue()
    process = context.Process(target=_put, args=(results, function, *arguments))
    process.start()
    result = results.get()
    process.join()
    return result


def _put(results, function, *arguments) -> None:  # type: ignore[no-untyped-def]
    results.put((function(*arguments), resident()))


def learn(directory: Path, tokens: int) -> float:
    """CPU seconds per token."""
    memory = AnswerIndex(10**9, kept=KeptAnswers(directory, identify(Words())))
    answers = Answers(tokens, 1)
    used = 0.0
    for number, answer in enumerate(answers.up_to(tokens)):
        before = time.process_time()
        memory.add(answer)
        if number % 4 == 0:
            memory.settle()
        used += time.process_time() - before
    before = time.process_time()
    memory.close()
    return (used + time.process_time() - before) / tokens


def draft(directory: Path, tokens: int) -> tuple[float, float, float, int]:
    """Seconds to open it, of the median look-up and of the 99th percentile; the number of files."""
    identity = identify(Words())
    started = time.perf_counter()
    memory = AnswerIndex(kept=KeptAnswers(directory, identity))
    opened = time.perf_counter() - started
    memory.settle()
    other = Answers(tokens, 2).answer(MOST)
    costs = []
    for at in np.random.default_rng(3).integers(64, MOST, LOOKUPS).tolist():
        context = other[at - 64 : at]
        started = time.thread_time()
        memory.look_up(context)
        costs.append(time.thread_time() - started)
    costs.sort()
    files = len(list(directory.glob("*.index")))
    memory.close()
    return opened, costs[LOOKUPS // 2], costs[LOOKUPS * 99 // 100], files


def keep_short(directory: Path, number: int) -> None:
    """Add short answers, without an index."""
    pick = np.random.default_rng(4)
    kept = KeptAnswers(directory, identify(Words()))
    with kept.locked():
        for length in pick.integers(5, 21, number).tolist():
            kept.add((VOCABULARY * pick.random(length) ** 3).astype(np.int32).tobytes(), {})
    kept.close()


def index_short(directory: Path) -> tuple[float, float]:
    """Seconds to build the index, and to find another process's answer (the median of nine)."""
    identity = identify(Words())
    other = KeptAnswers(directory, identity)
    started = time.perf_counter()
    memory = AnswerIndex(10**9, kept=KeptAnswers(directory, identity))
    memory.settle()
    indexed = time.perf_counter() - started
    costs = []
    for number in range(9):
        other.add(np.full(9, number, np.int32).tobytes(), {})
        started = time.perf_counter()
        memory.refresh()
        memory.settle()
        costs.append(time.perf_counter() - started)
    memory.close()
    return indexed, sorted(costs)[4]


def report(tokens: int, directory: Path) -> None:
    learning, peak = in_process_of_its_own(learn, directory, tokens)
    nbytes = sum(path.stat().st_size for path in directory.iterdir())
    (opened, median, slow, files), drafting_peak = in_process_of_its_own(draft, directory, tokens)
    print(
        f"{tokens:>12,} {learning * 1e6:>8.1f} µs {nbytes / tokens:>8.2f} B"
        f" {files:>6} {opened * 1e3:>7.1f} ms {median * 1e6:>8.1f} µs {slow * 1e6:>8.1f} µs"
        f" {peak:>7.0f} MB {drafting_peak:>7.0f} MB",
        flush=True,
    )


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}, {LOOKUPS} look-ups each")
    columns = ("tokens", "learn", "size", "files", "open", "look-up", "99 %")
    heads = "{:>12} {:>11} {:>10} {:>6} {:>10} {:>11} {:>11} {:>10} {:>10}"
    print(heads.format(*columns, "learning", "drafting"), flush=True)
    for tokens in map(int, sys.argv[1:] or ("100000", "1000000", "10000000")):
        with tempfile.TemporaryDirectory() as directory:
            report(tokens, Path(directory))
    number = int(os.environ.get("SHORT", "1000000"))
    with tempfile.TemporaryDirectory() as directory:
        keep_short(Path(directory), number)
        (indexed, found), peak = in_process_of_its_own(index_short, Path(directory))
        print(
            f"{number:>12,} short answers: {indexed:.1f} s to index, "
            f"{found * 1e3:.1f} ms to find another process's answer, {peak:.0f} MB"
        )


if __name__ == "__main__":
    main()
