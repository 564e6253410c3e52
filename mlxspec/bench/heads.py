"""Estimates what a trained head would add, by replaying drafts with a given acceptance curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Self

from ..drafting.accept import VerifiedStep
from ..drafting.costs import CostCurve, FixedCosts
from ..drafting.drafter import NoDraft
from ..drafting.heads import HeadExperience, HeadSource
from ..drafting.p_accept import TokenClasses
from ..drafting.planner import Planner
from ..drafting.sources import DrafterSource
from ..errors import OptionError
from .policies import AUTO, NewPlanner, ReplayPolicy, planned

_EXAMPLE = ".76,.60,.50,.41@0.08"
_WRONG = -2  # differs from all tokens, and from -1, which stands for an unknown choice


def parse_head_curve(text: str) -> tuple[list[float], float]:
    """Parse the value of ``--head-curve``, such as ``.76,.60,.50,.41@0.08``.

    Returns:
        the probabilities that the first 1, 2, … drafted tokens are all right, and the time to draft
        one token. The unit of time is a plain step of all sequences that draft together.

    Raises:
        OptionError: the text has another form, or its numbers are out of range.
    """
    first, _, last = text.partition("@")
    with suppress(ValueError):
        p_reached, cost = [float(number) for number in first.split(",")], float(last)
        falls = all(0 < p <= before for before, p in pairwise((1.0, *p_reached)))
        if falls and 0 <= cost < math.inf:
            return p_reached, cost
    raise OptionError(
        f"--head-curve {text!r}: write it like {_EXAMPLE}: the probabilities that the first 1, 2, "
        "… tokens are all right, none greater than the one before, then '@' and the time to draft "
        "one token, in plain steps"
    )


class ReplayedHead(HeadSource):
    """Drafts a recorded output's next tokens, right as often as a curve specifies.

    The number of right tokens at a position is random, but seeded by the output alone. So it is
    the same for all policies and chips. The head's confidence in a token depends only on its depth.

    Args:
        experience: what heads learn from the outputs, which all share it.
        p_reached: the probabilities that :func:`parse_head_curve` returns.
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
        p_reached, cost: as :func:`parse_head_curve` returns them.
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
