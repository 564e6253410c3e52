"""Reads a text that arrives in segments.

A parser is a generator that yields where it needs more of the text. What it finds depends on the
text alone, not on how the text is cut, and no part of the text is searched twice.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""A generator that waits for more text where it yields, and returns what it has read."""


class Unexpected(Exception):
    """The text is not in the expected format."""


class Unfinished(Unexpected):
    """The text has ended too early."""


class TextReader:
    """A text, of which more arrives, and a position in it.

    Attributes:
        text: the text from some point before the position.
        at: the position in ``text``.
        ended: whether nothing more arrives.
        cut: whether something other than the text's author ended it.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = self.cut = False

    def drop(self) -> None:
        """Forget the text before the position."""
        self.text, self.at = self.text[self.at :], 0

    def refused(self) -> Unexpected:
        """The exception for what comes next, if nothing can make sense of it."""
        return Unfinished() if self.ended and self.at >= len(self.text) else Unexpected()

    def peek(self, count: int = 1) -> Reading[str]:
        """The next characters, fewer at the end of the text. The position stays."""
        while len(self.text) < self.at + count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def space(self) -> Reading[str]:
        """Read the white space that comes next, if any."""
        start = self.at
        while (yield from self.peek()).isspace():
            self.at += 1
        return self.text[start : self.at]

    def one_of(self, *options: str) -> Reading[str]:
        """Read the longest of some options that comes next.

        Args:
            options: the options; an empty one stands for the end of a text that was not cut.

        Raises:
            Unexpected: none of them comes next.
        """
        option = yield from self._next_of(options)
        if option is None:
            raise Unexpected
        self.at += len(option)
        return option

    def maybe(self, *options: str) -> Reading[str]:
        """Read the longest of some options that comes next; an empty string if none does."""
        try:
            return (yield from self.one_of(*options))
        except Unexpected:
            return ""

    def _next_of(self, options: tuple[str, ...]) -> Reading[str | None]:
        longest = max(map(len, options), default=0)
        while True:
            rest = self.text[self.at : self.at + longest]
            grows = any(len(rest) < len(option) and option.startswith(rest) for option in options)
            if not grows or self.ended:
                break
            yield
        matches = [option for option in options if option and rest.startswith(option)]
        if matches:
            return max(matches, key=len)
        if not rest and "" in options and not self.cut:
            return ""
        if grows:
            raise Unfinished
        return None

    def run(self, characters: re.Pattern[str]) -> Reading[str]:
        """Read as many characters of a kind as there are."""
        start = self.at
        while character := (yield from self.peek()):
            if not characters.match(character):
                break
            self.at += 1
        return self.text[start : self.at]

    def find(self, *markers: str, limit: int | None = None) -> Reading[tuple[str, str]]:
        """Read up to and past the first of some markers.

        Args:
            markers: none of them is the beginning of another.
            limit: how many characters may come before it.

        Returns:
            the text before the marker, and the marker.

        Raises:
            Unexpected: there is too much text before the marker, or it does not come.
        """
        pattern, longest = any_of(markers), max(map(len, markers))
        start = look = self.at
        while not (match := pattern.search(self.text, look)):
            look = max(start, len(self.text) - longest + 1)
            if limit is not None and look - start > limit:
                raise Unexpected
            if self.ended:
                raise Unfinished
            yield
        if limit is not None and match.start() - start > limit:
            raise Unexpected
        self.at = match.end()
        return self.text[start : match.start()], match[0]

    def enclosed(self, close: str, *followers: str) -> Reading[str]:
        """Read up to and past a closing marker.

        Args:
            close: the marker. The text may contain it, too.
            followers: what may come after the marker, and white space after it.

        Raises:
            Unfinished: the marker does not come.
        """
        start = self.at
        while True:
            yield from self.find(close)
            end = self.at
            yield from self.space()
            try:
                follows = (yield from self._next_of(followers)) is not None
            except Unfinished:
                follows = True
            self.at = end
            if follows:
                return self.text[start : end - len(close)]


@lru_cache
def any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that finds the first of some texts."""
    return re.compile("|".join(map(re.escape, markers)))
