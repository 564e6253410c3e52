"""Replaying recorded outputs: the steps that drafters would have taken, and what they cost.

Outputs run one at a time, or several at once in joint steps. Every policy is replayed under every
chip's cost curve.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, cast

from ..drafting.costs import CostCurve, FixedCosts
from ..drafting.drafter import Drafter, DraftTree, NoDraft
from ..drafting.planner import Plan, Planner, plan_drafts
from ..errors import OptionError
from ..jsonl import load_json
from .policies import HINDSIGHT, POLICIES, NewDrafter, ReplayPolicy, planned, verify
from .prompts import Completion

SLOW = 0.98
"""A speed below this counts as slower than plain decoding, but for a few plain steps."""
_UNNOTICED = 2.0  # plain steps: what an output may lose, however short it is

_UNUSABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, OptionError)

MAX_DEPTH = 4096  # the drafter does not know where the output ends
_ANY_CURVE = CostCurve([(1, 1)])  # for policies that do not plan by it


@dataclass(frozen=True)
class Replayed:
    """The steps of replayed outputs.

    Attributes:
        tokens: how many the outputs have in all.
        rows: per step, how many rows the target verified for all sequences.
        sequences: per step, how many sequences shared it.
        heads: by step, what trained heads took before it, in plain joint steps.
    """

    tokens: int
    rows: tuple[int, ...]
    sequences: tuple[int, ...] = ()
    heads: Mapping[int, float] = field(default_factory=dict)

    def cost(self, curve: Callable[[int], float]) -> float:
        """The time of all steps under a cost curve, in plain steps of one sequence."""
        heads = sum(time * curve(self.sequences[step]) for step, time in self.heads.items())
        return sum(map(curve, self.rows)) + heads


def replay(prompt: Sequence[int], output: Sequence[int], drafter: Drafter) -> Replayed:
    """Let a drafter draft an output that is known.

    Args:
        prompt: the context of the output, at least one token id.
        output: what the target answered, its end token included.
        drafter: called as the decoding loop calls it; the target's choices are read from the
            output, and after rows that were not accepted they are unknown (-1).
    """
    one = Completion("", [*prompt], len(prompt), [*output])
    return replay_jointly([one], lambda output: drafter, _ANY_CURVE, 1)


def replay_jointly(
    completions: Sequence[Completion],
    new_drafter: NewDrafter,
    curve: CostCurve,
    concurrency: int,
    on_progress: Callable[[], None] = lambda: None,
) -> Replayed:
    """Replay recorded outputs in joint steps, ``concurrency`` at a time.

    When one ends, the next takes its place. As in :func:`mlxspec.engine.step.joint_step`, either
    all sequences are pipelined or none; one that joins pipelined sequences takes part in their
    next plain step. Prompts take no time.

    Args:
        completions: the recorded outputs.
        new_drafter: gives the drafter of each output. Planners share the rows of each step, as in
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
    heads: dict[int, float] = {}
    ahead = False  # whether the next step was dispatched in the last one
    try:
        while True:
            for completion in itertools.islice(waiting, most - len(active)):
                drafter = new_drafter(completion.output)
                drafter.begin(completion.prompt)
                last = completion.context[completion.begin - 1]
                active.append(_Output(completion.output, drafter, last))
            if not active:
                break
            step_rows, head, ahead = _step(active, ahead, costs(len(active)))
            if head:
                heads[len(rows)] = head
            rows.append(step_rows)
            sequences.append(len(active))
            ended = [one for one in active if one.done >= len(one.output)]
            active = [one for one in active if one not in ended]
            ahead = ahead and bool(active)
            for one in ended:
                one.drafter.end()
                on_progress()
    finally:
        for one in active:
            one.drafter.end()
    tokens = sum(len(completion.output) for completion in completions)
    return Replayed(tokens, tuple(rows), tuple(sequences), heads)


@dataclass(eq=False)
class _Output:
    """A recorded output on its way through the steps.

    Attributes:
        output: what is replayed.
        drafter: its own.
        last: the token that the next step's draft follows.
        done: how many tokens have been emitted.
    """

    output: Sequence[int]
    drafter: Drafter
    last: int
    done: int = 0


def _step(active: Sequence[_Output], ahead: bool, costs: FixedCosts) -> tuple[int, float, bool]:
    """Run a step of all outputs.

    Returns:
        its rows, what trained heads took, and whether the next step is dispatched in it.
    """
    planners = [one.drafter for one in active if isinstance(one.drafter, Planner)]
    shared: dict[Drafter, Plan] = {}
    if len(active) > 1:
        depths = [MAX_DEPTH] * len(planners)
        plans = plan_drafts(planners, depths, costs, sequences=len(active))
        shared = dict(zip(planners, plans, strict=True))
    proposals = [
        cast(Planner, one.drafter).draft(shared[one.drafter])
        if one.drafter in shared
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
    head = max((planner.head_time for planner in planners), default=0.0)  # the same for all
    for one, tree in zip(active, trees, strict=True):
        step = verify(tree, one.output[one.done : one.done + len(tree)], ahead)
        one.done += len(step.tokens)
        one.last = step.tokens[-1]
        one.drafter.observe(replace(step, rows=rows, sequences=len(active)))
    return rows, head, ahead


def extended(curve: CostCurve) -> CostCurve:
    """A curve for many sequences: beyond its end, cost rises at least in proportion to rows.

    A flat end would make any number of rows free.
    """
    widest = curve.widest
    points = [(rows, curve(rows)) for rows in range(1, widest + 1)]
    return CostCurve([*points, (2 * widest, max(curve(2 * widest), 2 * curve(widest)))])


def joint_curve(curve: CostCurve, count: int) -> CostCurve:
    """T(rows)/T(1) of joint steps; one row is a plain step of all, and drafts add the others.

    A joint step is assumed to cost as much as the same number of rows of one sequence, as
    :meth:`mlxspec.drafting.costs.LiveCosts.for_sequences` assumes before such steps have run.
    The curves leave out the cost of attending to several contexts.

    Args:
        curve: T(rows)/T(1) of one sequence.
        count: how many sequences share a step.

    Returns:
        a curve for as many draft rows as ``curve`` has.
    """
    whole = extended(curve)
    plain = whole(count)
    return CostCurve([(1 + n, whole(count + n) / plain) for n in range(curve.widest)])


# --- figures ---

Report = dict[str, Any]
"""Figures by name, as JSON has them."""

Comparison = Mapping[str, Mapping[str, Report]]
"""Reports by chip and policy."""


def replay_report(
    replayed: Iterable[tuple[str, Replayed]], curve: Callable[[int], float]
) -> Report:
    """Sum up what was replayed.

    Args:
        replayed: set and completion, at least one.
        curve: T(rows) / T(1).

    Returns:
        ``speedup``: the geometric mean of the sets'; ``worst``: the lowest of them;
        ``share_slow``: the mean of theirs; ``tokens_per_step`` and ``rows_per_step``: over all
        steps; ``sets``: by name, in the order of their appearance, see :func:`_figures`.
    """
    replayed = list(replayed)
    by_set: dict[str, list[Replayed]] = {}
    for name, completion in replayed:
        by_set.setdefault(name, []).append(completion)
    sets = {name: _figures(completions, curve) for name, completions in by_set.items()}
    everything = _figures([completion for _, completion in replayed], curve)
    return {
        "speedup": geometric_mean([one["speedup"] for one in sets.values()]),
        "worst": min(one["speedup"] for one in sets.values()),
        "share_slow": fmean(one["share_slow"] for one in sets.values()),
        "tokens_per_step": everything["tokens_per_step"],
        "rows_per_step": everything["rows_per_step"],
        "sets": sets,
    }


def _figures(completions: list[Replayed], curve: Callable[[int], float]) -> Report:
    """The figures of one set; ``speedup`` is the time of plain decoding / time of the steps."""
    costs = [completion.cost(curve) for completion in completions]
    tokens = sum(completion.tokens for completion in completions)
    steps = sum(len(completion.rows) for completion in completions)
    slow = sum(is_slow(c.tokens, cost) for c, cost in zip(completions, costs, strict=True))
    return {
        "completions": len(completions),
        "tokens": tokens,
        "speedup": tokens / sum(costs),
        "share_slow": slow / len(completions),
        "tokens_per_step": tokens / steps,
        "rows_per_step": sum(sum(completion.rows) for completion in completions) / steps,
    }


def is_slow(plain: float, cost: float) -> bool:
    """Whether an output lost noticeably: more than 2 % and more than two plain steps.

    Args:
        plain: the time of plain decoding, in plain steps.
        cost: the time that it took.
    """
    return plain / cost < SLOW and cost - plain > _UNNOTICED


def joint_report(
    joint: Replayed, plain: Replayed, alone: Sequence[Replayed], curve: CostCurve
) -> Report:
    """Sum up outputs that ran at once. Speeds are against one plain sequence.

    Args:
        joint: with drafts, in joint steps.
        plain: the same outputs without drafts, in joint steps.
        alone: the same outputs with drafts, one at a time.
        curve: T(rows)/T(1) of one sequence.

    Returns:
        ``speedup``: tokens of all sequences / time of the joint steps with drafts;
        ``plain_batching``: the same without drafts; ``one_at_a_time``: with drafts, one sequence
        after the other; ``over_plain_batching``: ``speedup / plain_batching``; ``tokens`` and
        ``completions``: how many; ``tokens_per_step``, ``rows_per_step`` and
        ``sequences_per_step``: of all sequences, on average over the joint steps.
    """
    whole = extended(curve)
    speedup, batching = (one.tokens / one.cost(whole) for one in (joint, plain))
    steps = len(joint.rows)
    return {
        "speedup": speedup,
        "plain_batching": batching,
        "one_at_a_time": joint.tokens / sum(one.cost(whole) for one in alone),
        "over_plain_batching": speedup / batching,
        "tokens": joint.tokens,
        "completions": len(alone),
        "tokens_per_step": joint.tokens / steps,
        "rows_per_step": sum(joint.rows) / steps,
        "sequences_per_step": sum(joint.sequences) / steps,
    }


# --- what is compared ---


def chosen_policies(names: str) -> dict[str, ReplayPolicy]:
    """The policies that a comma-separated list names, in its order; "all" names all.

    Raises:
        OptionError: one of them is unknown.
    """
    wanted = [*POLICIES] if names == "all" else [name.strip() for name in names.split(",")]
    try:
        return {name: POLICIES[name] for name in wanted}
    except KeyError as error:
        raise OptionError(
            f"no decoder is replayed as {error.args[0]!r}: choose among {', '.join(POLICIES)}"
        ) from None


def read_curve(path: Path) -> CostCurve:
    """Read a curve that ``mlxspec calibrate --json`` has written.

    Raises:
        OptionError: the file cannot be read, or holds no curve.
    """
    try:
        times = load_json(path.read_bytes())["times"]
        return CostCurve([(int(time["rows"]), float(time["cost"])) for time in times])
    except _UNUSABLE as error:
        raise OptionError(
            f"{path}: no cost curve; write one with mlxspec calibrate MODEL --json"
        ) from error


def compare(
    completions: Sequence[Completion],
    classes: bytes,
    policies: Mapping[str, ReplayPolicy],
    curves: Mapping[str, CostCurve],
    concurrency: int = 1,
    on_progress: Callable[[float], None] = lambda share: None,
) -> dict[str, dict[str, Report]]:
    """Replay outputs with several policies on several chips.

    Args:
        completions: the recorded outputs, at least one.
        classes: of their tokens, see :func:`mlxspec.drafting.acceptance.token_classes`.
        policies: by name.
        curves: T(rows)/T(1) by the chip's name.
        concurrency: how many outputs run at once. From 2 on they are set against batching and
            drafting alone.
        on_progress: called with the share that is done.

    Returns:
        by chip and policy, in the order given, what :func:`replay_report` returns; from 2 outputs
        at once on, what :func:`joint_report` does.
    """
    several = concurrency > 1
    runs = sum(len(curves) if policy.follows_costs else 1 for policy in policies.values())
    total = (1 + 2 * runs if several else runs) * len(completions)
    done = itertools.count(1)

    def count() -> None:
        on_progress(next(done) / total)

    def together(new: NewDrafter, curve: CostCurve) -> Replayed:
        return replay_jointly(completions, new, curve, concurrency, count)

    plain = together(lambda output: NoDraft(), _ANY_CURVE) if several else None
    reports: dict[str, dict[str, Report]] = {chip: {} for chip in curves}
    for name, policy in policies.items():
        alone: list[Replayed] = []
        for chip, curve in curves.items():
            if policy.follows_costs or not alone:  # without costs all chips have the same steps
                alone, new = [], policy.drafters(curve, classes)
                for one in completions:
                    alone.append(replay(one.prompt, one.output, new(one.output)))
                    count()
                if several:
                    joint = together(policy.drafters(curve, classes), curve)
            if plain:
                reports[chip][name] = joint_report(joint, plain, alone, curve)
            else:
                sets = (one.category for one in completions)
                reports[chip][name] = replay_report(zip(sets, alone, strict=True), curve)
    return reports


def verdict(comparison: Comparison) -> list[str]:
    """Which policy wins where, a line for each winner; plain decoding where nothing gains."""
    won: dict[str, list[str]] = {}
    for chip, reports in comparison.items():
        # Of several outputs at once, plain decoding is plain batching.
        gains = {
            name: report["speedup"] / report.get("plain_batching", 1)
            for name, report in reports.items()
            if name != HINDSIGHT
        }
        best = max(gains, key=lambda name: gains[name], default=None)
        if best and gains[best] > 1:
            won.setdefault(best, []).append(f"{chip} ({gains[best]:.2f}×)")
        else:
            won.setdefault("plain decoding", []).append(chip)
    return [f"{winner} wins on {', '.join(chips)}." for winner, chips in won.items()]


# --- memories of several sizes ---

_LETTERS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_SIZE = re.compile(r"([0-9]{1,15})([km]?)", re.ASCII | re.IGNORECASE)


def memories(sizes: str) -> dict[str, ReplayPolicy]:
    """The default decoder with memories of the sizes that a comma-separated list names.

    Args:
        sizes: numbers of tokens, with k for 1,024 and M for 1,048,576, or "all" for a memory
            without bound.

    Returns:
        by name, the smallest memory first. Before them, for comparison, stands the decoder without
        one, whether 0 is in the list or not.

    Raises:
        OptionError: a size has another form.
    """
    names: dict[float, str] = {}
    for text in map(str.strip, sizes.split(",")):
        match = _SIZE.fullmatch(text)
        if match is None and text != "all":
            raise OptionError(
                f"--memory: {text!r} is not a size: give tokens as 4096, 16k or 1M, 0 for none, or "
                "all"
            )
        size = int(match[1]) * _LETTERS[match[2].lower()] if match else math.inf
        names[size] = f"memory {text}"
    names[0] = "no memory"
    return {names[size]: planned(None if size == math.inf else int(size)) for size in sorted(names)}
