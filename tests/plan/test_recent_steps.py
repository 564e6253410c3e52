"""Averages over a generation's steps, reckoned by hand."""

from __future__ import annotations

import pytest

from mlxspec.draft.drafter import VerifiedStep
from mlxspec.draft.tree import DraftTree
from mlxspec.plan.policy import RecentSteps

PLAIN = VerifiedStep(DraftTree.chain(1), (2,), (2,), (), (2,))
DRAFTED = VerifiedStep(DraftTree.chain(1, [2, 3]), (2, 3, 4), (2, 3, 4), (1, 2), (2, 3, 4))


def test_rate_and_worth_approach_those_of_the_steps() -> None:
    recent = RecentSteps()
    assert (recent.rate, recent.worth) == (1.2, 0.0)
    for _ in range(20):
        recent.add(DRAFTED, cost=1.5, worth=0.8)  # three tokens in the time of 1.5
    assert recent.rate == pytest.approx(2.0 - 0.8 * 0.9**20)
    assert recent.worth == pytest.approx(0.8 - 0.8 * 0.9**20)


def test_a_draft_costs_an_entry_unless_one_was_verified_just_before() -> None:
    recent = RecentSteps()
    assert recent.entry_cost(0.3) == 0.3
    recent.add(DRAFTED, cost=1.5, worth=0.8)
    assert recent.entry_cost(0.3) == 0.0
    recent.add(PLAIN, cost=1.0, worth=0.8)  # a draft was chosen, and a plain step under way
    assert recent.entry_cost(0.3) == 0.3
