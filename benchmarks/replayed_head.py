"""Estimate what a trained head would add to the text's drafts, on recorded outputs.

    python benchmarks/replayed_head.py .76,.60,.50,.41 0.08 traces/*.jsonl --tokenizer MODEL \\
        --chip all --decoder auto,head,auto+head

First give the probabilities that the first 1, 2, … tokens that the head drafts are all right, and
the time to draft one token, in plain steps of all sequences that draft together. The other options
are those of ``mlxspec replay``. "head" is the head alone, and "auto+head" the default decoder with
the head added.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Self

from mlxspec.bench.policies import AUTO, POLICIES, NewPlanner, ReplayPolicy, planned
from mlxspec.cli.replay import replay_command
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.costs import FixedCosts
from mlxspec.drafting.drafter import NoDraft
from mlxspec.drafting.heads import HeadExperience, HeadSource
from mlxspec.drafting.p_accept import TokenClasses
from mlxspec.drafting.planner import Planner
from mlxspec.drafting.sources import DrafterSource

_WRONG = -2  # differs from all tokens, and from -1, which stands for an unknown choice


class ReplayedHead(HeadSource):
    """Drafts a recorded output's next tokens, right as often as a curve specifies.

    The number of right tokens at a position is random, but seeded by the output alone. So it is
    the same for all policies and chips. The head's confidence in a token depends only on its depth.

    Args:
        experience: what heads learn from the outputs, which all share it.
        p_reached: the probabilities that the first 1, 2, … tokens are all right.
    """

    def __init__(
        self,
        experience: HeadExperience,
        output: Sequence[int],
        p_reached: Sequence[float],
    ) -> None:
        super().__init__(experience)
        self._output = output
        luck = Random(repr(output))
        self._right = [sum(draw < p for p in p_reached) for draw in (luck.random() for _ in output)]
        self._confidences = [after / p for p, after in pairwise((1.0, *p_reached))]
        self._done = 0

    @classmethod
    def run(cls, heads: Sequence[Self], depth: int) -> list[tuple[list[int], list[float]]]:
        return [(head._tokens(depth), head._confidences[:depth]) for head in heads]

    def _tokens(self, depth: int) -> list[int]:
        end = self._done + min(depth, self._right[self._done])
        right = self._output[self._done : end]
        return [*right, *[_WRONG] * (depth - len(right))]

    def observe(self, step: VerifiedStep) -> None:
        super().observe(step)
        self._done += len(step.tokens)


def policies_with_head(p_reached: Sequence[float], cost: float) -> dict[str, ReplayPolicy]:
    """Policies with a trained head: the head alone, and the default decoder with the head added.

    Args:
        p_reached: the probabilities that the first 1, 2, … tokens are all right.
        cost: the time to draft one token, in plain steps of all sequences that draft together.
    """

    def with_head(alone: Callable[[CostCurve, TokenClasses], NewPlanner]) -> ReplayPolicy:
        def planners(curve: CostCurve, classes: TokenClasses) -> NewPlanner:
            experience = HeadExperience(cost, cost, len(p_reached))
            new_planner = alone(curve, classes)

            def new(output: Sequence[int]) -> Planner:
                planner = new_planner(output)
                planner.head = ReplayedHead(experience, output, p_reached)
                return planner

            return new

        return planners

    return {"head": with_head(_without_text), f"{AUTO}+head": with_head(planned())}


def _without_text(curve: CostCurve, classes: TokenClasses) -> NewPlanner:
    return lambda output: Planner(FixedCosts(curve), [DrafterSource(NoDraft())], branching=False)


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    p_reached, cost = sys.argv.pop(1), sys.argv.pop(1)
    POLICIES.update(policies_with_head([*map(float, p_reached.split(","))], float(cost)))
    replay_command()
