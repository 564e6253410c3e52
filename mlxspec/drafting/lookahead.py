"""Lookahead decoding: drafts n-grams from the text and from the target's own Jacobi iterations."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence

from ..errors import OptionError
from .drafter import Drafter, DraftTree, TreeBuilder, VerifiedStep

GUESS, WINDOW = "guess", "window"
"""The origins of drafts from the pool and from the window."""

MOST_GUESSES = 64
"""The most guesses to keep for one first token, if no limit is set. In a text of few symbols a
token may have thousands, and verifying them all would take longer than they could save."""


class JacobiWindow:
    """Guesses of the tokens ahead, which each step refines by the target's argmaxes.

    Level l holds, in column i, a guess for the position ``i + l`` after the current token, made
    l steps after level 0's guess. Row (l, i) of a step sees level 0's columns 0 to i and column
    i of the levels 1 to l: the latest guess for each earlier position. The argmax after the
    deepest level's row completes an n-gram and belongs to the next level. (Fu et al. 2024, arXiv
    2402.02057, section 3.)

    Level 0 is first drawn from the text at random. It starts N - 2 columns wider than W, since each
    of the first steps adds a level and loses a column. Once there are N - 1 levels, each step
    drops the oldest instead, which moves all guesses on by one position.

    As in the reference, this does not depend on the number of tokens that a step has emitted.
    Moving on by their number, with new columns drawn from the text at the right end, was no better:
    2.084 tokens per step instead of 2.086, the mean of nine runs (W, N, G = 5, 4, 5; 10, 5, 8; 15,
    5, 15, each with 100 tokens after 40 code and question texts on the bundled demo model, and
    after 20 random starts on stories260K and on BabyLlama; without the prompts in the pool).

    Args:
        window_size: W, the number of columns; at least 1.
        ngram_size: N, the length of the n-grams that the window yields; at least 2.
        text: the source of the first guesses; its last token is the current one.
    """

    def __init__(self, window_size: int, ngram_size: int, text: Sequence[int]) -> None:
        self.ngram_size = ngram_size
        # Seeded, to make generations repeatable.
        drawn = random.Random(0).choices(text, k=window_size + ngram_size - 3)
        self.levels: list[list[int]] = [[text[-1], *drawn]]
        """``levels[l][i]``, the oldest level first; ``levels[0][0]`` is the current token."""
        self.rows: list[list[int]] = []
        """The nodes of its rows in the current draft, as from :func:`add_window`."""

    @property
    def depth(self) -> int:
        """The depth of its deepest row below the current token."""
        return len(self.levels[0]) + len(self.levels) - 2

    def add_to(self, tree: TreeBuilder) -> None:
        """Add its rows to a draft after all other nodes; see :func:`add_window`."""
        self.rows = add_window(tree, self.levels)
        self._tree_size = len(tree)

    def observe(self, step: VerifiedStep) -> list[tuple[int, ...]]:
        """Learn from a step; return the n-grams that it completed."""
        rows, self.rows = self.rows, []
        current = step.tokens[-1]
        if not rows or len(step.tree) != self._tree_size:  # another step, or the tree was cut
            self.skip(current)
            return []
        return self.advance([step.argmaxes[node] for node in rows[-1]], current)

    def advance(self, argmaxes: Sequence[int], current: int) -> list[tuple[int, ...]]:
        """Add a level and move the window.

        Args:
            argmaxes: per column, the target's most likely token after the deepest level's row.
            current: the last emitted token.

        Returns:
            one n-gram per column, from its oldest guess to its newest; empty while levels are
            missing.
        """
        self.levels.append(list(argmaxes))
        ngrams: list[tuple[int, ...]] = []
        if len(self.levels) == self.ngram_size:
            ngrams = list(zip(*self.levels, strict=True))
            del self.levels[0]
        else:
            self.levels = [level[1:] for level in self.levels]
        self.skip(current)
        return ngrams

    def skip(self, current: int) -> None:
        """Set the last emitted token, without moving the window."""
        self.levels[0][0] = current


def add_window(tree: TreeBuilder, levels: Sequence[Sequence[int]]) -> list[list[int]]:
    """Add a window's rows to a draft; common prefixes share nodes.

    Args:
        tree: the draft, which has the guesses already: a target that verifies only chains takes
            the first branch.
        levels: as in :class:`JacobiWindow`.

    Returns:
        ``rows[l][i]`` is the node of the window's row (l, i).
    """
    trunk = [0]
    for token in levels[0][1:]:
        trunk.append(tree.child(trunk[-1], token, origin=WINDOW))
    rows = [trunk]
    for level in levels[1:]:
        pairs = zip(rows[-1], level, strict=True)
        rows.append([tree.child(node, token, origin=WINDOW) for node, token in pairs])
    return rows


_LONGEST_NGRAM = 64  # as for prompt lookup
_LARGEST_WINDOW = 1024  # rows, far more than pay on any machine


class LookaheadDrafter(Drafter):
    """Drafts n-grams from a pool, which a window of guesses fills with new ones.

    Each step verifies one tree: the pool's guesses of what follows the current token, and the
    window's rows, whose argmaxes give new n-grams. (Fu et al., "Break the Sequential
    Dependency of LLM Inference Using Lookahead Decoding", ICML 2024, arXiv 2402.02057.) Rows of the
    window may be accepted, too. A step has up to ``(N - 1) * (W + G)`` rows.

    A target that verifies only chains gets the newest guess and no window.

    Args:
        window_size: W, the reference's WINDOW_SIZE: the window's columns. The window may have
            1024 rows; 0 turns it off.
        ngram_size: N, the reference's LEVEL: the n-grams' length, at most 64. The window has
            N - 1 levels and guesses have N - 1 tokens.
        guess_set_size: G, the reference's GUESS_SET_SIZE: the n-grams to keep, and to verify in a
            step, for one first token. -1, the reference's "no limit", means 64, and None means W.
        pool_from_prompt: the reference's POOL_FROM_PROMPT: whether the pool starts with the
            prompt's n-grams. The output's are always added.

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
        if not 2 <= ngram_size <= _LONGEST_NGRAM:
            raise OptionError(f"ngram_size is {ngram_size}: choose 2 to {_LONGEST_NGRAM}")
        widest = _LARGEST_WINDOW // (ngram_size - 1)
        if not (isinstance(window_size, int) and 0 <= window_size <= widest):
            raise OptionError(
                f"window_size is {window_size!r}: with n-grams of {ngram_size} choose {widest} "
                "at most, or 0 for none"
            )
        if guess_set_size < 1 and guess_set_size != -1:
            raise OptionError(f"guess_set_size is {guess_set_size}: choose 1 or more, or -1 for 64")
        self.window_size = window_size
        self.ngram_size = ngram_size
        self.guess_set_size = guess_set_size
        self.pool_from_prompt = pool_from_prompt

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._end: deque[int] = deque(maxlen=self.ngram_size)  # the last tokens that were read
        # The pool: per first token, the rest of each n-gram, the newest last.
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}
        # The output's first n-gram begins with the current token.
        self._read(prompt if self.pool_from_prompt else prompt[-1:])
        self._window: JacobiWindow | None = None
        if self.window_size:
            self._window = JacobiWindow(self.window_size, self.ngram_size, self._text)

    def _read(self, tokens: Iterable[int]) -> None:
        """Add the n-grams that these tokens complete."""
        for token in tokens:
            self._end.append(token)
            if len(self._end) == self.ngram_size:
                self.add(tuple(self._end))

    def add(self, ngram: tuple[int, ...]) -> None:
        """Add an n-gram to the pool as the newest; drop the oldest if there is no room."""
        tail, tails = ngram[1:], self._tails.setdefault(ngram[0], {})
        if tail in tails:
            del tails[tail]
        elif len(tails) == (MOST_GUESSES if self.guess_set_size == -1 else self.guess_set_size):
            del tails[next(iter(tails))]
        tails[tail] = None

    def propose(self, max_depth: int) -> DraftTree:
        depth, last = min(max_depth, self.ngram_size - 1), self._text[-1]
        tree = TreeBuilder(last)
        for guess in reversed(self._tails.get(last, {})):  # the newest first
            tree.add_branch(guess[:depth], GUESS)
        if self._window and self._window.depth <= max_depth:
            self._window.add_to(tree)
        return tree.tree()

    def window_rows(self) -> dict[tuple[int, int], int]:
        return {
            (level, column): node
            for level, nodes in enumerate(self._window.rows if self._window else ())
            for column, node in enumerate(nodes)
        }

    def observe(self, step: VerifiedStep) -> None:
        for ngram in self._window.observe(step) if self._window else ():
            self.add(ngram)
        self._read(step.tokens)
        self._text += step.tokens

    def end(self) -> None:
        del self._text, self._tails, self._window
