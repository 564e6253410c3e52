"""Measuring T(rows) of a loaded model on this machine, by the same steps that decode."""

from __future__ import annotations

import random
import time
from collections import abc

import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from ..drafting.drafter import Drafter, DraftTree, VerifiedStep
from ..drafting.measurement import MeasurementPlan, RowsTime, ShareDone, measure
from ..errors import OptionError
from .capability import chain_capability, joint_mode
from .joint import JointMode
from .model_sizes import context_length
from .params import SamplingParams
from .sampling import Chooser
from .step import Batch, Sequence, step
from .target import Progress, Target, target_for, vocabulary_size

_UNENDING = 1 << 30  # tokens


def calibrate(
    model: nn.Module,
    plan: MeasurementPlan,
    *,
    context: int | None = None,
    sequences: int = 1,
    on_prefill: Progress | None = None,
    on_progress: ShareDone | None = None,
) -> list[RowsTime]:
    """Measure how long plain and drafted steps of a model take.

    Args:
        model: an mlx-lm model.
        plan: which steps, and for how long; see :data:`mlxspec.drafting.measurement.QUICK`.
        context: tokens of context, in place of the plan's own number. Where the model's context
            is too short for all steps after it, there are fewer rounds, and the plan's own number
            becomes smaller.
        sequences: how many share each step, every one with a context of its own. One row is a
            plain step of all, and each further row is one of a draft.
        on_prefill: called with context tokens done and context tokens in all.
        on_progress: called with the share of the steps that is done, 0 to 1.

    Returns:
        one entry per number of rows, fewest first. A model that cannot verify drafts has one.

    Raises:
        OptionError: ``context`` is below 1, or too long for the model; ``sequences`` is below 1,
            or more than share a forward of the model.
    """
    mode = joint_mode(model) if sequences > 1 else JointMode.ALONE
    if sequences < 1 or (sequences > 1 and mode is JointMode.ALONE):
        raise OptionError(
            f"sequences is {sequences}: "
            + ("choose 1 or more" if sequences < 1 else "a forward of this model takes 1")
        )
    started = time.perf_counter()
    window = context_length(model) or _UNENDING
    longest = window - plan.within(0).room
    if context is None:
        context = max(1, min(plan.context, window - plan.within(window - 1).room))
    elif not 1 <= context <= longest:
        raise OptionError(
            f"a context of {context} tokens: choose 1 to {longest} for this model"
            if longest > 0
            else "the model's context is too short for a measurement"
        )
    plan = plan.within(window - context)
    with wired_limit(model, [generation_stream]):
        steps = ModelSteps(model, context, on_prefill, sequences, mode)
        # The context grows by one token per step, and the widest step must fit at its end.
        room = min(steps.target.max_rows, window - context - plan.tokens)
        run = steps.plain, steps.drafted
        return measure(*run, plan, max(1, room), started, time.perf_counter, on_progress)


class ModelSteps:
    """Runs steps of a model to time them.

    The tokens are random: in a mixture of experts, repeated tokens would use the same experts
    and make wide steps look cheap.

    Args:
        model: an mlx-lm model.
        context: tokens before the first step.
        on_prefill: called with tokens done and tokens in all.
        sequences: how many share each step, every one with a context of its own.
        mode: how they share it.

    Attributes:
        target: of the first sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        context: int,
        on_prefill: Progress | None = None,
        sequences: int = 1,
        mode: JointMode = JointMode.ALONE,
    ) -> None:
        self._batch = Batch(model, mode)
        self._drafters: list[_RandomChains] = []
        self._sequences: list[Sequence] = []
        for _ in range(sequences):
            # It verifies chains, if the model does.
            target = target_for(model, chain_capability(model), vocabulary_size(model))
            drafter = _RandomChains(target.vocab_size)
            sequence = Sequence(
                target,
                drafter.tokens(context),
                drafter,
                Chooser(SamplingParams()),
                max_tokens=_UNENDING,
                ends=lambda token: False,
            )
            sequence.begin(on_prefill)
            step(sequence)
            self._batch.join(sequence)
            self._drafters.append(drafter)
            self._sequences.append(sequence)
        self.target: Target = self._sequences[0].target

    def plain(self, tokens: int) -> list[float]:
        """Seconds of each of ``tokens`` pipelined plain steps."""
        times: list[float] = []
        while len(times) < tokens:
            seconds, verified = self._step([1] * len(self._sequences), pipelined=True)
            if verified.pipelined:
                times.append(seconds)
        return times

    def drafted(self, rows: int) -> float:
        """Seconds of one whole drafted step: proposal, forward, reading, acceptance, commit.

        Its ``rows - 1`` rows of drafts are shared among the sequences as equally as can be.
        """
        count = len(self._sequences)
        wanted = [1 + (rows - 1 + index) // count for index in range(count)]
        while True:  # a plain step that was dispatched before comes first
            seconds, verified = self._step(wanted, pipelined=False)
            if verified.rows == sum(wanted):
                return seconds

    def _step(self, rows: abc.Sequence[int], pipelined: bool) -> tuple[float, VerifiedStep]:
        """One step with so many rows of each sequence: its seconds, and what the first verified."""
        for drafter, own in zip(self._drafters, rows, strict=True):
            drafter.pipelined, drafter.rows = pipelined, own
        started = time.perf_counter()
        outcomes = self._batch.step(self._sequences)
        seconds = time.perf_counter() - started
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return seconds, outcomes[0].verified  # type: ignore[union-attr]


class _RandomChains(Drafter):
    """Drafts chains of random tokens that make a step of ``rows`` rows.

    With REPLAY rejected drafts leave pending rows; where those alone are more, a step without a
    draft runs them first.
    """

    branching = False

    def __init__(self, vocab_size: int) -> None:
        self.pipelined = False
        self.rows = 1
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._last = self._pending = 0

    def tokens(self, count: int) -> list[int]:
        """``count`` random tokens."""
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def begin(self, prompt: abc.Sequence[int]) -> None:
        self._last = prompt[-1]

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._last, self.tokens(self.rows - self._pending - 1))

    def observe(self, step: VerifiedStep) -> None:
        self._last, self._pending = step.tokens[-1], step.pending
