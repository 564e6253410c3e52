"""llama.cpp's ngram-simple: long copies after a long match."""

from __future__ import annotations

from collections.abc import Sequence

from ..drafting import DraftTree, VerifiedStep


class NgramSimple:
    """Drafts what followed the newest earlier occurrence of the last 12 tokens, up to 48.

    The rule of ``--spec-type ngram-simple`` (common/ngram-map.cpp) with llama.cpp's defaults:
    nothing is drafted when fewer tokens than the n-gram has could be.
    """

    pipelined = False
    branching = False

    def __init__(self, size_n: int = 12, size_m: int = 48) -> None:
        self._size_n = size_n
        self._size_m = size_m

    def begin(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
        # Per n-gram its last end, and where the end before that is. The very end is not a match.
        self._newest: dict[tuple[int, ...], int] = {}
        self._extend(prompt)

    def propose(self, budget: int) -> DraftTree:
        root = self._text[-1]
        after, length = self._match, len(self._text)
        if after is None or length <= self._size_n + self._size_m + 1:
            return DraftTree.chain(root)
        draft = self._text[after : after + self._size_m]
        return DraftTree.chain(root, draft[:budget] if len(draft) >= self._size_n else ())

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
