"""Drop-in generation compared with mlx-lm's, argument by argument."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import GenerationResponse, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlxspec
from mlxspec.compat import decoder_of
from mlxspec.generation.options import GenerationOptions
from tests.support.architectures import ARCHITECTURES
from tests.support.drop_in import (
    FREE,
    REPEAT,
    demo_with_costs,
    fields,
    give_costs,
    stand_in_with_costs,
    stream_generate,
    write_float32_demo,
)
from tests.support.random_models import random_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return stand_in_with_costs()


def test_the_generator_keeps_its_model_alive() -> None:
    def started() -> Any:
        model, (_, tokenizer) = ARCHITECTURES["llama3"].model(), stand_in_with_costs()
        return mlxspec.stream_generate(model, tokenizer, [1, 2, 3], max_tokens=2)

    generator = started()
    gc.collect()
    assert len([*generator]) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 24, "sampler": make_sampler(0.0)},
        {"max_tokens": 20, "logits_processors": make_logits_processors({5: 3.0}, 1.3)},
        {"max_tokens": 20, "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 30},
        {"max_tokens": 20, "prefill_step_size": 8},
        {"max_tokens": 1},
        {"num_draft_tokens": 3, "max_tokens": 5},
        {"max_tokens": 5, "logits_processors": None, "sampler": None, "prompt_cache": None},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_responses_are_mlx_lm_s(loaded: tuple, options: dict) -> None:
    expected = list(stream_generate(*loaded, REPEAT, **options))
    actual = list(mlxspec.stream_generate(*loaded, REPEAT, **options))
    assert fields(actual) == fields(expected)
    for own, theirs in zip(actual[::7], expected[::7], strict=True):
        assert mx.allclose(own.logprobs, theirs.logprobs, atol=1e-4).item()
    assert actual[-1].stats.steps <= len(actual)


def test_responses_have_all_fields_of_mlx_lm_s(loaded: tuple) -> None:
    (response,) = mlxspec.stream_generate(*loaded, FREE, max_tokens=1)
    for field in dataclass_fields(GenerationResponse):
        assert hasattr(response, field.name)
    assert isinstance(response, GenerationResponse)


@pytest.mark.parametrize("with_draft_model", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_a_bounded_cache_is_mlx_lm_s_which_has_none_beside_a_draft_model(
    loaded: tuple, kind: str, with_draft_model: bool
) -> None:
    model = ARCHITECTURES[kind].model()
    give_costs(model, loaded[1])
    drafts = {"draft_model": model} if with_draft_model else {}

    def tokens(function: Callable, **options: Any) -> list[int]:
        prompt = [i * 7 % 60 for i in range(80)]
        return [r.token for r in function(model, loaded[1], prompt, max_tokens=24, **options)]

    expected = tokens(stream_generate, max_kv_size=16, **drafts)
    assert (expected == tokens(stream_generate)) is with_draft_model
    assert tokens(mlxspec.stream_generate, max_kv_size=16, **drafts) == expected


def test_a_tuple_of_caches_will_do(loaded: tuple) -> None:
    caches = tuple(make_prompt_cache(loaded[0]))
    expected = fields(stream_generate(*loaded, FREE, max_tokens=4))
    actual = mlxspec.stream_generate(*loaded, FREE, max_tokens=4, prompt_cache=caches)
    assert fields(actual) == expected
    assert {cache.offset for cache in caches} == {len(loaded[1].encode(FREE)) + 4}


def test_all_arguments_of_mlx_lm_are_taken() -> None:
    def names(function: Callable) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(mlxspec.load) == names(mlx_lm.load)
    assert names(mlxspec.generate)[:4] == names(mlx_lm.generate)[:4]
    assert names(mlxspec.stream_generate)[:6] == names(mlx_lm.stream_generate)[:6]
    assert names(mlxspec.batch_generate)[:9] == names(mlx_lm.batch_generate)[:9]
    taken = {*names(mlxspec.stream_generate), *GenerationOptions.__annotations__}
    assert set(names(generate_step)) <= taken


@pytest.mark.parametrize("prompt", ["text", "ids", "array"])
def test_prompts_are_texts_ids_or_arrays(loaded: tuple, prompt: str) -> None:
    ids = loaded[1].encode(FREE)
    given = {"text": FREE, "ids": ids, "array": mx.array(ids)}[prompt]
    expected = list(stream_generate(*loaded, given, max_tokens=6))
    assert fields(mlxspec.stream_generate(*loaded, given, max_tokens=6)) == fields(expected)


def test_a_bare_transformers_tokenizer_will_do(loaded: tuple) -> None:
    model, tokenizer = random_model("llama", vocab_size=4096), loaded[1]._tokenizer
    give_costs(model, tokenizer)
    expected = mlx_lm.generate(model, tokenizer, FREE, max_tokens=8)
    for _ in range(2):
        assert mlxspec.generate(model, tokenizer, FREE, max_tokens=8) == expected


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (FREE, {"foo": 1}),
        (FREE, {"max_tokens": 0}),
        ([], {}),
        (FREE, {"input_embeddings": mx.zeros((2, 8)), "draft_model": object()}),
    ],
    ids=["unknown argument", "no tokens", "empty prompt", "embeddings and draft model"],
)
def test_what_mlx_lm_refuses_is_refused_with_the_same_exception(
    loaded: tuple, prompt: Any, options: dict
) -> None:
    def refused(function: Callable) -> type[Exception]:
        with pytest.raises((TypeError, ValueError)) as caught:
            list(function(*loaded, prompt, **options))
        return caught.type

    expected = refused(stream_generate)
    assert issubclass(refused(mlxspec.stream_generate), expected)


def test_no_limit_means_until_a_stop_token() -> None:
    loaded = demo_with_costs()
    prompt = loaded[1].apply_chat_template(
        [{"role": "user", "content": 'Repeat the following phrase 2 times: "A day.".'}],
        add_generation_prompt=True,
    )
    expected = fields(stream_generate(*loaded, prompt, max_tokens=-1))
    assert expected[-1][-1] == "stop"
    assert fields(mlxspec.stream_generate(*loaded, prompt, max_tokens=-1)) == expected


@pytest.mark.parametrize("length", [1, 2, 23])
def test_progress_is_reported_like_mlx_lm_s(loaded: tuple, length: int) -> None:
    def calls_of(function: Callable) -> list[tuple[int, int]]:
        calls: list[tuple[int, int]] = []
        list(
            function(
                *loaded,
                list(range(3, 3 + length)),
                max_tokens=2,
                prefill_step_size=10,
                prompt_progress_callback=lambda *call: calls.append(call),
            )
        )
        return calls

    expected = calls_of(stream_generate)
    # The first step includes the last token, which is not reported separately.
    assert calls_of(mlxspec.stream_generate) == [call for call in expected if call[0] != length - 1]


def test_progress_with_a_session_is_that_of_what_is_run(loaded: tuple) -> None:
    session = mlxspec.Session()
    prompt = loaded[1].encode(FREE)
    list(mlxspec.stream_generate(*loaded, prompt, max_tokens=4, session=session))
    prompt = [*session.tokens, 11, 12, 13]
    progress: list[tuple[int, int]] = []
    *_, last = mlxspec.stream_generate(
        *loaded,
        prompt,
        max_tokens=2,
        session=session,
        prompt_progress_callback=lambda *call: progress.append(call),
    )
    assert last.reused_tokens == len(prompt) - 3
    assert progress == [(0, 3), (3, 3)]


@pytest.mark.parametrize(
    "option",
    [{"stop": "x"}, {"temp": 0.5}, {"session": mlxspec.Session()}],
    ids=lambda option: next(iter(option)),
)
def test_what_mlx_lm_does_not_know_is_refused_beside_embeddings(
    loaded: tuple, option: dict
) -> None:
    (name,) = option
    with pytest.raises(TypeError, match=name):
        next(mlxspec.stream_generate(*loaded, [5], input_embeddings=mx.zeros((1, 8)), **option))


def test_embeddings_are_generated_from_plainly(loaded: tuple) -> None:
    model, tokenizer = loaded
    embeddings = model.model.embed_tokens(mx.array(tokenizer.encode(FREE)))
    options = {"max_tokens": 6, "input_embeddings": embeddings}
    expected = list(stream_generate(model, tokenizer, [], **options))
    actual = list(mlxspec.stream_generate(model, tokenizer, [], **options))
    assert fields(actual) == fields(expected)
    assert actual[-1].stats.tokens_per_step == 1


def test_repeated_samples_differ_and_a_seed_repeats_them(loaded: tuple) -> None:
    def sample(**options: Any) -> str:
        return mlxspec.generate(*loaded, FREE, max_tokens=8, **options)

    mx.random.seed(3)
    assert len({sample(sampler=make_sampler(1.0)) for _ in range(3)}) > 1
    assert sample(temp=1.0, seed=4) == sample(temp=1.0, seed=4)


def test_verbose_prints_mlx_lm_s_lines_and_what_speculation_did(
    loaded: tuple, capsys: pytest.CaptureFixture
) -> None:
    def printed(function: Callable) -> list[str]:
        text = function(*loaded, REPEAT, verbose=True, max_tokens=16)
        output = capsys.readouterr().out
        assert text in output
        return re.sub(r"\d+\.\d+", "#", output).splitlines()

    theirs, ours = printed(mlx_lm.generate), printed(mlxspec.generate)
    (speculation,) = [line for line in ours if line.startswith("Speculation: ")]
    assert re.fullmatch(
        r"Speculation: # tokens per step, \d+ of \d+ draft tokens accepted", speculation
    )
    ours.remove(speculation)
    assert ours == theirs


def test_a_conversation_in_a_prompt_cache_goes_on_as_with_mlx_lm(loaded: tuple) -> None:
    model, tokenizer = loaded
    theirs, ours = make_prompt_cache(model), make_prompt_cache(model)
    for text in (REPEAT, " [INST] Again. [/INST]", " [INST] And again. [/INST]"):
        prompt = tokenizer.encode(text, add_special_tokens=False)
        expected = fields(
            stream_generate(model, tokenizer, prompt, max_tokens=16, prompt_cache=theirs)
        )
        actual = mlxspec.stream_generate(model, tokenizer, prompt, max_tokens=16, prompt_cache=ours)
        assert fields(actual) == expected
        assert [cache.offset for cache in ours] == [cache.offset for cache in theirs]


def readme_examples() -> list[str]:
    """Return the Python programs in mlx-lm's README that generate or load."""
    page = str(metadata("mlx-lm").get_payload() or "")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return [block for block in blocks if "load(" in block]


@pytest.mark.skipif(not readme_examples(), reason="this mlx-lm carries no README")
@pytest.mark.parametrize("program", readme_examples())
def test_examples_of_mlx_lm_s_readme_run_with_the_import_changed(
    program: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    loaded: tuple,
) -> None:
    costs = decoder_of(*loaded).costs
    monkeypatch.setattr("mlxspec.generation.decoder.costs_for", lambda *_, **__: costs)

    def printed(package: str, model: str) -> str:
        if "import" not in program:  # an excerpt that uses names of another one
            text = f"from {package} import load\n{program}"
        else:
            text = program.replace("from mlx_lm import", f"from {package} import")
        text = re.sub(r'"[\w-]+/[\w.-]+"', repr(model), text)
        text = text.replace("max_tokens=512", "max_tokens=48")
        exec(text, {"__name__": "__main__"})
        return re.sub(r"\d+\.\d+", "#", capsys.readouterr().out)

    directory = write_float32_demo(tmp_path)
    theirs = printed("mlx_lm", directory).splitlines()
    ours = printed("mlxspec", directory).splitlines()
    assert [line for line in ours if not line.startswith("Speculation: ")] == theirs
