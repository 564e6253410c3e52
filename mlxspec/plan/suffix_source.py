"""Candidates from text that repeats: what followed where the text's end occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from ..draft.context_index import ContextIndex, OutputMemory
from ..draft.drafter import VerifiedStep
from ..draft.suffix_index import (
    MAX_LENGTH,
    Occurrence,
    SuffixIndex,
    TextStore,
    continuations,
)
from .p_accept import AcceptanceModel, Estimate
from .planner import Candidates, Source

# Negative p_reached, serial number, parent, rank among its siblings, occurrences, path.
_Frontier = tuple[float, int, int, int, list[Occurrence], list[int]]

# Where these come from: docs/planner-notes.md, "Constants".
_CHILDREN = 6  # per node of a tree; more are never likely enough
_STORED_OCCURRENCES = 8  # that a store is asked for
_LEAST_P_REACHED = 0.01  # nodes that are reached more rarely gain nothing on any machine


class SuffixSource(Source):
    """Continuations of the earlier occurrences of the text's end.

    The text is the context, preceded by earlier outputs; a store on disk can be searched as
    well. The probabilities are learned from every emitted token, drafted or not.

    Args:
        memory: earlier outputs to draft from, to which each output is added at its end.
        store: other texts to draft from.
        token_classes: see :func:`mlxspec.plan.p_accept.token_classes`.
        context: the index of the conversation so far, which is extended; by default each
            generation has a new one.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        memory: OutputMemory | None = None,
        store: TextStore | None = None,
        token_classes: bytes = b"",
        context: ContextIndex | None = None,
    ) -> None:
        self._memory = memory
        self._store = store
        self._acceptance = AcceptanceModel(token_classes)
        self._kept_context = context

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation; a thread builds the index during the prefill."""
        self._context = self._kept_context or ContextIndex()
        self._context.begin(prompt, self._memory.text() if self._memory else [])
        self._index: SuffixIndex | None = None
        self._acceptance.begin(memory_end=self._context.memory_end)

    def candidates(
        self, max_nodes: int, max_depth: int, branching: bool, least_p: Sequence[float]
    ) -> Candidates:
        self._acceptance.refresh()
        self._tree = SuffixCandidates(
            self._text(),
            self._acceptance,
            max_nodes=max_nodes,
            max_depth=max_depth,
            branching=branching,
            least_p=least_p,
            store=self._store,
        )
        return self._tree

    def observe(self, step: VerifiedStep, searched: bool) -> None:
        if searched:
            self._tree.learn(step.tokens)
        self._text().extend(step.tokens)

    def end(self) -> None:
        if self._memory:
            self._memory.add(self._context.output)
        self._index = None

    def _text(self) -> SuffixIndex:
        if self._index is None:
            self._index = self._context.index
        return self._index


class SuffixCandidates(Candidates):
    """A tree of continuations, grown best first.

    A child's probability is its parent's, times those of its better siblings being wrong, times
    its own. No child's exceeds its parent's, so any number of first nodes is a tree.

    Args:
        index: the text to draft from.
        acceptance: estimates the probabilities.
        max_nodes, max_depth, branching, least_p: as for :meth:`Source.candidates`.
        store: other texts to draft from.
    """

    def __init__(
        self,
        index: SuffixIndex,
        acceptance: AcceptanceModel,
        *,
        max_nodes: int,
        max_depth: int,
        branching: bool,
        least_p: Sequence[float],
        store: TextStore | None = None,
    ) -> None:
        super().__init__(index.tokens[-1], "suffix")
        self._index = index
        self._stored = store.tokens if store else ()
        self._acceptance = acceptance
        self._most_children = _CHILDREN if branching else 1
        # Per node its ranked children: tokens, estimates, and their nodes where they were grown.
        self._children: list[tuple[list[int], list[Estimate], dict[int, int]]] = []
        self._serial = 0  # decides between equals: the older entry comes first
        occurrences = index.occurrences()
        if store:
            occurrences += store.occurrences(index.tokens[-MAX_LENGTH:], _STORED_OCCURRENCES)
            occurrences.sort(reverse=True)
        self._grow(occurrences, max_nodes, max_depth, least_p)

    def learn(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that followed, whether they had been verified as drafts or not."""
        node: int | None = 0
        for token in emitted:
            if node is None or node >= len(self._children):
                return
            tokens, estimates, nodes = self._children[node]
            if not tokens:
                return
            right = tokens.index(token) if token in tokens else None
            self._acceptance.learn(estimates, right, at_root=node == 0)
            node = None if right is None else nodes.get(right)

    def _grow(
        self,
        occurrences: list[Occurrence],
        max_nodes: int,
        max_depth: int,
        least_p: Sequence[float],
    ) -> None:
        """Best-first search from the root."""
        frontier: list[_Frontier] = []
        self._expand(0, 1.0, occurrences, [], frontier)
        while frontier and len(self.p_reached) < max_nodes and max_depth > 0:
            negative_p, _, parent, rank, occurrences, path = heappop(frontier)
            p_reached = -negative_p
            # Nodes that would pay if the first token were known to be right are grown as well.
            first = self.p_reached[0] if self.p_reached else 1.0
            if p_reached < max(_LEAST_P_REACHED, first * least_p[len(self.p_reached)]):
                break
            node = self.add(path[-1], parent, p_reached)
            self._children[parent][2][rank] = node
            if len(path) < max_depth:
                self._expand(node, p_reached, occurrences, path, frontier)
            else:
                self._children.append(([], [], {}))

    def _expand(
        self,
        node: int,
        p_reached: float,
        occurrences: list[Occurrence],
        path: list[int],
        frontier: list[_Frontier],
    ) -> None:
        """Rank a node's continuations and put them on the frontier."""
        text = self._index.tokens
        found = continuations(text, occurrences, path, self._stored)
        estimates: list[Estimate] = []
        if found:
            estimates = self._acceptance.estimate(
                found, len(text), len(path), self.tokens[node], self._most_children
            )
        for rank, estimate in enumerate(estimates):
            token, _, _, going_on = found[rank]
            p_child = p_reached * estimate.p_accept
            heappush(frontier, (-p_child, self._serial, node, rank, going_on, [*path, token]))
            self._serial += 1
            p_reached *= 1 - estimate.p_accept
        tokens = [continuation.token for continuation in found[: self._most_children]]
        self._children.append((tokens, estimates, {}))
