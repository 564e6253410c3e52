"""Suffix decoding: drafts by the frequencies of what followed the text's end before."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ..drafting import DraftTree, VerifiedStep


class _Draft(NamedTuple):
    score: float
    tokens: list[int]
    parents: list[int]


class SuffixDecoding:
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

    pipelined = False

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

    def propose(self, budget: int) -> DraftTree:
        best = _Draft(0.0, [], [])
        for positions, most in self._matches():
            grow = self._tree if self.branching else self._path
            draft = grow(positions, min(most, budget))
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
