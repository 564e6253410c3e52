"""Plain decoding and prompt lookup side by side with mlx-lm, in one run.

    python benchmarks/side_by_side.py [--model demo] [--max-tokens 250] [--repeats 5]

For each prompt the three take turns, warm, on the same model in the same process; every figure
is a median over the turns. A rate counts the time from the end of the prefill to the last
token. On Linux's CPU back end everything runs twice, in processes of their own: with the BLAS
of MLX's wheel, where a forward over M rows costs M times one, and with OpenBLAS, where it is
nearly flat. Outputs are compared token by token; a speed-up of other tokens would be none.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import date
from importlib.metadata import version
from statistics import median

from prompts import CONTINUATIONS, INSTRUCTIONS

import mlxspec  # before mlx: loads OpenBLAS where there is one

Turn = tuple[list[int], float]
"""The generated tokens and the seconds from the end of the prefill to the last of them."""


def timed(start: Callable[[Callable[[int, int], None]], Iterable]) -> Turn:
    """Consume a stream of responses; ``start`` is given a progress callback."""
    ended = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal ended
        if not tokens:  # mlx-lm reports once more behind the first token
            ended = time.perf_counter()

    tokens: list[int] = []
    for response in start(on_progress):
        tokens.append(response.token)
    return tokens, time.perf_counter() - ended


def measure(decoder, prompt: list[int], max_tokens: int, repeats: int) -> dict[str, list[Turn]]:
    """Let the three take turns; the first round warms up and does not count."""
    import mlx_lm

    def mlx_lm_turn(on_progress):
        # Its last callback of the prefill comes before the first token is computed.
        def before_first_token(done: int, total: int) -> None:
            if done < total:
                on_progress(done, total)

        return mlx_lm.stream_generate(
            decoder.model,
            decoder.tokenizer,
            prompt,
            max_tokens=max_tokens,
            prompt_progress_callback=before_first_token,
        )

    contestants = {
        "mlx-lm": mlx_lm_turn,
        "plain": lambda progress: decoder.stream(
            prompt, max_tokens, n_draft=0, on_progress=progress
        ),
        "lookup": lambda progress: decoder.stream(prompt, max_tokens, on_progress=progress),
    }
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name, start in contestants.items():
            turn = timed(start)
            if repeat:
                turns[name].append(turn)
    return turns


def report(arguments: argparse.Namespace) -> None:
    """Print one table for the BLAS that this process runs on."""
    import mlx.core as mx

    from mlxspec.bench.equality import first_difference

    decoder = mlxspec.PromptLookupDecoder(arguments.model)
    tokenizer = decoder.tokenizer
    prompts = {
        name: tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )
        for name, text in INSTRUCTIONS.items()
    } | {name: tokenizer.encode(text) for name, text in CONTINUATIONS.items()}
    print(
        f"{'prompt':<12}{'tokens':>7}{'mlx-lm':>9}{'plain':>9}{'ratio':>7}"
        f"{'lookup':>9}{'ratio':>7}{'tok/step':>9}  output"
    )
    plain_ratios, lookup_ratios = [], []
    for name, prompt in prompts.items():
        turns = measure(decoder, prompt, arguments.max_tokens, arguments.repeats)
        outputs = {who: of[0][0] for who, of in turns.items()}
        rates = {
            who: median(len(tokens) / seconds for tokens, seconds in of)
            for who, of in turns.items()
        }
        # A slow moment of the machine hits neighbours alike, so ratios are taken turn by turn.
        plain, lookup = (
            median(base[1] / own[1] for base, own in zip(turns["mlx-lm"], turns[who], strict=True))
            for who in ("plain", "lookup")
        )
        plain_ratios.append(plain)
        lookup_ratios.append(lookup)
        *_, last = decoder.stream(prompt, arguments.max_tokens)
        differences = [
            first_difference(
                decoder.model,
                prompt,
                outputs["mlx-lm"],
                outputs[who],
                mlxspec.SamplingParams(),
            )
            for who in ("plain", "lookup")
        ]
        equal = ", ".join(f"differs at {d.index}, margin {d.margin:.1e}" for d in differences if d)
        print(
            f"{name:<12}{len(outputs['mlx-lm']):>7}{rates['mlx-lm']:>9.1f}"
            f"{rates['plain']:>9.1f}{plain:>7.2f}{rates['lookup']:>9.1f}{lookup:>7.2f}"
            f"{last.stats.tokens_per_step:>9.2f}  {equal or 'equal'}"
        )
    print(
        f"geometric means of the ratios to mlx-lm: plain {geometric_mean(plain_ratios):.3f}, "
        f"lookup {geometric_mean(lookup_ratios):.3f}"
    )
    print(
        "steps:",
        ", ".join(
            f"{row.rows} rows {row.seconds * 1e3:.2f} ms"
            + (f" (×{row.cost:.2f})" if row.cost else "")
            for row in decoder.step_times.table()
        ),
    )
    print(f"device {mx.default_device()}, float32 on the CPU; rates in tokens per second")


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare with mlx-lm in one run.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-tokens", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one-process", action="store_true", help="only the BLAS at hand")
    arguments = parser.parse_args()
    if arguments.one_process:
        report(arguments)
        return
    versions = {
        "mlxspec": mlxspec.__version__,
        **{name: version(name) for name in ("mlx", "mlx-lm")},
    }
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    print(f"{packages}; Python {platform.python_version()}; {platform.platform()}; {date.today()}")
    blas = {"": "1"}
    if sys.platform == "linux":
        blas = {"with the BLAS of MLX's wheel": "0", "with OpenBLAS, where installed": "1"}
    for title, value in blas.items():
        print(f"\n{title}" if title else "", flush=True)
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--one-process"],
            env={**os.environ, "MLXSPEC_OPENBLAS": value},
            check=True,
        )


if __name__ == "__main__":
    main()
