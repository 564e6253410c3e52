"""Drafts from repeated text: the tokens after earlier occurrences of the text's end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from ..corpus.answer_index import LEADING_TOKENS, AnswerIndex
from ..corpus.suffix_index import (
    EXCERPT_TOKENS,
    MAX_LENGTH,
    SEPARATOR,
    Continuation,
    Excerpts,
    Occurrence,
    SuffixIndex,
    continuations,
    excerpts,
)
from .accept import VerifiedStep
from .candidates import Source, SourceNode
from .experience import Experience
from .p_accept import AcceptanceModel, Estimate, TokenClasses

CONTEXT = "context"
"""The origin of drafts from the context itself."""
MEMORY, PREDICTION = "memory", "prediction"
"""The origins of drafts from other texts."""
OTHERS = "other"
"""The origin under which drafts of other drafters are counted."""

# Where these come from: notes/planner.md, "Constants".
_LESSONS = 8  # tokens of a step to learn from; in a copy, more tokens teach nothing new
_EARLIER_OCCURRENCES = 8  # the most occurrences to request from each earlier text


class SuffixSource(Source):
    """Drafts the continuations of earlier occurrences of the text's end.

    The text's end is looked up in the context and in other texts: a memory of outputs, and the text
    that the output is expected to follow. The probabilities of continuations are learned from every
    emitted token, whether or not it was drafted.

    Args:
        token_classes: see :class:`mlxspec.drafting.p_accept.TokenClasses`.
        experience: the experience of earlier generations, to which this one adds.
        memory: the memory of earlier outputs, to which this output is added when it ends.
        prediction: the text that the output is expected to follow.

    Attributes:
        earned: the generation's counts: "steps", "tokens", and the accepted draft tokens by origin.
    """

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
        self._roots: list[TextNode] = []
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

    def search(self, max_depth: int) -> Sequence[TextNode]:
        """The roots of the tokens that may follow the current one, one for each text."""
        index = self._building.result()
        last, tail = index.tokens[-1], index.tokens[-MAX_LENGTH:] if self._others else ()
        texts = [(Text(CONTEXT, index.tokens, self._acceptance), index.occurrences())]
        for name, (look_up, acceptance) in self._others.items():
            tokens, occurrences = look_up(
                tail, _EARLIER_OCCURRENCES, min(max_depth, EXCERPT_TOKENS)
            )
            texts.append((Text(name, tokens, acceptance), occurrences))
        self._roots = [TextNode(text, last, places) for text, places in texts if places]
        return self._roots

    def observe(self, step: VerifiedStep) -> None:
        self.earned["steps"] += 1
        self.earned["tokens"] += len(step.tokens)
        origins = step.tree.node_origins
        for node in step.accepted:
            is_ours = origins[node] in (CONTEXT, *self._others)
            self.earned[origins[node] if is_ours else OTHERS] += 1
        for root in self._roots:
            root.learn(step.tokens)
        self._roots = []
        self._building.result().extend(step.tokens)

    def end(self) -> None:
        if self._memory:
            output = self._building.result().tokens[len(self._prompt) :]
            self._memory.add(output, self.earned, self._prompt)
        del self._building


class Text(NamedTuple):
    """A text in which the context's end occurs.

    Attributes:
        name: the origin of drafts from it.
        tokens: its tokens.
        acceptance: estimates the probabilities of continuations.
    """

    name: str
    tokens: Sequence[int]
    acceptance: AcceptanceModel


class TextNode:
    """A node of the tree of a text's continuations.

    Args:
        token: the node's token.
        occurrences: the places in the text where the context's end and the path to this node occur,
            the longest match first.
        depth: the node's depth; 0 for the root, the current token.
        path: returns the tokens from the root's child to this node.
    """

    def __init__(
        self,
        text: Text,
        token: int,
        occurrences: list[Occurrence],
        depth: int = 0,
        path: Callable[[], list[int]] = list,
    ) -> None:
        self._text, self._token, self._occurrences = text, token, occurrences
        self._depth, self._path = depth, path
        self._limit = 0
        self._following: tuple[list[Continuation], list[Estimate]] = [], []

    @property
    def origin(self) -> str:
        return self._text.name

    def children(self, limit: int) -> list[tuple[int, float, SourceNode]]:
        """Like :meth:`mlxspec.drafting.candidates.SourceNode.children`.

        A child is right with its own p_accept, if none of the better children is.
        """
        text, self._limit = self._text, limit
        following = continuations(text.tokens, self._occurrences, self._depth, self._path)
        estimates = text.acceptance.estimate(
            following, len(text.tokens), self._depth, self._token, limit
        )
        self._following = following, estimates
        children: list[tuple[int, float, SourceNode]] = []
        left = 1.0  # the probability that no child so far is right
        for continuation, (p_accept, _, _) in zip(following, estimates, strict=False):
            run = TextRun(text, continuation, self._depth + 1, self._path)
            children.append((continuation.token, left * p_accept, run))
            left *= 1 - p_accept
        return children

    def learn(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that followed this root, whether or not they were drafted."""
        _, tokens, acceptance = self._text
        (following, estimates), lessons = self._following, []
        for depth, token in enumerate(emitted[:_LESSONS], start=1):
            if not following:
                break
            tried = [continuation.token for continuation in following[: self._limit]]
            right = tried.index(token) if token in tried else None
            lessons.append((estimates, right))
            if right is None or depth == min(len(emitted), _LESSONS):
                break
            following = continuations(tokens, following[right].occurrences, depth, lambda: emitted)
            estimates = acceptance.estimate(following, len(tokens), depth, token, self._limit)
        for estimates, right in lessons:
            acceptance.learn(estimates, right)


class TextRun:
    """The nodes after a continuation, one after the other, as long as its occurrences agree.

    It yields what :class:`TextNode` would, in a fraction of the time.

    Args:
        begin: the continuation whose token is the first node.
        depth: the depth of the first node.
        path: returns the tokens from the root's child to the first node's parent.
    """

    def __init__(
        self, text: Text, begin: Continuation, depth: int, path: Callable[[], list[int]]
    ) -> None:
        self._text, self._begin, self._depth, self._path = text, begin, depth, path
        self._tokens = [begin.token]
        self._end = len(text.tokens) - begin.newest  # from this depth on, the path is repeated
        self._p_accept: Callable[[int, int, int], float] | None = None  # until it is needed

    @property
    def origin(self) -> str:
        return self._text.name

    def children(self, limit: int) -> Sequence[tuple[int, float, SourceNode]]:
        """The next node, or those between which the occurrences differ."""
        depth, tokens = self._depth, self._text.tokens
        if self._p_accept is None:
            self._p_accept = self._text.acceptance.unanimous(self._begin, len(tokens))
            self._place, *self._others = [place for _, place in self._begin.occurrences]
        if depth < self._end:
            token = tokens[self._place + depth]
            agree = all(tokens[place + depth] == token for place in self._others)
            if agree and token != SEPARATOR:
                p_accept = self._p_accept(token, self._tokens[-1], depth)
                self._tokens.append(token)
                self._depth = depth + 1
                return ((token, p_accept, self),)
        last = self._tokens[-1]
        node = TextNode(self._text, last, self._begin.occurrences, depth, self._whole_path)
        return node.children(limit)

    def _whole_path(self) -> list[int]:
        return [*self._path(), *self._tokens]
