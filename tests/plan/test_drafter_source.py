"""Any drafter's drafts as candidates: what is learned of them stays a probability."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxspec.draft.drafter import Drafter, DraftTree, VerifiedStep
from mlxspec.plan.drafter_source import DrafterSource


class Always(Drafter):
    """Drafts the same tokens again and again."""

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._last, [1] * 20)

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]


@pytest.mark.parametrize(("token", "first"), [(1, 0.99), (2, 0.01)])
def test_no_draft_becomes_certain_or_impossible(token: int, first: float) -> None:
    source = DrafterSource(Always())
    source.begin([token])
    step = VerifiedStep(DraftTree.chain(token), (token,), (token,), (), (token,))
    for _ in range(400):
        found = source.candidates(12, 100, True, [])
        source.observe(step, searched=True)
    assert found.p_reached[0] == pytest.approx(first)
