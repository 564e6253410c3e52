"""The acceptance rule that every decoder shares."""

from __future__ import annotations

from collections.abc import Sequence

from ..drafting import DraftTree


def accept(tree: DraftTree, choices: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Walk the tree along the target's own choices.

    From the root, descend while a child proposes what the target chose after its parent; the
    first choice without such a child is the bonus token, which costs nothing since the target
    has already computed it. The same rule serves every temperature: a choice is an argmax or
    a sample keyed by its position, and with point-mass drafts no lossless rule accepts more
    than this one (Leviathan et al. 2023, arXiv 2211.17192, in the case q = 1).

    Args:
        tree: what was verified.
        choices: the target's choice after each node.

    Returns:
        the accepted nodes from the root's child downwards, and the emitted tokens: the
        accepted nodes' tokens and the bonus token.
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
