"""Replaying recorded outputs: the steps that a drafter would have taken, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from ..draft.drafter import Drafter, DraftTree, VerifiedStep, accept

SLOW = 0.98
"""A speed below this counts as slower than plain decoding, but for a few plain steps."""
_UNNOTICED = 2.0  # plain steps: what an output may lose, however short it is

MAX_DEPTH = 4096  # the drafter does not know where the output ends
_UNKNOWN = -1  # the choice after a row that was not accepted


@dataclass(frozen=True)
class ReplayedCompletion:
    """What replaying one output gave.

    Attributes:
        tokens: how many the output has.
        rows: per step, how many rows the target verified.
    """

    tokens: int
    rows: tuple[int, ...]

    def cost(self, curve: Callable[[int], float]) -> float:
        """The time of all steps under a cost curve, in plain steps."""
        return sum(map(curve, self.rows))


def replay(prompt: Sequence[int], output: Sequence[int], drafter: Drafter) -> ReplayedCompletion:
    """Let a drafter draft an output that is known.

    The drafter is called as the decoding loop calls it; the target's choices are read from the
    output, and after rows that were not accepted they are unknown (-1).

    Args:
        prompt: the context of the output, at least one token id.
        output: what the target answered, its end token included.
    """
    rows: list[int] = []
    done, last, ahead = 0, prompt[-1], False
    drafter.begin(prompt)
    try:
        while done < len(output):
            proposal = drafter.propose(MAX_DEPTH)
            # A plain step that was dispatched ahead runs first, whatever is proposed meanwhile.
            tree = DraftTree.chain(last) if ahead else proposal
            ahead = len(proposal) == 1 and drafter.pipelined
            step = verify(tree, output[done : done + len(tree)], ahead)
            rows.append(len(tree))
            done += len(step.tokens)
            last = step.tokens[-1]
            drafter.observe(step)
    finally:
        drafter.end()
    return ReplayedCompletion(len(output), tuple(rows))


def verify(tree: DraftTree, following: Sequence[int], ahead: bool = False) -> VerifiedStep:
    """Verify a tree against the tokens that follow its root; the last one may end the output."""
    right = [following[d] if d < len(following) else _UNKNOWN for d in tree.depths]
    accepted, tokens = accept(tree, right)
    path = {0, *accepted}
    choices = tuple(token if node in path else _UNKNOWN for node, token in enumerate(right))
    return VerifiedStep(tree, choices, choices, accepted, tokens[: len(following)], ahead=ahead)


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
    replayed: Iterable[tuple[str, ReplayedCompletion]], curve: Callable[[int], float]
) -> ReplayReport:
    """Sum up what was replayed.

    Args:
        replayed: set and completion, at least one.
        curve: T(rows) / T(1).
    """
    replayed = list(replayed)
    by_set: dict[str, list[ReplayedCompletion]] = {}
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


def _set_report(completions: list[ReplayedCompletion], curve: Callable[[int], float]) -> SetReport:
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
