"""Lookahead decoding against plain decoding on the demo model, with each BLAS, in one run.

    python benchmarks/lookahead_rates.py [REPEATS]

On Linux's CPU back end everything runs twice, in separate processes: with the BLAS of MLX's wheel,
where a forward over M rows costs nearly M times as much as over one, and with OpenBLAS, where it
costs much less. The first table compares ``window_size="auto"`` with plain decoding, turn by turn
in random order. It shows, per prompt, the median over the repeats of plain decoding's time divided
by lookahead's, and then geometric means. The second table has fixed W, N, G, with three turns each
for two prompts that contain the answer (prompt in the pool), and for two of code to continue (not
in the pool). Prefill does not count.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import geometric_mean, mean, median
from typing import Any

import mlxspec
from mlxspec import LookaheadDecoder, SpeculationStats
from mlxspec.bench.prompts import bundled_prompts
from mlxspec.drafting.drafter import NoDraft
from mlxspec.generation.response import GenerationResponse

_TOKENS = 80
_SIZES = [
    *((0, 5, 8), (3, 3, 3), (5, 3, 5), (5, 4, 5), (7, 5, 7)),
    *((10, 3, 8), (10, 5, 8), (15, 5, 15)),
]
_CODE = {
    "read lines": "def read_lines(path):\n    result = []\n    with open(path) as file:\n",
    "stack": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(",
    "main": "import json\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
}

Stream = Callable[[], Iterator[GenerationResponse]]


class Rates:
    """Times turns of one model."""

    def __init__(self) -> None:
        self.decoder = LookaheadDecoder("demo")
        self.code = {name: self._encode(text) for name, text in _CODE.items()}
        self.bundled = {
            prompt.category: self._encode(
                prompt.messages[0]["content"]
                if prompt.raw
                else f"[INST] {prompt.messages[0]['content']} [/INST]"
            )
            for prompt in bundled_prompts()
        }
        self.code["free code"] = self.bundled["free code"]

    def compare(self, prompt: list[int], repeats: int, *args: Any) -> tuple[float, str]:
        """Plain decoding's time divided by lookahead's, and a line of figures."""

        def plain() -> Iterator[GenerationResponse]:
            return self.decoder.decode(prompt, NoDraft(), max_tokens=_TOKENS)

        def lookahead() -> Iterator[GenerationResponse]:
            return self.decoder.stream(prompt, _TOKENS, *args)

        ratios, rates = [], []
        for _ in range(repeats):
            order = [plain, lookahead]
            random.shuffle(order)
            turns = {stream: _turn(stream) for stream in order}
            ratios.append(turns[plain][0] / turns[lookahead][0])
            rates.append(1 / turns[lookahead][0])
            stats = turns[lookahead][1]
        return median(ratios), _figures(stats, median(rates), median(ratios))

    def _encode(self, text: str) -> list[int]:
        return list(self.decoder.tokenizer.encode(text))


def _turn(stream: Stream) -> tuple[float, SpeculationStats]:
    """Seconds per token after the first step, and the statistics of drafting."""
    first = None
    for response in stream():
        if first is None:
            first, started = response, time.perf_counter()
        ended = time.perf_counter()
    # The tokens of the first step come at once.
    return (ended - started) / max(response.generation_tokens - 1, 1), response.stats


def _figures(stats: SpeculationStats, rate: float, ratio: float) -> str:
    rows = stats.rows / stats.steps
    return f"{stats.tokens_per_step:11.2f} {rows:9.1f} {rate:8.0f} {ratio:9.3f}"


def measure(repeats: int) -> None:
    """Print both tables for the current BLAS."""
    rates = Rates()
    curve = rates.decoder.costs.curve
    print("T(rows): " + ", ".join(f"{rows} {curve(rows):.1f}" for rows in (2, 4, 8, 16, 32, 64)))
    heading = f"{'tokens/step':>11} {'rows/step':>9} {'tokens/s':>8} {'vs. plain':>9}"
    print(f"\n{'auto':16} {heading}")
    code_ratios, ratios = [], []
    for name, prompt in {**rates.bundled, **rates.code}.items():
        ratio, line = rates.compare(prompt, repeats)
        ratios.append(ratio)
        if name in rates.code:
            code_ratios.append(ratio)
        print(f"{name:16} {line}", flush=True)
    print(f"{'all prompts':16} {geometric_mean(ratios):40.3f}")
    print(f"{'code prompts':16} {geometric_mean(code_ratios):40.3f}")
    print(f"\n{'W, N, G':>10} {'prompt in pool':>15} {heading}")
    for size in _SIZES:
        for pooled in (True, False):
            _print_size(rates, size, pooled)


def _print_size(rates: Rates, size: tuple[int, int, int], pooled: bool) -> None:
    """One line: the means over the two prompts that contain the answer, or over the two of code."""
    names = ("repeat", "edit JSON") if pooled else ("free code", "read lines")
    prompts = {**rates.bundled, **rates.code}
    lines = [rates.compare(prompts[name], 3, *size, pooled) for name in names]
    columns = zip(*([float(value) for value in line.split()] for _, line in lines), strict=True)
    tokens, rows, rate, _ = (mean(column) for column in columns)
    ratio = geometric_mean(ratio for ratio, _ in lines)
    name = ", ".join(map(str, size))
    print(
        f"{name:>10} {'yes' if pooled else 'no':>15} {tokens:11.2f} {rows:9.1f} {rate:8.0f} "
        f"{ratio:9.3f}",
        flush=True,
    )


def main() -> None:
    repeats = int(sys.argv[1]) if sys.argv[1:] else 9
    if os.environ.get("MLXSPEC_LOOKAHEAD_RATES"):
        measure(repeats)
        return
    print(f"mlxspec {mlxspec.__version__}, the demo model, {_TOKENS} tokens a turn")
    blas = {"with the BLAS of MLX's wheel": "0", "with OpenBLAS, where installed": "1"}
    for title, openblas in blas.items() if sys.platform == "linux" else [("", "1")]:
        print(f"\n{title}\n", flush=True)
        environment = {"MLXSPEC_OPENBLAS": openblas, "MLXSPEC_LOOKAHEAD_RATES": "1"}
        command = [sys.executable, __file__, str(repeats)]
        subprocess.run(command, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    main()
