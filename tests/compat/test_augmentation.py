"""Unchanged mlx-lm programs speculate under ``augment``, with the same output."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import mlx.core as mx
import mlx_lm
import pytest

import mlxspec
from mlxspec import compat
from tests.support.drop_in import FREE, REPEAT, fields, give_costs, stand_in_with_costs

MLX_LM = import_module("mlx_lm.generate")
ORIGINALS = {
    name: getattr(MLX_LM, name) for name in ("generate", "stream_generate", "batch_generate")
}


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return stand_in_with_costs()


@pytest.fixture(autouse=True)
def no_earlier_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_warned", set())


@pytest.fixture
def program() -> Iterator[ModuleType]:
    """A module that imported mlx-lm's functions earlier."""
    module = ModuleType("a_program")
    exec("from mlx_lm import generate as answer, stream_generate, batch_generate", vars(module))
    sys.modules["a_program"] = module
    yield module
    del sys.modules["a_program"]


@pytest.mark.slow
def test_a_program_speculates_until_it_is_undone(loaded: tuple, program: ModuleType) -> None:
    expected = fields(program.stream_generate(*loaded, REPEAT, max_tokens=24))
    text = program.answer(*loaded, REPEAT, max_tokens=24)
    with mlxspec.augment():
        responses = list(program.stream_generate(*loaded, REPEAT, max_tokens=24))
        assert program.answer(*loaded, REPEAT, max_tokens=24) == text
        answers = program.batch_generate(*loaded, [loaded[1].encode(REPEAT)], max_tokens=8)
        assert answers.stats.generation_steps < 8
    assert fields(responses) == expected
    assert responses[-1].stats.steps < 24  # fewer than tokens: drafts were accepted
    assert program.answer is ORIGINALS["generate"]


def test_mlx_lm_s_own_programs_are_reached_whenever_they_were_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = import_module("mlx_lm.chat")
    monkeypatch.delitem(sys.modules, "mlx_lm.benchmark", raising=False)
    with mlxspec.augment():
        later = import_module("mlx_lm.benchmark")
        stand_in = MLX_LM.stream_generate
        assert stand_in is not ORIGINALS["stream_generate"]
        for module in (mlx_lm, chat, later):
            assert module.stream_generate is stand_in
    for module in (mlx_lm, chat, later):
        assert module.stream_generate is ORIGINALS["stream_generate"]


def test_augmenting_twice_is_augmenting_once(program: ModuleType) -> None:
    outer, inner = mlxspec.augment(), mlxspec.augment()
    stand_in = program.stream_generate
    inner.undo()
    inner.undo()
    assert program.stream_generate is stand_in
    outer.undo()
    assert {name: getattr(MLX_LM, name) for name in ORIGINALS} == ORIGINALS
    with mlxspec.augment():
        assert program.stream_generate is stand_in
    assert program.stream_generate is ORIGINALS["stream_generate"]


def test_what_cannot_be_served_goes_to_mlx_lm_with_one_warning(
    loaded: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded[0].args, "max_position_embeddings", 8)
    prompt = [5] * 9
    options = {"max_tokens": 3}
    expected = fields(mlx_lm.stream_generate(*loaded, prompt, **options))
    with mlxspec.augment():
        with pytest.warns(UserWarning, match="without speculation: the prompt has 9 tokens"):
            assert fields(mlx_lm.stream_generate(*loaded, prompt, **options)) == expected
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert fields(mlx_lm.stream_generate(*loaded, prompt, **options)) == expected


def test_the_same_reason_with_other_numbers_is_reported_once(
    loaded: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded[0].args, "max_position_embeddings", 8)
    with mlxspec.augment(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (9, 10, 11):
            list(mlx_lm.stream_generate(*loaded, [5] * length, max_tokens=1))
    assert len(caught) == 1


def test_what_a_program_s_own_processor_raises_comes_through_at_once(loaded: tuple) -> None:
    calls = 0

    def fails_later(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError
        return logits

    with mlxspec.augment(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError):
            mlx_lm.generate(*loaded, [5, 6, 7], max_tokens=8, logits_processors=[fails_later])
    assert calls == 3


def test_a_batch_that_cannot_be_served_goes_to_mlx_lm(
    loaded: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded[0].args, "max_position_embeddings", 8)
    prompts, options = [[5, 6, 7], [5] * 9], {"max_tokens": 3}
    expected = mlx_lm.batch_generate(*loaded, prompts, **options).texts
    with mlxspec.augment(), pytest.warns(UserWarning, match="the prompt has 9 tokens"):
        assert mlx_lm.batch_generate(*loaded, prompts, **options).texts == expected


def test_a_model_that_cannot_be_examined_goes_to_mlx_lm(loaded: tuple) -> None:
    class Wrapped(type(loaded[0])):  # type: ignore[misc]
        """A model that takes several rows in the prefill only."""

        def __call__(self, inputs: mx.array, cache: list | None = None) -> mx.array:
            if cache and cache[0].offset and inputs.shape[1] > 1:
                raise NotImplementedError("such steps")
            return super().__call__(inputs, cache=cache)

    model = Wrapped(loaded[0].args)
    model.update(loaded[0].parameters())
    prompt = [7, 8, 9]
    expected = fields(mlx_lm.stream_generate(model, loaded[1], prompt, max_tokens=3))
    give_costs(model, loaded[1])
    with mlxspec.augment(), pytest.warns(UserWarning, match="without speculation: such steps"):
        actual = list(mlx_lm.stream_generate(model, loaded[1], prompt, max_tokens=3))
    assert fields(actual) == expected


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"foo": 1}])
def test_errors_are_mlx_lm_s_own(loaded: tuple, options: dict) -> None:
    with pytest.raises((TypeError, ValueError)) as expected:
        mlx_lm.generate(*loaded, FREE, **options)
    with mlxspec.augment(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(expected.type) as actual:
            mlx_lm.generate(*loaded, FREE, **options)
    assert str(actual.value) == str(expected.value)
