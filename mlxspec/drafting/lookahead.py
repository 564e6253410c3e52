"""Lookahead decoding: drafts n-grams of the text and of the target's own Jacobi iterations."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence

from ..errors import OptionError, whole
from .accept import VerifiedStep
from .drafter import Drafter
from .tree import DraftTree, TreeBuilder

GUESS, WINDOW = "guess", "window"
"""The origins of drafts from the pool and from the window."""

MOST_GUESSES = 64
"""The most guesses to keep for each first token if no limit is set. A text with few different
tokens may have thousands, and to verify all of them would take longer than they could save.
"""


Levels = list[list[int]]
"""A window of guesses of the tokens ahead, which each step refines with the target's argmaxes.

Level l holds in column i a guess for the position ``i + l`` after the current token, made l steps
later than level 0. The oldest level comes first, and ``levels[0][0]`` is the current token. In a
step, the row (l, i) sees the columns 0 to i of level 0, and column i of the levels 1 to l. These
are the latest guesses for the positions before it. The argmax after a row of the deepest level
completes an n-gram, and is a guess of the next level. (Fu et al. 2024, arXiv 2402.02057, section
3.)

As in the reference, the window moves by one position, however many tokens a step emits. To move it
by the number of tokens, and to fill columns at its right end from the text, was no better: 2.084
tokens per step instead of 2.086, the mean of nine runs (W, N, G = 5, 4, 5; 10, 5, 8; 15, 5, 15; for
each, 100 tokens after 40 code and question texts with the bundled demo model, and after 20 random
starts with stories260K and with BabyLlama; prompts were not in the pool).
"""


def first_window(window_size: int, ngram_size: int, text: Sequence[int]) -> Levels:
    """The window before the first step: only level 0, drawn from the text at random.

    It has W + N - 2 columns, since each of the first steps adds a level and drops a column.

    Args:
        window_size: W, the number of columns of a full window; at least 1.
        ngram_size: N, the length of the n-grams that the window yields; at least 2.
        text: the source of the first guesses; its last token is the current token.
    """
    # A fixed seed, so that generations are repeatable.
    drawn = random.Random(0).choices(text, k=window_size + ngram_size - 3)
    return [[text[-1], *drawn]]


def next_window(
    levels: Levels, argmaxes: list[int], ngram_size: int
) -> tuple[Levels, list[tuple[int, ...]]]:
    """Add a level to a window and move the window by one position.

    Once there are N - 1 levels, each step drops the oldest.

    Args:
        levels: the window of the last step.
        argmaxes: for each column, the target's most likely token after the deepest level's row.
        ngram_size: N.

    Returns:
        the window, whose current token is not set yet, and for each column an n-gram of its guesses
        from the oldest to the newest. There are no n-grams until the window has N - 1 levels.
    """
    levels = [*levels, argmaxes]
    if len(levels) == ngram_size:
        return levels[1:], list(zip(*levels, strict=True))
    return [level[1:] for level in levels], []


def add_window(tree: TreeBuilder, levels: Levels) -> list[list[int]]:
    """Add a window's rows to a draft; common prefixes share nodes.

    Args:
        tree: the draft. It already has the guesses of the pool, since a target that verifies only
            chains takes the first branch.
        levels: the window.

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
_LARGEST_WINDOW = 1024  # rows; far fewer pay on any machine


class LookaheadDrafter(Drafter):
    """Drafts n-grams from a pool that a window of guesses keeps filling.

    Each step verifies one tree. It has the pool's guesses for the tokens after the current one, and
    the window's rows, after which the argmaxes give new n-grams. (Fu et al., "Break the Sequential
    Dependency of LLM Inference Using Lookahead Decoding", ICML 2024, arXiv 2402.02057.) Rows of the
    window may be accepted, too. A step has up to ``(N - 1) * (W + G)`` rows.

    A target that verifies only chains gets only the newest guess, and no window.

    Args:
        window_size: W, the reference's WINDOW_SIZE: the number of the window's columns. The window
            has W * (N - 1) rows, at most 1024. 0 turns the window off.
        ngram_size: N, the reference's LEVEL: the length of the n-grams, at most 64. The window has
            N - 1 levels, and guesses have N - 1 tokens.
        guess_set_size: G, the reference's GUESS_SET_SIZE: for each first token, the most n-grams to
            keep, and to verify in a step. -1, the reference's "no limit", means 64.
        pool_from_prompt: the reference's POOL_FROM_PROMPT: whether the pool begins with the
            prompt's n-grams. The output's n-grams are always added.

    Raises:
        OptionError: a size is not a whole number, or is out of range.
    """

    def __init__(
        self,
        window_size: int = 7,
        ngram_size: int = 5,
        guess_set_size: int = 7,
        pool_from_prompt: bool = True,
    ) -> None:
        self.window_size = whole("window_size", window_size)
        self.ngram_size = whole("ngram_size", ngram_size)
        self.guess_set_size = whole("guess_set_size", guess_set_size)
        if not 2 <= ngram_size <= _LONGEST_NGRAM:
            raise OptionError(f"ngram_size is {ngram_size}: choose 2 to {_LONGEST_NGRAM}")
        widest = _LARGEST_WINDOW // (ngram_size - 1)
        if not 0 <= window_size <= widest:
            raise OptionError(
                f"window_size is {window_size}: for n-grams of {ngram_size} tokens, choose 1 to "
                f"{widest}, or 0 for no window"
            )
        if guess_set_size < 1 and guess_set_size != -1:
            raise OptionError(f"guess_set_size is {guess_set_size}: choose 1 or more, or -1 for 64")
        self.pool_from_prompt = pool_from_prompt

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._end: deque[int] = deque(maxlen=self.ngram_size)  # the last tokens read
        # The pool has, for each first token, the rest of each n-gram; the newest comes last.
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}
        # The output's first n-gram begins with the current token.
        self._read(prompt if self.pool_from_prompt else prompt[-1:])
        self._rows: list[list[int]] = []  # the window's nodes in the current draft
        self._levels: Levels = []
        if self.window_size:
            self._levels = first_window(self.window_size, self.ngram_size, self._text)

    def _read(self, tokens: Iterable[int]) -> None:
        """Add the n-grams that these tokens complete."""
        for token in tokens:
            self._end.append(token)
            if len(self._end) == self.ngram_size:
                self.add(tuple(self._end))

    def add(self, ngram: tuple[int, ...]) -> None:
        """Add an n-gram to the pool as the newest; drop the oldest if the pool is full."""
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
        # The deepest row comes after all of level 0, and one guess of each further level.
        has_window = self._levels and len(self._levels[0]) + len(self._levels) - 2 <= max_depth
        self._rows = add_window(tree, self._levels) if has_window else []
        self._tree_size = len(tree)
        return tree.tree()

    def observe(self, step: VerifiedStep) -> None:
        if self._rows and len(step.tree) == self._tree_size:  # the tree was not cut
            newest = [step.argmaxes[node] for node in self._rows[-1]]
            self._levels, ngrams = next_window(self._levels, newest, self.ngram_size)
            for ngram in ngrams:
                self.add(ngram)
        if self._levels:
            self._levels[0][0] = step.tokens[-1]
        self._rows = []
        self._read(step.tokens)
        self._text += step.tokens

    def end(self) -> None:
        del self._text, self._tails, self._levels
