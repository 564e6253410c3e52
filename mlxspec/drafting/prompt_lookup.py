"""Prompt lookup: drafts the continuation of an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OptionError, whole
from .accept import VerifiedStep
from .drafter import Drafter
from .tree import DraftTree

_LONGEST_NGRAM = 64  # every length needs an index, which takes time and memory


class PromptLookupDrafter(Drafter):
    """Drafts a chain by looking up the context's last tokens in the context itself.

    For n from ``ngram_max`` down to ``ngram_min``, the last n tokens of prompt and output are
    looked up in the text before them. The draft is the tokens after the earliest occurrence of the
    longest n-gram that is found. (Apoorv Saxena, "Prompt Lookup Decoding", 2023; transformers also
    takes the earliest match.)

    Args:
        n_draft: the most tokens to draft.
        ngram_max: the length of the longest n-gram to look up, at most 64.
        ngram_min: the length of the shortest n-gram.

    Raises:
        OptionError: a number is not whole or is out of range, or ``ngram_min`` exceeds
            ``ngram_max``.
    """

    branching = False

    def __init__(self, n_draft: int = 10, ngram_max: int = 3, ngram_min: int = 1) -> None:
        self.n_draft = whole("n_draft", n_draft)
        self.ngram_max = whole("ngram_max", ngram_max)
        self.ngram_min = whole("ngram_min", ngram_min)
        if n_draft < 1:
            raise OptionError(
                f"n_draft is {n_draft}: choose 1 or more (only decoders take 0, for no drafts)"
            )
        if not 1 <= ngram_min <= ngram_max <= _LONGEST_NGRAM:
            raise OptionError(
                f"ngram_min is {ngram_min}, and ngram_max is {ngram_max}: "
                f"choose 1 <= ngram_min <= ngram_max <= {_LONGEST_NGRAM}"
            )

    def begin(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
        # The end of each n-gram's earliest occurrence. A new token adds one entry for each n, so
        # the text need not be scanned.
        self._ends: dict[tuple[int, ...], int] = {}
        self._sizes = range(self.ngram_max, self.ngram_min - 1, -1)
        self.extend(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        text = self._text
        for n in self._sizes:
            end = self._ends.get(tuple(text[-n:]), len(text))
            # Nothing follows the n-gram at the text's end, which the table also has.
            if end < len(text):
                draft = text[end : end + min(max_depth, self.n_draft)]
                return DraftTree.chain(text[-1], draft, "lookup")
        return DraftTree.chain(text[-1])

    def observe(self, step: VerifiedStep) -> None:
        self.extend(step.tokens)

    def end(self) -> None:
        del self._text, self._ends

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._text.append(token)
            suffix = tuple(self._text[-self.ngram_max :])
            for n in self._sizes:
                if n <= len(suffix):
                    self._ends.setdefault(suffix[-n:], len(self._text))
