"""How drafts recover when step times were first measured on a busy machine.

    python benchmarks/busy_start.py [MEASUREMENTS] [GENERATIONS] [MODEL]

Each first measurement has its own cache directory, and two processes keep the CPU busy until it
ends. Then, without these processes, the decoder answers prompts that copy, from
:mod:`short_answers`. The result is the tokens per step after the first 300 tokens, relative to a
decoder that starts with the curve of a CPU with OpenBLAS, and also learns. Run it on an otherwise
idle machine.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from short_answers import SEED, prompts

import mlxspec
from mlxspec import AutoDecoder
from mlxspec.drafting.chips import known_chip
from mlxspec.drafting.cost_file import Calibration, StepTime
from mlxspec.drafting.costs import LiveCosts
from mlxspec.engine.calibration import cost_file

_MOST = 160  # tokens of an answer
_FIRST = 300  # tokens after which drafts should be good


@contextmanager
def _load() -> Iterator[None]:
    """Two processes that keep the CPU busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _tokens_per_step(decoder: AutoDecoder, generations: int) -> tuple[float, float]:
    """The tokens per step in the first tokens, and after them."""
    tokens, steps = [0, 0], [0, 0]
    for _, text in list(prompts(SEED))[:generations]:
        later = tokens[0] >= _FIRST
        *_, last = decoder.stream(f"[INST] {text} [/INST]", _MOST)
        tokens[later] += last.generation_tokens
        steps[later] += last.stats.steps
    return tokens[0] / max(steps[0], 1), tokens[1] / max(steps[1], 1)


def main(measurements: int, generations: int, name: str) -> None:
    logging.basicConfig(format="  %(message)s")
    model, tokenizer = mlxspec.load(name)
    chip, good = known_chip("CPU fp32 OpenBLAS").curve, 0.0
    times = [StepTime(rows, 0.005 * chip(rows), 0.05) for rows in chip.rows]
    for number in range(measurements + 1):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["MLXSPEC_CACHE_DIR"] = cache
            decoder = AutoDecoder(model, tokenizer)
            with _load() if number else nullcontext():
                curve = decoder.costs.curve if number else chip
            if not number:
                known = {1024: Calibration(times, "quick")}
                decoder.costs = LiveCosts(known, cost_file(model))
            costs = ", ".join(f"T({rows}) {curve(rows):.2f}" for rows in (2, 4, 8, 16))
            first, later = _tokens_per_step(decoder, generations)
            good, begun = good or later, "beside other work" if number else "a good curve"
            rates = f"{first:.2f} at first, {later:.2f} later ({later / good:.0%})"
            print(f"{begun}: {costs}; tokens per step {rates}", flush=True)


if __name__ == "__main__":
    measurements, generations, name = [*sys.argv[1:4], *("8", "20", "demo")[len(sys.argv) - 1 :]]
    main(int(measurements), int(generations), name)
