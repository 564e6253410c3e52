"""The gain or loss of learning the costs from noisy step times, relative to the true curve.

    python benchmarks/learned_costs.py TOKENIZER TRACE [...]

Planners draft recorded outputs one after another, and learn from simulated step times. Each figure
is the change of speed in per cent, relative to planners with the true curve. Differences below 1 %
are noise.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import geometric_mean

from mlxspec.bench.prompts import Completion, read_completions
from mlxspec.bench.replay import replay
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.chips import known_chip
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.cost_file import Calibration, StepTime
from mlxspec.drafting.costs import Costs, FixedCosts, LiveCosts
from mlxspec.drafting.drafter import Drafter
from mlxspec.drafting.experience import Experience
from mlxspec.drafting.p_accept import TokenClasses
from mlxspec.drafting.planner import Planner, trees_pay
from mlxspec.drafting.suffix_source import SuffixSource
from mlxspec.drafting.tree import DraftTree
from mlxspec.models.tokenizer import VocabularyClasses, load_tokenizer_of

_LIMIT = 5  # conversations of a category
_CHIPS = ("M2 Pro", "M3 Ultra", "M4 Pro", "CPU fp32 OpenBLAS", "H200-like")
MEASURED = (2, 4, 5, 6, 8, 10, 12, 16, 32)  # rows
_PLAIN_STEP = 0.02  # seconds
_OVERLAP = 0.6  # of a plain step: the part of the next forward that a run's first step computes
_PHASE = 150  # steps after which the machine's speed changes


@dataclass(frozen=True)
class Scenario:
    """A first measurement's errors, and the machine's behaviour.

    Attributes:
        plain: T(1) as measured, over the true one.
        drafted: T(rows) as measured, over the true one.
        error: relative standard deviation of measured times.
        scatter: of a step's time.
        sync_overhead: of waiting for a token.
        slow: how many times as long all steps take in every other phase.
        only_plain: whether nothing else was measured.
        widest: the most rows that were measured.
        linear: whether each row was measured to cost a plain step.
    """

    plain: float = 1.0
    drafted: float = 1.0
    error: float = 0.0
    scatter: float = 0.05
    sync_overhead: float = 0.03
    slow: float = 1.0
    only_plain: bool = False
    widest: int = 32
    linear: bool = False

    def known(self, curve: CostCurve) -> Calibration:
        """The measurement of a machine with this curve."""
        if self.only_plain:
            return Calibration([StepTime(1, 1.4 * _PLAIN_STEP, 0.4)])
        chance = random.Random(7)
        costs = {1: self.plain}
        for rows in (rows for rows in MEASURED if rows <= self.widest):
            cost = float(rows) if self.linear else self.drafted * curve(rows)
            costs[rows] = cost * chance.lognormvariate(0, self.error)
        times = [StepTime(rows, _PLAIN_STEP * cost, 0.1) for rows, cost in costs.items()]
        return Calibration(times)


_SCENARIOS = {
    "right": Scenario(scatter=0.03),
    "error 10 %": Scenario(error=0.1),
    "only T(1)": Scenario(only_plain=True),
    "up to 8 rows": Scenario(error=0.1, widest=8),
    "drafts × 0.6": Scenario(drafted=0.6),
    "drafts × 1.6": Scenario(drafted=1.6),
    "linear": Scenario(linear=True),
    "T(1) × 1.5": Scenario(plain=1.5),
    "T(1) / 1.5": Scenario(plain=1 / 1.5),
    "hot and cool": Scenario(slow=1.5),
    "scatter 10 %": Scenario(error=0.1, scatter=0.1),
    "long wait": Scenario(error=0.1, sync_overhead=0.2),
}


class Machine:
    """Simulates step times."""

    plain_step = _PLAIN_STEP

    def __init__(self, curve: CostCurve, scenario: Scenario) -> None:
        self.curve, self._scenario = curve, scenario
        self._chance, self._steps = random.Random(3), 0

    def step(self, rows: int, pipelined: bool, ahead: bool, context: int) -> tuple[float, float]:
        """A step's cost in plain steps, and the seconds that a clock measures."""
        waits = rows == 1 and not pipelined
        cost = self.curve(rows) + (self._scenario.sync_overhead if waits else 0.0)
        measured = cost + _OVERLAP * (ahead - pipelined)
        speed = self._scenario.slow if self._steps // _PHASE % 2 else 1.0
        self._steps += 1
        scatter = self._chance.lognormvariate(0, self._scenario.scatter)
        return cost, self.plain_step * measured * speed * scatter


class Timed(Drafter):
    """Lets a planner learn from the machine's times.

    Args:
        planner: of the drafts.
        machine: says how long steps take.
        before: tokens of context in front of the prompt.

    Attributes:
        cost: of all steps so far, in plain steps.
    """

    def __init__(self, planner: Planner, machine: Machine, before: int = 0) -> None:
        self._planner, self._machine, self._before = planner, machine, before
        self.cost, self._pipelined, self._context = 0.0, False, 0

    @property
    def pipelined(self) -> bool:  # type: ignore[override]
        return self._planner.pipelined

    def begin(self, prompt: Sequence[int]) -> None:
        self._context = self._before + len(prompt)
        self._planner.begin(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        return self._planner.propose(max_depth)

    def observe(self, step: VerifiedStep) -> None:
        pipelined, self._pipelined = self._pipelined, step.ahead
        cost, seconds = self._machine.step(step.rows, pipelined, step.ahead, self._context)
        self.cost += cost
        self._context += len(step.tokens)
        timed = replace(step, seconds=seconds, pipelined=pipelined, context=self._context)
        self._planner.observe(timed)

    def end(self) -> None:
        self._planner.end()


def speeds(
    completions: Sequence[Completion],
    classes: TokenClasses,
    machine: Machine,
    costs: Costs,
    before: Sequence[int] = (0,),
) -> dict[str, float]:
    """The speed relative to plain decoding, by category.

    The outputs have so many tokens in front of their prompts, in turn.
    """
    experience = Experience()
    totals: dict[str, list[float]] = {}
    for one, in_front in zip(completions, cycle(before), strict=False):
        own = costs.for_generation() if isinstance(costs, LiveCosts) else costs
        source = SuffixSource(token_classes=classes, experience=experience)
        branching = trees_pay(own.curve)
        planner = Planner(own, [source], branching=branching, experience=experience)
        timed = Timed(planner, machine, in_front)
        replay(one.prompt, one.output, timed)
        total = totals.setdefault(one.category, [0.0, 0.0])
        total[0] += len(one.output)
        total[1] += timed.cost
    return {category: tokens / cost for category, (tokens, cost) in totals.items()}


def main(tokenizer: str, traces: Sequence[str]) -> None:
    """Print a line per scenario, with a figure per chip."""
    encoder = load_tokenizer_of(tokenizer)
    completions = read_completions(map(Path, traces), encoder, _LIMIT)
    random.Random(1).shuffle(completions)
    print(f"{'':14}", *(f"{chip:>18}" for chip in _CHIPS))
    for name, scenario in _SCENARIOS.items():
        print(f"{name:14}", end="", flush=True)
        for chip in _CHIPS:
            curve = known_chip(chip).curve
            live = LiveCosts({1024: scenario.known(curve)})
            fixed = FixedCosts(curve, scenario.sync_overhead)
            learned, known = (
                geometric_mean(
                    speeds(
                        completions, VocabularyClasses(encoder), Machine(curve, scenario), costs
                    ).values()
                )
                for costs in (live, fixed)
            )
            print(f" {100 * (learned / known - 1):+17.1f}%", end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
