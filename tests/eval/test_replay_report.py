"""The figures of a report, reckoned by hand."""

import math

import pytest

from mlxspec.eval.replay import ReplayedCompletion
from mlxspec.eval.replay_report import report


def test_sets_count_alike_and_completions_by_their_time() -> None:
    replayed = [
        ("a", ReplayedCompletion(4, (2, 2))),  # 4 tokens in a cost of 3
        ("b", ReplayedCompletion(2, (1, 1))),
        ("a", ReplayedCompletion(2, (2, 2))),  # 2 tokens in a cost of 3
    ]
    figures = report(replayed, lambda rows: {1: 1.0, 2: 1.5}[rows])
    assert figures.sets["a"].speedup == pytest.approx(1.0)
    assert figures.sets["a"].share_below_098 == 0.5
    assert figures.sets["a"].tokens_per_step == 6 / 4
    assert figures.sets["a"].rows_per_step == 2
    assert figures.speedup == pytest.approx(math.sqrt(1.0 * 1.0))
    assert figures.share_below_098 == 0.25
    assert figures.tokens_per_step == 8 / 6
    assert figures.rows_per_step == 10 / 6
    json = figures.as_json()
    assert json["worst"] == pytest.approx(1.0)
    assert list(json["sets"]) == ["a", "b"]


def test_nothing_replayed_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing"):
        report([], float)
