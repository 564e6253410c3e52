"""Several prompts on the demo model: in one batch, or one after another with speculation.

    python benchmarks/batch_ways.py [REPEATS]

On Linux's CPU back end everything runs twice, in processes of their own: with the BLAS of MLX's
wheel, where a forward over M rows costs nearly M times one, and with OpenBLAS, where it costs
much less. A figure is the median over the repeats, in random order, of the time that plain
decoding one after another takes, by the time of that way. Prefill counts. Times are processor
times on the CPU back end, where they tell nothing of what else runs, and wall times elsewhere.
The last column is what a batch should gain according to the measured cost of a step's rows.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import mlxspec  # before mlx_lm, for OpenBLAS

# isort: split
import mlx.core as mx
import mlx_lm

from mlxspec.eval.prompts import bundled_prompts

_TOKENS = 80
_BATCHES = (2, 4, 8)
_KINDS = {
    "grounded": ("repeat", "rename", "edit JSON", "quote"),
    "free": ("free code", "free text"),
}


def prompts_of(categories: tuple[str, ...], tokenizer: mlx_lm.tokenizer_utils.TokenizerWrapper):
    """Token ids of the bundled prompts of some categories."""
    for prompt in bundled_prompts():
        if prompt.category in categories:
            text = prompt.messages[0]["content"]
            if prompt.raw:
                yield tokenizer.encode(text)
            else:
                yield tokenizer.apply_chat_template(
                    list(prompt.messages), add_generation_prompt=True
                )


def seconds_of(function: Callable[[], object]) -> float:
    clock = time.process_time if mx.default_device().type == mx.cpu else time.perf_counter
    started = clock()
    function()
    return clock() - started


def measure(repeats: int) -> None:
    model, tokenizer = mlxspec.load("demo")
    # Without the memory of outputs: some prompts come several times.
    decoder = mlxspec.AutoDecoder(model, tokenizer, memory_tokens=0)
    list(decoder.stream("a", 2))  # measures steps, and finds out what the model can verify
    print(f"{'prompts':>8} {'kind':>9} {'in a batch':>11} {'speculated':>11} {'rows/cost':>10}")
    for kind, categories in _KINDS.items():
        found = list(prompts_of(categories, tokenizer))
        for count in _BATCHES:
            prompts = (found * count)[:count]

            def plain(prompts: list = prompts) -> None:
                for prompt in prompts:
                    mlx_lm.generate(model, tokenizer, prompt, max_tokens=_TOKENS)

            def batch(prompts: list = prompts) -> None:
                mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=_TOKENS)

            def speculated(prompts: list = prompts) -> None:
                for prompt in prompts:
                    for _ in decoder.stream(prompt, _TOKENS):
                        pass

            ways = [plain, batch, speculated]
            times: dict[Callable[[], None], list[float]] = {way: [] for way in ways}
            for _ in range(repeats):
                for way in random.sample(ways, 3):
                    times[way].append(seconds_of(way))
            ratios = [
                median(p / t for p, t in zip(times[plain], times[way], strict=True))
                for way in (batch, speculated)
            ]
            foreseen = count / decoder.costs.curve(count)
            print(
                f"{count:8} {kind:>9} {ratios[0]:11.2f} {ratios[1]:11.2f} {foreseen:10.2f}",
                flush=True,
            )


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    if os.environ.get("MLXSPEC_OPENBLAS") or sys.platform != "linux":
        measure(repeats)
        return
    for title, openblas in (("with the BLAS of MLX's wheel", "0"), ("with OpenBLAS", "1")):
        print(f"\n{title}\n", flush=True)
        environment = {**os.environ, "MLXSPEC_OPENBLAS": openblas}
        subprocess.run([sys.executable, __file__, str(repeats)], env=environment, check=True)


if __name__ == "__main__":
    main()
