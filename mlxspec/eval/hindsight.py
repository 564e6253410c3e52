"""How far the planner could go: its candidates, their number chosen with the output at hand."""

from __future__ import annotations

from collections.abc import Sequence

from ..draft.drafter import Drafter, VerifiedStep
from ..draft.suffix_index import SuffixIndex
from ..draft.tree import DraftTree
from ..plan.cost_curve import CostCurve
from ..plan.p_accept import AcceptanceModel
from ..plan.suffix_source import SuffixCandidates
from .replay import verify


class Hindsight(Drafter):
    """Verifies as many of the planner's candidates as turn out to pay best.

    The candidates and their order are the planner's. Of their first 0, 1, 2, … those are
    drafted that emit most per time, which only who knows the output can tell. So no planner
    reaches this speed with these candidates; with others, such as those of a memory, one may.

    Args:
        output: what the target answers, from the first token after the prompt.
        curve: T(rows) / T(1).
        branching: whether drafts may be trees.
        token_classes: see :func:`mlxspec.plan.p_accept.token_classes`.
    """

    def __init__(
        self,
        output: Sequence[int],
        curve: CostCurve,
        *,
        branching: bool,
        token_classes: bytes = b"",
    ) -> None:
        self.branching = branching
        self._output = output
        self._curve = curve
        self._acceptance = AcceptanceModel(token_classes)
        self._any_p = [0.0] * curve.widest

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = SuffixIndex(prompt)
        self._acceptance.begin(memory_end=0)
        self._done = 0

    def propose(self, max_depth: int) -> DraftTree:
        following = self._output[self._done : self._done + self._curve.widest]
        self._acceptance.refresh()
        self._candidates = SuffixCandidates(
            self._text,
            self._acceptance,
            max_nodes=self._curve.widest - 1,
            max_depth=min(max_depth, len(following)),
            branching=self.branching,
            least_p=self._any_p,  # what is improbable may turn out to be right
        )
        everything = self._candidates.draft(len(self._candidates.p_reached))
        return self._candidates.draft(self._best_width(verify(everything, following).accepted))

    def observe(self, step: VerifiedStep) -> None:
        self._candidates.learn(step.tokens)
        self._text.extend(step.tokens)
        self._done += len(step.tokens)

    def end(self) -> None:
        del self._text, self._candidates

    def _best_width(self, right: Sequence[int]) -> int:
        """How many nodes to verify, given those on the output's path: up to one of them."""
        costs = self._curve.table
        rates = {node: (1 + depth) / costs[1 + node] for depth, node in enumerate(right, start=1)}
        return max((0, *right), key=lambda node: rates.get(node, 1.0))
