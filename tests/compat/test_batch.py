"""Batches of prompts: each gets the answer that it gets alone."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from mlx_lm.generate import BatchResponse
from mlx_lm.models.cache import make_prompt_cache

import mlxspec
from mlxspec.compat import decoder_of
from mlxspec.engine.joint import JointMode
from mlxspec.errors import MlxspecError, OptionError
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import FLAT, LINEAR
from tests.support.drop_in import (
    FREE,
    REPEAT,
    batch_generate,
    demo_with_costs,
    give_costs,
    stand_in_with_costs,
    stream_generate,
)
from tests.support.random_models import random_model, scaled_rope

pytestmark = pytest.mark.slow

LIMITS = [12, 6, 14]


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return stand_in_with_costs(LINEAR)


@pytest.fixture(scope="module")
def prompts(loaded: tuple) -> list[list[int]]:
    # The bundled model ends its answer to this before max_tokens.
    short = '[INST] Repeat the following phrase 2 times: "A day.". [/INST]'
    return [loaded[1].encode(text) for text in (REPEAT, FREE, short)]


@pytest.fixture(params=[JointMode.SPLIT, JointMode.ALONE], ids=["joint", "mlx-lm's batches"])
def way(
    request: pytest.FixtureRequest, loaded: tuple, monkeypatch: pytest.MonkeyPatch
) -> JointMode:
    """Run in joint steps, then in mlx-lm's batches, as for models without joint steps."""
    decoder = decoder_of(*loaded)
    assert decoder.loaded.joint_mode is JointMode.SPLIT
    monkeypatch.setattr(decoder.loaded, "joint_mode", request.param)
    give_costs(*loaded, FLAT)
    return request.param


def alone(loaded: tuple, prompt: list[int], limit: int) -> list[int]:
    """Return mlx-lm's answer to one prompt."""
    responses = stream_generate(*loaded, prompt, max_tokens=limit)
    return [r.token for r in responses if r.token not in loaded[1].eos_token_ids]


def test_answers_end_where_those_to_single_prompts_end(loaded: tuple, prompts: list) -> None:
    tokens = alone(loaded, prompts[0], 12)
    stop = loaded[1].decode(tokens[5:6]).strip() or loaded[1].decode(tokens[5:7])
    for options in ({"stop": [stop]}, {"stop_tokens": [tokens[5]]}):
        (text,) = mlxspec.batch_generate(*loaded, prompts[:1], max_tokens=12, **options).texts
        one_by_one = mlxspec.stream_generate(*loaded, prompts[0], max_tokens=12, **options)
        assert text.strip() == "".join(response.text for response in one_by_one).strip()
        assert len(text) < len(loaded[1].decode(tokens))


@pytest.mark.parametrize("name", ["on_progress", "prompt_cache"])
def test_options_of_a_single_prompt_are_refused(loaded: tuple, prompts: list, name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is for one prompt: pass prompt_"):
        mlxspec.batch_generate(*loaded, prompts, **{name: None})


@pytest.mark.nightly(keep=1)
def test_answers_are_those_to_single_prompts(
    prompts: list, way: JointMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = demo_with_costs(FLAT)
    monkeypatch.setattr(decoder_of(*loaded).loaded, "joint_mode", way)
    expected = [alone(loaded, prompt, n) for prompt, n in zip(prompts, LIMITS, strict=True)]
    response = mlxspec.batch_generate(*loaded, prompts, max_tokens=LIMITS, return_token_ids=True)
    assert isinstance(response, BatchResponse)
    assert response.token_ids == expected
    assert response.texts == [loaded[1].decode(tokens) for tokens in expected]
    assert response.stats.prompt_tokens >= sum(map(len, prompts)) - len(prompts)
    assert response.stats.generation_steps <= max(LIMITS)


def test_all_that_mlx_lm_returns_is_returned(loaded: tuple, prompts: list, way: JointMode) -> None:
    options: dict[str, Any] = {
        "max_tokens": 8,
        "return_prompt_caches": True,
        "return_token_ids": True,
        "return_logprobs": True,
    }
    theirs = batch_generate(*loaded, prompts, **options)
    ours = mlxspec.batch_generate(*loaded, prompts, **options)
    assert ours.token_ids == theirs.token_ids
    for own, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert own == pytest.approx(other, abs=1e-4)
    for own, other in zip(ours.caches, theirs.caches, strict=True):
        assert [cache.offset for cache in own] == [cache.offset for cache in other]
    assert ours.stats.generation_tokens == theirs.stats.generation_tokens

    # The conversations continue from these caches, without changing them.
    following = [loaded[1].encode(" [INST] Again. [/INST]", add_special_tokens=False)] * len(
        prompts
    )
    expected = batch_generate(*loaded, following, copy.deepcopy(theirs.caches), **options)
    for _ in range(2):
        actual = mlxspec.batch_generate(*loaded, following, ours.caches, **options)
        assert actual.token_ids == expected.token_ids


def test_it_prints_mlx_lm_s_lines(
    loaded: tuple, prompts: list, way: JointMode, capsys: pytest.CaptureFixture
) -> None:
    def printed(function: Any) -> list[str]:
        function(*loaded, prompts[:2], max_tokens=4, verbose=True)
        lines = re.sub(r"\d+(\.\d+)?", "#", capsys.readouterr().out).splitlines()
        return [re.sub(r".*\r", "", line).removesuffix(" ...").rstrip() for line in lines]

    theirs, ours = printed(batch_generate), printed(mlxspec.batch_generate)
    assert [line for line in ours if "Speculation" not in line and "Finished" not in line] == [
        line for line in theirs if "Finished" not in line
    ]


def test_a_model_that_mlx_lm_s_batches_cannot_run_is_answered_one_by_one(loaded: tuple) -> None:
    scaling = scaled_rope("dynamic", factor=4.0)
    dynamic = random_model("llama", **scaling, max_position_embeddings=64), loaded[1]
    give_costs(*dynamic, FLAT)
    prompts = [[5, 6, 7, token] for token in range(8)]
    response = mlxspec.batch_generate(*dynamic, prompts, max_tokens=5, return_token_ids=True)
    assert response.token_ids == [alone(dynamic, prompt, 5) for prompt in prompts]


@pytest.mark.filterwarnings("ignore:Exception ignored")  # mlx-lm's partly constructed generator
def test_unknown_arguments_are_refused(loaded: tuple, prompts: list) -> None:
    for function in (batch_generate, mlxspec.batch_generate):
        with pytest.raises(TypeError):
            function(*loaded, prompts, foo=1)


def test_limits_for_other_prompts_are_refused(loaded: tuple, prompts: list) -> None:
    with pytest.raises(OptionError, match="max_tokens: 1 for 3 prompts"):
        mlxspec.batch_generate(*loaded, prompts, max_tokens=[1])


@pytest.mark.parametrize(
    ("prompt_caches", "message"),
    [
        ([None], "prompt_caches: 1 for 3 prompts"),
        ([[], None, None], "prompt_cache has 0 caches"),
    ],
)
def test_caches_that_do_not_fit_are_refused_before_any_answer(
    loaded: tuple, prompts: list, way: JointMode, prompt_caches: list, message: str
) -> None:
    def untouched(tokens: Any, logits: Any) -> Any:
        raise AssertionError

    with pytest.raises(OptionError, match=message):
        mlxspec.batch_generate(*loaded, prompts, prompt_caches, logits_processors=[untouched])


def test_bad_arguments_are_refused_before_anything_is_measured(
    loaded: tuple, prompts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(decoder_of(*loaded)), "costs")
    monkeypatch.setattr(
        "mlxspec.generation.decoder.costs_for", lambda *_, **__: pytest.fail("measured")
    )
    for bad in ({"max_tokens": [12, 6, 0]}, {"prompts": [prompts[0], []]}, {"max_kv_size": 3}):
        with pytest.raises(MlxspecError):
            mlxspec.batch_generate(*loaded, **{"prompts": prompts, **bad})


def test_processors_are_passed_on(loaded: tuple, prompts: list, way: JointMode) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "return_token_ids": True}
    freely = batch_generate(*loaded, prompts, **options).token_ids
    forbidden = sorted({tokens[2] for tokens in freely})

    def forbid(tokens: Any, logits: Any) -> Any:
        logits[:, forbidden] = -1e9
        return logits

    options["logits_processors"] = [forbid]
    expected = batch_generate(*loaded, prompts, **options).token_ids
    assert not {*forbidden} & {token for tokens in expected for token in tokens}
    assert mlxspec.batch_generate(*loaded, prompts, **options).token_ids == expected


@pytest.mark.parametrize("curve", [LINEAR, FLAT], ids=["linear", "flat"])
@pytest.mark.parametrize("count", [1, 3])
def test_bounded_caches_give_the_answers_to_single_prompts(
    loaded: tuple, curve: dict, count: int
) -> None:
    model = ARCHITECTURES["mixtral"].model()
    give_costs(model, loaded[1], curve)
    prompts = [[(i * 7 + row * i * i) % 60 for i in range(40)] for row in range(count)]
    options = {"max_tokens": 12, "return_token_ids": True}
    bounded = [stream_generate(model, loaded[1], p, max_tokens=12, max_kv_size=16) for p in prompts]
    expected = [[r.token for r in answer if r.finish_reason != "stop"] for answer in bounded]
    assert expected != batch_generate(model, loaded[1], prompts, **options).token_ids
    actual = mlxspec.batch_generate(model, loaded[1], prompts, max_kv_size=16, **options)
    assert actual.token_ids == expected
    caches = [make_prompt_cache(model, 16) for _ in prompts]
    actual = mlxspec.batch_generate(model, loaded[1], prompts, caches, **options)
    assert actual.token_ids == expected


def test_no_prompts_give_no_answers(loaded: tuple) -> None:
    assert mlxspec.batch_generate(*loaded, []).texts == []


def test_a_cache_is_made_where_none_is_given(loaded: tuple, prompts: list) -> None:
    give_costs(*loaded, LINEAR)
    caches = [make_prompt_cache(loaded[0]) for _ in prompts]
    options = {"max_tokens": 4, "return_token_ids": True}
    with_caches = mlxspec.batch_generate(*loaded, prompts, caches, **options)
    assert with_caches.token_ids == mlxspec.batch_generate(*loaded, prompts, **options).token_ids
    assert all(cache.empty() for of_prompt in caches for cache in of_prompt)


def test_progress_of_all_prompts_is_reported(loaded: tuple, prompts: list, way: JointMode) -> None:
    progress: list[tuple[int, int]] = []
    mlxspec.batch_generate(
        *loaded,
        [*prompts, [5]],
        max_tokens=2,
        prefill_step_size=8,
        prompt_progress_callback=lambda *call: progress.append(call),
    )
    total = sum(map(len, prompts)) + 1
    assert progress[0][0] < total
    assert progress[-1] == (total, total)
    assert progress == sorted(progress)
    assert {whole for _, whole in progress} == {total}
    assert len(progress) > 2 or way is JointMode.ALONE
