"""Several prompts at once: mlx-lm's batches, one by one with drafts, or joint steps.

    python benchmarks/batch_ways.py [REPEATS [MODEL]]

The model is the demo model by default. There are three times as many prompts as run at once, so
that most steps are full: the last ones, which run few sequences, would judge otherwise.

On Linux's CPU back end everything runs twice, in separate processes: with the BLAS of MLX's wheel,
where a forward over M rows costs nearly M times as much as over one, and with OpenBLAS, where it
costs much less. A figure is the ratio of the tokens per second of all prompts, including prefill,
to those of mlx-lm's ``batch_generate``: the median over the repeats, in random order. The memory of
outputs is off, since prompts recur. The last column counts, over all repeats, the outputs of joint
steps with drafts that equal those one by one. The others differ at a near tie, since OpenBLAS sums
in a different order for more rows.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import mlxspec  # before mlx_lm, for OpenBLAS

# isort: split
import mlx_lm

from mlxspec.bench.prompts import bundled_prompts
from mlxspec.generation.scheduler import Scheduler

_TOKENS = 160
_COUNTS = (1, 2, 4, 8)
_ROUNDS = 3
_KINDS = {
    "grounded": ("repeat", "rename", "edit JSON", "quote"),
    "free": ("free code", "free text"),
}
_ONE_BY_ONE, _PLAIN, _DRAFTS = "one by one, drafts", "joint, plain", "joint, drafts"


def prompts_of(
    categories: tuple[str, ...], tokenizer: mlx_lm.tokenizer_utils.TokenizerWrapper
) -> Iterator[list[int]]:
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


def in_joint_steps(
    decoder: mlxspec.Decoder, prompts: Sequence[list[int]], count: int
) -> list[list[int]]:
    """Answer the prompts, ``count`` at once; return their tokens."""
    scheduler = Scheduler(decoder, max_active=count, stall=float("inf"))
    answers: list[list[mlxspec.GenerationResponse]] = [[] for _ in prompts]
    requests = [
        decoder.new_request(prompt, _TOKENS, {}, receive=answer.append)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    scheduler.add(*requests)
    scheduler.run()
    assert not any(request.error for request in requests)
    return [[response.token for response in answer] for answer in answers]


def measure(repeats: int, name: str) -> None:
    model, tokenizer = mlxspec.load(name)
    drafting = mlxspec.AutoDecoder(model, tokenizer, memory_tokens=0)
    plain = mlxspec.Decoder(model, tokenizer)
    for decoder in (drafting, plain):
        in_joint_steps(decoder, [[5, 6, 7]] * 2, 2)  # measures steps and capability

    answers: dict[str, list[list[int]]] = {}

    def mlx_lms_batch(prompts: Sequence[list[int]], count: int) -> int:
        sizes = {"completion_batch_size": count, "prefill_batch_size": count}
        response = mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=_TOKENS, **sizes)
        return response.stats.generation_tokens

    def one_by_one(prompts: Sequence[list[int]], count: int) -> int:
        answers[_ONE_BY_ONE] = [
            [response.token for response in drafting.stream(prompt, _TOKENS)] for prompt in prompts
        ]
        return sum(map(len, answers[_ONE_BY_ONE]))

    def joint_plain(prompts: Sequence[list[int]], count: int) -> int:
        return sum(map(len, in_joint_steps(plain, prompts, count)))

    def joint_drafts(prompts: Sequence[list[int]], count: int) -> int:
        answers[_DRAFTS] = in_joint_steps(drafting, prompts, count)
        return sum(map(len, answers[_DRAFTS]))

    ways: dict[str, Callable[[Sequence[list[int]], int], int]] = {
        "mlx-lm's batch": mlx_lms_batch,
        _ONE_BY_ONE: one_by_one,
        _PLAIN: joint_plain,
        _DRAFTS: joint_drafts,
    }
    heading = "".join(f"{way:>20}" for way in (_ONE_BY_ONE, _PLAIN, _DRAFTS))
    print(f"{'at once':>8} {'kind':>9}{heading} {'tokens/s of the batch':>23}{'equal outputs':>15}")
    for kind, categories in _KINDS.items():
        found = list(prompts_of(categories, tokenizer))
        for count in _COUNTS:
            prompts = [*itertools.islice(itertools.cycle(found), _ROUNDS * count)]
            speeds: dict[str, list[float]] = {way: [] for way in ways}
            equal = 0
            for _ in range(repeats):
                for way in random.sample(list(ways), len(ways)):
                    started = time.perf_counter()
                    tokens = ways[way](prompts, count)
                    speeds[way].append(tokens / (time.perf_counter() - started))
                pairs = zip(answers[_DRAFTS], answers[_ONE_BY_ONE], strict=True)
                equal += sum(joint == alone for joint, alone in pairs)
            base, *others = speeds.values()
            ratios = [median(own / b for own, b in zip(way, base, strict=True)) for way in others]
            figures = "".join(f"{ratio:20.2f}" for ratio in ratios)
            print(
                f"{count:8} {kind:>9}{figures} {median(base):23.0f}"
                f"{f'{equal} of {repeats * len(prompts)}':>15}",
                flush=True,
            )


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    model = sys.argv[2] if len(sys.argv) > 2 else "demo"
    if os.environ.get("MLXSPEC_OPENBLAS") or sys.platform != "linux":
        measure(repeats, model)
        return
    for title, openblas in (("with OpenBLAS", "1"), ("with the BLAS of MLX's wheel", "0")):
        print(f"\n{title}\n", flush=True)
        environment = {**os.environ, "MLXSPEC_OPENBLAS": openblas}
        subprocess.run([sys.executable, __file__, str(repeats), model], env=environment, check=True)


if __name__ == "__main__":
    main()
