"""Prompt lookup: drafts of what followed the context's last n-gram where it first occurred."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from ..errors import OptionError
from .drafter import Drafter, DraftTree, VerifiedStep


class NgramIndex:
    """Maps every n-gram of a token sequence, n_min <= n <= n_max, to its earliest end.

    Adding a token costs one dictionary entry per n and a look-up one probe per n, whatever
    the length of the text; nothing is ever scanned.
    """

    def __init__(self, n_min: int, n_max: int) -> None:
        self.tokens: list[int] = []
        self._sizes = range(n_max, n_min - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text = self.tokens
        longest = self._sizes[0]
        for token in tokens:
            text.append(token)
            suffix = tuple(text[-longest:])
            for n in self._sizes:
                if n <= len(suffix):
                    self._ends.setdefault(suffix[-n:], len(text))

    def continuation(self, length: int) -> Sequence[int]:
        """What followed the first occurrence of the longest n-gram at the text's end.

        Returns:
            up to ``length`` tokens; none if no n-gram at the end has occurred before.
        """
        for n in self._sizes:
            end = self._ends.get(tuple(self.tokens[-n:]), len(self.tokens))
            # The n-gram at the very end is in the table too, and nothing follows it.
            if end < len(self.tokens):
                return self.tokens[end : end + length]
        return ()


_LONGEST_NGRAM = 64  # each length has an index, which takes time and memory


class PromptLookupDrafter(Drafter):
    """Drafts a chain by looking the context's last tokens up in the context itself.

    For n from ``ngram_max`` down to ``ngram_min``, the last n tokens of prompt and output are
    looked up in what precedes them; the tokens after the earliest occurrence of the
    longest match are the draft. (Apoorv Saxena, "Prompt Lookup Decoding", 2023; the earliest
    match is the one that transformers takes too.)

    Args:
        n_draft: how many tokens to draft at most.
        ngram_max: the longest n-gram looked up, at most 64.
        ngram_min: the shortest.

    Raises:
        OptionError: a number is out of range, or ``ngram_min`` exceeds ``ngram_max``.
    """

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

    def propose(self, max_depth: int) -> DraftTree:
        draft = self._index.continuation(min(max_depth, self.n_draft))
        return DraftTree.chain(self._index.tokens[-1], draft, "lookup")

    def observe(self, step: VerifiedStep) -> None:
        self._index.extend(step.tokens)

    def end(self) -> None:
        del self._index


def parse_lookup_config(config: str | Sequence[object]) -> tuple[int, int, str | None]:
    """Read TensorRT-LLM's ``prompt_lookup_config``: ``"[10,2,[0]]"``, or the list itself.

    Args:
        config: draft tokens, longest n-gram, and optionally a list of devices.

    Returns:
        the number of draft tokens, the longest n-gram, and a note for the user when a device
        list was ignored.

    Raises:
        OptionError: it has another form.
    """
    try:
        values = json.loads(config) if isinstance(config, str) else list(config)
        n_draft, ngram_max, *devices = values
        if not _is_count(n_draft) or not _is_count(ngram_max) or len(devices) > 1:
            raise ValueError
    except (TypeError, ValueError, RecursionError):
        raise OptionError(
            f"prompt_lookup_config is {config!r}: write it as [draft tokens, longest n-gram], "
            "for example [10,2]"
        ) from None
    note = None
    if devices:
        note = f"prompt_lookup_config: the device list {devices[0]} is ignored, MLX has one device"
    return n_draft, ngram_max, note


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
