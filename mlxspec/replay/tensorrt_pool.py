"""TensorRT-LLM's n-gram pool for prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence

from ..drafting import DraftTree, VerifiedStep

_Tokens = tuple[int, ...]


class TensorRTPool:
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

    pipelined = False
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

    def propose(self, budget: int) -> DraftTree:
        self._enter(self._text[self._start :])
        self._start = max(0, len(self._text) - (self._n_draft + self._sizes.start - 1))
        for size in self._sizes:
            drafts = self._pool.get(tuple(self._text[-size:]))
            if drafts and size < len(self._text):
                return DraftTree.chain(self._text[-1], drafts[self._choice][:budget])
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
