"""The pool's guesses about the next tokens, each with its probability of being right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..drafting.ngram_pool import NgramPool

_RANKS = 4  # siblings that are considered
_CLASSES = 8  # of agreement with the text, in tokens

# How often the guess at a rank was right, by its agreement from 1 to 8 tokens, with N = 5 on the
# Spec-Bench answers of Vicuna-7B. Rarer cells are smoothed.
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

    Logits are learned by stochastic gradient from every emitted token: one per cell of the
    table, and one that all have in common, which follows the kind of text at hand.
    """

    def __init__(self) -> None:
        self._cells = [[_logit(p) for p in row] for row in _PRIOR]
        self._common = 0.0

    def begin(self) -> None:
        """Start a text; what was learned of the cells stays."""
        self._common = 0.0

    def probability(self, agreement: int, rank: int) -> float:
        """That a token follows, given the tokens before it."""
        logit = self._cells[rank][min(agreement, _CLASSES) - 1] + self._common
        return 1 / (1 + math.exp(-logit))

    def learn(self, agreement: int, rank: int, right: bool) -> None:
        """Learn what came of a guess, whether it was verified or not."""
        error = right - self.probability(agreement, rank)
        self._cells[rank][min(agreement, _CLASSES) - 1] += _CELL_RATE * error
        if rank == 0:
            common = self._common + _COMMON_RATE * error
            self._common = min(_COMMON_LIMIT, max(-_COMMON_LIMIT, common))


class LiveGuesses:
    """The guesses for the current token, and those of the tokens before that still hold.

    An n-gram that was recalled one token ago and named the current token agrees with two tokens
    of the text, and so on: that tells likely guesses from mere successors of one token.

    Args:
        pool: where guesses are recalled from.
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
        """The text goes on by these tokens; :meth:`at` was asked about the one before them."""
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
        """The text goes on unobserved."""
        self._live, self._guesses, self._streak = [], [], 0


class GuessTree:
    """Guesses merged into one tree; nodes are numbered so that parents come first.

    Args:
        guesses: best first.
        odds: gives their probabilities.
        max_depth: of a node.
        least_reach: less likely nodes are left out.
        branching: whether nodes may have siblings.

    Attributes:
        reach: per node from the root, 1.0, the probability that it is accepted.
    """

    def __init__(
        self,
        guesses: Sequence[Guess],
        odds: GuessOdds,
        *,
        max_depth: int,
        least_reach: float,
        branching: bool,
    ) -> None:
        self._odds = odds
        self._children: list[dict[int, int]] = [{}]
        self._agreements = [0]
        self._paths: list[tuple[int, ...]] = [()]
        self.reach = [1.0]
        ranks = _RANKS if branching else 1
        for tail, agreement in guesses:
            node = 0
            for depth, token in enumerate(tail[:max_depth]):
                siblings = self._children[node]
                if token not in siblings:
                    rank = len(siblings)
                    if rank >= ranks:
                        break
                    reach = self.reach[node] * odds.probability(agreement + depth, rank)
                    if reach < least_reach and node:
                        break
                    siblings[token] = len(self.reach)
                    self._children.append({})
                    self._agreements.append(agreement + depth)
                    self._paths.append(tail[: depth + 1])
                    self.reach.append(reach)
                node = siblings[token]
        self._order = sorted(range(1, len(self.reach)), key=lambda node: -self.reach[node])

    def best_reach(self) -> list[float]:
        """The probabilities of the nodes, the likeliest first, the root left out."""
        return [self.reach[node] for node in self._order]

    def reach_by_depth(self, width: int) -> list[float]:
        """Per depth from 1, the probability that so many of the ``width`` best are accepted."""
        by_depth = [0.0] * max((len(self._paths[node]) for node in self._order[:width]), default=0)
        for node in self._order[:width]:
            by_depth[len(self._paths[node]) - 1] += self.reach[node]
        return by_depth

    def paths(self, width: int) -> list[tuple[int, ...]]:
        """The tokens that lead to each of the ``width`` likeliest nodes."""
        return [self._paths[node] for node in self._order[:width]]

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that followed."""
        node = 0
        for token in tokens:
            for rank, (guess, child) in enumerate(self._children[node].items()):
                self._odds.learn(self._agreements[child], rank, guess == token)
            if token not in self._children[node]:
                break
            node = self._children[node][token]


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
