"""Lookahead as a source: guesses with their probabilities, and a window where it pays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..draft.context_index import common_length
from ..draft.drafter import Drafter, DraftTree, Limits, TreeBuilder, VerifiedStep
from ..draft.lookahead import GUESS, JacobiWindow, NgramPool
from .policy import Policy, price_of_time

# Where these come from: docs/planner-notes.md, "Constants".
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
_CELL_RATE, _COMMON_RATE, _COMMON_LIMIT = 0.1, 0.1, 1.5

Guess = tuple[tuple[int, ...], int]
"""What may follow, and how many of the text's last tokens agree with its n-gram."""


class GuessOdds:
    """How likely a guess is right, by its agreement with the text and its rank.

    Logits are learned by stochastic gradient descent from every emitted token: one per cell of
    the table, and one that all cells share, which follows the kind of text.
    """

    def __init__(self) -> None:
        self._cells = [[_logit(p) for p in row] for row in _PRIOR]
        self._common = 0.0

    def begin(self) -> None:
        """Start a text; the cells keep what they have learned."""
        self._common = 0.0

    def probability(self, agreement: int, rank: int) -> float:
        """The p_accept of a guess."""
        logit = self._cells[rank][min(agreement, _CLASSES) - 1] + self._common
        return 1 / (1 + math.exp(-logit))

    def learn(self, agreement: int, rank: int, right: bool) -> None:
        """Learn whether a guess was right, verified or not."""
        error = right - self.probability(agreement, rank)
        self._cells[rank][min(agreement, _CLASSES) - 1] += _CELL_RATE * error
        if rank == 0:
            common = self._common + _COMMON_RATE * error
            self._common = min(_COMMON_LIMIT, max(-_COMMON_LIMIT, common))


class LiveGuesses:
    """The guesses after the current token, and those of earlier tokens that were right so far.

    An n-gram that was recalled one token ago and foretold the current token agrees with two
    tokens of the text, and so on. That tells likely guesses from mere successors of one token.

    Args:
        pool: holds the guesses.
        ngram_size: N; an n-gram agrees with N - 1 tokens at most before its last.
    """

    def __init__(self, pool: NgramPool, ngram_size: int) -> None:
        self._pool = pool
        self._longest = ngram_size - 1
        self._live: list[Guess] = []  # sorted by agreement, as are all below
        self._guesses: list[Guess] = []
        self._streak = 0  # how many tokens in a row a whole n-gram's guess has foretold

    def at(self, current: int) -> list[Guess]:
        """What may follow the current token, best first."""
        fresh = [(tail, 1) for tail in self._pool.guesses(current)]
        self._guesses = [*self._live, *fresh]
        return [
            (tail, agreement + self._streak if agreement == self._longest else agreement)
            for tail, agreement in self._guesses
        ]

    def advance(self, tokens: Iterable[int]) -> None:
        """Continue the text; :meth:`at` has been called for the token before these."""
        for token in tokens:
            guesses = self._guesses
            whole = bool(guesses) and guesses[0][1] == self._longest
            self._streak = self._streak + 1 if whole and guesses[0][0][0] == token else 0
            self._live = [
                (tail[1:], agreement + 1)
                for tail, agreement in guesses
                if tail[0] == token and len(tail) > 1
            ]
            self.at(token)

    def forget(self) -> None:
        """Drop all guesses: the text continues without :meth:`advance`."""
        self._live, self._guesses, self._streak = [], [], 0


class GuessTree(TreeBuilder):
    """Guesses merged into a tree; it knows the agreement and rank of each node.

    Args:
        current: the token before the guesses.
        guesses: best first.
        odds: gives their probabilities.
        max_depth: of the deepest node.
        least_p: less likely nodes below the first level are left out.
        branching: whether nodes may have siblings.
    """

    def __init__(
        self,
        current: int,
        guesses: Sequence[Guess],
        odds: GuessOdds,
        *,
        max_depth: int,
        least_p: float,
        branching: bool,
    ) -> None:
        super().__init__(current)
        self._odds = odds
        self._cells = [(0, 0)]  # per node its agreement and rank
        n_children = [0]
        ranks = _RANKS if branching else 1
        for tail, agreement in guesses:
            node, p_node = 0, 1.0
            for depth, token in enumerate(tail[:max_depth]):
                child = self.find(node, token)
                if child is None:
                    rank = n_children[node]
                    if rank >= ranks:
                        break
                    p_reached = p_node * odds.probability(agreement + depth, rank)
                    if p_reached < least_p and node:
                        break
                    child = self.child(node, token, p_reached, GUESS)
                    n_children[node] += 1
                    n_children.append(0)
                    self._cells.append((agreement + depth, rank))
                node = child
                p_node = self.p_reached[node - 1]

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that followed."""
        node: int | None = 0
        for token in tokens:
            for child, parent in enumerate(self.parents):
                if parent == node:
                    self._odds.learn(*self._cells[child], self.tokens[child] == token)
            node = None if node is None else self.find(node, token)
            if node is None:
                return


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


_RATE = 0.05
_RELAXATION = 0.003
_MOST = 3.0
_TRIAL_STEPS = 12
_NOTICEABLE = 0.05  # tokens per step


class WindowSize(NamedTuple):
    """A window's columns W and its n-gram size N."""

    columns: int
    ngram_size: int

    @property
    def rows(self) -> int:
        """Rows that it adds to a step; that of column 0, level 0 is the root's."""
        return (self.ngram_size - 1) * self.columns - 1


# Tokens per step that a window adds to a pool of the text's own n-grams.
_USUAL_GAINS = {
    WindowSize(3, 3): 0.08,
    WindowSize(5, 4): 0.2,
    WindowSize(7, 5): 0.3,
    WindowSize(10, 5): 0.36,
    WindowSize(15, 5): 0.42,
}


class WindowGain:
    """How many tokens per step a window adds, learned while one is on.

    It learns one factor on the average gain of each size. While there is no window the factor
    slowly returns to 1, so that a window is tried again.
    """

    def __init__(self) -> None:
        self._factor = 1.0

    def of(self, size: WindowSize) -> float:
        """Tokens per step."""
        return self._factor * _USUAL_GAINS[size]

    def learn(self, size: WindowSize, tokens: int) -> None:
        """Learn from a step that emitted ``tokens`` more thanks to the window."""
        factor = self._factor + _RATE * (tokens / _USUAL_GAINS[size] - self._factor)
        self._factor = min(factor, _MOST)

    def relax(self) -> None:
        """Forget a little, after a step without a window."""
        self._factor += _RELAXATION * (1 - self._factor)


def best_window(
    gain: WindowGain,
    expected: Sequence[float],
    costs: Sequence[float],
    price: float,
    max_ngram_size: int,
    bank: float,
    now: WindowSize | None,
) -> WindowSize | None:
    """The window that gains most beside these guesses; None where no window does.

    Args:
        gain: what windows earn.
        expected: E(n), the tokens that a step without a window emits with n guess nodes.
        costs: ``costs[rows]`` is T(rows) / T(1).
        price: of a plain step's time, in tokens.
        max_ngram_size: the largest N.
        bank: the time, in plain steps, that the first steps with a window may cost.
        now: the current window, which stays while it pays, unless another one gains noticeably
            more: a new window takes N - 2 steps until it earns anything.
    """
    gains: dict[WindowSize | None, float] = {None: _best_gain(expected, costs, price, 0)}
    for size in _USUAL_GAINS:
        if size.ngram_size > max_ngram_size or size.rows + 1 >= len(costs):
            continue
        if size == now or _TRIAL_STEPS * (costs[1 + size.rows] - costs[1]) <= bank:
            gains[size] = gain.of(size) + _best_gain(expected, costs, price, size.rows)
    best = max(gains, key=gains.__getitem__)
    pays = now is None or (now in gains and gains[now] > gains[None])
    return now if pays and gains[best] < gains[now] + _NOTICEABLE else best


def _best_gain(expected: Sequence[float], costs: Sequence[float], price: float, rows: int) -> float:
    """Tokens less the price of their time, with the best number of guesses beside ``rows``."""
    return max(
        tokens - price * cost for tokens, cost in zip(expected, costs[1 + rows :], strict=False)
    )


_STEPS_BETWEEN_SIZES = 8
_SUREST = 0.98  # no guess is likelier right; where a row costs more, there is nothing to look up


class LookaheadKnowledge:
    """What is kept between generations: how likely guesses are right, what a window earns."""

    def __init__(self) -> None:
        self.odds = GuessOdds()
        self.gain = WindowGain()


class LookaheadSource(Drafter):
    """Lookahead decoding whose sizes follow what rows cost; often there is no window.

    It drafts the pool's guesses. A window is verified beside them where the tokens that
    windows have lately earned pay for its rows. So W, N and G change from step to step; where
    each row costs as much as a plain step, nothing is drafted.

    Args:
        ngram_size: the largest N.
        guess_set_size: how many n-grams are kept for one first token; -1 keeps 64.
        pool_from_prompt: whether the pool starts with the prompt's n-grams.
        knowledge: what was learned from earlier generations of the same target.
    """

    def __init__(
        self,
        *,
        ngram_size: int = 5,
        guess_set_size: int = 16,
        pool_from_prompt: bool = True,
        knowledge: LookaheadKnowledge | None = None,
    ) -> None:
        self._ngram_size = ngram_size
        self._guess_set_size = guess_set_size
        self._pool_from_prompt = pool_from_prompt
        self._knowledge = knowledge or LookaheadKnowledge()

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._pool = NgramPool(self._ngram_size, self._guess_set_size)
        self._pool.read(prompt if self._pool_from_prompt else prompt[-1:])
        self._live = LiveGuesses(self._pool, self._ngram_size)
        self._guesses: GuessTree | None = None
        self._knowledge.odds.begin()
        self._size: WindowSize | None = None
        self._window: JacobiWindow | None = None
        self._steps = 0

    def propose(self, limits: Limits) -> DraftTree:  # type: ignore[override]  # a planner's
        self._branching, least_p = limits.branching, limits.least_p[0]
        self._hopeless = least_p >= _SUREST
        self._guesses = GuessTree(
            self._text[-1],
            () if self._hopeless else self._live.at(self._text[-1]),
            self._knowledge.odds,
            max_depth=min(limits, self._ngram_size - 1),
            least_p=least_p,
            branching=limits.branching,
        )
        return self._guesses.tree().best_first(limits.nodes)

    def rows_beside(
        self, expected: Sequence[float], costs: Sequence[float], policy: Policy, max_depth: int
    ) -> tuple[int, float]:
        """The window's rows to verify beside the guesses.

        Args:
            expected: E(n) of the candidates.
            costs: ``costs[rows]`` is T(rows) / T(1), as far as there is room.
            policy: the planner's.
            max_depth: how deep these rows may be.

        Returns:
            how many rows, and the tokens per step that they earn.
        """
        if self._hopeless or not self._branching:
            self._window = self._size = None
            return 0, 0.0
        if self._steps % _STEPS_BETWEEN_SIZES == 0:
            self._resize(expected, costs, policy)
        if not self._window or not self._size or self._window.depth > max_depth:
            return 0, 0.0
        if 1 + self._size.rows >= len(costs):
            return 0, 0.0
        return self._size.rows, self._knowledge.gain.of(self._size)

    def add_rows(self, tree: TreeBuilder) -> None:
        """Add these rows to the draft."""
        if self._window:
            self._window.add_to(tree)

    def window_rows(self) -> dict[tuple[int, int], int]:
        return self._window.by_place() if self._window else {}

    def observe(self, step: VerifiedStep) -> None:
        tokens = step.tokens
        self._steps += 1
        guesses, self._guesses = self._guesses, None
        if guesses and not self._hopeless:
            guesses.learn(tokens)
            self._live.advance(tokens)
        else:
            self._live.forget()
        if self._window and self._size:
            self._advance(self._window, self._size, step)
        else:
            self._knowledge.gain.relax()
        self._pool.read(tokens)
        self._text += tokens

    def end(self) -> None:
        del self._text, self._pool, self._live, self._window

    def _resize(self, expected: Sequence[float], costs: Sequence[float], policy: Policy) -> None:
        """Start, end or replace the window, where another size gains more."""
        price = price_of_time(expected[: len(costs) - 1], costs, policy.rate)
        size = best_window(
            self._knowledge.gain,
            expected,
            costs,
            price,
            max_ngram_size=self._ngram_size,
            bank=policy.bank,
            now=self._size,
        )
        if size != self._size:
            self._size = size
            self._window = JacobiWindow(size.columns, size.ngram_size, self._text) if size else None

    def _advance(self, window: JacobiWindow, size: WindowSize, step: VerifiedStep) -> None:
        ngrams = window.observe(step)
        if ngrams:
            self._knowledge.gain.learn(size, self._earned(step))
        for ngram in ngrams:
            self._pool.add(ngram)

    def _earned(self, step: VerifiedStep) -> int:
        """How many accepted tokens no guess from the text alone would have drafted."""
        accepted = step.tokens[: len(step.accepted)]
        guessed = (
            common_length(guess, accepted) for guess in self._pool.text_guesses(step.tree.tokens[0])
        )
        return len(accepted) - max(guessed, default=0)
