"""Lookahead decoding's pool: n-grams by their first token, the newest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

MOST_GUESSES = 64
"""That a first token keeps where no number is asked for. After a token of a text of few symbols
there may be thousands; to verify them all would take longer than any could save."""


class NgramPool:
    """Keeps what has followed each token; adding an n-gram and recalling one are O(1).

    Args:
        ngram_size: N, the length of the n-grams that are read from a text.
        guess_set_size: G, how many n-grams a first token keeps; the least recently added goes
            first. -1 keeps :data:`MOST_GUESSES`.
    """

    def __init__(self, ngram_size: int, guess_set_size: int) -> None:
        self._guess_set_size = MOST_GUESSES if guess_set_size == -1 else guess_set_size
        self._end: deque[int] = deque(maxlen=ngram_size)  # of the text
        # Per first token, the rest of its n-grams and whether a text held them. A dictionary
        # keeps the order of insertion, so an n-gram that is entered anew is the newest.
        self._tails: dict[int, dict[tuple[int, ...], bool]] = {}

    def read(self, tokens: Iterable[int]) -> None:
        """Continue the text by these tokens and enter the n-grams that they complete."""
        end = self._end
        for token in tokens:
            end.append(token)
            if len(end) == end.maxlen:
                first, *tail = end
                self._enter(first, tuple(tail), of_text=True)

    def add(self, ngram: Iterable[int]) -> None:
        """Enter an n-gram that stands in no text: one that the target has guessed itself."""
        first, *tail = ngram
        self._enter(first, tuple(tail), of_text=False)

    def guesses(self, first: int, limit: int | None = None) -> list[tuple[int, ...]]:
        """What has followed a token, newest first, ``limit`` guesses at most."""
        return list(islice(reversed(self._tails.get(first, {})), limit))

    def text_guesses(self, first: int) -> list[tuple[int, ...]]:
        """Those of the guesses that the pool would hold without :meth:`add`."""
        return [tail for tail, of_text in self._tails.get(first, {}).items() if of_text]

    def _enter(self, first: int, tail: tuple[int, ...], of_text: bool) -> None:
        tails = self._tails.setdefault(first, {})
        if tail in tails:
            of_text |= tails.pop(tail)
        elif len(tails) == self._guess_set_size:
            del tails[next(iter(tails))]
        tails[tail] = of_text
