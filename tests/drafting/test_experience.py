"""Experience: estimates converge to known probabilities, and request kinds stay separate."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from mlxspec.bench.replay import replay
from mlxspec.drafting import planner as planning
from mlxspec.drafting.chips import known_chip
from mlxspec.drafting.costs import FixedCosts
from mlxspec.drafting.experience import Experience
from mlxspec.drafting.p_accept import Corrections, probability
from mlxspec.drafting.planner import Planner
from mlxspec.drafting.suffix_source import SuffixSource


def test_the_probabilities_of_a_known_source_are_found() -> None:
    """Features add to the true logit; the estimates start 1.5 too low.

    They keep following new requests, so they vary slightly around the truth, without bias.
    """
    source, corrections = random.Random(1), Corrections()
    truth = {0: 1.0, 1: -2.0, 2: 0.5, 3: 2.0}
    errors = []
    for count in range(20_000):
        features = source.choice((0, 1)), source.choice((2, 3))
        p_true = probability(sum(truth[one] for one in features))
        corrections.learn(features, -1.5, source.random() < p_true)
        if count > 15_000:
            errors.append(probability(-1.5 + corrections.logit(features)) - p_true)
    assert abs(sum(errors) / len(errors)) < 0.015
    assert sum(map(abs, errors)) / len(errors) < 0.06


def test_it_follows_requests_that_change() -> None:
    corrections = Corrections()
    for right in (True, False):
        for _ in range(3000):
            corrections.learn((5,), 0.0, right)
        assert (corrections.logit((5,)) > 1) == right


def test_features_that_were_never_seen_change_nothing() -> None:
    corrections = Corrections()
    corrections.learn((1, 2), 0.0, True)
    assert corrections.logit((3, 4)) == 0
    assert corrections.logit((1, 3)) == corrections.logit((1,)) > 0


def prompt(kind: int, number: int) -> list[int]:
    return [kind] * 32 + [number]


def test_a_kind_of_request_is_known_from_its_second_on() -> None:
    experience = Experience()
    (everyone,) = experience.of_kind(prompt(1, 1))
    everyone.learn((7,), 0.0, True)
    own, everyone_again = experience.of_kind(prompt(1, 2))
    assert everyone_again is everyone
    # A request starts from the shared estimates and then diverges.
    assert own.logit((7,)) == everyone.logit((7,)) > 0
    own.learn((7,), 0.0, False)
    assert own.logit((7,)) < everyone.logit((7,))
    assert experience.of_kind(prompt(1, 3))[0] is own
    assert experience.of_kind(prompt(2, 1)) == [everyone]


def test_requests_of_a_kind_that_run_at_once_share_its_corrections() -> None:
    experience = Experience()
    experience.of_kind(prompt(1, 0))
    own = experience.of_kind(prompt(1, 1))[0]  # nothing has been learned yet
    assert experience.of_kind(prompt(1, 2))[0] is own


def test_few_kinds_are_remembered() -> None:
    experience = Experience()
    for kind in range(500):
        for number in range(2):
            experience.of_kind(prompt(kind, number))
    assert len(experience.of_kind(prompt(499, 2))) == 2  # it knows the newest ones
    assert len(experience.of_kind(prompt(0, 2))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("copies", [True, False])
def test_a_decoder_drafts_more_where_its_requests_copy_and_less_where_they_do_not(
    copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output repeats a passage of its prompt, or leaves each after the first token."""
    monkeypatch.setattr(planning, "_FIRST_BANK", math.inf)  # the guard allows all
    source, curve = random.Random(3), known_chip("M4 Pro").curve

    def request() -> tuple[list[int], list[int]]:
        passages = [[source.randrange(50, 5000) for _ in range(12)] for _ in range(8)]
        tokens = [token for passage in passages for token in passage]
        if copies:
            return tokens, source.choice(passages)[1:] * 2
        return tokens, [t for p in passages for t in (p[0], source.randrange(50, 5000))]

    def rows(experience: Experience, rounds: int) -> float:
        """Return the rows of each step."""
        total = 0.0
        for _ in range(rounds):
            tokens, output = request()
            suffixes = SuffixSource(experience=experience)
            planner = Planner(FixedCosts(curve), [suffixes])
            total += fmean(replay(tokens, output, planner).rows)
        return total / rounds

    experience = Experience()
    rows(experience, 30)
    taught = rows(experience, 30)
    untaught = fmean(rows(Experience(), 1) for _ in range(30))
    assert taught > untaught + 0.5 if copies else taught < untaught - 0.05
