"""The acceptance of drafts: the one rule for all decoders and temperatures, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .tree import DraftTree


def accept(tree: DraftTree, choices: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Walk the tree along the target's own choices.

    Start at the root and descend as long as a child is the target's choice. The first choice that
    is no child's is the bonus token, which costs nothing, since the target has already computed it.
    The rule is the same at every temperature: a choice is an argmax, or a sample whose random
    numbers depend on its position alone. If drafts are single tokens and not distributions, no
    lossless rule accepts more (Leviathan et al. 2023, arXiv 2211.17192, in the case q = 1).

    Args:
        tree: the verified tree.
        choices: the target's choice after each node.

    Returns:
        the accepted nodes in order, and the emitted tokens: the accepted nodes' tokens and the
        bonus token.
    """
    accepted: list[int] = []
    tokens: list[int] = []
    node = 0
    while True:
        tokens.append(choices[node])
        child = tree.child(node, choices[node])
        if child is None:
            return tuple(accepted), tuple(tokens)
        accepted.append(child)
        node = child


@dataclass(frozen=True)
class VerifiedStep:
    """The target's verdict on a draft in one step.

    Attributes:
        tree: the verified tree, that is, the proposed one without the nodes that had to be cut.
        choices: the token that the target picks after each node.
        argmaxes: the target's most likely token after each node; equals ``choices`` at temperature
            0.
        accepted: the accepted nodes, in order; the first is a child of the root.
        tokens: the emitted tokens: the accepted ones, then the bonus token; fewer if the output
            ends earlier.
        rows: the number of rows of the step's forward, including those of other sequences.
        sequences: the number of sequences that shared the forward.
        seconds: the wall time from the proposal to the commit, plus what drafting took since the
            previous step; 0 if not measured.
        planning_seconds: what drafting took to propose this step's draft and to learn from the
            previous step; of a joint plan, the sequence's share.
        blocking_seconds: ``planning_seconds`` if drafting used the processor that also runs the
            forwards; 0 on a GPU.
        pipelined: whether the previous step dispatched this step's forward.
        ahead: whether this step dispatched the next step's forward.
        context: the number of the context's positions, including ``tokens``.
        logprobs: for each emitted token, the log-probabilities before filters and temperature,
            (vocabulary,); dispatched, but not waited for.
        no_draft: if steps are recorded, a clause that says why nothing was drafted; empty if
            something was.
    """

    tree: DraftTree
    choices: tuple[int, ...]
    argmaxes: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: int = 1
    sequences: int = 1
    seconds: float = 0.0
    planning_seconds: float = 0.0
    blocking_seconds: float = 0.0
    pipelined: bool = False
    ahead: bool = False
    context: int = 0
    logprobs: Sequence[Any] = field(default=(), compare=False, repr=False)
    no_draft: str = ""

    @property
    def drafted(self) -> int:
        """The number of draft tokens that were verified."""
        return len(self.tree) - 1


def view(step: VerifiedStep, tree: DraftTree) -> VerifiedStep:
    """A step as if only the nodes of one tree had been verified.

    Args:
        step: the verified step.
        tree: a draft after the same token. Nodes that the step did not verify are left out.

    Returns:
        the step with only the choices and accepted nodes of ``tree``, but with all emitted tokens.
    """
    verified = tree.nodes_in(step.tree)
    rows = [row for row in verified if row is not None]
    node_of = {row: node for node, row in reversed(list(enumerate(rows)))}
    return replace(
        step,
        tree=tree.filtered([same is not None for same in verified]),
        choices=tuple(step.choices[row] for row in rows),
        argmaxes=tuple(step.argmaxes[row] for row in rows),
        accepted=tuple(node_of[node] for node in step.accepted if node in node_of),
        planning_seconds=0.0,  # unknown, since the other drafters took a part of it
    )
