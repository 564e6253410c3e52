"""Draft trees, their acceptance and merging, and :class:`Drafter`, the base of all drafters."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any

import numpy as np

from ..errors import MlxspecError, OptionError


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens below the last emitted token; a chain is a tree without branches.

    Node 0 is the root: the last emitted token, which is not drafted. Every other node is a token
    that is proposed to follow its parent. Parents come before their children, so a loop over the
    nodes visits a node's ancestors before the node.

    Trees with equal tokens and parents are equal.

    Args:
        tokens: a token id for each node, the root's first; any sequence of integers.
        parents: the index of each node's parent; -1 for the root.
        p_reached: for each node except the root, the probability that it is accepted, at most its
            parent's; empty if unknown.
        origins: for each node except the root, a word for where it comes from; by default "draft".

    Raises:
        TypeError: a token or a parent is not an integer.
        ValueError: tokens and parents differ in number, a parent does not come before its child,
            or probabilities or origins do not fit the nodes.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    p_reached: tuple[float, ...] = field(default=(), compare=False, repr=False)
    origins: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        # Lists and NumPy's numbers are converted for comparisons and for MLX.
        object.__setattr__(self, "tokens", tuple(map(index, self.tokens)))
        object.__setattr__(self, "parents", tuple(map(index, self.parents)))
        object.__setattr__(self, "p_reached", tuple(map(float, self.p_reached)))
        drafted = len(self.tokens) - 1
        object.__setattr__(self, "origins", tuple(self.origins) or ("draft",) * drafted)
        if self.parents[:1] != (-1,) or len(self.parents) != len(self.tokens):
            raise ValueError("a draft tree needs one parent per token, and -1 for its root, node 0")
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents) if node):
            raise ValueError("in a draft tree, parents come before their children")
        if len(self.origins) != drafted or len(self.p_reached) not in (0, drafted):
            raise ValueError("a draft tree needs one probability and one origin per drafted token")
        p_parent = (1.0, *self.p_reached)
        for probability, parent in zip(self.p_reached, self.parents[1:], strict=False):
            if not 0 <= probability <= p_parent[parent]:
                raise ValueError("in a draft tree, a node's probability is 0 to its parent's")

    @classmethod
    def chain(cls, root: int, draft: Iterable[int] = (), origin: str = "draft") -> DraftTree:
        """A tree with ``draft`` as its only branch; just the root if ``draft`` is empty."""
        tokens = (root, *draft)
        parents, origins = tuple(range(-1, len(tokens) - 1)), (origin,) * (len(tokens) - 1)
        return cls(tokens, parents, origins=origins)

    @classmethod
    def from_branches(cls, root: int, branches: Iterable[Sequence[int]]) -> DraftTree:
        """A tree of alternative continuations of the root; common prefixes share nodes."""
        builder = TreeBuilder(root)
        for branch in branches:
            builder.add_branch(branch)
        return cls(tuple(builder.tokens), tuple(builder.parents))  # checks the tokens

    @classmethod
    def of(cls, *parts: Sequence[Any]) -> DraftTree:
        """A tree of valid tokens, parents, probabilities and origins, without the checks, which
        take longer than all else.
        """
        tree = object.__new__(cls)
        names = ("tokens", "parents", "p_reached", "origins")
        vars(tree).update(zip(names, map(tuple, parts), strict=True))
        return tree

    def __len__(self) -> int:
        """The number of nodes, including the root: the rows of a forward over this tree."""
        return len(self.tokens)

    @property
    def node_origins(self) -> tuple[str, ...]:
        """The origin of each node; "root" for the root."""
        return "root", *self.origins

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Each node's distance from the root, by which its position exceeds the root's."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    def ancestors(self) -> np.ndarray:
        """Which nodes each node attends to: its ancestors and itself.

        Returns:
            bool, (nodes, nodes): a row for each attending node.
        """
        closure = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            closure[node] |= closure[parent]
        return closure

    def child(self, node: int, token: int) -> int | None:
        """The first child of ``node`` with this token, or None."""
        for other in range(node + 1, len(self)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def first_chain(self) -> DraftTree:
        """The chain of first children, for a target that verifies only chains."""
        if self.is_chain:
            return self
        nodes = [0]
        for node in range(1, len(self)):
            if self.parents[node] == nodes[-1]:
                nodes.append(node)
        return self._renumbered(nodes)

    def judged(self, tokens: Iterable[int]) -> Iterator[tuple[int, bool]]:
        """Compare the tree with the tokens that followed.

        Yields:
            a node and whether it was right: for each of the root's children, then for each child of
            the right one, and so on.
        """
        above: int | None = 0
        for token in tokens:
            if above is None:
                return
            for node in range(1, len(self)):
                if self.parents[node] == above:
                    yield node, self.tokens[node] == token
            above = self.child(above, token)

    def nodes_in(self, other: DraftTree) -> list[int | None]:
        """For each node, the node with the same path in another tree, or None.

        If the other tree has equal siblings, the first one counts.
        """
        keys = zip(other.parents, other.tokens, strict=True)
        places = {key: node for node, key in reversed([*enumerate(keys)])}
        nodes: list[int | None] = [0]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            above = nodes[parent]
            nodes.append(None if above is None else places.get((above, token)))
        return nodes

    def first(self, n_draft: int) -> DraftTree:
        """The root and the ``n_draft`` nodes after it."""
        return self if n_draft >= len(self) - 1 else self._renumbered(range(n_draft + 1))

    def pruned(self, max_depth: int, vocab_size: int) -> DraftTree:
        """Drop nodes deeper than ``max_depth`` or outside the vocabulary, with their subtrees."""
        nodes = zip(self.tokens, self.depths, strict=True)
        return self.filtered([d <= max_depth and 0 <= token < vocab_size for token, d in nodes])

    def filtered(self, keeps: Sequence[bool]) -> DraftTree:
        """Drop nodes whose entry in ``keeps`` is False, with their subtrees; the root must stay."""
        if all(keeps):
            return self
        nodes = {0: None}  # in order
        for node in range(1, len(self)):
            if keeps[node] and self.parents[node] in nodes:
                nodes[node] = None
        return self._renumbered([*nodes])

    def _renumbered(self, nodes: Sequence[int]) -> DraftTree:
        """A tree of these nodes in this order: the root first, and parents before children."""
        number = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        return self.of(
            [self.tokens[node] for node in nodes],
            [number[self.parents[node]] for node in nodes],
            [self.p_reached[node - 1] for node in nodes[1:]] if self.p_reached else (),
            [self.origins[node - 1] for node in nodes[1:]],
        )


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
        seconds: the wall time from the proposal to the commit, plus that of the drafter's
            ``observe`` after the previous step; 0 if not measured.
        drafting: ``planning`` if the drafter used the processor that also runs the forwards; 0 on a
            GPU.
        planning: the seconds that the drafter took to propose this step's draft and to learn from
            the previous step; of a joint plan, the sequence's share.
        pipelined: whether the previous step dispatched this step's forward.
        ahead: whether this step dispatched the next step's forward.
        context: the number of the context's positions, including ``tokens``.
        logprobs: for each emitted token, the log-probabilities before filters and temperature,
            (vocabulary,); dispatched, but not waited for.
    """

    tree: DraftTree
    choices: tuple[int, ...]
    argmaxes: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: int = 1
    sequences: int = 1
    seconds: float = 0.0
    drafting: float = 0.0
    planning: float = 0.0
    pipelined: bool = False
    ahead: bool = False
    context: int = 0
    logprobs: Sequence[Any] = field(default=(), compare=False, repr=False)

    @property
    def drafted(self) -> int:
        """The number of draft tokens that were verified."""
        return len(self.tree) - 1


class Drafter:
    """Proposes draft trees. A drafter can change the speed of decoding, but never the output.

    A subclass must define :meth:`propose` and :meth:`observe`; the other methods have defaults. A
    generation calls ``begin`` once with the prompt, then ``propose`` and ``observe`` alternately,
    and ``end`` at the end, even after an error. A planner drafts only when drafting pays, so it
    may call ``observe`` without calling ``propose`` before.
    """

    branching = True
    """Whether the drafter's trees may branch. If False, the model is not tried for trees."""

    is_fallback = False
    """Whether the drafter, if it is the second one of a :class:`mlxspec.CombinedDrafter`, drafts
    only when the first has no draft.
    """

    pipelined = False
    """Whether the next forward may be dispatched before the token of this one is read, if nothing
    is proposed. The next proposal then has to wait for a plain step. This attribute is read after
    every proposal, so it may be a property.
    """

    def attach(self, target: Any, perturb: Callable[..., Any]) -> None:
        """Receive the target that will verify the drafts; called before :meth:`begin`.

        Only drafters that run a model need this: more of their tokens are right if they use the
        random numbers that will choose the output's tokens.

        Args:
            target: the sequence's :class:`mlxspec.engine.target.Target`.
            perturb: :meth:`mlxspec.engine.sampling.Chooser.perturb`.
        """

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation whose context is ``prompt`` (at least one token id)."""

    def propose(self, max_depth: int) -> DraftTree:
        """Draft the tokens that may follow the context, at most ``max_depth`` tokens deep.

        The tree's root is the context's last token. :meth:`DraftTree.chain` makes a tree without
        branches, or just the root if there is nothing to draft. A planner uses the tree's
        ``p_reached``. If it is empty, the planner learns how often the nodes are right.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define propose")

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a step, after which ``step.tokens`` belong to the context."""
        raise NotImplementedError(f"{type(self).__name__} does not define observe")

    def end(self) -> None:
        """Release the generation's state."""

    def no_draft(self) -> str:
        """A clause that says why the last proposal was just the root; called before ``observe``."""
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


class TreeBuilder:
    """Builds a draft tree node by node.

    Args:
        root: the last emitted token, node 0.

    Attributes:
        tokens, parents, origins: as in :class:`DraftTree`, of the nodes so far.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.origins: list[str] = []
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        """The number of nodes, including the root."""
        return len(self.tokens)

    def child(self, parent: int, token: int, origin: str = "draft") -> int:
        """The child with this token, which is added if it is missing."""
        node = self._children.get((parent, token))
        if node is None:
            node = self._children[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.origins.append(origin)
        return node

    def add_branch(self, tokens: Iterable[int], origin: str = "draft") -> None:
        """Add a continuation of the root; common prefixes share nodes."""
        node = 0
        for token in tokens:
            node = self.child(node, token, origin)

    def tree(self) -> DraftTree:
        """The tree so far."""
        return DraftTree.of(self.tokens, self.parents, (), self.origins)


def view(step: VerifiedStep, tree: DraftTree) -> VerifiedStep:
    """A step as if only the nodes of one tree had been verified.

    Args:
        step: the verified step.
        tree: a draft after the same token. Nodes that the step did not verify are left out.

    Returns:
        the step with only the choices and accepted nodes of ``tree``, but with all emitted tokens.
    """
    verified = tree.nodes_in(step.tree)
    rows = [same for same in verified if same is not None]
    own = {same: node for node, same in reversed(list(enumerate(rows)))}
    return replace(
        step,
        tree=tree.filtered([same is not None for same in verified]),
        choices=tuple(step.choices[row] for row in rows),
        argmaxes=tuple(step.argmaxes[row] for row in rows),
        accepted=tuple(own[node] for node in step.accepted if node in own),
        planning=0.0,  # unknown, since the other drafters took a part of it
    )


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """Merge drafts after the same token; common prefixes share nodes.

    Returns:
        a tree that begins with the first tree's nodes, without probabilities.
    """
    merged = TreeBuilder(trees[0].tokens[0])
    for tree in trees:
        nodes = [0]
        for token, parent, origin in zip(
            tree.tokens[1:], tree.parents[1:], tree.origins, strict=True
        ):
            nodes.append(merged.child(nodes[parent], token, origin))
    return merged.tree()


def checked_drafter(drafter: object) -> Drafter:
    """Return ``drafter`` if it is a :class:`Drafter`.

    Raises:
        MlxspecError: it is not an instance of a class derived from :class:`Drafter`.
    """
    if not isinstance(drafter, Drafter):
        name = repr(drafter) if isinstance(drafter, type) else f"a {type(drafter).__name__}"
        raise MlxspecError(
            f"drafter is {name}, not an instance of a class derived from mlxspec.Drafter"
        )
    return drafter


def checked_draft(proposed: object, drafter: Drafter, last: int) -> DraftTree:
    """Return a drafter's proposal if it is a tree with the root ``last``.

    Raises:
        MlxspecError: the proposal is not a draft tree, or its root is another token.
    """
    name = type(drafter).__name__
    if not isinstance(proposed, DraftTree):
        raise MlxspecError(
            f"{name}.propose returned {type(proposed).__name__}: return a DraftTree, such as "
            "DraftTree.chain(last token, drafted tokens)"
        )
    if proposed.tokens[0] != last:
        raise MlxspecError(
            f"{name}.propose returned a tree with the root {proposed.tokens[0]}, but the context "
            f"ends with {last}: let the root be the last token of the prompt, or of step.tokens "
            "after a step"
        )
    return proposed


def load_drafter(name: str) -> type[Drafter]:
    """Import the drafter class ``module:Class``. The module may be in the working directory.

    Raises:
        OptionError: the class does not exist, is not derived from :class:`Drafter`, lacks a
            method, or requires arguments.
    """
    module, _, class_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), class_name)
        inspect.signature(found).bind()
        if issubclass(found, Drafter) and not {found.propose, found.observe} & _UNDEFINED:
            return found
        reason = "it is not derived from mlxspec.Drafter, or lacks one of its methods"
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
    raise OptionError(
        f"drafter {name}: {reason}; write it as module:Class, such as mine:MyDrafter, a class "
        "derived from mlxspec.Drafter that has the methods propose and observe and needs no "
        "arguments"
    )


_UNDEFINED = {Drafter.propose, Drafter.observe}
