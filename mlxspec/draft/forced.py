"""What a constraint says of a draft: which of it may come, and which tokens must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .combined import CombinedDrafter
from .drafter import Drafter, DraftTree, VerifiedStep

GRAMMAR = "grammar"
"""Where forced tokens say that they come from."""


class Guide(Protocol):
    """Knows how a constrained output may go on after the tokens that have been accepted."""

    def forced(self) -> Sequence[int]:
        """The tokens that come next whatever the model says; empty where it has a choice."""

    def guide(
        self, tokens: Sequence[int], parents: Sequence[int]
    ) -> tuple[Sequence[bool], Mapping[int, Sequence[int]]]:
        """Look at a draft; the arguments are as in :class:`DraftTree`.

        Returns:
            per node whether it may come; and what is forced, where anything is, after the root
            and after each node that no other of the draft may follow.
        """


class ForcedDrafter(Drafter):
    """Drafts the tokens that a constraint forces.

    Args:
        guide: of the generation's output.
    """

    branching = False
    pipelined = True

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]

    def propose(self, max_depth: int) -> DraftTree:
        self._draft = DraftTree.chain(self._last, self._guide.forced()[:max_depth])
        return self._draft

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]

    def origins(self) -> tuple[str, ...]:
        return "root", *[GRAMMAR] * (len(self._draft) - 1)


def with_forced(drafter: Drafter, guide: Guide) -> Drafter:
    """A drafter that drafts what is forced, too.

    Args:
        drafter: of a constrained output.
        guide: of the output.
    """
    both = CombinedDrafter(ForcedDrafter(guide), drafter)
    # Where something is forced, nothing else may come: the two never make a branch together.
    both.branching = drafter.branching
    return both
