"""Replaying a recorded output: the steps in which a drafter would have decoded it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..drafting import Drafter, DraftTree, VerifiedStep

_BUDGET = 4096  # the drafter does not know where the output ends
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
        """The time of all steps, in plain tokens, under a cost curve."""
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
            proposal = drafter.propose(_BUDGET)
            # A plain step that was dispatched ahead runs first, whatever is proposed meanwhile.
            tree = DraftTree.chain(last) if ahead else proposal
            step = verify(tree, output[done : done + len(tree)])
            ahead = len(proposal) == 1 and drafter.pipelined
            rows.append(len(tree))
            done += len(step.tokens)
            last = step.tokens[-1]
            drafter.observe(step)
    finally:
        drafter.end()
    return ReplayedCompletion(len(output), tuple(rows))


def verify(tree: DraftTree, following: Sequence[int]) -> VerifiedStep:
    """Walk a tree along the tokens that follow its root; the last one may end the output."""
    choices = [_UNKNOWN] * len(tree)
    accepted: list[int] = []
    tokens: list[int] = []
    node = 0
    for token in following:
        choices[node] = token
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            break
        accepted.append(child)
        node = child
    return VerifiedStep(tree, tuple(choices), tuple(choices), tuple(accepted), tuple(tokens))
