"""Lookahead decoding: drafts from n-grams seen, and from the target's own Jacobi iterations."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from ..errors import OptionError
from .drafter import Drafter, DraftTree, TreeBuilder, VerifiedStep

GUESS, WINDOW = "guess", "window"
"""The origins of drafts from the pool and from the window."""

MOST_GUESSES = 64
"""Guesses kept for one first token where no limit is set. In a text of few symbols a token may
have thousands; verifying them all would take longer than they could save."""


class NgramPool:
    """Keeps the n-grams that begin with each token; adding and recalling one take O(1).

    Args:
        ngram_size: N, the length of the n-grams that are read from a text.
        guess_set_size: G, how many n-grams a first token keeps; the least recently added goes
            first. -1 keeps :data:`MOST_GUESSES`.
    """

    def __init__(self, ngram_size: int, guess_set_size: int) -> None:
        self._guess_set_size = MOST_GUESSES if guess_set_size == -1 else guess_set_size
        self._end: deque[int] = deque(maxlen=ngram_size)  # of the text
        # Per first token, the rest of each n-gram and whether the text held it. A dictionary
        # keeps the order of insertion, so an n-gram that is entered again is the newest.
        self._tails: dict[int, dict[tuple[int, ...], bool]] = {}

    def read(self, tokens: Iterable[int]) -> None:
        """Continue the text with these tokens and enter the n-grams that they complete."""
        end = self._end
        for token in tokens:
            end.append(token)
            if len(end) == end.maxlen:
                first, *tail = end
                self._enter(first, tuple(tail), of_text=True)

    def add(self, ngram: Iterable[int]) -> None:
        """Enter an n-gram that is not from the text: a guess of the target's own."""
        first, *tail = ngram
        self._enter(first, tuple(tail), of_text=False)

    def guesses(self, first: int, limit: int | None = None) -> list[tuple[int, ...]]:
        """What has followed a token, newest first, ``limit`` guesses at most."""
        return list(islice(reversed(self._tails.get(first, {})), limit))

    def text_guesses(self, first: int) -> list[tuple[int, ...]]:
        """The guesses that come from the text, not from :meth:`add`."""
        return [tail for tail, of_text in self._tails.get(first, {}).items() if of_text]

    def _enter(self, first: int, tail: tuple[int, ...], of_text: bool) -> None:
        tails = self._tails.setdefault(first, {})
        if tail in tails:
            of_text |= tails.pop(tail)
        elif len(tails) == self._guess_set_size:
            del tails[next(iter(tails))]
        tails[tail] = of_text


class JacobiWindow:
    """Guesses of the tokens ahead, each improved on by the next step's argmax.

    Level l holds, in column i, a guess for the position ``i + l`` after the current token, made
    l steps after that of level 0. Row (l, i) of a step sees level 0's columns 0 to i and column
    i of the levels 1 to l: the guess for each earlier position that was made just before. The
    argmax after the deepest level's row completes an n-gram and belongs to the next level.
    (Fu et al. 2024, arXiv 2402.02057, section 3.)

    At first level 0 is drawn from the text at random, wider than W by the N - 2 columns that are
    lost while each step adds a level. Once there are N - 1 levels, each step drops the oldest
    instead, by which all guesses move on by one position.

    This does not depend on how many tokens a step has emitted, as in the reference. Moving on by
    their number, with new columns drawn from the text at the right end, was no better: 2.084
    tokens per step instead of 2.086, the mean of nine runs (W, N, G = 5, 4, 5; 10, 5, 8; 15, 5, 15,
    each with 100 tokens after 40 code and question texts on the bundled demo model, and after 20
    random starts on stories260K and on BabyLlama; without the prompts in the pool).

    Args:
        window_size: W, the number of columns; at least 1.
        ngram_size: N, the length of the n-grams that the window yields; at least 2.
        text: where the first guesses are drawn from; its last token is the current one.
    """

    def __init__(self, window_size: int, ngram_size: int, text: Sequence[int]) -> None:
        self._height = ngram_size - 1
        self._text = text
        self._random = random.Random(0)  # seeded, so that a generation repeats step by step
        drawn = self._draw(window_size + ngram_size - 3)
        self.levels: list[list[int]] = [[text[-1], *drawn]]
        """``levels[l][i]``, the oldest level first; ``levels[0][0]`` is the current token."""
        self.rows: list[list[int]] = []
        """The nodes of its rows in the current draft, as from :func:`add_window`."""

    @property
    def columns(self) -> int:
        """How many columns there are now."""
        return len(self.levels[0])

    @property
    def depth(self) -> int:
        """How far after the current token its deepest row is."""
        return self.columns + len(self.levels) - 2

    def add_to(self, tree: TreeBuilder, columns: int | None = None) -> None:
        """Add rows to a draft that has all its other nodes; see :func:`add_window`."""
        self.rows = add_window(tree, self.levels, columns)
        self._tree_size = len(tree)

    def by_place(self) -> dict[tuple[int, int], int]:
        """The nodes of the rows by (level, column)."""
        return {
            (level, column): node
            for level, nodes in enumerate(self.rows)
            for column, node in enumerate(nodes)
        }

    def observe(self, step: VerifiedStep) -> list[tuple[int, ...]]:
        """Learn from a step; returns the n-grams that it completed."""
        rows, self.rows = self.rows, []
        current = step.tokens[-1]
        if not rows or len(step.tree) != self._tree_size:  # another step, or the tree was cut
            self.skip(current)
            return []
        return self.advance([step.argmaxes[node] for node in rows[-1]], current)

    def advance(self, argmaxes: Sequence[int], current: int) -> list[tuple[int, ...]]:
        """Learn from a step.

        Args:
            argmaxes: per column, the target's most likely token after the deepest level's row;
                of the first columns only, where there was no room for all of them.
            current: the last emitted token.

        Returns:
            one n-gram per argmax, from its oldest guess to its newest; none while levels are
            missing.
        """
        newest = [*argmaxes, *self._draw(self.columns - len(argmaxes))]
        self.levels.append(newest)
        ngrams: list[tuple[int, ...]] = []
        if len(self.levels) > self._height:
            ngrams = list(zip(*self.levels, strict=True))[: len(argmaxes)]
            del self.levels[0]
        else:
            self.levels = [level[1:] for level in self.levels]
        self.skip(current)
        return ngrams

    def skip(self, current: int) -> None:
        """Go on after a step without the window's rows; ``current`` is the last emitted token."""
        self.levels[0][0] = current

    def _draw(self, count: int) -> list[int]:
        return self._random.choices(self._text, k=count)


def add_window(
    tree: TreeBuilder, levels: Sequence[Sequence[int]], columns: int | None = None
) -> list[list[int]]:
    """Add the first columns of a window to a draft.

    The window's level 0 is a trunk that starts at the root; the deeper levels of its column i
    are a branch of the trunk's node i. So the ancestors of a row are exactly what the paper's
    mask lets it see, and its depth gives the paper's position. Where the guesses and the window
    have a common prefix they share its nodes.

    Args:
        tree: holds the guesses; they come first, for a target that verifies chains only.
        levels: as :class:`JacobiWindow` has them.
        columns: how many, at least 1; None for all.

    Returns:
        ``rows[l][i]`` is the node of the window's row (l, i).
    """
    trunk = [0]
    for token in levels[0][1:columns]:
        trunk.append(tree.child(trunk[-1], token, origin=WINDOW))
    rows = [trunk]
    for level in levels[1:]:
        pairs = zip(rows[-1], level, strict=False)
        rows.append([tree.child(node, token, origin=WINDOW) for node, token in pairs])
    return rows


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


class LookaheadDrafter(Drafter):
    """Drafts n-grams from a pool, which a window of guesses of the tokens ahead feeds.

    Each step verifies one tree: the pool's guesses of what follows the current token, and the
    window's rows, whose argmaxes give new n-grams. (Fu et al., "Break the Sequential
    Dependency of LLM Inference Using Lookahead Decoding", ICML 2024, arXiv 2402.02057.) The
    walk may accept along the window too. A step has up to ``(N - 1) * (W + G)`` rows.

    A target that verifies chains only gets the newest guess, and no window.

    Args:
        window_size: W, the reference's WINDOW_SIZE: columns of the window, which may have
            1024 rows; 0 does without it.
        ngram_size: N, the reference's LEVEL: length of the n-grams, at most 64; the window has
            N - 1 levels and guesses have N - 1 tokens.
        guess_set_size: G, the reference's GUESS_SET_SIZE: n-grams that are kept, and verified
            in a step, for one first token; -1, the reference's "no limit", for 64, and None for
            as many as W.
        pool_from_prompt: the reference's POOL_FROM_PROMPT: whether the pool starts with the
            prompt's n-grams. Those of the output are always entered.

    Raises:
        OptionError: a size is out of range.
    """

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

    def propose(self, max_depth: int) -> DraftTree:
        return self.propose_beside(1, max_depth, sys.maxsize)

    def propose_beside(self, rows: int, max_depth: int, max_rows: int) -> DraftTree:
        """Draft for a step that has ``rows`` rows already and may have ``max_rows``.

        Guesses come first, then as many columns of the window as fit.
        """
        depth = min(max_depth, self.ngram_size - 1)
        limit = max(max_rows - rows, 0) // max(depth, 1)
        tree = TreeBuilder(self._current)
        for guess in self._pool.guesses(self._current, limit):
            tree.add_branch(guess[:depth], GUESS)
        if self._window and self._window.depth <= max_depth:
            # The window's first row is the root's, which every step has.
            left = max_rows - rows - len(tree) + 2
            columns = min(self._window.columns, left // len(self._window.levels))
            if columns > 0:
                self._window.add_to(tree, columns)
        return tree.tree()

    def observe(self, step: VerifiedStep) -> None:
        for ngram in self._window.observe(step) if self._window else ():
            self._pool.add(ngram)
        self._pool.read(step.tokens)
        self._current = step.tokens[-1]

    def end(self) -> None:
        del self._pool, self._window

    def window_rows(self) -> dict[tuple[int, int], int]:
        return self._window.by_place() if self._window else {}
