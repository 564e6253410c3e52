"""Prompt lookup as its author and Spec-Bench run it: only full drafts count."""

from __future__ import annotations

from collections.abc import Sequence

from ..drafting import DraftTree, VerifiedStep
from ..drafting.ngram_index import NgramIndex


class FullDraftLookup:
    """The earliest match that ``n_draft`` tokens follow, of the longest n-gram that has one.

    The rule of ``find_candidate_pred_tokens`` in apoorvumang/prompt-lookup-decoding and of
    Spec-Bench's PLD (n = 3 to 1, 10 tokens).
    """

    pipelined = False
    branching = False

    def __init__(self, n_draft: int = 10, ngram_max: int = 3) -> None:
        self._n_draft = n_draft
        self._ngram_max = ngram_max

    def begin(self, prompt: Sequence[int]) -> None:
        self._indices = [NgramIndex(n, n) for n in range(self._ngram_max, 0, -1)]
        self._extend(prompt)

    def propose(self, budget: int) -> DraftTree:
        for index in self._indices:
            draft = index.continuation(self._n_draft)
            if len(draft) == self._n_draft:
                return DraftTree.chain(self._last, draft[:budget])
        return DraftTree.chain(self._last)

    def observe(self, step: VerifiedStep) -> None:
        self._extend(step.tokens)

    def end(self) -> None:
        del self._indices

    def _extend(self, tokens: Sequence[int]) -> None:
        for index in self._indices:
            index.extend(tokens)
        self._last = tokens[-1]
