"""The caches that a request uses: new ones, or a caller's, the model's and a draft model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..engine.draft_model import DraftModelDrafter
from ..engine.prompt_cache import Loan
from ..engine.target import Target


class CacheLease:
    """A request's use of caches: new ones, which end with it. Subclasses lend others' caches.

    Attributes:
        keeps: whether somebody needs the caches after the request's end.
    """

    keeps = False

    def __init__(self, new_target: Callable[[], Target]) -> None:
        self._new_target = new_target

    def take(self, close: Callable[[], None]) -> tuple[Target, int]:
        """Begin: the target, and how many of the prompt's tokens its cache holds.

        Args:
            close: ends the request's use of the target, for an owner who gives the caches to
                somebody else before the request has ended.
        """
        return self._new_target(), 0

    def pause(self, context: Sequence[int]) -> None:
        """The consumer gets a response; ``context`` is the prompt and the output so far."""

    def resume(self) -> None:
        """The consumer asks for the next response."""

    def give_back(self, context: Sequence[int]) -> None:
        """The request has ended, in whatever way."""


class LentCaches(CacheLease):
    """A caller's caches, which hold what the caller has taken."""

    keeps = True

    def __init__(
        self, loan: Loan, prompt_tokens: int, continued: Callable[[Sequence[Any]], Target]
    ) -> None:
        self._loan = loan
        self._prompt_tokens = prompt_tokens
        self._continued = continued

    def take(self, close: Callable[[], None]) -> tuple[Target, int]:
        target = self._loan.take(self._continued)
        self._loan.end = close
        return target, 0

    def pause(self, context: Sequence[int]) -> None:
        self._loan.pause(context)

    def resume(self) -> None:
        self._loan.resume()

    def give_back(self, context: Sequence[int]) -> None:
        self._loan.give_back(context, complete=len(context) > self._prompt_tokens)


class DraftCaches(CacheLease):
    """A caller's caches for a draft model, which also hold what the caller has taken.

    Args:
        owner: of the target's caches.
        drafter: has the loan of the draft model's.
        prompt: token ids.
    """

    keeps = True

    def __init__(self, owner: CacheLease, drafter: DraftModelDrafter, prompt: list[int]) -> None:
        assert drafter.loan is not None
        self._owner = owner
        self._drafter = drafter
        self._loan = drafter.loan
        self._prompt = prompt

    def take(self, close: Callable[[], None]) -> tuple[Target, int]:
        taken = self._owner.take(close)
        self._loan.end = close
        return taken

    def pause(self, context: Sequence[int]) -> None:
        self._owner.pause(context)
        self._begin_unless_begun()
        self._loan.pause(context)

    def resume(self) -> None:
        self._owner.resume()
        self._loan.resume()

    def give_back(self, context: Sequence[int]) -> None:
        complete = len(context) > len(self._prompt)
        try:
            self._owner.give_back(context)
            if complete:
                self._begin_unless_begun()
        finally:
            self._loan.give_back(context, complete)

    def _begin_unless_begun(self) -> None:
        """Let the draft model's caches follow the output even where nothing was drafted."""
        if not self._drafter.begun:
            self._drafter.begin(self._prompt)
