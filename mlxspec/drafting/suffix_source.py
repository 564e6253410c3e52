"""Drafts from text that repeats: what followed where the text's end occurred before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..corpus.suffix_index import (
    EXCERPT_TOKENS,
    MAX_LENGTH,
    SEPARATOR,
    ContextIndex,
    Continuation,
    Excerpts,
    Occurrence,
    SuffixIndex,
    continuations,
)
from .acceptance import AcceptanceModel, Estimate, Experience
from .combined import united
from .drafter import DraftTree, Limits, Source, TreeBuilder, VerifiedStep
from .policy import SHARE_OF_NOW

if TYPE_CHECKING:
    from ..corpus.memory import Memory
    from ..corpus.store import Store

CONTEXT = "context"
"""The origin of drafts from the context itself."""
OTHERS = "other"
"""Where accepted drafts came from that are not of a :class:`SuffixSource`."""

# Where these come from: notes/planner.md, "Constants".
_LESSONS = 8  # tokens of a step that are learned from: further ones of a copy add nothing
_CHILDREN = 6  # per node of a tree; more are never likely enough
_EARLIER_OCCURRENCES = 8  # that earlier texts are asked for
_LEAST_P_REACHED = 0.01  # nodes that are reached more rarely gain nothing on any machine

OnOutput = Callable[[Sequence[int], Mapping[str, int], Sequence[int]], None]
"""Called with an output, its figures as :attr:`SuffixSource.earned` has them, and its prompt."""


class Earlier:
    """Earlier texts that all generations of a decoder draft from.

    Args:
        name: the origin of their drafts.
        texts: where they are looked up.
        on_used: called with the one of ``Excerpts.sources`` that an accepted draft came from.

    Attributes:
        experience: what the generations so far have taught of them.
    """

    def __init__(
        self, name: str, texts: Memory | Store, on_used: Callable[[Any], None] | None = None
    ) -> None:
        self.name = name
        self.texts = texts
        self.on_used = on_used
        self.experience = Experience()


class SuffixSource(Source):
    """Drafts continuations of the earlier occurrences of the text's end.

    They are looked up in the context, and in earlier texts such as a memory of outputs or a store.
    How likely each of these is right is learned from every emitted token, drafted or not.

    Args:
        earlier: earlier texts to draft from.
        on_output: takes each output at its end, to be drafted from later.
        token_classes: see :func:`mlxspec.drafting.acceptance.token_classes`.
        context: the index of the conversation so far, which is extended; by default each
            generation has a new one.
        experience: what earlier generations have taught of contexts; this one adds to it.

    Attributes:
        earned: the generation's figures: its "steps" and "tokens", and how many accepted drafts
            came from the context, from each of the earlier texts, and from others.
    """

    def __init__(
        self,
        *,
        earlier: Sequence[Earlier] = (),
        on_output: OnOutput | None = None,
        token_classes: bytes = b"",
        context: ContextIndex | None = None,
        experience: Experience | None = None,
    ) -> None:
        self._on_output = on_output
        self._kept_context = context
        self._experience = experience or Experience()
        self._acceptance = AcceptanceModel(token_classes)
        self._earlier = [(one, AcceptanceModel(token_classes, earlier=True)) for one in earlier]

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation; a thread builds the index during the prefill."""
        self._context = self._kept_context or ContextIndex()
        self._context.begin(prompt)
        self._index: SuffixIndex | None = None
        self._trees: list[SuffixTree] = []
        self._acceptance.begin(self._experience.of_kind(prompt), self._context.output_start)
        for one, acceptance in self._earlier:
            acceptance.begin(one.experience.of_kind(prompt))
        self.earned: Counter[str] = Counter()

    def search(self, limits: Limits) -> DraftTree:
        index = self._text()
        evidence = [Evidence(CONTEXT, index.tokens, index.occurrences(), self._acceptance)]
        self._excerpts: dict[str, tuple[Earlier, Excerpts]] = {}
        tail = index.tokens[-MAX_LENGTH:] if self._earlier else ()
        depth = min(limits.max_depth, limits.nodes, EXCERPT_TOKENS)
        for one, acceptance in self._earlier:
            excerpts = one.texts.look_up(tail, _EARLIER_OCCURRENCES, depth)
            if excerpts.occurrences:
                self._excerpts[one.name] = one, excerpts
                evidence.append(
                    Evidence(one.name, excerpts.tokens, excerpts.occurrences, acceptance)
                )
        self._trees = [SuffixTree(index.tokens[-1], one, limits) for one in evidence]
        return united([tree.tree() for tree in self._trees], limits)

    def observe(self, step: VerifiedStep) -> None:
        self._count(step)
        for tree in self._trees:
            tree.learn(step.tokens)
        self._trees = []
        self._text().extend(step.tokens)

    def end(self) -> None:
        if self._on_output:
            self._on_output(self._context.output, self.earned, self._context.prompt)
        self._index = None

    def _text(self) -> SuffixIndex:
        if self._index is None:
            self._index = self._context.index
        return self._index

    def _count(self, step: VerifiedStep) -> None:
        """Count the step, and its accepted drafts by the first text that they came from."""
        self.earned["steps"] += 1
        self.earned["tokens"] += len(step.tokens)
        reached = [(tree, 0) for tree in self._trees]
        for accepted in step.accepted:
            token = step.tree.tokens[accepted]
            below = [(tree, tree.find(node, token)) for tree, node in reached]
            reached = [(tree, node) for tree, node in below if node]
            name = reached[0][0].evidence.name if reached else OTHERS
            self.earned[name] += 1
            if name in self._excerpts:
                earlier, excerpts = self._excerpts[name]
                if earlier.on_used:
                    tree, node = reached[0]
                    first = excerpts.occurrences.index(tree.firsts[node - 1])
                    earlier.on_used(excerpts.sources[first])


class Evidence(NamedTuple):
    """Where a text's end occurred before.

    Attributes:
        name: the origin of drafts.
        tokens: the text that was searched.
        occurrences: the longest match first.
        acceptance: estimates the probabilities of what followed.
    """

    name: str
    tokens: Sequence[int]
    occurrences: list[Occurrence]
    acceptance: AcceptanceModel


# Negative p_reached, serial number, parent, occurrences, path.
_Frontier = tuple[float, int, int, list[Occurrence], list[int]]
# The tokens that the text proposes as children of a node, and their estimates.
_Saying = tuple[Sequence[int], Sequence[Estimate]]


class SuffixTree(TreeBuilder):
    """A tree of continuations, grown best first.

    A child's probability is its parent's, times those of its better siblings being wrong, times
    its own. No child's exceeds its parent's, so any number of first nodes is a tree.

    It grows as long as the next node may belong to the best draft. The nodes so far bound the
    price of time from below: in a good copy that ends the growth early.

    Args:
        root: the current token.
        evidence: where it occurred before.
        limits: of the tree.
    """

    def __init__(self, root: int, evidence: Evidence, limits: Limits) -> None:
        super().__init__(root)
        self.evidence = evidence
        self._max_nodes, self._max_depth = limits.nodes, limits.max_depth
        self._least_p, self._costs = limits.least_p, limits.costs
        self._most_children = _CHILDREN if limits.branching else 1
        self._expected = self._best_rate = self._price = 1.0
        self._sayings: list[_Saying | None] = []  # per node, what was said of its children
        self.firsts: list[Occurrence] = []  # per node but the root, the best occurrence
        self._frontier: list[_Frontier] = []
        self._serial = 0  # decides between equals: the older entry comes first
        self._grow()

    def learn(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that followed, whether they had been verified as drafts or not."""
        node: int | None = 0
        for token in emitted[:_LESSONS]:
            if node is None:
                return
            if said := self._sayings[node]:
                tokens, estimates = said
                right = tokens.index(token) if token in tokens else None
                self.evidence.acceptance.learn(estimates, right)
            node = self.find(node, token)

    def _grow(self) -> None:
        """Best-first search from the root."""
        self._expand(0, 1.0, self.evidence.occurrences, [])
        while self._frontier and self._max_depth > 0:
            negative_p, _, parent, occurrences, path = heappop(self._frontier)
            if not self._is_wanted(-negative_p):
                break
            node = self._append(path[-1], parent, -negative_p, occurrences[0])
            self._follow(node, -negative_p, occurrences, path)

    def _push(
        self, p_reached: float, parent: int, occurrences: list[Occurrence], path: list[int]
    ) -> None:
        heappush(self._frontier, (-p_reached, self._serial, parent, occurrences, path))
        self._serial += 1

    def _is_wanted(self, p_reached: float) -> bool:
        """Whether to grow a node that is reached with this probability, the best one left."""
        return len(self.p_reached) < self._max_nodes and p_reached >= self._least_wanted()

    def _least_wanted(self) -> float:
        """The probability below which no further node is wanted."""
        return max(_LEAST_P_REACHED, self._least_p[len(self.p_reached)] * self._price)

    def _append(self, token: int, parent: int, p_reached: float, occurrence: Occurrence) -> int:
        """Add a node that the text proposes."""
        node = self.child(parent, token, p_reached, self.evidence.name)
        self.firsts.append(occurrence)
        self._expected += p_reached
        rows = node + 1
        if rows < len(self._costs) and self._expected > self._best_rate * self._costs[rows]:
            self._best_rate = self._expected / self._costs[rows]
            self._price = self._best_rate**SHARE_OF_NOW
        return node

    def _follow(
        self, node: int, p_reached: float, occurrences: list[Occurrence], path: list[int]
    ) -> None:
        """Grow what follows a node, while that is one token, and the likeliest.

        Most of a long copy is such a path. The result is the same as with the frontier and
        :meth:`_expand`.
        """
        length, position = occurrences[0]
        others = [position for _, position in occurrences[1:]]
        _, tokens, _, acceptance = self.evidence
        end = len(tokens)
        together = Continuation(path[-1], length, max(map(_POSITION, occurrences)), occurrences)
        estimate = acceptance.along([together], 0, len(occurrences), end)
        likeliest_other = -self._frontier[0][0] if self._frontier else 0.0
        while (depth := len(path)) < self._max_depth:
            at = position + depth
            token = tokens[at] if at < end else path[at - end]
            for other in others:
                at = other + depth
                if token != (tokens[at] if at < end else path[at - end]):
                    self._expand(node, p_reached, occurrences, path)
                    return
            if token == SEPARATOR:
                break
            estimated = estimate(token, depth, path[-1])
            self._sayings.append(((token,), (estimated,)))
            p_reached *= estimated[0]
            path.append(token)
            if p_reached <= likeliest_other or not self._is_wanted(p_reached):
                self._push(p_reached, node, occurrences, path)
                return
            node = self._append(token, node, p_reached, occurrences[0])
        self._sayings.append(None)  # nothing follows

    def _expand(
        self, node: int, p_node: float, occurrences: list[Occurrence], path: list[int]
    ) -> None:
        """Rank a node's continuations and put them on the frontier."""
        _, text, _, acceptance = self.evidence
        found = continuations(text, occurrences, path)
        if not found:
            self._sayings.append(None)
            return
        # Of the current token all are worth learning from.
        least_left = self._least_wanted() / p_node if node else 0.0
        estimates = acceptance.estimate(
            found, len(text), len(path), self.tokens[node], self._most_children, least_left
        )
        self._sayings.append(([one.token for one in found[: len(estimates)]], estimates))
        left = p_node  # the probability that no child so far is right
        for (token, _, _, followed), (p_accept, _, _) in zip(found, estimates, strict=False):
            self._push(left * p_accept, node, followed, [*path, token])
            left *= 1 - p_accept


_POSITION = itemgetter(1)
