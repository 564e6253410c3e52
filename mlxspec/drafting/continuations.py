"""What followed at the earlier occurrences of a text's end, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

from .suffix_index import SEPARATOR, Occurrence


class TextStore(Protocol):
    """Other texts to draft from, such as :class:`mlxspec.store.Store`."""

    @property
    def tokens(self) -> Sequence[int]:
        """All of them, a SEPARATOR behind each."""

    def occurrences(self, tail: Sequence[int], limit: int) -> list[Occurrence]:
        """Where ``tail`` stands in them, best first; positions are negative: from their end."""


class Continuation(NamedTuple):
    """A token that followed at one or more of the occurrences.

    Attributes:
        token: its id.
        length: the longest match among its occurrences, in tokens before the draft.
        newest: the last position among its occurrences.
        occurrences: those that go on with it, the longest match first.
    """

    token: int
    length: int
    newest: int
    occurrences: list[Occurrence]


def continuations(
    text: Sequence[int],
    occurrences: list[Occurrence],
    path: Sequence[int],
    stored: Sequence[int] = (),
) -> list[Continuation]:
    """Group occurrences by the token that follows a path drafted from them.

    Args:
        text: the indexed text.
        occurrences: those at which all of ``path`` follows, the longest match first.
        path: draft tokens behind the text's end.
        stored: the text of the occurrences whose positions are negative.

    Returns:
        the different next tokens, best first: by longest match, then number of occurrences,
        then recency. Where an occurrence has reached the text's end, the path itself goes on:
        so a loop is drafted to any length.
    """
    depth, end = len(path), len(text)
    groups: dict[int, list[Occurrence]] = {}
    for occurrence in occurrences:
        at = occurrence.position + depth
        source = text if occurrence.position >= 0 else stored
        token = source[at] if at < end else path[at - end]
        if token in groups:
            groups[token].append(occurrence)
        else:
            groups[token] = [occurrence]
    groups.pop(SEPARATOR, None)
    found = [
        Continuation(token, group[0].length, max(map(_POSITION, group)), group)
        for token, group in groups.items()
    ]
    if len(found) > 1:
        found.sort(key=_rank, reverse=True)
    return found


_POSITION = itemgetter(1)


def _rank(continuation: Continuation) -> tuple[int, int, int]:
    return continuation.length, len(continuation.occurrences), continuation.newest
