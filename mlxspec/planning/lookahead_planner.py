"""Lookahead decoding whose sizes follow what steps cost and what drafts earn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..drafting.context_index import common_length
from ..drafting.drafter import VerifiedStep
from ..drafting.jacobi_window import JacobiWindow
from ..drafting.lookahead_tree import LookaheadTree
from ..drafting.ngram_pool import NgramPool
from ..drafting.tree import DraftTree
from .cost_curve import CostCurve
from .guard import Guard, expected_shortfall
from .lookahead_guesses import GuessOdds, GuessTree, LiveGuesses
from .lookahead_window import WindowGain, WindowSize, best_window
from .plain_steps import PlainSteps
from .recent_steps import RecentSteps
from .rest import Rest
from .waiting_cost import USUAL_WAITING_COST
from .width import expected_tokens, price_of_time, widths_by_worth

_STEPS_BETWEEN_SIZES = 8
_SUREST = 0.98  # no guess is surer; where a row costs more, nothing need be looked up


class LookaheadKnowledge:
    """What outlasts a generation: how likely guesses are right and what a window earns."""

    def __init__(self) -> None:
        self.odds = GuessOdds()
        self.gain = WindowGain()


class PlannedLookahead:
    """Lookahead decoding that verifies what is worth its time: often no window, or nothing.

    Each step takes the guesses, likeliest first, up to the number at which expected tokens less
    the price of the time are greatest. A window is added where the tokens that windows have
    lately earned are worth its rows, within what the guard allows. So W, N and G change from
    step to step; where each row costs as much as a plain step, all of them are zero.

    Args:
        curve: the verify cost. May be replaced between steps (attribute ``curve``) by a newly
            measured one.
        ngram_size: the longest n-grams.
        guess_set_size: how many are kept for one first token; -1 for 64.
        pool_from_prompt: whether the pool starts with the prompt's n-grams.
        waiting_cost: what a plain step costs more when its forward is dispatched only after the
            last token was read, as a share of a pipelined one. May be replaced too.
        branching: whether the target verifies trees; otherwise drafts are chains, without a
            window.
        knowledge: what was learned from earlier generations of the same target.
    """

    def __init__(
        self,
        curve: CostCurve,
        *,
        ngram_size: int = 5,
        guess_set_size: int = 16,
        pool_from_prompt: bool = True,
        waiting_cost: float = USUAL_WAITING_COST,
        branching: bool = True,
        knowledge: LookaheadKnowledge | None = None,
    ) -> None:
        self.curve = curve
        self.waiting_cost = waiting_cost
        self.plain_steps = PlainSteps()
        """While they are sought, steps are pipelined wherever nothing is drafted."""
        self.branching = branching
        self._ngram_size = ngram_size
        self._guess_set_size = guess_set_size
        self._pool_from_prompt = pool_from_prompt
        self._knowledge = knowledge or LookaheadKnowledge()
        self._guard = Guard()

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._pool = NgramPool(self._ngram_size, self._guess_set_size)
        self._pool.read(prompt if self._pool_from_prompt else prompt[-1:])
        self._live = LiveGuesses(self._pool, self._ngram_size)
        self._knowledge.odds.begin()
        self._guard.begin()
        self._size: WindowSize | None = None
        self._window: JacobiWindow | None = None
        self._steps = self._pending = 0
        self._rest = Rest()
        self._recent = RecentSteps()

    def propose(self, budget: int) -> DraftTree:
        return self.propose_beside(1, budget, self.curve.widest)

    def propose_beside(self, rows: int, budget: int, max_rows: int) -> DraftTree:
        """Draft for a step that has ``rows`` rows already and may have ``max_rows``."""
        self._rows_beside = rows + self._pending
        self._hopeless = self.curve.cheapest_rows[0] >= _SUREST or self._rest.due(self.curve)
        self._guesses = GuessTree(
            () if self._hopeless else self._live.at(self._text[-1]),
            self._knowledge.odds,
            max_depth=min(budget, self._ngram_size - 1),
            least_reach=self.curve.cheapest_rows[0],
            branching=self.branching,
        )
        self._plan = self._choose(budget, min(max_rows, self.curve.widest))
        self._tree = LookaheadTree(self._text[-1])
        self._tree.add_guesses(self._guesses.paths(self._plan.width))
        if self._plan.window:
            self._tree.add_window(self._plan.window.levels)
        self._draft = self._tree.tree()
        return self._draft

    @property
    def pipelined(self) -> bool:
        """Whether to dispatch the next forward before the next token is known.

        Not where drafts have lately been worth more than it costs to wait for the token.
        """
        return self.plain_steps.sought or self._recent.worth <= self.waiting_cost

    def observe(self, step: VerifiedStep) -> None:
        tokens, cost = step.tokens, self.curve(self._rows_beside + step.drafted)
        self._pending = step.pending  # rows that the next step begins with
        self._steps += 1
        self._rest.count(drafted=self._plan.width > 0 or self._plan.window is not None)
        self.plain_steps.count()
        self._recent.add(step, cost, self._plan.worth)
        self._guard.settle(len(tokens), cost)
        if self._hopeless:
            self._live.forget()
        else:
            self._guesses.learn(tokens)
            self._live.advance(tokens)
        if self._window and self._size:
            self._advance(self._window, self._size, step)
        else:
            self._knowledge.gain.relax()
        self._pool.read(tokens)
        self._text += tokens

    def end(self) -> None:
        del self._text, self._pool, self._live, self._window

    def origins(self) -> tuple[str, ...]:
        """Per node of the tree proposed last: "root", "guess" or "window"."""
        return self._tree.origins()

    def window_rows(self) -> dict[tuple[int, int], int]:
        """The node of each window row (level, column) in the tree proposed last."""
        return self._tree.window_rows()

    def _choose(self, budget: int, max_rows: int) -> _Plan:
        """Choose the window, and how many guesses to verify beside it."""
        if self.plain_steps.due or self._hopeless or self._rows_beside > max_rows:
            self._window = self._size = None
            return _Plan(0, None, 0.0)
        expected = expected_tokens(self._guesses.best_reach())
        if self._steps % _STEPS_BETWEEN_SIZES == 0 and self.branching:
            self._resize(expected, max_rows)
        window, size = self._window, self._size
        gain, rows = 0.0, self._rows_beside
        if window and size and window.depth <= budget and rows + size.rows <= max_rows:
            gain, rows = self._knowledge.gain.of(size), rows + size.rows
        else:
            window = None
        costs = [0.0, *self.curve.table[rows : max_rows + 1]]
        expected = [tokens + gain for tokens in expected[: len(costs) - 1]]
        price = price_of_time(expected, costs, self._recent.rate)
        worth_of_window = gain - price * (costs[1] - self.curve.table[self._rows_beside])
        entry_cost = self._recent.entry_cost(self.waiting_cost)
        widths = [*widths_by_worth(expected, costs, price, entry_cost), (0.0, 0)]
        for worth, width in widths:
            if not width and not window:
                break
            reached = self._guesses.reach_by_depth(width)
            if self._guard.allows(expected_shortfall(costs[width + 1], reached) - gain):
                return _Plan(width, window, max(worth + worth_of_window, 0.0))
        return _Plan(0, None, 0.0)

    def _resize(self, expected: Sequence[float], max_rows: int) -> None:
        """Begin, end or exchange the window, where another size is worth more."""
        costs = self.curve.table[self._rows_beside - 1 : max_rows + 1]
        price = price_of_time(expected[: len(costs) - 1], costs, self._recent.rate)
        size = best_window(
            self._knowledge.gain,
            expected,
            costs,
            price,
            max_ngram_size=self._ngram_size,
            bank=self._guard.bank,
            now=self._size,
        )
        if size != self._size:
            self._size = size
            self._window = JacobiWindow(size.columns, size.ngram_size, self._text) if size else None

    def _advance(self, window: JacobiWindow, size: WindowSize, step: VerifiedStep) -> None:
        rows = self._tree.rows
        if not rows or step.tree != self._draft:
            window.skip(step.tokens[-1])
            return
        ngrams = window.advance([step.argmaxes[node] for node in rows[-1]], step.tokens[-1])
        if ngrams:
            self._knowledge.gain.learn(size, self._earned(step))
        for ngram in ngrams:
            self._pool.add(ngram)

    def _earned(self, step: VerifiedStep) -> int:
        """How many tokens of a step no guess from the text would have given."""
        accepted = step.tokens[: len(step.accepted)]
        guessed = (
            common_length(guess, accepted) for guess in self._pool.text_guesses(step.tree.tokens[0])
        )
        return len(accepted) - max(guessed, default=0)


class _Plan(NamedTuple):
    """How many guesses to verify, the window beside them, and what both are worth."""

    width: int
    window: JacobiWindow | None
    worth: float
