"""Lookahead decoding: drafts from the target's own Jacobi iterations, and from n-grams seen."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import OptionError
from .drafter import VerifiedStep
from .jacobi_window import JacobiWindow
from .lookahead_tree import LookaheadTree
from .ngram_pool import NgramPool
from .tree import DraftTree

_LONGEST_NGRAM = 64  # as for prompt lookup
_LARGEST_WINDOW = 1024  # rows; far more than pay on any machine


def check_sizes(window_size: int, ngram_size: int, guess_set_size: int) -> None:
    """Refuse impossible W, N and G.

    Raises:
        OptionError: one of them is out of range.
    """
    if not isinstance(window_size, int) or window_size < 0:
        raise OptionError(f"window_size is {window_size!r}: choose 1 or more, or 0 for none")
    if ngram_size < 2:
        raise OptionError(f"ngram_size is {ngram_size}: an n-gram has at least 2 tokens")
    if ngram_size > _LONGEST_NGRAM:
        raise OptionError(f"ngram_size is {ngram_size}: choose {_LONGEST_NGRAM} at most")
    widest = _LARGEST_WINDOW // (ngram_size - 1)
    if window_size > widest:
        raise OptionError(
            f"window_size is {window_size}: with n-grams of {ngram_size} choose {widest} at most"
        )
    if guess_set_size < 1 and guess_set_size != -1:
        raise OptionError(f"guess_set_size is {guess_set_size}: choose 1 or more, or -1 for 64")


class LookaheadDrafter:
    """Drafts n-grams from a pool, which a window of guesses about the tokens ahead feeds.

    Each step verifies one tree: the pool's guesses about what follows the current token, and
    the window's rows, whose argmaxes give new n-grams. (Fu et al., "Break the Sequential
    Dependency of LLM Inference Using Lookahead Decoding", ICML 2024, arXiv 2402.02057.) The
    walk may accept along the window too. A step has up to ``(N - 1) * (W + G)`` rows.

    A target that verifies no branches gets the newest guess; the window stands still then.

    Args:
        window_size: W, the reference's WINDOW_SIZE: columns of the window, which may have
            1024 rows; 0 does without it.
        ngram_size: N, the reference's LEVEL: length of the n-grams, at most 64; the window has
            N - 1 levels and guesses have N - 1 tokens.
        guess_set_size: G, the reference's GUESS_SET_SIZE: n-grams that are kept, and verified
            in a step, for one first token; -1, the reference's "no limit", for 64, and None for
            as many as W.
        pool_from_prompt: the reference's POOL_FROM_PROMPT: whether the pool starts with the
            prompt's n-grams. Those of the output are entered in any case.

    Raises:
        OptionError: a size is out of range.
    """

    pipelined = False
    branching = True

    def __init__(
        self,
        window_size: int = 15,
        ngram_size: int = 5,
        guess_set_size: int | None = None,
        pool_from_prompt: bool = True,
    ) -> None:
        if guess_set_size is None:
            guess_set_size = window_size or 1
        check_sizes(window_size, ngram_size, guess_set_size)
        self.window_size = window_size
        self.ngram_size = ngram_size
        self.guess_set_size = guess_set_size
        self.pool_from_prompt = pool_from_prompt

    def begin(self, prompt: Sequence[int]) -> None:
        self._current = prompt[-1]
        self._pool = NgramPool(self.ngram_size, self.guess_set_size)
        # The output's first n-gram begins with the current token.
        self._pool.read(prompt if self.pool_from_prompt else prompt[-1:])
        self._window = (
            JacobiWindow(self.window_size, self.ngram_size, prompt) if self.window_size else None
        )

    def propose(self, budget: int) -> DraftTree:
        return self.propose_beside(1, budget, sys.maxsize)

    def propose_beside(self, rows: int, budget: int, max_rows: int) -> DraftTree:
        """Draft for a step that has ``rows`` rows already and may have ``max_rows``.

        Guesses come first, then as many columns of the window as there is room for.
        """
        self._tree = LookaheadTree(self._current)
        depth = min(budget, self.ngram_size - 1)
        limit = max(max_rows - rows, 0) // max(depth, 1)
        guesses = self._pool.guesses(self._current, limit)
        self._tree.add_guesses(guess[:depth] for guess in guesses)
        if self._window and self._window.depth <= budget:
            # The window's first row is the current token's, which is there in any case.
            left = max_rows - rows - self._tree.guess_nodes + 1
            columns = min(self._window.columns, left // len(self._window.levels))
            if columns > 0:
                self._tree.add_window(self._window.levels, columns)
        self._draft = self._tree.tree()
        return self._draft

    def observe(self, step: VerifiedStep) -> None:
        if self._window:
            self._advance(self._window, step)
        self._pool.read(step.tokens)
        self._current = step.tokens[-1]

    def end(self) -> None:
        del self._pool, self._window

    def origins(self) -> tuple[str, ...]:
        """Per node of the tree proposed last: "root", "guess" or "window"."""
        return self._tree.origins()

    def window_rows(self) -> dict[tuple[int, int], int]:
        """The node of each window row (level, column) in the tree proposed last."""
        return self._tree.window_rows()

    def _advance(self, window: JacobiWindow, step: VerifiedStep) -> None:
        rows = self._tree.rows
        if not rows or step.tree != self._draft:  # another step ran, or the tree was cut
            window.skip(step.tokens[-1])
            return
        argmaxes = [step.argmaxes[node] for node in rows[-1]]
        for ngram in window.advance(argmaxes, step.tokens[-1]):
            self._pool.add(ngram)
