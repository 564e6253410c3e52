"""Lookahead decoding against plain decoding, with each BLAS, in one run.

    python benchmarks/lookahead_rates.py [REPEATS]

On Linux's CPU back end everything runs twice, in separate processes: with the BLAS of MLX's wheel,
where a forward over M rows costs nearly M times as much as over one, and with OpenBLAS, where it
costs much less. The table has a line for each W, N, G, and one for prompt lookup: tokens per step,
rows per step, tokens per second, and the geometric mean, over two prompts, of the median over the
repeats of plain decoding's time divided by the decoder's. With the demo model, the prompts contain
the answer (prompt in the pool), or are code to continue (not in the pool). With the model that
MLXSPEC_REAL_MODEL names, they are two chats, a text to turn into JSON and a story, in a line each,
with OpenBLAS only. Prefill does not count.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import geometric_mean, mean, median
from typing import Any

import mlxspec
from mlxspec import Decoder, SpeculationStats
from mlxspec.bench.prompts import bundled_prompts
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.lookahead import LookaheadDrafter
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.generation.response import GenerationResponse

_TOKENS = 80
_SIZES = [
    *((0, 5, 8), (3, 3, 3), (5, 3, 5), (5, 4, 5), (7, 5, 7)),
    *((10, 3, 8), (10, 5, 8), (15, 5, 15)),
]
_REAL_SIZES = [(0, 5, 7), (5, 3, 5), (7, 5, 7)]
_READ_LINES = "def read_lines(path):\n    result = []\n    with open(path) as file:\n"
_CHATS = {
    "JSON": "Turn this into a JSON array of objects with the keys name, city and year.\n\n"
    "Ada Byron lives in London and joined in 2011. Paul Stein lives in Bremen and joined in 2014. "
    "Rosa Vidal lives in Girona and joined in 2019. Ines Falk lives in Aarau and joined in 2020.",
    "story": "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
}
_REAL_MODEL = os.environ.get("MLXSPEC_REAL_MODEL")

Prompt = list[int] | list[dict[str, str]]


def _turn(stream: Iterator[GenerationResponse]) -> tuple[float, SpeculationStats]:
    """Seconds per token after the first step, and the statistics of drafting."""
    first = None
    for response in stream:
        if first is None:
            first, started = response, time.perf_counter()
        ended = time.perf_counter()
    # The tokens of the first step come at once.
    return (ended - started) / max(response.generation_tokens - 1, 1), response.stats


def _compare(
    decoder: Decoder, prompt: Prompt, repeats: int, new: Callable[[], Drafter]
) -> tuple[float, float, float, float]:
    """Tokens and rows per step, tokens per second, and the time ratio of plain decoding."""
    ratios, rates = [], []
    for _ in range(repeats):
        turns = {}
        for make in random.sample([NoDraft, new], 2):
            turns[make] = _turn(
                Decoder(decoder.loaded, decoder.tokenizer, make()).stream(prompt, _TOKENS)
            )
        seconds, stats = turns[new]
        ratios.append(turns[NoDraft][0] / seconds)
        rates.append(1 / seconds)
    return stats.tokens_per_step, stats.rows / stats.steps, median(rates), median(ratios)


def measure(repeats: int) -> None:
    """Print the table for the current BLAS."""
    decoder = Decoder(_REAL_MODEL or "demo")
    prompts: dict[str, list[Prompt]]
    if _REAL_MODEL:
        prompts = {name: [[{"role": "user", "content": text}]] for name, text in _CHATS.items()}
    else:
        bundled = {one.category: one.messages[0]["content"] for one in bundled_prompts()}
        encode = decoder.tokenizer.encode
        prompts = {
            "in pool": [
                encode(f"[INST] {bundled[name]} [/INST]") for name in ("repeat", "edit JSON")
            ],
            "code": [encode(bundled["free code"]), encode(_READ_LINES)],
        }
    print(f"{'W, N, G':>13} {'prompt':>8} tokens/step rows/step tokens/s vs. plain")
    for size in [None, *(_REAL_SIZES if _REAL_MODEL else _SIZES)]:
        for name, of in prompts.items():
            new: Callable[[], Drafter] = PromptLookupDrafter
            if size:
                new = partial(LookaheadDrafter, *size, pool_from_prompt=name != "code")
            figures: Any = zip(*(_compare(decoder, one, repeats, new) for one in of), strict=True)
            tokens, rows, rate, ratios = figures
            print(
                f"{', '.join(map(str, size)) if size else 'prompt lookup':>13} {name:>8} "
                f"{mean(tokens):11.2f} {mean(rows):9.1f} {mean(rate):8.1f} "
                f"{geometric_mean(ratios):9.3f}",
                flush=True,
            )


def main() -> None:
    repeats = int(sys.argv[1]) if sys.argv[1:] else 5
    if os.environ.get("MLXSPEC_LOOKAHEAD_RATES"):
        measure(repeats)
        return
    print(
        f"mlxspec {mlxspec.__version__}, {_REAL_MODEL or 'the demo model'}, {_TOKENS} tokens a turn"
    )
    blas = {"with the BLAS of MLX's wheel": "0", "with OpenBLAS, where installed": "1"}
    if _REAL_MODEL or sys.platform != "linux":
        blas = {"": "1"}
    for title, openblas in blas.items():
        print(f"\n{title}\n", flush=True)
        environment = {"MLXSPEC_OPENBLAS": openblas, "MLXSPEC_LOOKAHEAD_RATES": "1"}
        command = [sys.executable, __file__, str(repeats)]
        subprocess.run(command, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    main()
