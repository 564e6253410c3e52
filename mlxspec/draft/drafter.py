"""Draft trees, their acceptance by a step, and the base class of the drafters that propose them.

Derive your own drafter from :class:`Drafter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import index

import numpy as np


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens below the last emitted token; a chain is a tree without branches.

    Node 0 is the root, the last emitted token, which is no draft itself. Every other node is
    a token proposed to follow its parent. Parents come before their children, so a loop over
    the nodes meets all ancestors of a node before it.

    Args:
        tokens: one token id per node, the root's first; any sequence of integers.
        parents: the index of each node's parent; -1 for the root.

    Raises:
        TypeError: a token or a parent is no integer.
        ValueError: the two differ in length, or a parent does not come before its child.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        # Lists and NumPy's integers become what the comparisons here and MLX understand.
        object.__setattr__(self, "tokens", tuple(map(index, self.tokens)))
        object.__setattr__(self, "parents", tuple(map(index, self.parents)))
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError("a draft tree needs one parent per token and at least the root")
        if self.parents[0] != -1:
            raise ValueError("node 0 of a draft tree is its root, whose parent is -1")
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents) if node):
            raise ValueError("in a draft tree parents come before their children")

    @classmethod
    def chain(cls, root: int, draft: Iterable[int] = ()) -> DraftTree:
        """The tree whose only branch is ``draft``; without one, the root alone."""
        tokens = (index(root), *draft)
        if len(tokens) == 1:
            return _root_alone(tokens[0])
        return cls(tokens, tuple(range(-1, len(tokens) - 1)))

    @classmethod
    def from_branches(cls, root: int, branches: Iterable[Sequence[int]]) -> DraftTree:
        """Merge alternative continuations; branches with a common prefix share its nodes."""
        builder = TreeBuilder(root)
        for branch in branches:
            builder.add_branch(branch)
        return builder.tree()

    def __len__(self) -> int:
        """The number of rows that a forward over this tree has, the root's included."""
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root: its position is that of the root plus this."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    def ancestors(self) -> np.ndarray:
        """Which nodes each node attends to: its ancestors and itself.

        Returns:
            bool array of shape (nodes, nodes); row = the node that attends.
        """
        closure = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            closure[node] |= closure[parent]
        return closure

    def child(self, node: int, token: int) -> int | None:
        """The first child of ``node`` that proposes ``token``, or None."""
        for other in range(node + 1, len(self)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def first_chain(self) -> DraftTree:
        """The chain of first children: the part of a tree for a target that verifies chains."""
        if self.is_chain:
            return self
        draft, node = [], 0
        for other in range(1, len(self)):
            if self.parents[other] == node:
                draft.append(self.tokens[other])
                node = other
        return DraftTree.chain(self.tokens[0], draft)

    def pruned(self, max_depth: int, vocab_size: int) -> DraftTree:
        """Drop nodes deeper than ``max_depth`` or outside the vocabulary, with their subtrees."""
        if max(self.depths) <= max_depth and all(0 <= t < vocab_size for t in self.tokens):
            return self
        return self.kept(
            [
                depth <= max_depth and 0 <= token < vocab_size
                for token, depth in zip(self.tokens, self.depths, strict=True)
            ]
        )

    def kept(self, keeps: Sequence[bool]) -> DraftTree:
        """The nodes that are to be kept, of which the root is one, and whose parents are kept."""
        if all(keeps):
            return self
        renumbered = {-1: -1}
        tokens: list[int] = []
        parents: list[int] = []
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent in renumbered and keeps[node]:
                renumbered[node] = len(tokens)
                tokens.append(token)
                parents.append(renumbered[parent])
        return DraftTree(tuple(tokens), tuple(parents))


@lru_cache(maxsize=1024)
def _root_alone(token: int) -> DraftTree:
    """The tree of a step without a draft: every step of a sequence asks for it."""
    return DraftTree((token,), (-1,))


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


@dataclass(frozen=True)
class VerifiedStep:
    """What one step of the target says about a draft.

    Attributes:
        tree: the verified tree: the proposed one without what the step had to cut.
        choices: per node, the token that the target picks after it.
        argmaxes: per node, the target's most likely token; equals ``choices`` at temperature 0.
        accepted: the accepted nodes, from the root's child downwards.
        tokens: the emitted tokens: the accepted ones, then the bonus token; fewer if the output
            ends before.
        pending: accepted tokens that the next step has to run again in front of its own rows,
            which makes it wider (models whose state cannot be cut back).
        rows: of the step's forward, those of other sequences and pending ones included.
        sequences: how many sequences shared the forward.
        seconds: wall time of the step, from the proposal to the commit, and of the drafter's
            ``observe`` after the step before. 0 where nobody measures.
        drafting: seconds of them that the drafter took from the processor that ran the forward:
            none where that is a GPU.
        pipelined: whether its forward had been dispatched during the step before.
        ahead: whether the next step's forward was dispatched during this one.
        context: positions of the context, ``tokens`` included.
    """

    tree: DraftTree
    choices: tuple[int, ...]
    argmaxes: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    pending: int = 0
    rows: int = 1
    sequences: int = 1
    seconds: float = 0.0
    drafting: float = 0.0
    pipelined: bool = False
    ahead: bool = False
    context: int = 0

    @property
    def drafted(self) -> int:
        """Draft tokens that were verified."""
        return len(self.tree) - 1


class Drafter:
    """Proposes draft trees. It can change the speed of decoding, never its output.

    A drafter of your own needs :meth:`propose` and :meth:`observe`; all else has a default. A
    generation calls ``begin`` once with the prompt, then ``propose`` and ``observe`` in turn, and
    ``end`` when it ends in whatever way. A planner, which drafts only where that pays, may leave
    out ``propose``: then ``observe`` comes alone.
    """

    branching = True
    """Whether its trees may branch; False saves finding out whether the model verifies trees."""

    pipelined = False
    """Whether, when nothing is proposed, the next forward may be dispatched before the token of
    this one is read.

    The next proposal then waits for one plain step. It is read after every proposal, so it may be
    a property: a drafter that never proposes says True; one that plans says True while it expects
    no draft soon."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation whose context is ``prompt`` (at least one token id)."""

    def propose(self, max_depth: int) -> DraftTree:
        """Draft what follows the context, at most ``max_depth`` tokens deep.

        The root of the tree is the context's last token; :meth:`DraftTree.chain` makes a tree
        of tokens in a row, and of the root alone where there is nothing to draft.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method propose")

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a step; ``step.tokens`` now belong to the context."""
        raise NotImplementedError(f"{type(self).__name__} has no method observe")

    def end(self) -> None:
        """Release the generation's state."""

    def origins(self) -> tuple[str, ...] | None:
        """Per node of the tree proposed last, a word for where it came from; the root's is "root".

        None means "draft" for all other nodes.
        """
        return None

    def window_rows(self) -> Mapping[tuple[int, int], int]:
        """Lookahead decoding's window in the tree proposed last: the node of each row
        (level, column)."""
        return {}

    def no_draft(self) -> str:
        """Why the last proposal was the root alone, in a clause; asked before ``observe``."""
        return "the drafter has nothing to propose"


class NoDraft(Drafter):
    """Plain decoding: proposes nothing."""

    pipelined = True
    branching = False

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]

    def no_draft(self) -> str:
        return "this decoder never drafts"

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._last)

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]


def origins_of(drafter: Drafter, tree: DraftTree) -> tuple[str, ...]:
    """Per node of the tree that a drafter proposed last, where it came from."""
    told = drafter.origins() if hasattr(drafter, "origins") else None
    return told or ("root", *["draft"] * (len(tree) - 1))


def window_rows_of(drafter: Drafter) -> Mapping[tuple[int, int], int]:
    """:meth:`Drafter.window_rows` of any drafter."""
    return drafter.window_rows() if hasattr(drafter, "window_rows") else {}


def no_draft_of(drafter: Drafter) -> str:
    """:meth:`Drafter.no_draft` of any drafter."""
    return drafter.no_draft() if hasattr(drafter, "no_draft") else Drafter.no_draft(drafter)


class TreeBuilder:
    """Builds a draft tree node by node.

    Args:
        root: the last emitted token, node 0.
    """

    def __init__(self, root: int) -> None:
        self._tokens = [root]
        self._parents = [-1]
        self._children: dict[tuple[int, int], int] = {}

    @classmethod
    def of(cls, tree: DraftTree) -> TreeBuilder:
        """A builder that starts from a tree."""
        builder = cls(tree.tokens[0])
        builder._tokens, builder._parents = list(tree.tokens), list(tree.parents)
        for node in range(len(tree) - 1, 0, -1):  # so that the first of equal siblings counts
            builder._children[tree.parents[node], tree.tokens[node]] = node
        return builder

    def __len__(self) -> int:
        """The number of nodes, the root included."""
        return len(self._tokens)

    def has(self, parent: int, token: int) -> bool:
        """Whether a node has a child with this token."""
        return (parent, token) in self._children

    def child(self, parent: int, token: int) -> int:
        """The child of a node with this token; it is added if there is none."""
        key = parent, token
        node = self._children.get(key)
        if node is None:
            node = self._children[key] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
        return node

    def add_branch(self, tokens: Iterable[int]) -> None:
        """Add a continuation of the root; it shares the nodes of a common prefix."""
        node = 0
        for token in tokens:
            node = self.child(node, token)

    def tree(self) -> DraftTree:
        """The tree so far."""
        return DraftTree(tuple(self._tokens), tuple(self._parents))
