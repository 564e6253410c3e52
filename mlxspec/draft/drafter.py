"""What every drafter offers to the decoding loop; users may pass their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .tree import DraftTree


@dataclass(frozen=True)
class VerifiedStep:
    """What one step of the target says about a draft.

    Attributes:
        tree: the verified tree; the proposed one, less what the loop had to cut.
        choices: per node, the token that the target picks after it.
        argmaxes: per node, the target's most likely token; equals ``choices`` at temperature 0.
        accepted: the accepted nodes, from the root's child downwards.
        tokens: the emitted tokens: the accepted ones, then the bonus token, unless an end of
            the output was among them.
        pending: accepted tokens that the next step has to run again in front of its own rows,
            which makes it wider (models whose state cannot be cut back).
    """

    tree: DraftTree
    choices: tuple[int, ...]
    argmaxes: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    pending: int = 0

    @property
    def drafted(self) -> int:
        """Draft tokens that were verified."""
        return len(self.tree) - 1


class Drafter(Protocol):
    """Proposes draft trees. It can change the speed of decoding, never its output.

    The loop calls ``begin`` once with the prompt, then ``propose`` and ``observe`` in turn,
    and ``end`` when the generation ends in whatever way.
    """

    @property
    def pipelined(self) -> bool:
        """Whether, when a proposal is empty, the loop may dispatch the next forward before it
        has read the token of the last one.

        Then a later proposal waits for one plain step. Asked after every proposal: a drafter
        that never proposes says True, one that plans says True while it expects no draft soon.
        """

    @property
    def branching(self) -> bool:
        """Whether its trees may branch; False spares the check that the model verifies trees."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation whose context is ``prompt`` (at least one token id)."""

    def propose(self, max_depth: int) -> DraftTree:
        """Draft what follows the context, at most ``max_depth`` tokens deep.

        The root of the tree is the context's last token.
        """

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a step; ``step.tokens`` now belong to the context."""

    def end(self) -> None:
        """Let go of the generation's state."""


class NoDraft:
    """Plain decoding: proposes nothing."""

    pipelined = True
    branching = False

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._last)

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]

    def end(self) -> None:
        pass
