"""Where an n-gram first stood in a growing text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Token ids are packed into one integer per n-gram; no vocabulary has 2**24 tokens.
_TOKEN_BITS = 24


class NgramIndex:
    """Maps every n-gram of a token sequence, n_min <= n <= n_max, to its earliest end.

    Adding a token costs one dictionary entry per n and a look-up one probe per n, whatever
    the length of the text; nothing is ever scanned.
    """

    def __init__(self, n_min: int, n_max: int) -> None:
        self.tokens: list[int] = []
        self._sizes = tuple(range(n_max, n_min - 1, -1))
        self._masks = {n: (1 << n * _TOKEN_BITS) - 1 for n in self._sizes}
        self._ends: dict[int, dict[int, int]] = {n: {} for n in self._sizes}
        self._suffix = 0  # the last n_max tokens, packed

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens (ids >= 0) to the text."""
        suffix, longest = self._suffix, self._masks[self._sizes[0]]
        text = self.tokens
        tables = [(n, self._masks[n], self._ends[n]) for n in self._sizes]
        for token in tokens:
            text.append(token)
            suffix = (suffix << _TOKEN_BITS | token) & longest
            end = len(text)
            for n, mask, ends in tables:
                if n <= end:
                    ends.setdefault(suffix & mask, end)
        self._suffix = suffix

    def continuation(self, length: int) -> Sequence[int]:
        """What followed the earliest earlier occurrence of the longest n-gram that ends the text.

        Returns:
            up to ``length`` tokens; none if no n-gram at the end has occurred before.
        """
        for n in self._sizes:
            end = self._ends[n].get(self._suffix & self._masks[n])
            # The n-gram at the very end has been entered too: there it continues with nothing.
            if end is not None and end < len(self.tokens) >= n:
                return self.tokens[end : end + length]
        return ()
