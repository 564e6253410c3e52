"""Replaying several recorded outputs at once: sequences that share joint steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import cast

from ..draft.drafter import Drafter, DraftTree, NoDraft
from ..plan.cost_curve import CostCurve, FixedCosts
from ..plan.planner import Planner
from ..plan.sharing import Plan, plan_drafts
from .replay import MAX_DEPTH, ReplayedCompletion, is_slow, verify
from .traces import Completion

_WORTH_IT = 1.02
"""How much faster both must be than the better of the two, to count as adding up."""


@dataclass(frozen=True)
class JointReplay:
    """What replaying outputs in joint steps gave.

    Attributes:
        tokens: how many the outputs have in all.
        sequences: per step, how many sequences shared it.
        rows: per step, how many rows the target verified for all of them.
        spans: per output, in the order in which they ended, its tokens and its steps.
    """

    tokens: int
    sequences: tuple[int, ...]
    rows: tuple[int, ...]
    spans: tuple[tuple[int, range], ...]

    def cost(self, curve: Callable[[int], float]) -> float:
        """The time of all steps under a cost curve, in plain steps of one sequence."""
        return sum(map(curve, self.rows))

    def times(self, curve: Callable[[int], float]) -> list[tuple[int, float]]:
        """Per output its tokens, and the time of its steps in plain joint steps.

        A sequence waits for the drafts of the others, so it may be slower where all together
        are faster.
        """
        times = [
            curve(rows) / curve(count)
            for rows, count in zip(self.rows, self.sequences, strict=True)
        ]
        return [(tokens, sum(times[steps.start : steps.stop])) for tokens, steps in self.spans]


def extended(curve: CostCurve) -> CostCurve:
    """A curve for many sequences: beyond its end, cost rises at least in proportion to rows.

    A flat end would make any number of rows free.
    """
    widest = curve.widest
    points = [(rows, curve(rows)) for rows in range(1, widest + 1)]
    return CostCurve([*points, (2 * widest, max(curve(2 * widest), 2 * curve(widest)))])


def joint_curve(curve: CostCurve, count: int) -> CostCurve:
    """T(rows)/T(1) of joint steps: one row is a plain step of all, each further one of a draft.

    A joint step is taken to cost what as many rows of one sequence do, as
    :meth:`mlxspec.plan.live_costs.LiveCosts.for_sequences` takes it before such steps have run.
    What it costs to attend to several contexts is not in the curves.

    Args:
        curve: T(rows)/T(1) of one sequence.
        count: how many sequences share a step.

    Returns:
        a curve for as many draft rows as ``curve`` has.
    """
    whole = extended(curve)
    plain = whole(count)
    return CostCurve([(1 + n, whole(count + n) / plain) for n in range(curve.widest)])


class _Output:
    """A recorded output on its way through the steps.

    Args:
        completion: what is replayed.
        drafter: its own; it begins here, and has to be ended afterwards.

    Attributes:
        steps: how many it has taken.
    """

    def __init__(self, completion: Completion, drafter: Drafter) -> None:
        self.drafter = drafter
        self.steps = 0
        self._output, self._done = completion.output, 0
        self._last = completion.prompt[-1]
        drafter.begin(completion.prompt)

    @property
    def tokens(self) -> int:
        """How many it has."""
        return len(self._output)

    @property
    def finished(self) -> bool:
        """Whether all of it has been emitted."""
        return self._done >= len(self._output)

    def plain_row(self) -> DraftTree:
        """The row of a step without a draft."""
        return DraftTree.chain(self._last)

    def take(self, tree: DraftTree, rows: int, sequences: int, ahead: bool) -> None:
        """Verify a tree in a step of so many rows and sequences.

        Args:
            ahead: whether the next step is dispatched during this one.
        """
        step = verify(tree, self._output[self._done : self._done + len(tree)], ahead)
        self._done += len(step.tokens)
        self._last = step.tokens[-1]
        self.steps += 1
        self.drafter.observe(replace(step, rows=rows, sequences=sequences))


def replay_jointly(
    completions: Sequence[Completion],
    make_drafter: Callable[[Completion], Drafter],
    curve: CostCurve,
    concurrency: int,
    on_progress: Callable[[], None] = lambda: None,
) -> JointReplay:
    """Let outputs that are known be drafted in joint steps.

    When one ends, the next of the list takes its place, so fewer run only at the end. As in
    :func:`mlxspec.engine.step.joint_step`, all go on pipelined together or none; a sequence that
    joins these takes their plain step with them. Prompts take no time.

    Args:
        completions: the recorded outputs.
        make_drafter: gives the drafter of each. Planners share the rows of each step, as in
            :class:`mlxspec.engine.batch.Batch`; what others propose is verified whole.
        curve: T(rows)/T(1) of one sequence, which the planners' own costs follow, too.
        concurrency: how many run at once, at least 1.
        on_progress: called when an output has ended.
    """
    waiting, most = iter(completions), min(concurrency, len(completions))
    batch = _Batch(curve)
    sequences: list[int] = []
    rows: list[int] = []
    spans: list[tuple[int, range]] = []
    try:
        while True:
            for completion in itertools.islice(waiting, most - len(batch.active)):
                batch.active.append(_Output(completion, make_drafter(completion)))
            if not batch.active:
                break
            sequences.append(len(batch.active))
            rows.append(batch.step())
            for one in batch.remove_finished():
                spans.append((one.tokens, range(len(rows) - one.steps, len(rows))))
                on_progress()
    finally:
        batch.close()
    tokens = sum(len(completion.output) for completion in completions)
    return JointReplay(tokens, tuple(sequences), tuple(rows), tuple(spans))


class _Batch:
    """The outputs that share the next step.

    Args:
        curve: T(rows)/T(1) of one sequence.

    Attributes:
        active: these outputs; append one that joins.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.active: list[_Output] = []
        self._curve = curve
        self._costs: dict[int, FixedCosts] = {}  # by the number of sequences
        self._ahead = False  # whether the next step was dispatched in the last one

    def step(self) -> int:
        """Run a joint step; returns its rows."""
        count = len(self.active)
        plans = self._plans()
        proposals = [
            cast(Planner, one.drafter).draft(plans[one])
            if one in plans
            else one.drafter.propose(MAX_DEPTH)
            for one in self.active
        ]
        # A plain step that was dispatched ahead runs first, whatever is proposed meanwhile.
        trees = [one.plain_row() for one in self.active] if self._ahead else proposals
        self._ahead = all(
            len(proposal) == 1 and one.drafter.pipelined
            for one, proposal in zip(self.active, proposals, strict=True)
        )
        rows = sum(map(len, trees))
        for one, tree in zip(self.active, trees, strict=True):
            one.take(tree, rows, count, self._ahead)
        return rows

    def remove_finished(self) -> list[_Output]:
        """Let the outputs go that have ended, and return them."""
        ended = [one for one in self.active if one.finished]
        self.active = [one for one in self.active if not one.finished]
        self._ahead = self._ahead and bool(self.active)
        for one in ended:
            one.drafter.end()
        return ended

    def close(self) -> None:
        """End the drafters of all that are left."""
        for one in self.active:
            one.drafter.end()

    def _plans(self) -> dict[_Output, Plan]:
        """Let the planners plan together; one alone plans by itself."""
        count = len(self.active)
        planners = {one: one.drafter for one in self.active if isinstance(one.drafter, Planner)}
        if count == 1 or not planners:
            return {}
        if count not in self._costs:
            self._costs[count] = FixedCosts(joint_curve(self._curve, count))
        depths = [MAX_DEPTH] * len(planners)
        costs = self._costs[count]
        plans = plan_drafts(list(planners.values()), depths, costs, sequences=count)
        return dict(zip(planners, plans, strict=True))


def replay_plain_batch(
    completions: Sequence[Completion],
    concurrency: int,
    on_progress: Callable[[], None] = lambda: None,
) -> JointReplay:
    """Plain batching: the same without drafts. Its steps are those on all chips."""
    no_costs = CostCurve([(1, 1)])
    return replay_jointly(completions, lambda one: NoDraft(), no_costs, concurrency, on_progress)


@dataclass(frozen=True)
class JointReport:
    """The figures of several sequences at once. Speeds are against one plain sequence.

    Attributes:
        speedup: tokens of all sequences / time of the joint steps with drafts.
        plain_batching: the same without drafts.
        one_at_a_time: the same with drafts, one sequence after the other.
        over_plain_batching: ``speedup / plain_batching``.
        share_slow: the share of outputs that lose more than 2 % and more than two steps against
            plain joint steps.
        tokens: how many the outputs have.
        completions: how many were replayed.
        tokens_per_step: tokens of all sequences / joint steps.
        rows_per_step: verified rows / joint steps.
        sequences_per_step: how many shared a step on average; fewer run at the end.
    """

    speedup: float
    plain_batching: float
    one_at_a_time: float
    over_plain_batching: float
    share_slow: float
    tokens: int
    completions: int
    tokens_per_step: float
    rows_per_step: float
    sequences_per_step: float

    @property
    def adds_up(self) -> bool:
        """Whether batching and drafting together are faster than either alone."""
        return self.speedup > _WORTH_IT * max(self.plain_batching, self.one_at_a_time)


def joint_report(
    joint: JointReplay,
    plain: JointReplay,
    alone: Sequence[ReplayedCompletion],
    curve: CostCurve,
) -> JointReport:
    """Sum up what was replayed.

    Args:
        joint: with drafts, in joint steps.
        plain: the same outputs without drafts, in joint steps.
        alone: the same outputs with drafts, one at a time.
        curve: T(rows)/T(1) of one sequence.
    """
    whole = extended(curve)
    speedup, batching = (one.tokens / one.cost(whole) for one in (joint, plain))
    steps = len(joint.rows)
    return JointReport(
        speedup=speedup,
        plain_batching=batching,
        one_at_a_time=joint.tokens / sum(one.cost(whole) for one in alone),
        over_plain_batching=speedup / batching,
        share_slow=fmean(is_slow(tokens, time) for tokens, time in joint.times(whole)),
        tokens=joint.tokens,
        completions=len(alone),
        tokens_per_step=joint.tokens / steps,
        rows_per_step=sum(joint.rows) / steps,
        sequences_per_step=sum(joint.sequences) / steps,
    )
