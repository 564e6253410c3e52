"""Lookahead decoding: drafts from n-grams seen, and from the target's own Jacobi iterations."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from ..errors import OptionError
from .drafter import DraftTree, Limits, Source, TreeBuilder, VerifiedStep

GUESS, WINDOW = "guess", "window"
"""The origins of drafts from the pool and from the window."""

MOST_GUESSES = 64
"""Guesses kept for one first token where no limit is set. In a text of few symbols a token may
have thousands; verifying them all would take longer than they could save."""

Guess = tuple[tuple[int, ...], int]
"""What may follow, and how many of the text's last tokens agree with its n-gram."""


class NgramPool:
    """Keeps the n-grams that begin with each token; adding and recalling one take O(1).

    An n-gram that was recalled one token ago and foretold the current token agrees with two
    tokens of the text, and so on: :meth:`live_guesses` separates likely guesses from mere
    successors of one token.

    Args:
        ngram_size: N, the length of the n-grams that are read from a text.
        guess_set_size: G, how many n-grams a first token keeps; the least recently added goes
            first. -1 keeps :data:`MOST_GUESSES`.
    """

    def __init__(self, ngram_size: int, guess_set_size: int) -> None:
        self._guess_set_size = MOST_GUESSES if guess_set_size == -1 else guess_set_size
        self._end: deque[int] = deque(maxlen=ngram_size)  # of the text
        # Per first token, the rest of each n-gram. A dictionary keeps the order of insertion, so
        # an n-gram that is entered again is the newest.
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}
        self._longest = ngram_size - 1
        self._live: list[Guess] = []  # sorted by agreement, as are those below
        self._recalled: list[Guess] = []
        self._streak = 0  # how many tokens in a row a whole n-gram's guess has foretold

    def read(self, tokens: Iterable[int]) -> None:
        """Continue the text with these tokens and enter the n-grams that they complete."""
        for token in tokens:
            self._end.append(token)
            if len(self._end) == self._end.maxlen:
                self.add(self._end)

    def add(self, ngram: Iterable[int]) -> None:
        """Enter an n-gram, from the text or from the target's own guesses."""
        first, *rest = ngram
        tail, tails = tuple(rest), self._tails.setdefault(first, {})
        if tail in tails:
            del tails[tail]
        elif len(tails) == self._guess_set_size:
            del tails[next(iter(tails))]
        tails[tail] = None

    def guesses(self, first: int) -> list[tuple[int, ...]]:
        """What has followed a token, newest first."""
        return list(reversed(self._tails.get(first, {})))

    def live_guesses(self, current: int) -> list[Guess]:
        """What may follow the current token, best first.

        These are its own guesses, and those of earlier tokens that were right so far.
        """
        self._recalled = [*self._live, *((tail, 1) for tail in self.guesses(current))]
        return [
            (tail, agreement + self._streak if agreement == self._longest else agreement)
            for tail, agreement in self._recalled
        ]

    def follow(self, tokens: Iterable[int]) -> None:
        """Keep the guesses that these tokens confirm.

        :meth:`live_guesses` was called for the token before them.
        """
        for token in tokens:
            recalled = self._recalled
            whole = bool(recalled) and recalled[0][1] == self._longest
            self._streak = self._streak + 1 if whole and recalled[0][0][0] == token else 0
            self._live = [
                (tail[1:], agreement + 1)
                for tail, agreement in recalled
                if tail[0] == token and len(tail) > 1
            ]
            self.live_guesses(token)

    def forget(self) -> None:
        """Drop the live guesses: the text continues without :meth:`follow`."""
        self._live, self._recalled, self._streak = [], [], 0


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
        self.ngram_size = ngram_size
        # Seeded, so that a generation repeats step by step.
        drawn = random.Random(0).choices(text, k=window_size + ngram_size - 3)
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

    def add_to(self, tree: TreeBuilder) -> None:
        """Add its rows to a draft that has all its other nodes; see :func:`add_window`."""
        self.rows = add_window(tree, self.levels)
        self._tree_size = len(tree)

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
            argmaxes: per column, the target's most likely token after the deepest level's row.
            current: the last emitted token.

        Returns:
            one n-gram per column, from its oldest guess to its newest; none while levels are
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
        """Go on after a step without the window's rows; ``current`` is the last emitted token."""
        self.levels[0][0] = current


def add_window(tree: TreeBuilder, levels: Sequence[Sequence[int]]) -> list[list[int]]:
    """Add a window's rows to a draft; equal beginnings share nodes.

    Args:
        tree: holds the guesses; they come first, for a target that verifies chains only.
        levels: as :class:`JacobiWindow` has them.

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


# Where these come from: notes/planner.md, "Constants".
_RANKS = 4  # siblings that are considered
_CLASSES = 8  # of agreement with the text, in tokens

# How often the guess of a rank was right, by its agreement from 1 to 8 tokens, with N = 5 on the
# Spec-Bench answers of Vicuna-7B; cells with few guesses are smoothed.
_PRIOR = (
    (0.27, 0.51, 0.63, 0.66, 0.67, 0.74, 0.81, 0.85),
    (0.08, 0.13, 0.16, 0.20, 0.20, 0.20, 0.25, 0.30),
    (0.05, 0.06, 0.06, 0.07, 0.08, 0.10, 0.10, 0.10),
    (0.03, 0.04, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05),
)
_GUESS_RATE = 0.3


class LookaheadKnowledge:
    """How likely guesses are right, by agreement with the text and rank among siblings.

    The logits of that table are learned by stochastic gradient descent from every emitted token.
    """

    def __init__(self) -> None:
        self._logits = [[math.log(p / (1 - p)) for p in row] for row in _PRIOR]

    def p_accept(self, agreement: int, rank: int) -> float:
        """The probability that a guess is accepted if its parent is."""
        return 1 / (1 + math.exp(-self._logits[rank][min(agreement, _CLASSES) - 1]))

    def learn(self, agreement: int, rank: int, right: bool) -> None:
        """Learn whether a guess was right, verified or not."""
        error = right - self.p_accept(agreement, rank)
        self._logits[rank][min(agreement, _CLASSES) - 1] += _GUESS_RATE * error


_LONGEST_NGRAM = 64  # as for prompt lookup
_LARGEST_WINDOW = 1024  # rows; far more than pay on any machine
_AUTO_GUESSES = 16  # kept for one first token; how many are verified depends on the costs
_SUREST = 0.98  # no guess is likelier right; where a row costs more, there is nothing to look up


class LookaheadDrafter(Source):
    """Drafts n-grams from a pool, which a window of guesses of the tokens ahead feeds.

    Each step verifies one tree: the pool's guesses of what follows the current token, and the
    window's rows, whose argmaxes give new n-grams. (Fu et al., "Break the Sequential
    Dependency of LLM Inference Using Lookahead Decoding", ICML 2024, arXiv 2402.02057.) The
    walk may accept along the window too. A step has up to ``(N - 1) * (W + G)`` rows.

    A target that verifies chains only gets the newest guess, and no window. A planner gets the
    likeliest guesses, and no window.

    Args:
        window_size: W, the reference's WINDOW_SIZE: columns of the window, which may have
            1024 rows; 0 or "auto" does without it.
        ngram_size: N, the reference's LEVEL: length of the n-grams, at most 64; the window has
            N - 1 levels and guesses have N - 1 tokens.
        guess_set_size: G, the reference's GUESS_SET_SIZE: n-grams that are kept, and verified
            in a step, for one first token; -1, the reference's "no limit", for 64, and None for
            as many as W, or 16 with "auto".
        pool_from_prompt: the reference's POOL_FROM_PROMPT: whether the pool starts with the
            prompt's n-grams. Those of the output are always entered.
        knowledge: what earlier generations of the same target have taught.

    Raises:
        OptionError: a size is out of range.
    """

    def __init__(
        self,
        window_size: int | Literal["auto"] = 15,
        ngram_size: int = 5,
        guess_set_size: int | None = None,
        pool_from_prompt: bool = True,
        *,
        knowledge: LookaheadKnowledge | None = None,
    ) -> None:
        if guess_set_size is None:
            guess_set_size = _AUTO_GUESSES if window_size == "auto" else window_size or 1
        if window_size == "auto":
            window_size = 0
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
        self._knowledge = knowledge or LookaheadKnowledge()

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._pool = NgramPool(self.ngram_size, self.guess_set_size)
        # The output's first n-gram begins with the current token.
        self._pool.read(prompt if self.pool_from_prompt else prompt[-1:])
        self._window: JacobiWindow | None = None
        if self.window_size:
            self._window = JacobiWindow(self.window_size, self.ngram_size, self._text)
        self._cells: list[tuple[int, int]] = []  # as in `_likely`; empty where nothing was found

    def propose(self, max_depth: int) -> DraftTree:
        depth = min(max_depth, self.ngram_size - 1)
        tree = TreeBuilder(self._text[-1])
        for guess in self._pool.guesses(self._text[-1]):
            tree.add_branch(guess[:depth], GUESS)
        if self._window and self._window.depth <= max_depth:
            self._window.add_to(tree)
        return tree.tree()

    def search(self, limits: Limits) -> DraftTree:
        least_p, most = limits.least_p[0], _RANKS if limits.branching else 1
        if least_p >= _SUREST:
            return DraftTree.chain(self._text[-1])
        guesses = self._pool.live_guesses(self._text[-1])
        return self._likely(guesses, limits.max_depth, least_p, most).best_first(limits.nodes)

    def _likely(
        self, guesses: Iterable[Guess], max_depth: int, least_p: float, most_children: int
    ) -> DraftTree:
        """Merge the likely guesses into a tree with probabilities.

        Args:
            guesses: best first.
            max_depth: of the deepest node.
            least_p: less likely nodes below the first level are left out.
            most_children: of a node.
        """
        tree = TreeBuilder(self._text[-1])
        self._cells = [(0, 0)]  # per node its agreement and rank
        n_children = [0]
        for tail, agreement in guesses:
            node, p_node = 0, 1.0
            for at, token in enumerate(tail[:max_depth], agreement):
                child = tree.find(node, token)
                if child is None:
                    rank = n_children[node]
                    if rank >= most_children:
                        break
                    p_reached = p_node * self._knowledge.p_accept(at, rank)
                    if node and p_reached < least_p:
                        break
                    child = tree.child(node, token, p_reached, GUESS)
                    n_children[node] += 1
                    n_children.append(0)
                    self._cells.append((at, rank))
                node, p_node = child, tree.p_reached[child - 1]
        self._guesses = tree.tree()
        return self._guesses

    def window_rows(self) -> dict[tuple[int, int], int]:
        return {
            (level, column): node
            for level, nodes in enumerate(self._window.rows if self._window else ())
            for column, node in enumerate(nodes)
        }

    def observe(self, step: VerifiedStep) -> None:
        cells, self._cells = self._cells, []
        if cells:
            for node, right in self._guesses.judged(step.tokens):
                self._knowledge.learn(*cells[node], right)
            self._pool.follow(step.tokens)
        else:
            self._pool.forget()
        for ngram in self._window.observe(step) if self._window else ():
            self._pool.add(ngram)
        self._pool.read(step.tokens)
        self._text += step.tokens

    def end(self) -> None:
        del self._text, self._pool, self._window
