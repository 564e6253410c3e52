"""The steps that a calibration runs, without their times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxspec.drafting.measurement import CAREFUL
from mlxspec.engine import calibration
from mlxspec.engine.calibration import ModelSteps, calibrate, check_context, measured_contexts
from mlxspec.engine.heads import TrainedHead
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.target import Capability
from mlxspec.errors import OptionError
from tests.support import heads
from tests.support.architectures import ARCHITECTURES
from tests.support.random_models import SLIDING_GEMMA_3, random_model

SMALL = replace(CAREFUL, rows=(2, 4, 16), rounds=2, plain_tokens=2, seconds=1e9)


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return LoadedModel(random_model("llama"))


@pytest.fixture
def forwards(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the rows of each forward of a target."""
    rows: list[int] = []
    forward = calibration.Target.forward

    def counting(self, tokens, tree):
        rows.append(len(tree))
        return forward(self, tokens, tree)

    monkeypatch.setattr(calibration.Target, "forward", counting)
    return rows


def test_a_drafted_step_is_one_forward_over_its_rows(llama: LoadedModel, forwards: list[int]):
    steps = ModelSteps(llama, context=8)
    forwards.clear()
    assert steps.drafted(5) > 0
    assert forwards == [5]


def test_plain_steps_are_pipelined_and_a_drafted_step_waits_for_the_last(
    llama: LoadedModel, forwards: list[int]
):
    steps = ModelSteps(llama, context=8)
    forwards.clear()
    times = steps.plain(3)
    assert len(times) == 3
    assert all(seconds > 0 for seconds in times)
    assert forwards == [1] * 5  # one to start, three, and one in flight
    forwards.clear()
    steps.drafted(4)
    assert forwards == [4]


def test_the_context_grows_no_further_than_the_plan_says(llama: LoadedModel):
    steps = ModelSteps(llama, context=8)
    for _ in range(SMALL.rounds):
        steps.plain(SMALL.plain_tokens)
        for rows in SMALL.rows:
            steps.drafted(rows)
    assert 8 < steps.target.length <= 8 + SMALL.tokens + 2


def test_a_calibration_gives_every_number_of_rows_its_time(llama: LoadedModel):
    shares: list[float] = []
    times = calibrate(llama, SMALL, context=8, on_progress=shares.append).times
    assert [(time.rows, time.steps) for time in times] == [(1, 4), (2, 2), (4, 2), (16, 2)]
    assert all(time.seconds > 0 for time in times)
    assert shares[-1] == 1


def test_where_accepted_tokens_run_again_a_step_is_measured_with_them(
    monkeypatch: pytest.MonkeyPatch,
):
    model = ARCHITECTURES["mamba"].model()
    steps = ModelSteps(LoadedModel(model), context=8)
    rows: list[int] = []
    ordinary = type(model).__call__

    def counting(self, tokens, cache):
        rows.append(tokens.shape[1])
        return ordinary(self, tokens, cache)

    monkeypatch.setattr(type(model), "__call__", counting)
    for wanted in (4, 4, 16, 2):
        steps.drafted(wanted)
        assert rows[-2] == wanted  # then the accepted token, since the draft is wrong


def test_a_model_that_verifies_no_drafts_has_plain_steps_only():
    loaded = LoadedModel(random_model("llama"))
    loaded.chain_capability = Capability.PLAIN
    assert [time.rows for time in calibrate(loaded, SMALL, context=8).times] == [1]


def test_a_sliding_window_bounds_neither_rows_nor_context():
    model = LoadedModel(random_model("gemma3_text", **{**SLIDING_GEMMA_3, "sliding_window": 12}))
    assert [time.rows for time in calibrate(model, SMALL, context=30).times] == [1, 2, 4, 16]


def test_a_model_with_a_head_is_measured_behind_a_filled_context(llama: LoadedModel):
    for make_head in (heads.eagle3, heads.dflash):
        model = TrainedHead(make_head(llama.model)[1], llama.model).new_model()
        assert [time.rows for time in calibrate(model, SMALL, context=600).times] == [1, 2, 4, 16]


def test_a_short_context_is_not_outgrown(monkeypatch: pytest.MonkeyPatch):
    longest = 0
    forward = calibration.Target.forward

    def watching(self, tokens, tree):
        nonlocal longest
        longest = max(longest, self.length + len(tree))
        return forward(self, tokens, tree)

    monkeypatch.setattr(calibration.Target, "forward", watching)
    model = LoadedModel(random_model("llama", max_position_embeddings=48))
    calibrate(model, SMALL, context=12)
    assert 16 < longest <= 48


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(("window", "widest"), [(512, 64), (200, 64), (116, 33), (24, 1)])
def test_a_careful_calibration_measures_as_wide_as_a_short_context_allows(
    window: int, widest: int, monkeypatch: pytest.MonkeyPatch
):
    longest = 0
    forward = calibration.Target.forward

    def watching(self, tokens, tree):
        nonlocal longest
        longest = max(longest, self.length + len(tree))
        return forward(self, tokens, tree)

    monkeypatch.setattr(calibration.Target, "forward", watching)
    model = LoadedModel(random_model("llama", max_position_embeddings=window))
    careful, context = replace(CAREFUL, seconds=1e9), measured_contexts(model)[0]
    times = calibrate(model, careful, context=context).times
    assert times[-1].rows == widest
    assert longest <= window


@pytest.mark.parametrize("context", [0, -5, 40_000])
def test_a_context_that_the_model_cannot_have_is_refused(llama: LoadedModel, context: int):
    with pytest.raises(OptionError, match=f"context of {context} tokens: choose 1 to"):
        check_context(llama.model, SMALL, context)
