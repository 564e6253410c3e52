"""Replays recorded outputs: counts the steps that drafters would have taken, and their cost.

Outputs run one at a time, or several at once in joint steps. Every policy is replayed under every
chip's cost curve.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from ..drafting.accept import VerifiedStep, accept
from ..drafting.cost_curve import CostCurve
from ..drafting.costs import FixedCosts
from ..drafting.drafter import Drafter, NoDraft
from ..drafting.p_accept import TokenClasses
from ..drafting.planner import Planner, plan_drafts
from ..drafting.tree import DraftTree
from ..errors import OptionError
from ..jsonl import load_json
from .policies import NewDrafter, ReplayPolicy
from .prompts import Completion

MAX_DEPTH = 4096  # the most tokens of a draft, as the drafter does not know where the output ends
_UNKNOWN = -1  # stands for the target's choice after a row that was not accepted
_ANY_CURVE = CostCurve([(1, 1)])  # for drafters that do not use the curve


class Step(NamedTuple):
    """A step of one or several outputs.

    Attributes:
        rows: how many rows the target verified for all sequences.
        sequences: how many sequences shared the step.
        head_time: the time that trained heads took before the step, in plain joint steps.
    """

    rows: int
    sequences: int = 1
    head_time: float = 0.0


@dataclass(frozen=True)
class Replayed:
    """The steps that replayed outputs took. ``tokens`` is the total number of their tokens."""

    tokens: int
    steps: tuple[Step, ...]

    @property
    def rows(self) -> list[int]:
        """The rows of each step."""
        return [step.rows for step in self.steps]

    def cost(self, curve: Callable[[int], float]) -> float:
        """The time of all steps under a cost curve, in plain steps of one sequence."""
        return sum(curve(step.rows) + step.head_time * curve(step.sequences) for step in self.steps)


def replay(prompt: Sequence[int], output: Sequence[int], drafter: Drafter | Planner) -> Replayed:
    """Let a drafter draft a recorded output.

    Args:
        prompt: the token ids before the output, at least one.
        output: the recorded output, as token ids with the end token.
        drafter: the drafter, which is called as in generation. Only after accepted rows does it
            learn the target's choice; after other rows the choice is unknown (-1).
    """
    completion = Completion("", [*prompt], len(prompt), [*output])
    return replay_jointly([completion], lambda output: drafter, _ANY_CURVE, 1)


def replay_jointly(
    completions: Sequence[Completion],
    new_drafter: NewDrafter,
    curve: CostCurve,
    concurrency: int,
    on_progress: Callable[[], None] = lambda: None,
) -> Replayed:
    """Replay recorded outputs in joint steps, ``concurrency`` at a time.

    When an output ends, the next takes its place. As in :func:`mlxspec.engine.step.joint_step`,
    either all sequences are pipelined or none. A sequence that joins while the others are pipelined
    takes part in their next plain step. Prompts are assumed to take no time.

    Args:
        new_drafter: gives the drafter of each output. Planners share the rows of each step, as in
            :class:`mlxspec.engine.step.Batch`; other drafters' proposals are verified in full.
        curve: T(rows)/T(1) of one sequence, from which planners compute how to share rows.
        concurrency: how many outputs run at once, at least 1.
        on_progress: called each time an output ends.
    """
    waiting, limit = iter(completions), min(concurrency, len(completions))
    costs = cache(FixedCosts(curve).for_sequences)
    active: list[_Output] = []
    steps: list[Step] = []
    ahead = False  # whether the last step dispatched the next one
    while True:
        for completion in itertools.islice(waiting, limit - len(active)):
            drafter = new_drafter(completion.output)
            if isinstance(drafter, Planner):
                *others, end = completion.output
                drafter.stop_tokens = {end} - {*others}  # an end token occurs only once
            drafter.begin(completion.prompt)
            last = completion.context[completion.begin - 1]
            active.append(_Output(completion.output, drafter, last))
        if not active:
            break
        step, ahead = _step(active, ahead, costs(len(active)))
        steps.append(step)
        ended = [sequence for sequence in active if sequence.done >= len(sequence.output)]
        active = [sequence for sequence in active if sequence not in ended]
        ahead = ahead and bool(active)
        for sequence in ended:
            sequence.drafter.end()
            on_progress()
    return Replayed(sum(len(completion.output) for completion in completions), tuple(steps))


@dataclass(eq=False)
class _Output:
    """A recorded output that is being replayed.

    Attributes:
        output: its token ids.
        drafter: the drafter for this output alone.
        last: the context's last token, which the next draft follows.
        done: how many tokens have been emitted.
    """

    output: Sequence[int]
    drafter: Drafter | Planner
    last: int
    done: int = 0


def _step(active: Sequence[_Output], ahead: bool, costs: FixedCosts) -> tuple[Step, bool]:
    """Run a step of all outputs; also return whether it dispatches the next step."""
    planners = [drafter for sequence in active if isinstance(drafter := sequence.drafter, Planner)]
    if len(active) > 1 and planners:
        plans = plan_drafts(dict.fromkeys(planners, MAX_DEPTH), costs, sequences=len(active))
        for planner, plan in zip(planners, plans, strict=True):
            planner.shared_plan = plan
    proposals = [sequence.drafter.propose(MAX_DEPTH) for sequence in active]
    # A plain step that was dispatched ahead runs first, whatever is proposed meanwhile.
    trees = [DraftTree.chain(sequence.last) for sequence in active] if ahead else proposals
    ahead = all(
        len(proposal) == 1 and sequence.drafter.pipelined
        for sequence, proposal in zip(active, proposals, strict=True)
    )
    rows = sum(map(len, trees))
    head = max((planner.head_time for planner in planners), default=0.0)  # the same for all
    for sequence, tree in zip(active, trees, strict=True):
        step = verify(tree, sequence.output[sequence.done : sequence.done + len(tree)], ahead)
        sequence.done += len(step.tokens)
        sequence.last = step.tokens[-1]
        sequence.drafter.observe(replace(step, rows=rows, sequences=len(active)))
    return Step(rows, len(active), head), ahead


def verify(tree: DraftTree, following: Sequence[int], ahead: bool = False) -> VerifiedStep:
    """Verify a tree against the tokens that follow its root in a recorded output."""
    right = [following[d] if d < len(following) else _UNKNOWN for d in tree.depths]
    accepted, tokens = accept(tree, right)
    path = {0, *accepted}
    choices = tuple(token if node in path else _UNKNOWN for node, token in enumerate(right))
    return VerifiedStep(tree, choices, choices, accepted, tokens[: len(following)], ahead=ahead)


# --- figures ---

Report = dict[str, Any]
"""Figures by name, as in JSON."""

Comparison = Mapping[str, Mapping[str, Report]]
"""Reports by chip and policy."""


def replay_report(
    replayed: Iterable[tuple[str, Replayed]], curve: Callable[[int], float]
) -> Report:
    """Summarise the replayed outputs.

    Args:
        replayed: the replayed outputs, at least one, each after the name of the set it is in.
        curve: T(rows) / T(1).

    Returns:
        ``sets``: the figures of each set by its name, in order of appearance, see :func:`_figures`;
        ``speedup``: the geometric mean of the sets' speed-ups; ``worst``: the lowest of them;
        ``share_slow``: the mean of the sets' ``share_slow``; ``tokens_per_step`` and
        ``rows_per_step``: means over all steps.
    """
    by_set: dict[str, list[Replayed]] = {}
    for name, completion in replayed:
        by_set.setdefault(name, []).append(completion)
    sets = {name: _figures(completions, curve) for name, completions in by_set.items()}
    return {
        "speedup": geometric_mean(figures["speedup"] for figures in sets.values()),
        "worst": min(figures["speedup"] for figures in sets.values()),
        "share_slow": fmean(figures["share_slow"] for figures in sets.values()),
        **_per_step([completion for completions in by_set.values() for completion in completions]),
        "sets": sets,
    }


def _figures(completions: Sequence[Replayed], curve: Callable[[int], float]) -> Report:
    """The figures of one set.

    ``speedup`` is plain decoding's time divided by the steps' time. ``share_slow`` is the share of
    completions that are slower than plain decoding by more than 2 % and more than two plain steps.
    """
    costs = [completion.cost(curve) for completion in completions]
    tokens = sum(completion.tokens for completion in completions)
    slow = (
        completion.tokens < 0.98 * cost and cost - completion.tokens > 2
        for completion, cost in zip(completions, costs, strict=True)
    )
    return {
        "completions": len(completions),
        "tokens": tokens,
        "speedup": tokens / sum(costs),
        "share_slow": fmean(slow),
        **_per_step(completions),
    }


def _per_step(replayed: Sequence[Replayed]) -> Report:
    """The mean tokens and rows per step, over all steps."""
    steps = sum(len(completion.steps) for completion in replayed)
    return {
        "tokens_per_step": sum(completion.tokens for completion in replayed) / steps,
        "rows_per_step": sum(sum(completion.rows) for completion in replayed) / steps,
    }


def joint_report(
    joint: Replayed, plain: Replayed, alone: Sequence[Replayed], curve: CostCurve
) -> Report:
    """Summarise outputs that ran several at once.

    Args:
        joint: the outputs, replayed with drafts in joint steps.
        plain: the same outputs without drafts, in joint steps.
        alone: the same outputs with drafts, one at a time.
        curve: T(rows)/T(1) of one sequence.

    Returns:
        Three speeds, relative to plain decoding of one output at a time: ``speedup`` (joint steps
        with drafts), ``plain_batching`` (joint steps without drafts) and ``one_at_a_time`` (drafts
        without joint steps). ``over_plain_batching`` is ``speedup / plain_batching``; ``tokens``
        and ``completions`` are the totals; ``tokens_per_step``, ``rows_per_step`` and
        ``sequences_per_step`` are means over the joint steps.
    """
    speedup, batching = (run.tokens / run.cost(curve) for run in (joint, plain))
    return {
        "speedup": speedup,
        "plain_batching": batching,
        "one_at_a_time": joint.tokens / sum(output.cost(curve) for output in alone),
        "over_plain_batching": speedup / batching,
        "tokens": joint.tokens,
        "completions": len(alone),
        **_per_step([joint]),
        "sequences_per_step": fmean(step.sequences for step in joint.steps),
    }


# --- what is compared ---


def read_curve(path: Path) -> CostCurve:
    """Read a curve that ``mlxspec calibrate --json`` wrote.

    Raises:
        OptionError: the file cannot be read, or is not a curve.
    """
    try:
        times = load_json(path.read_bytes())["times"]
        return CostCurve([(int(time["rows"]), float(time["cost"])) for time in times])
    except (OSError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise OptionError(
            f"{path}: not a cost curve; make one with mlxspec calibrate MODEL --json"
        ) from error


def compare(
    completions: Sequence[Completion],
    classes: TokenClasses,
    policies: Mapping[str, ReplayPolicy],
    curves: Mapping[str, CostCurve],
    concurrency: int = 1,
    on_progress: Callable[[float], None] = lambda share: None,
) -> dict[str, dict[str, Report]]:
    """Replay outputs with several policies on several chips.

    Args:
        completions: the recorded outputs, at least one.
        curves: the curve T(rows)/T(1) of each chip, by the chip's name.
        concurrency: how many outputs run at once. Two or more are compared with plain batching and
            with drafting one at a time.
        on_progress: called with the fraction of the work that is done.

    Returns:
        for each chip and policy, in the given order, the report that :func:`replay_report` makes,
        or :func:`joint_report` with two or more outputs at once.
    """
    several = concurrency > 1
    work = len(completions)
    runs = len(curves) * len(policies)
    done = itertools.count(1)

    def count() -> None:
        on_progress(next(done) / (work * (1 + 2 * runs if several else runs)))

    def together(new: NewDrafter, curve: CostCurve) -> Replayed:
        return replay_jointly(completions, new, curve, concurrency, count)

    def compared(policy: ReplayPolicy, curve: CostCurve) -> Report:
        new = policy(curve, classes)
        alone = [replay_jointly([completion], new, curve, 1, count) for completion in completions]
        if plain:
            return joint_report(together(policy(curve, classes), curve), plain, alone, curve)
        sets = (completion.category for completion in completions)
        return replay_report(zip(sets, alone, strict=True), curve)

    plain = together(lambda output: NoDraft(), _ANY_CURVE) if several else None
    return {
        chip: {name: compared(policy, curve) for name, policy in policies.items()}
        for chip, curve in curves.items()
    }


def verdict(comparison: Comparison) -> Iterator[str]:
    """A sentence per chip on which policy wins there; plain decoding wins if no policy gains.

    A single policy has nothing to win against, so its sentence gives only its speed.
    """
    for chip, reports in comparison.items():
        # With several outputs at once, plain decoding means plain batching.
        gains: dict[str, float] = {"plain decoding": 1.0}
        for name, report in reports.items():
            gains[name] = report.get("over_plain_batching") or report["speedup"]
        if len(gains) == 2:
            (_, only) = gains
            plain = "batching" if "over_plain_batching" in reports[only] else "decoding"
            yield f"On {chip}, {only} has {gains[only]:.2f} times the speed of plain {plain}."
        else:
            best = max(gains, key=gains.__getitem__)
            yield f"{best} wins on {chip} ({gains[best]:.2f}×)."
