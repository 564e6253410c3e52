"""Steps of several sequences of one model: shared rows, one forward, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..drafting.costs import LiveCosts
from ..drafting.drafter import VerifiedStep
from ..drafting.planner import NO_PLAN, Plan, Planner, log_fault, plan_drafts
from .joint import Joint, JointMode
from .step import DecodedStep, Sequence, each, joint_step, step

_Made = TypeVar("_Made")

_SHORT = 128  # tokens; more of them make a forward of their own as good as one for several prompts


class Batch:
    """Runs the steps of several sequences of one model, which may join and leave between steps.

    A fault in planning drafts makes a plain step. Only the first of a batch is logged, since the
    next steps may well have it, too.

    Args:
        model: an mlx-lm model.
        mode: the model's, from :func:`mlxspec.engine.capability.joint_mode`. With ``ALONE`` the
            sequences take turns: each has a forward of its own in every step.
        costs: what rows cost, to share them where drafts are planned; None where none are.
        patient: whether a sequence may wait for others' drafts as long as all gain together.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: JointMode,
        costs: LiveCosts | None = None,
        patient: bool = False,
    ) -> None:
        self._patient = patient
        self._joint = None if mode is JointMode.ALONE else Joint(model, mode)
        self._costs = costs
        self._costs_of: dict[int, LiveCosts] = {}
        self._has_failed = False

    def _planned(self, plan: Callable[[], _Made]) -> _Made | None:
        """What a part of planning makes; None where it fails."""
        try:
            return plan()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                log_fault(error)
            return None

    def begins_together(self, sequence: Sequence) -> bool:
        """Whether a sequence that has not begun may do so in :meth:`begin`."""
        if self._joint is None or self._joint.mode is not JointMode.SPLIT:
            return False
        short = 0 < len(sequence.to_prefill) <= _SHORT
        return short and sequence.target.prefills_jointly and not sequence.prefills_as_mlx_lm

    def begin(self, sequences: Several[Sequence]) -> dict[Sequence, Exception]:
        """Run prompts, all but the last tokens, in one forward; returns what drafters have raised.

        Args:
            sequences: that :meth:`begins_together`.
        """
        assert self._joint
        if begun := each(Sequence.open_drafter, sequences):
            with mx.stream(generation_stream):
                self._joint.prefill([(own.target, own.to_prefill) for own in begun])
        return {own: own.fault for own in sequences if own.fault is not None}

    def join(self, sequence: Sequence) -> None:
        """A sequence that has begun takes part from now on."""
        if self._joint:
            self._joint.join(sequence.target)

    def leave(self, sequence: Sequence, keep: bool = True) -> None:
        """A sequence takes no more part; it is to be closed after this.

        Args:
            keep: whether somebody needs what its target's caches hold.
        """
        if self._joint:
            self._joint.leave(sequence.target, keep)
        for costs in self._costs_of.values():
            self._planned(costs.end)

    def step(self, sequences: Several[Sequence]) -> list[DecodedStep | Exception]:
        """Run one step of each sequence, as :func:`mlxspec.engine.step.joint_step`."""
        together = [s for s in sequences if self._joint and self._joint.takes(s.target)]
        if len(together) < 2:
            together = []
        outcomes = dict(zip(together, self._step_together(together), strict=True))
        return [outcomes[s] if s in outcomes else _step_alone(s) for s in sequences]

    def _step_together(self, sequences: Several[Sequence]) -> list[DecodedStep | Exception]:
        if not sequences:
            return []
        started = time.perf_counter()
        costs, plans = None, dict[Sequence, Plan]()
        if self._costs:
            planned = self._planned(lambda: self._plan(sequences))
            costs, plans = planned or (None, dict.fromkeys(_planners(sequences), NO_PLAN))
        outcomes = joint_step(sequences, self._joint, plans)
        steps = [outcome.verified for outcome in outcomes if isinstance(outcome, DecodedStep)]
        together = [step for step in steps if step.sequences == len(sequences)]
        if costs and len(together) == len(sequences):
            rows = 1 + together[0].rows - len(sequences)
            seconds, pipelined = time.perf_counter() - started, together[0].pipelined
            self._planned(partial(costs.record, rows, seconds, pipelined))
        return outcomes

    def cost(self, sequence: Sequence, step: VerifiedStep) -> float | None:
        """What a step of a sequence takes by the measured costs, in steps without drafts.

        That is 1 for a step without a draft. It is a ratio: other programs, a long context and
        prompts that run in between slow both kinds of step.

        Returns:
            None where steps do not tell what drafts cost, such as those of a draft model.
        """
        planner = sequence.drafter
        if not isinstance(planner, Planner) or not isinstance(planner.costs, LiveCosts):
            return None
        own, count = planner.costs, step.sequences
        rows = 1 + step.rows - count
        return self._planned(lambda: (own if count == 1 else self._costs_for(count)).curve(rows))

    def _costs_for(self, count: int) -> LiveCosts:
        """What joint steps of so many sequences cost."""
        assert self._costs
        if count not in self._costs_of:
            self._costs_of[count] = self._costs.for_sequences(count)
        return self._costs_of[count]

    def _plan(self, sequences: Several[Sequence]) -> tuple[LiveCosts, dict[Sequence, Plan]]:
        """Plan the drafts of all sequences together; what such steps cost, and the plans."""
        count = len(sequences)
        costs = self._costs_for(count)
        costs.move_to(max(sequence.length for sequence in sequences))
        planned = _planners(sequences)
        if not planned:
            return costs, {}
        # Others are asked in the step itself: what they propose now is about what they did.
        others = [sequence for sequence in sequences if sequence not in planned]
        pending = sum(len(sequence.target.pending) for sequence in sequences)
        plans = plan_drafts(
            list(planned.values()),
            [sequence.max_depth for sequence in planned],
            costs,
            sequences=count,
            rows_taken=pending + sum(sequence.proposed for sequence in others),
            patient=self._patient,
        )
        return costs, dict(zip(planned, plans, strict=True))


def _planners(sequences: Several[Sequence]) -> dict[Sequence, Planner]:
    """The planners of those sequences that have one."""
    return {
        sequence: sequence.drafter
        for sequence in sequences
        if isinstance(sequence.drafter, Planner) and not sequence.drafter.failed
    }


def _step_alone(sequence: Sequence) -> DecodedStep | Exception:
    """A step of one sequence, with a forward of its own."""
    try:
        return step(sequence)
    except Exception as error:  # of the forward, too: it is nobody else's
        return error
