"""What other programs draft, for comparison in replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ..draft.drafter import Drafter, VerifiedStep
from ..draft.prompt_lookup import NgramIndex, PromptLookupDrafter
from ..draft.tree import DraftTree


class FullDraftLookup(Drafter):
    """The earliest match that ``n_draft`` tokens follow, of the longest n-gram that has one.

    The rule of ``find_candidate_pred_tokens`` in apoorvumang/prompt-lookup-decoding and of
    Spec-Bench's PLD (n = 3 to 1, 10 tokens).
    """

    branching = False

    def __init__(self, n_draft: int = 10, ngram_max: int = 3) -> None:
        self._n_draft = n_draft
        self._ngram_max = ngram_max

    def begin(self, prompt: Sequence[int]) -> None:
        self._indices = [NgramIndex(n, n) for n in range(self._ngram_max, 0, -1)]
        self._extend(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        for index in self._indices:
            draft = index.continuation(self._n_draft)
            if len(draft) == self._n_draft:
                return DraftTree.chain(self._last, draft[:max_depth])
        return DraftTree.chain(self._last)

    def observe(self, step: VerifiedStep) -> None:
        self._extend(step.tokens)

    def end(self) -> None:
        del self._indices

    def _extend(self, tokens: Sequence[int]) -> None:
        for index in self._indices:
            index.extend(tokens)
        self._last = tokens[-1]


class NgramSimple(Drafter):
    """Drafts what followed the newest earlier occurrence of the last 12 tokens, up to 48.

    The rule of ``--spec-type ngram-simple`` (common/ngram-map.cpp) with llama.cpp's defaults:
    nothing is drafted when fewer tokens than the n-gram has could be.
    """

    branching = False

    def __init__(self, size_n: int = 12, size_m: int = 48) -> None:
        self._size_n = size_n
        self._size_m = size_m

    def begin(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
        # Per n-gram its last end, and where the end before that is. The very end is not a match.
        self._newest: dict[tuple[int, ...], int] = {}
        self._extend(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        root = self._text[-1]
        after, length = self._match, len(self._text)
        if after is None or length <= self._size_n + self._size_m + 1:
            return DraftTree.chain(root)
        draft = self._text[after : after + self._size_m]
        return DraftTree.chain(root, draft[:max_depth] if len(draft) >= self._size_n else ())

    def observe(self, step: VerifiedStep) -> None:
        self._extend(step.tokens)

    def end(self) -> None:
        del self._text, self._newest

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
            key = tuple(self._text[-self._size_n :])
            self._match = self._newest.get(key)
            # llama.cpp never looks at the text's very first position.
            if len(self._text) > self._size_n:
                self._newest[key] = len(self._text)


class _Draft(NamedTuple):
    score: float
    tokens: list[int]
    parents: list[int]


class SuffixDecoding(Drafter):
    """The most frequent continuation of some suffix of the text, over prompt and output.

    Each match length gives a draft of at most ``max_spec_factor`` times as many tokens; a
    token's probability is the share of the match's occurrences that it continues; the draft
    with the greatest sum of probabilities is taken. (Oliaro et al. 2024, arXiv 2411.04975,
    with the rules and defaults of Snowflake's ArcticInference: ``SuffixTree::speculate``. The
    text's own end counts as an occurrence there, and so it does here. Its global tree of
    earlier requests is left out.)

    Args:
        tree: draft the most probable nodes of the tree rather than one path.
        max_spec_factor: draft tokens per matched token.
        min_token_prob: the least probable token that is drafted.
        max_depth: matched and drafted tokens together.
    """

    def __init__(
        self,
        tree: bool = False,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_depth: int = 64,
    ) -> None:
        self.branching = tree
        self._factor = max_spec_factor
        self._least = min_token_prob
        self._max_depth = max_depth

    def begin(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
        self._ends: dict[int, list[int]] = {}  # per token, the positions after it
        self._extend(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        best = _Draft(0.0, [], [])
        for positions, most in self._matches():
            grow = self._tree if self.branching else self._path
            draft = grow(positions, min(most, max_depth))
            if draft.score >= best.score:
                best = draft
        root = self._text[-1]
        return DraftTree((root, *best.tokens), (-1, *(parent + 1 for parent in best.parents)))

    def observe(self, step: VerifiedStep) -> None:
        self._extend(step.tokens)

    def end(self) -> None:
        del self._text, self._ends

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
            self._ends.setdefault(token, []).append(len(self._text))

    def _matches(self) -> list[tuple[list[int], int]]:
        """The different sets of occurrences, shortest match first, and their longest drafts.

        Match lengths with the same occurrences differ in their longest draft alone.
        """
        text, end = self._text, len(self._text)
        matches: list[tuple[list[int], int]] = []
        positions = self._ends[text[-1]]
        for length in range(1, min(end, self._max_depth)):
            if length > 1:
                token = text[end - length]
                longer = [p for p in positions if p >= length and text[p - length] == token]
            else:
                longer = positions
            if len(longer) < 2:  # the text's end alone
                break
            most = min(int(length * self._factor + 1e-6), self._max_depth - length)
            if matches and len(longer) == len(positions):
                most = max(most, matches.pop()[1])
            matches.append((longer, most))
            positions = longer
        return matches

    def _continued(self, positions: list[int], depth: int) -> dict[int, list[int]]:
        """Occurrences by the token that follows at a depth; those at the text's end drop out."""
        groups: dict[int, list[int]] = {}
        for position in positions:
            if position + depth < len(self._text):
                groups.setdefault(self._text[position + depth], []).append(position)
        return groups

    def _path(self, positions: list[int], most: int) -> _Draft:
        score, probability, tokens = 0.0, 1.0, list[int]()
        while len(tokens) < most:
            groups = self._continued(positions, len(tokens))
            if not groups:
                break
            token = max(groups, key=lambda token: len(groups[token]))
            probability *= len(groups[token]) / len(positions)
            if probability < self._least:
                break
            positions = groups[token]
            tokens.append(token)
            score += probability
        return _Draft(score, tokens, list(range(-1, len(tokens) - 1)))

    def _tree(self, positions: list[int], most: int) -> _Draft:
        draft = _Draft(0.0, [], [])
        score, serial = 0.0, 0
        # Negative probability, serial number, parent, depth, token, occurrences.
        frontier: list[tuple[float, int, int, int, int, list[int]]] = []
        parent, depth, probability = -1, 0, 1.0
        while True:
            for token, group in self._continued(positions, depth).items():
                share = probability * len(group) / len(positions)
                if share >= self._least:
                    serial += 1
                    heappush(frontier, (-share, serial, parent, depth + 1, token, group))
            if not frontier or len(draft.tokens) >= most:
                return draft._replace(score=score)
            negative, _, parent_of, depth, token, positions = heappop(frontier)
            probability = -negative
            parent = len(draft.tokens)
            draft.tokens.append(token)
            draft.parents.append(parent_of)
            score += probability


_Tokens = tuple[int, ...]


class TensorRTPool(Drafter):
    """A pool from n-grams to the drafts that followed them.

    The rules of ``NGramPoolManager`` and of ``PLDPool`` in TensorRT-LLM's
    examples/prompt_lookup: every n-gram with what followed it is put in the pool, the newest
    part of the context again at each step, since more follows there now; a draft that is
    shorter than allowed is replaced rather than kept beside the next one.

    Args:
        n_draft: how many tokens to draft at most.
        ngram_max: the longest n-gram.
        is_keep_all: keep all the drafts of an n-gram, not the newest alone.
        is_use_oldest: propose the oldest draft kept, not the newest.
    """

    branching = False

    def __init__(
        self,
        n_draft: int = 10,
        ngram_max: int = 2,
        is_keep_all: bool = True,
        is_use_oldest: bool = True,
    ) -> None:
        self._n_draft = n_draft
        self._sizes = range(ngram_max, 0, -1)
        self._keep_all = is_keep_all
        self._choice = 0 if is_use_oldest else -1

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._pool: dict[_Tokens, list[_Tokens]] = {}
        self._start = 0

    def propose(self, max_depth: int) -> DraftTree:
        self._enter(self._text[self._start :])
        self._start = max(0, len(self._text) - (self._n_draft + self._sizes.start - 1))
        for size in self._sizes:
            drafts = self._pool.get(tuple(self._text[-size:]))
            if drafts and size < len(self._text):
                return DraftTree.chain(self._text[-1], drafts[self._choice][:max_depth])
        return DraftTree.chain(self._text[-1])

    def observe(self, step: VerifiedStep) -> None:
        self._text.extend(step.tokens)

    def end(self) -> None:
        del self._text, self._pool

    def _enter(self, tokens: list[int]) -> None:
        for size in self._sizes:
            for left in range(len(tokens) - size):
                right = left + size
                key, draft = tuple(tokens[left:right]), tuple(tokens[right : right + self._n_draft])
                drafts = self._pool.get(key)
                if drafts is None or not self._keep_all or len(drafts[0]) < self._n_draft:
                    self._pool[key] = [draft]
                elif draft not in drafts:
                    drafts.append(draft)


POLICIES: dict[str, Callable[[], Drafter]] = {
    # Spec-Bench's PLD, the yardstick of published figures.
    "prompt-lookup": FullDraftLookup,
    # transformers: generate(prompt_lookup_num_tokens=10), max_matching_ngram_size 2.
    "transformers": lambda: PromptLookupDrafter(n_draft=10, ngram_max=2),
    # vLLM: method "ngram", prompt_lookup_min = prompt_lookup_max = 5; the number of tokens
    # has no default there, 5 is that of its documentation.
    "vllm": lambda: PromptLookupDrafter(n_draft=5, ngram_max=5, ngram_min=5),
    # TensorRT-LLM: prompt_lookup_config [10,2], is_keep_all and is_use_oldest.
    "tensorrt-llm": TensorRTPool,
    "llama.cpp": NgramSimple,
    "suffix-path": SuffixDecoding,
    "suffix-tree": lambda: SuffixDecoding(tree=True, max_spec_factor=4.0),
}
"""Makers of fresh drafters. None knows what a step costs on the machine at hand."""
