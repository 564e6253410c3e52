"""What became of each node of a draft tree: the acceptance walk, told node by node."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from ..draft.drafter import VerifiedStep
from ..draft.recording import RecordedStep


class Fate(Enum):
    """What the walk did with a node; the value tells the reader."""

    ROOT = "emitted before"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNREACHED = "not reached"
    BONUS = "the target's own"


def fates(step: VerifiedStep) -> tuple[Fate, ...]:
    """Per node of the tree, what became of it.

    A node is rejected where the walk stood at its parent and the target chose something else;
    what hangs below a rejected node, or behind the output's end, was not reached.
    """
    walked = {0, *step.accepted}
    if bonus(step) is None:
        walked.discard(step.accepted[-1])  # the output ended there, and nothing was compared
    result = [Fate.ROOT]
    for node, parent in enumerate(step.tree.parents[1:], start=1):
        if node in step.accepted:
            result.append(Fate.ACCEPTED)
        else:
            result.append(Fate.REJECTED if parent in walked else Fate.UNREACHED)
    return tuple(result)


def bonus(step: VerifiedStep) -> int | None:
    """The token that the target added to the accepted ones; None if the output ended before."""
    return step.tokens[-1] if len(step.tokens) > len(step.accepted) else None


def described_counts(step: VerifiedStep) -> str:
    """The figures of a step in words."""
    emitted = f"{len(step.tokens)} emitted"
    if not step.drafted:
        return f"1 row, no draft, {emitted}"
    accepted = f"{len(step.accepted)} of {step.drafted} draft tokens accepted"
    return f"{len(step.tree)} rows: {accepted}, {emitted}"


def telling_run(steps: Sequence[RecordedStep], count: int) -> int:
    """Where the most telling ``count`` successive steps begin.

    Those are the ones where most drafts were accepted in part, so that a walk and its end can be
    seen; among equals, those with the largest windows, then those with most accepted tokens,
    then the first.
    """

    def told(first: int) -> tuple[int, int, int]:
        run = steps[first : first + count]
        partly = sum(0 < len(one.verified.accepted) < one.verified.drafted for one in run)
        return (
            partly,
            sum(len(one.window) for one in run),
            sum(len(one.verified.accepted) for one in run),
        )

    return max(range(max(1, len(steps) - count + 1)), key=told)
