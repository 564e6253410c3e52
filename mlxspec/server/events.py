"""What happens to a generation, as the worker tells it and as answers are made of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One generated token of a choice.

    Attributes:
        index: of the choice.
        text: the next segment of text; may be empty, and hold text of earlier tokens.
        token: the token id.
        accepted: it was an accepted draft token.
        logprob: the token's, where log-probabilities were asked for.
        top: the likeliest tokens in its place and theirs, best first.
    """

    index: int
    text: str
    token: int
    accepted: bool = False
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Begun:
    """A choice's prompt has run, and its first token follows.

    Attributes:
        index: of the choice.
        prompt_tokens: tokens in its prompt.
        cached_tokens: those of them that were in a cache.
    """

    index: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Ended:
    """A choice has ended.

    Attributes:
        index: of the choice.
        finish_reason: "stop" or "length".
        prompt_tokens: tokens in its prompt.
        cached_tokens: those of them that were in a cache.
        completion_tokens: tokens generated, the one that ended the output included.
        drafted: draft tokens proposed.
        accepted: draft tokens accepted.
        stop: the stop string that ended it, if one did.
    """

    index: int
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    stop: str | None = None


Event = Begun | Piece | Ended
