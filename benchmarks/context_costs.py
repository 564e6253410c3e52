"""What drafts cost behind a long context: predicted from two lengths, and what knowing it brings.

    python benchmarks/context_costs.py
    python benchmarks/context_costs.py TOKENIZER TRACE [...]

The first form measures a random model on this machine as at its first use: behind a short context
and a long one. Then steps run behind other lengths. The table has T(M)/T(1) there as predicted and
as measured, the error, and the error that is left once 40 steps of each kind have corrected it.

The second form replays recorded outputs on a made-up chip whose attention leaves its fast kernel
beyond 8 rows, so that 12 rows take 2.3 times as long as 8 behind 16,000 tokens (mlx#3826). Every
other output gets that many in front. Each figure is the speed against plain decoding, by category:
with a curve that was measured behind 64 tokens and stays so, with one that steps correct, with
times at two context lengths, and with the chip's own costs.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median

import mlxspec  # noqa: F401  (before mlx.core, for OpenBLAS)
from mlxspec.engine.loaded_model import LoadedModel

# isort: split
import numpy as np
from learned_costs import MEASURED, Machine, Scenario, speeds

from mlxspec.bench.prompts import read_completions
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.cost_file import Calibration, StepTime
from mlxspec.drafting.costs import Costs, FixedCosts, LiveCosts
from mlxspec.engine.calibration import ModelSteps, cost_file, costs_for
from mlxspec.models.tokenizer import VocabularyClasses, load_tokenizer_of

sys.path.append(str(Path(__file__).parents[1]))  # where the tests are

from tests.support.random_models import random_model

_ROWS = (4, 8, 16)
_CONTEXTS = (256, 4000, 16_000)
_STEPS = 40

_LENGTH = 16_000
_CURVE = {1: 1, 2: 1.05, 3: 1.11, 5: 1.42, 8: 2.2, 12: 3.16, 16: 3.87, 32: 3.87}
"""An M5 Max (mlx#3791)."""
_ATTENTION = {1: 0.5, 8: 0.6, 9: 3.0, 12: 3.3, 16: 3.6, 32: 5.0}
"""What that many tokens add."""
_PLAIN_STEP = 0.02  # seconds


def predict() -> None:
    """Print predicted and measured costs."""
    model = random_model(
        "llama",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=64,
        vocab_size=8192,
    )
    target = LoadedModel(model)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["MLXSPEC_CACHE_DIR"] = directory
        fresh, corrected = (costs_for(target) for _ in range(2))
        measured = cost_file(model).read()
    for context, known in measured.items():
        print(f"measured behind {context} tokens: {[time.rows for time in known.times]} rows")
    print(f"{'context':>8} {'rows':>5} {'predicted':>10} {'measured':>9} {'error':>6} {'then':>6}")
    for context in _CONTEXTS:
        steps = ModelSteps(target, context)
        times: dict[int, list[float]] = {rows: [] for rows in (1, *_ROWS)}
        for costs in (fresh, corrected):
            costs.move_to(context)
        for _ in range(_STEPS):
            times[1] += steps.plain(3)
            for rows in _ROWS:
                times[rows].append(steps.drafted(rows))
        for index in range(_STEPS):
            for seconds in times[1][3 * index : 3 * index + 3]:
                corrected.record(1, seconds, True)
            for rows in _ROWS:
                corrected.record(rows, times[rows][index], False)
        for rows in _ROWS:
            truth = median(times[rows]) / median(times[1])
            predicted, then = fresh.curve(rows), corrected.curve(rows)
            print(
                f"{context:8} {rows:5} {predicted:10.2f} {truth:9.2f} "
                f"{predicted / truth - 1:+6.0%} {then / truth - 1:+6.0%}"
            )


@cache
def curve(context: int) -> CostCurve:
    """T(rows)/T(1) of the made-up chip."""
    rows = range(1, max(_CURVE) + 1)
    base, added = (np.interp(rows, [*of], [*of.values()]) for of in (_CURVE, _ATTENTION))
    times = base + added * context / _LENGTH
    return CostCurve(zip(rows, times / times[0], strict=True))


def plain_step(context: int) -> float:
    """T(1) of the made-up chip."""
    return _PLAIN_STEP * (1 + _ATTENTION[1] * context / _LENGTH)


class Chip(Machine):
    """The made-up chip."""

    def step(self, rows: int, pipelined: bool, ahead: bool, context: int) -> tuple[float, float]:
        context = context // 256 * 256
        self.curve, self.plain_step = curve(context), plain_step(context)
        return super().step(rows, pipelined, ahead, context)


class TrueCosts(FixedCosts):
    """The chip's costs at any context length."""

    def move_to(self, context: int) -> None:
        self.curve = curve(context // 256 * 256)


def known_at(context: int) -> Calibration:
    """What a first measurement of the made-up chip shows."""
    plain, rows = plain_step(context), (1, *MEASURED)
    return Calibration([StepTime(row, plain * curve(context)(row), 0.1) for row in rows])


def gain(tokenizer: str, traces: Sequence[str]) -> None:
    """Print what knowing the context brings, a line per category."""
    encoder = load_tokenizer_of(tokenizer)
    completions = read_completions(map(Path, traces), encoder, 5)
    random.Random(1).shuffle(completions)
    ways: dict[str, Costs] = {
        "fixed": FixedCosts(curve(64)),
        "corrected": LiveCosts({64: known_at(64)}),
        "two lengths": LiveCosts({64: known_at(64), 8000: known_at(8000)}),
        "the truth": TrueCosts(curve(64)),
    }
    found = {
        name: speeds(
            completions,
            VocabularyClasses(encoder),
            Chip(curve(64), Scenario()),
            costs,
            (0, _LENGTH),
        )
        for name, costs in ways.items()
    }
    print(f"{'category':>20}", *(f"{name:>12}" for name in found))
    for category in found["fixed"]:
        print(f"{category[:20]:>20}", *(f"{of[category]:12.3f}" for of in found.values()))
    print(f"{'all':>20}", *(f"{geometric_mean(of.values()):12.3f}" for of in found.values()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        gain(sys.argv[1], sys.argv[2:])
    else:
        predict()
