"""Drafts from repeated text: the tokens after earlier occurrences of the text's end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from heapq import heappop, heappush
from itertools import count

from ..corpus.answer_index import LEADING_TOKENS, AnswerIndex
from ..corpus.suffix_index import (
    EXCERPT_TOKENS,
    MAX_LENGTH,
    Continuation,
    Excerpts,
    Occurrence,
    SuffixIndex,
    continuations,
    excerpts,
)
from .acceptance import AcceptanceModel, Estimate, TokenClasses
from .drafter import Drafter, DraftTree, Limits, TreeBuilder, VerifiedStep, united
from .learned import Experience

CONTEXT = "context"
"""The origin of drafts from the context itself."""
MEMORY, PREDICTION = "memory", "prediction"
"""The origins of drafts from other texts."""
OTHERS = "other"
"""The origin under which drafts of other drafters are counted."""

# Where these come from: notes/planner.md, "Constants".
_LESSONS = 8  # tokens of a step to learn from; in a copy, more tokens teach nothing new
_CHILDREN = 6  # the most children of a node; further ones are never likely enough
_EARLIER_OCCURRENCES = 8  # the most occurrences to request from each earlier text
_LEAST_P_REACHED = 0.01  # less likely nodes do not pay on any machine


class SuffixSource(Drafter):
    """Drafts the continuations of earlier occurrences of the text's end.

    The text's end is looked up in the context and in other texts: a memory of outputs, and the text
    that the output is expected to follow. The probabilities of continuations are learned from every
    emitted token, whether or not it was drafted.

    Args:
        token_classes: see :class:`mlxspec.drafting.acceptance.TokenClasses`.
        experience: the experience of earlier generations, to which this one adds.
        memory: the memory of earlier outputs, to which this output is added when it ends.
        prediction: the text that the output is expected to follow.

    Attributes:
        earned: the generation's counts: "steps", "tokens", and the accepted draft tokens by origin.
    """

    spent = 0.0
    fault: Exception | None = None

    def __init__(
        self,
        token_classes: TokenClasses = b"",
        experience: Experience | None = None,
        *,
        memory: AnswerIndex | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        self._experience = experience or Experience()
        self._memory, self._prediction = memory, prediction
        self._token_classes = token_classes
        self._acceptance = AcceptanceModel(token_classes)

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation; a thread builds the index during the prefill."""
        executor = ThreadPoolExecutor(max_workers=1)
        self._building = executor.submit(SuffixIndex, prompt)
        executor.shutdown(wait=False)
        self._prompt = prompt
        self._trees: list[SuffixTree] = []
        self._acceptance.begin(self._experience.of_kind(prompt), len(prompt))
        self._others: dict[str, tuple[Callable[..., Excerpts], AcceptanceModel]] = {}
        if self._memory:
            acceptance = AcceptanceModel(self._token_classes, earlier=True)
            acceptance.begin([self._experience.of_memory])
            self._others[MEMORY] = self._memory.look_up, acceptance
        if self._prediction:
            # The text begins with the prompt's end. So looking this up finds the prediction's
            # beginning.
            text = SuffixIndex([*prompt[-LEADING_TOKENS:], *self._prediction])
            look_up = partial(excerpts, [text], vocab_size=sys.maxsize)
            acceptance = AcceptanceModel(self._token_classes, earlier=True)
            self._others[PREDICTION] = look_up, acceptance
        self.earned: Counter[str] = Counter()

    def search(self, limits: Limits) -> DraftTree:
        """The tokens that may follow the current one, the likeliest first, with ``p_reached``."""
        index = self._building.result()
        last, tail = index.tokens[-1], index.tokens[-MAX_LENGTH:] if self._others else ()
        depth = min(limits.max_depth, limits.nodes, EXCERPT_TOKENS)
        found = index.occurrences()
        self._trees = [SuffixTree(last, CONTEXT, index.tokens, found, self._acceptance, limits)]
        for name, (look_up, acceptance) in self._others.items():
            tokens, occurrences = look_up(tail, _EARLIER_OCCURRENCES, depth)
            if occurrences:
                tree = SuffixTree(last, name, tokens, occurrences, acceptance, limits)
                self._trees.append(tree)
        return united([tree.tree() for tree in self._trees], limits)

    def observe(self, step: VerifiedStep) -> None:
        self.earned["steps"] += 1
        self.earned["tokens"] += len(step.tokens)
        origins = step.tree.node_origins
        for node in step.accepted:
            own = origins[node] in (CONTEXT, *self._others)
            self.earned[origins[node] if own else OTHERS] += 1
        for tree in self._trees:
            tree.learn(step.tokens)
        self._trees = []
        self._building.result().extend(step.tokens)

    def end(self) -> None:
        if self._memory:
            output = self._building.result().tokens[len(self._prompt) :]
            self._memory.add(output, self.earned, self._prompt)
        del self._building


class SuffixTree(TreeBuilder):
    """A tree of continuations, grown best first.

    A node's probability is the product of its parent's probability, the probability that its better
    siblings are wrong, and its own p_accept. It never exceeds its parent's, so for any n the first
    n nodes form a tree.

    The tree grows as long as the next node may belong to the best draft.

    Args:
        root: the current token.
        name: the origin of the nodes.
        text: the text that was searched.
        occurrences: the places in the text where the context's end occurs, the longest match first.
        acceptance: estimates the probabilities of continuations.
        limits: the limits of the tree.
    """

    def __init__(
        self,
        root: int,
        name: str,
        text: Sequence[int],
        occurrences: list[Occurrence],
        acceptance: AcceptanceModel,
        limits: Limits,
    ) -> None:
        super().__init__(root)
        self.name, self._text, self._acceptance = name, text, acceptance
        self._limits = limits
        # For each node, the tokens that follow it in the text, and their estimates.
        self._proposals: list[tuple[list[int], list[Estimate]]] = []
        # An entry is: the negative p_reached, a serial number, the parent, occurrences, the path.
        self._frontier: list[tuple[float, int, int, list[Occurrence], list[int]]] = []
        self._serial = count()  # breaks ties: the older entry comes first
        self._grow(occurrences)

    def learn(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that followed, whether or not they were drafted."""
        node: int | None = 0
        for token in emitted[:_LESSONS]:
            if node is None:
                return
            tokens, estimates = self._proposals[node]
            if tokens:
                right = tokens.index(token) if token in tokens else None
                self._acceptance.learn(estimates, right)
            node = self.find(node, token)

    def _grow(self, occurrences: list[Occurrence]) -> None:
        """Grow the tree from the root, the likeliest nodes first."""
        self._expand(0, 1.0, occurrences, [])
        while self._frontier and len(self.p_reached) < self._limits.nodes:
            negative_p, _, parent, occurrences, path = heappop(self._frontier)
            if -negative_p < max(_LEAST_P_REACHED, self._limits.least_p[len(self.p_reached)]):
                return
            node = self.child(parent, path[-1], -negative_p, self.name)
            self._expand(node, -negative_p, occurrences, path)

    def _expand(
        self, node: int, p_node: float, occurrences: list[Occurrence], path: list[int]
    ) -> None:
        """Rank a node's continuations and add them to the frontier."""
        limits, found = self._limits, list[Continuation]()
        if len(path) < limits.max_depth:
            found = continuations(self._text, occurrences, path)
        most = _CHILDREN if limits.branching else 1
        estimates = self._acceptance.estimate(
            found, len(self._text), len(path), self.tokens[node], most
        )
        self._proposals.append(([one.token for one in found[: len(estimates)]], estimates))
        left = p_node  # the probability that no child so far is right
        for (token, _, _, followed), (p_accept, _, _) in zip(found, estimates, strict=False):
            entry = -left * p_accept, next(self._serial), node, followed, [*path, token]
            heappush(self._frontier, entry)
            left *= 1 - p_accept
