"""Prompt lookup decoding: the draft is what followed the same n-gram earlier in the context."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OptionError
from .drafter import VerifiedStep
from .ngram_index import NgramIndex
from .tree import DraftTree

_LONGEST_NGRAM = 64  # each length is indexed, at a cost in time and memory


class PromptLookupDrafter:
    """Drafts a chain by looking the context's last tokens up in the context itself.

    For n from ``ngram_max`` down to ``ngram_min``, the last n tokens of prompt and output are
    looked up in what stands before them; the tokens after the earliest occurrence of the
    longest match are the draft. (Apoorv Saxena, "Prompt Lookup Decoding", 2023; the earliest
    match is the one that transformers takes too.)

    Args:
        n_draft: how many tokens to draft at most.
        ngram_max: the longest n-gram looked up, at most 64.
        ngram_min: the shortest.

    Raises:
        OptionError: a number is out of range, or ``ngram_min`` exceeds ``ngram_max``.
    """

    pipelined = False
    branching = False

    def __init__(self, n_draft: int = 10, ngram_max: int = 3, ngram_min: int = 1) -> None:
        if n_draft < 1:
            raise OptionError(f"n_draft is {n_draft}: draft at least 1 token")
        if not 1 <= ngram_min <= ngram_max <= _LONGEST_NGRAM:
            raise OptionError(
                f"ngram_min is {ngram_min} and ngram_max {ngram_max}: "
                f"choose 1 <= ngram_min <= ngram_max <= {_LONGEST_NGRAM}"
            )
        self.n_draft = n_draft
        self.ngram_max = ngram_max
        self.ngram_min = ngram_min

    def begin(self, prompt: Sequence[int]) -> None:
        self._index = NgramIndex(self.ngram_min, self.ngram_max)
        self._index.extend(prompt)

    def propose(self, budget: int) -> DraftTree:
        draft = self._index.continuation(min(budget, self.n_draft))
        self._drafted = len(draft)
        return DraftTree.chain(self._index.tokens[-1], draft)

    def origins(self) -> tuple[str, ...]:
        """Per node of the tree proposed last, where it came from."""
        return "root", *["lookup"] * self._drafted

    def observe(self, step: VerifiedStep) -> None:
        self._index.extend(step.tokens)

    def end(self) -> None:
        del self._index
