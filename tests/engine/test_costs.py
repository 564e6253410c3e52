"""A model's costs on a machine: measured once, saved, corrected, and keyed by model and machine."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxspec.drafting.cost_file import Calibration, CostFile, StepTime
from mlxspec.drafting.costs import LiveCosts
from mlxspec.engine import calibration
from mlxspec.engine.calibration import (
    cost_file,
    costs_for,
    measured_contexts,
    with_long_context,
)
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.machine import machine_identity, model_identity
from mlxspec.engine.patches import split_attention
from mlxspec.engine.target import Capability
from tests.support.openblas import needs_openblas
from tests.support.random_models import random_model

TIMES = [
    StepTime(rows, seconds, 0.01 / 1.96, 5)
    for rows, seconds in ((1, 0.02), (2, 0.022), (4, 0.03), (8, 0.04))
]
BUSY = [StepTime(rows, 0.02 + 0.01 * rows, 0.8 / 1.96, 1) for rows in (1, 2, 4, 8)]


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return LoadedModel(random_model("llama"))


@pytest.fixture
def file(llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CostFile:
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path))
    return cost_file(llama.model)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[LoadedModel]:
    """Record the models that are measured, each with the result TIMES."""
    measured: list[LoadedModel] = []

    def calibrate(model, plan, *, context):
        measured.append(model)
        return Calibration(TIMES, plan.source)

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    monkeypatch.setattr(calibration, "measured_contexts", lambda model: [64])
    return measured


@pytest.fixture(autouse=True)
def no_note_of_a_busy_machine() -> None:
    """Keep the check for a busy machine, which other tests disable."""


@pytest.mark.parametrize("drafts", [Capability.CHAIN, Capability.PLAIN])
def test_a_first_start_measures_a_few_plain_steps_and_warns_of_nothing(
    file: CostFile, caplog: pytest.LogCaptureFixture, drafts: Capability
) -> None:
    loaded, rows = LoadedModel(random_model("llama")), []
    loaded.chain_capability = drafts
    call = type(loaded.model).__call__

    def counted(self: nn.Module, inputs: mx.array, *args: object, **named: object) -> mx.array:
        rows.append(inputs.size)
        return call(self, inputs, *args, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(loaded.model), "__call__", counted)
        costs = costs_for(loaded)
    assert sum(rows) < 32  # a prompt of 16 tokens and some single steps
    assert max(rows[1:]) <= 16
    assert costs.curve(4) == pytest.approx(2.0)  # the usual costs of rows
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    (known,) = cost_file(loaded.model).read().values()
    assert (known.source, [time.rows for time in known.times]) == ("steps", [1])


def test_what_a_first_short_answer_has_shown_is_kept(
    llama: LoadedModel, file: CostFile, monkeypatch: pytest.MonkeyPatch
):
    costs = costs_for(llama)
    plain = costs.plain_seconds
    for rows in (1, 1, 2, 5):
        costs.record(rows, plain, rows == 1)
    costs.end()
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: pytest.fail("measured"))
    again = costs_for(llama)
    assert again.curve(5) < 1.5
    (known,) = file.read().values()
    assert (known.source, [time.rows for time in known.times]) == ("steps", [1, 2, 5])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def learn(costs: LiveCosts, steps: int = 100, wide: float = 0.06) -> None:
    for _ in range(steps // 2):
        costs.record(1, 0.02, True)
        costs.record(1, 0.02, True)
        costs.record(8, wide, False)


def test_the_first_use_measures_and_the_next_one_knows(
    llama: LoadedModel, file: CostFile, measurements: list[LoadedModel]
):
    first = costs_for(llama)
    assert measurements == [llama]
    again = costs_for(llama)
    assert measurements == [llama]
    assert first.curve(8) == again.curve(8) == pytest.approx(2.0)
    assert again.plain_seconds == pytest.approx(0.02)


def test_a_spoiled_cache_is_measured_anew(
    llama: LoadedModel,
    file: CostFile,
    measurements: list[LoadedModel],
    caplog: pytest.LogCaptureFixture,
):
    costs_for(llama)
    file.path.write_text("{")
    assert costs_for(llama).curve(8) == pytest.approx(2.0)
    assert "ignoring" in caplog.text
    assert len(measurements) == 2
    assert costs_for(llama).curve(8) == pytest.approx(2.0)
    assert len(measurements) == 2


def test_an_interrupted_measurement_leaves_the_cache_as_it_was(
    llama: LoadedModel, file: CostFile, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "calibrate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        costs_for(llama)
    assert not file.directory.exists()


def test_what_steps_have_taught_is_kept(
    llama: LoadedModel, file: CostFile, measurements: list[LoadedModel]
):
    costs = costs_for(llama)
    learn(costs)
    costs.end()
    assert costs_for(llama).curve(8) == pytest.approx(3.0, rel=0.05)
    (known,) = file.read().values()
    assert known.source == "steps"


def test_what_shared_steps_have_taught_is_kept_for_each_number_of_sequences(
    llama: LoadedModel, file: CostFile, measurements: list[LoadedModel]
):
    costs = costs_for(llama)
    shared = costs.for_sequences(4)
    before = costs.curve(8)
    learn(shared)
    shared.end()
    again = costs_for(llama)
    assert again.for_sequences(4).curve(8) == pytest.approx(3.0, rel=0.05)
    assert again.for_sequences(3).curve(8) < 2.5
    assert again.curve(8) == pytest.approx(before)
    (known,) = file.of_sequences(4).read().values()
    assert known.source == "steps"


def test_saving_waits_if_the_last_one_is_recent(llama: LoadedModel, file: CostFile):
    clock = Clock()
    known = Calibration([StepTime(1, 0.02, 0.1), StepTime(8, 0.04, 0.1)], "careful")
    costs = LiveCosts({1024: known}, file, clock)

    def kept_cost() -> float:
        times = file.read()[1024].times
        return times[-1].seconds / times[0].seconds

    learn(costs, steps=100, wide=0.06)
    costs.end()
    assert kept_cost() == pytest.approx(3.0, rel=0.05)
    learn(costs, steps=300, wide=0.08)
    costs.end()
    assert kept_cost() == pytest.approx(3.0, rel=0.05)  # too early to save
    clock.now += 60
    costs.end()
    assert kept_cost() == pytest.approx(4.0, rel=0.05)


def test_generations_that_overlap_save_as_seldom_as_one(file: CostFile):
    clock = Clock()
    costs = LiveCosts({64: Calibration(TIMES, "quick")}, file, clock)
    first, second = costs.for_generation(), costs.for_generation()
    clock.now += 60
    first.move_to(600)
    first.end()
    assert file.path.exists()
    file.path.unlink()
    third = costs.for_generation()
    second.end()
    third.end()
    assert not file.path.exists()
    assert costs.wants_long_context


def test_steps_after_a_long_context_are_measured_once_a_generation_has_had_one(
    llama: LoadedModel, file: CostFile, monkeypatch: pytest.MonkeyPatch
):
    contexts: list[int] = []

    def calibrate(model, plan, *, context):
        contexts.append(context)
        return Calibration(TIMES, "quick", split=context == 8000)

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    costs = costs_for(llama)
    costs.move_to(400)
    costs.end()
    assert not costs.wants_long_context
    costs.move_to(600)
    costs.end()
    assert costs.wants_long_context
    learn(costs)
    long = with_long_context(llama, costs)
    assert contexts == [64, 8000]
    kept = file.read()
    assert {context: known.split for context, known in kept.items()} == {64: False, 8000: True}
    assert llama.split_from == 715  # √(64 · 8000)
    long.move_to(600)
    long.end()
    assert not long.wants_long_context
    long.move_to(0)
    assert long.curve(8) == pytest.approx(costs.curve(8), rel=0.3)
    split_attention(llama, None)
    assert not costs_for(llama).wants_long_context
    assert llama.split_from == 715
    split_attention(llama, None)
    assert contexts == [64, 8000]


def test_a_busy_measurement_after_a_long_context_is_not_kept_and_not_tried_again(
    llama: LoadedModel, file: CostFile, monkeypatch: pytest.MonkeyPatch
):
    costs = LiveCosts({64: Calibration(TIMES, "quick")}, file)
    costs.move_to(600)
    costs.end()
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: Calibration(BUSY, "quick"))
    assert with_long_context(llama, costs) is costs
    assert list(file.read()) == [64]
    costs.end()
    assert not costs.wants_long_context


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({64: None, 8000: None}, None),
        ({64: None, 8000: False}, None),
        ({64: None, 8000: True}, 715),
        ({1000: False, 8000: True}, 2828),
        ({1000: True, 8000: True}, 252),
        ({1000: True, 8000: False}, None),
    ],
)
def test_attention_is_split_from_between_the_contexts_that_were_measured(
    llama: LoadedModel, file: CostFile, split: dict[int, bool | None], expected: int | None
):
    known = {context: Calibration(TIMES, "quick", split=own) for context, own in split.items()}
    file.update(known)
    costs_for(llama)
    assert llama.split_from == expected
    split_attention(llama, None)


@pytest.mark.parametrize(
    ("settings", "gib", "contexts"),
    [
        ({}, 64, [64, 1000, 8000]),
        ({"max_position_embeddings": 4096}, 64, [64, 1000, 2000]),
        ({"max_position_embeddings": 1024}, 64, [64, 500]),
        ({"max_position_embeddings": 999}, 64, [64]),
        ({"max_position_embeddings": 128}, 64, [32]),
        ({}, 256 * 16 * 3000 / 2**30, [64, 1000, 2000]),  # 256 bytes a position
    ],
)
def test_contexts_fit_the_model_and_the_memory(
    settings: dict[str, int], gib: float, contexts: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calibration, "whole_memory", lambda: int(gib * 2**30))
    assert measured_contexts(LoadedModel(random_model("llama", **settings))) == contexts


_PRINT_BLAS = """
import mlxspec
from mlxspec.engine.machine import global_blas
print(global_blas())
"""


def wide() -> nn.Module:
    return random_model("llama", hidden_size=64, head_dim=16)


def quantized(bits: int, group_size: int = 32) -> nn.Module:
    model = wide()
    nn.quantize(model, group_size=group_size, bits=bits)
    return model


def test_weights_do_not_matter_and_sizes_do():
    base, tuned = random_model("llama"), random_model("llama")
    tuned.apply(lambda p: p * 2)
    assert model_identity(tuned) == model_identity(base)
    assert model_identity(random_model("llama", num_hidden_layers=3)) != model_identity(base)
    assert model_identity(random_model("llama", rope_theta=5e5)) != model_identity(base)


def test_data_type_and_quantisation_matter():
    half = wide()
    half.set_dtype(mx.float16)
    models = (wide(), half, quantized(4), quantized(8), quantized(4, 64))
    assert len({model_identity(model)["digest"] for model in models}) == len(models)


def test_an_identity_says_what_it_is_and_survives_json():
    identity = model_identity(random_model("llama"))
    assert identity["type"] == "llama"
    assert identity["bits_per_weight"] == 32
    assert json.loads(json.dumps(identity)) == identity
    machine = machine_identity()
    assert machine["chip"]
    assert machine["device"] in ("cpu", "gpu")
    assert json.loads(json.dumps(machine)) == machine


@pytest.mark.nightly
@needs_openblas
@pytest.mark.slow
def test_the_blas_in_use_is_identified():
    def blas(choice: str) -> str:
        environment = {**os.environ, "MLXSPEC_OPENBLAS": choice}
        command = [sys.executable, "-c", _PRINT_BLAS]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert blas("0") == "own"
    assert blas("1").startswith("libopenblas")
