"""Replaying recorded outputs: the steps that drafters would have taken, and what they cost.

Outputs run one at a time, or several at once in joint steps; one is the case of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, geometric_mean
from typing import cast

from ..drafting.costs import CostCurve, FixedCosts
from ..drafting.drafter import Drafter, DraftTree, NoDraft, VerifiedStep, accept
from ..drafting.planner import Plan, Planner, plan_drafts
from .traces import Completion

SLOW = 0.98
"""A speed below this counts as slower than plain decoding, but for a few plain steps."""
_UNNOTICED = 2.0  # plain steps: what an output may lose, however short it is
_WORTH_IT = 1.02
"""How much faster batching and drafting must be than the better of the two, to add up."""

MAX_DEPTH = 4096  # the drafter does not know where the output ends
_UNKNOWN = -1  # the choice after a row that was not accepted
_ANY_CURVE = CostCurve([(1, 1)])  # where nobody plans by it


@dataclass(frozen=True)
class Replayed:
    """What replaying outputs gave.

    Attributes:
        tokens: how many the outputs have in all.
        rows: per step, how many rows the target verified for all sequences.
        sequences: per step, how many sequences shared it.
        spans: per output, in the order in which they ended, its tokens and its steps.
    """

    tokens: int
    rows: tuple[int, ...]
    sequences: tuple[int, ...] = ()
    spans: tuple[tuple[int, range], ...] = ()

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


def replay(prompt: Sequence[int], output: Sequence[int], drafter: Drafter) -> Replayed:
    """Let a drafter draft an output that is known.

    Args:
        prompt: the context of the output, at least one token id.
        output: what the target answered, its end token included.
        drafter: called as the decoding loop calls it; the target's choices are read from the
            output, and after rows that were not accepted they are unknown (-1).
    """
    one = Completion("", [*prompt], len(prompt), [*output])
    return replay_jointly([one], lambda one: drafter, _ANY_CURVE, 1)


def replay_jointly(
    completions: Sequence[Completion],
    make_drafter: Callable[[Completion], Drafter],
    curve: CostCurve,
    concurrency: int,
    on_progress: Callable[[], None] = lambda: None,
) -> Replayed:
    """Let outputs that are known be drafted in joint steps.

    When one ends, the next of the list takes its place, so fewer run only at the end. As in
    :func:`mlxspec.engine.step.joint_step`, all go on pipelined together or none; a sequence that
    joins these takes their plain step with them. Prompts take no time.

    Args:
        completions: the recorded outputs.
        make_drafter: gives the drafter of each. Planners share the rows of each step, as in
            :class:`mlxspec.engine.step.Batch`; what others propose is verified whole.
        curve: T(rows)/T(1) of one sequence, by which planners share rows.
        concurrency: how many run at once, at least 1.
        on_progress: called when an output has ended.
    """
    waiting, most = iter(completions), min(concurrency, len(completions))
    costs = cache(lambda count: FixedCosts(joint_curve(curve, count)))
    active: list[_Output] = []
    sequences: list[int] = []
    rows: list[int] = []
    spans: list[tuple[int, range]] = []
    ahead = False  # whether the next step was dispatched in the last one
    try:
        while True:
            for completion in itertools.islice(waiting, most - len(active)):
                active.append(_Output(completion, make_drafter(completion)))
            if not active:
                break
            plans = _plans(active, costs(len(active))) if len(active) > 1 else {}
            step_rows, ahead = _step(active, ahead, plans)
            rows.append(step_rows)
            sequences.append(len(active))
            ended = [one for one in active if one.finished]
            active = [one for one in active if not one.finished]
            ahead = ahead and bool(active)
            for one in ended:
                one.drafter.end()
                spans.append((one.tokens, range(len(rows) - one.steps, len(rows))))
                on_progress()
    finally:
        for one in active:
            one.drafter.end()
    tokens = sum(len(completion.output) for completion in completions)
    return Replayed(tokens, tuple(rows), tuple(sequences), tuple(spans))


def replay_plain_batch(
    completions: Sequence[Completion],
    concurrency: int,
    on_progress: Callable[[], None] = lambda: None,
) -> Replayed:
    """Plain batching: the same without drafts. Its steps are those on all chips."""
    return replay_jointly(completions, lambda one: NoDraft(), _ANY_CURVE, concurrency, on_progress)


class _Output:
    """A recorded output on its way through the steps.

    Args:
        completion: what is replayed.
        drafter: its own; it begins here, and has to be ended afterwards.

    Attributes:
        last: the token that the next step's draft follows.
        steps: how many it has taken.
    """

    def __init__(self, completion: Completion, drafter: Drafter) -> None:
        self.drafter = drafter
        self.last = completion.context[completion.begin - 1]
        self.steps = 0
        self._output, self._done = completion.output, 0
        drafter.begin(completion.prompt)

    @property
    def tokens(self) -> int:
        """How many it has."""
        return len(self._output)

    @property
    def finished(self) -> bool:
        """Whether all of it has been emitted."""
        return self._done >= len(self._output)

    def take(self, tree: DraftTree, rows: int, sequences: int, ahead: bool) -> None:
        """Verify a tree in a step of so many rows and sequences.

        Args:
            ahead: whether the next step is dispatched during this one.
        """
        step = verify(tree, self._output[self._done : self._done + len(tree)], ahead)
        self._done += len(step.tokens)
        self.last = step.tokens[-1]
        self.steps += 1
        self.drafter.observe(replace(step, rows=rows, sequences=sequences))


def _plans(active: Sequence[_Output], costs: FixedCosts) -> dict[_Output, Plan]:
    """Plan the drafts of those outputs together that have a planner."""
    planners = {one: one.drafter for one in active if isinstance(one.drafter, Planner)}
    depths = [MAX_DEPTH] * len(planners)
    plans = plan_drafts(list(planners.values()), depths, costs, sequences=len(active))
    return dict(zip(planners, plans, strict=True))


def _step(
    active: Sequence[_Output], ahead: bool, plans: Mapping[_Output, Plan]
) -> tuple[int, bool]:
    """Run a step of all outputs; returns its rows, and whether the next one is dispatched in it."""
    proposals = [
        cast(Planner, one.drafter).draft(plans[one])
        if one in plans
        else one.drafter.propose(MAX_DEPTH)
        for one in active
    ]
    # A plain step that was dispatched ahead runs first, whatever is proposed meanwhile.
    trees = [DraftTree.chain(one.last) for one in active] if ahead else proposals
    ahead = all(
        len(proposal) == 1 and one.drafter.pipelined
        for one, proposal in zip(active, proposals, strict=True)
    )
    rows = sum(map(len, trees))
    for one, tree in zip(active, trees, strict=True):
        one.take(tree, rows, len(active), ahead)
    return rows, ahead


def verify(tree: DraftTree, following: Sequence[int], ahead: bool = False) -> VerifiedStep:
    """Verify a tree against the tokens that follow its root; the last one may end the output."""
    right = [following[d] if d < len(following) else _UNKNOWN for d in tree.depths]
    accepted, tokens = accept(tree, right)
    path = {0, *accepted}
    choices = tuple(token if node in path else _UNKNOWN for node, token in enumerate(right))
    return VerifiedStep(tree, choices, choices, accepted, tokens[: len(following)], ahead=ahead)


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
    :meth:`mlxspec.drafting.costs.LiveCosts.for_sequences` takes it before such steps have run.
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


@dataclass(frozen=True)
class SetReport:
    """The figures of one set of completions.

    Attributes:
        completions: how many were replayed.
        tokens: how many tokens they have.
        speedup: time of plain decoding / time of the steps.
        share_slow: the share of completions that lose more than 2 % and more than two plain steps.
        tokens_per_step: tokens / steps.
        rows_per_step: verified rows / steps.
    """

    completions: int
    tokens: int
    speedup: float
    share_slow: float
    tokens_per_step: float
    rows_per_step: float


@dataclass(frozen=True)
class ReplayReport:
    """The figures over all sets.

    Attributes:
        speedup: the geometric mean of the sets' speed-ups.
        worst: the lowest of them.
        share_slow: the mean of the sets' shares.
        tokens_per_step: over all steps.
        rows_per_step: over all steps.
        sets: by name, in the order of their appearance.
    """

    speedup: float
    worst: float
    share_slow: float
    tokens_per_step: float
    rows_per_step: float
    sets: dict[str, SetReport]


def replay_report(
    replayed: Iterable[tuple[str, Replayed]], curve: Callable[[int], float]
) -> ReplayReport:
    """Sum up what was replayed.

    Args:
        replayed: set and completion, at least one.
        curve: T(rows) / T(1).
    """
    replayed = list(replayed)
    by_set: dict[str, list[Replayed]] = {}
    for name, completion in replayed:
        by_set.setdefault(name, []).append(completion)
    sets = {name: _set_report(completions, curve) for name, completions in by_set.items()}
    everything = _set_report([completion for _, completion in replayed], curve)
    return ReplayReport(
        speedup=geometric_mean([one.speedup for one in sets.values()]),
        worst=min(one.speedup for one in sets.values()),
        share_slow=fmean(one.share_slow for one in sets.values()),
        tokens_per_step=everything.tokens_per_step,
        rows_per_step=everything.rows_per_step,
        sets=sets,
    )


def is_slow(plain: float, cost: float) -> bool:
    """Whether an output lost noticeably: more than 2 % and more than two plain steps.

    Args:
        plain: the time of plain decoding, in plain steps.
        cost: the time that it took.
    """
    return plain / cost < SLOW and cost - plain > _UNNOTICED


def _set_report(completions: list[Replayed], curve: Callable[[int], float]) -> SetReport:
    costs = [completion.cost(curve) for completion in completions]
    tokens = sum(completion.tokens for completion in completions)
    steps = sum(len(completion.rows) for completion in completions)
    slow = sum(is_slow(c.tokens, cost) for c, cost in zip(completions, costs, strict=True))
    return SetReport(
        completions=len(completions),
        tokens=tokens,
        speedup=tokens / sum(costs),
        share_slow=slow / len(completions),
        tokens_per_step=tokens / steps,
        rows_per_step=sum(sum(completion.rows) for completion in completions) / steps,
    )


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
    joint: Replayed,
    plain: Replayed,
    alone: Replayed,
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
        one_at_a_time=alone.tokens / alone.cost(whole),
        over_plain_batching=speedup / batching,
        share_slow=fmean(is_slow(tokens, time) for tokens, time in joint.times(whole)),
        tokens=joint.tokens,
        completions=len(joint.spans),
        tokens_per_step=joint.tokens / steps,
        rows_per_step=sum(joint.rows) / steps,
        sequences_per_step=sum(joint.sequences) / steps,
    )
