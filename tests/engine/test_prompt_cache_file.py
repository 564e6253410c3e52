"""Prompt cache files are exchanged with mlx-lm; wrong files give a one-line error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache as mlx_lm_load
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.models.cache import save_prompt_cache as mlx_lm_save

from mlxspec import PromptLookupDecoder, Session, load_prompt_cache, save_prompt_cache
from mlxspec.engine.prompt_cache import check_fits, tokens_in
from mlxspec.errors import FileError, OptionError
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import demo

pytestmark = pytest.mark.slow

PROMPT = [token * 7 % 60 + 3 for token in range(40)]
NEXT = [9, 8, 7]
KINDS = ["llama3", "gemma3", "mamba2", "recurrent_gemma", "llama4", "deepseek_v32", "lfm2"]


def cached(model: nn.Module, **options: object) -> list:
    """Return an mlx-lm cache with the prompt."""
    cache = make_prompt_cache(model)
    list(generate_step(mx.array(PROMPT), model, max_tokens=0, prompt_cache=cache, **options))
    return cache


def following(model: nn.Module, cache: list) -> list[int]:
    """Return mlx-lm's output after a cache."""
    steps = generate_step(mx.array(NEXT), model, max_tokens=9, prompt_cache=cache)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways(kind: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[kind].model()
    expected = following(model, cached(model))
    save_prompt_cache(tmp_path / "ours", cached(model), {"model": "m"}, tokens=PROMPT)
    cache, metadata = mlx_lm_load(str(tmp_path / "ours.safetensors"), return_metadata=True)
    assert metadata["model"] == "m"
    assert following(model, cache) == expected
    mlx_lm_save(str(tmp_path / "theirs.safetensors"), cached(model))
    cache = load_prompt_cache(tmp_path / "theirs.safetensors")
    check_fits(cache, model, "theirs")
    assert following(model, cache) == expected
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "ours.safetensors",
        "theirs.safetensors",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_goes_on_from_a_file_that_says_what_it_holds(kind: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[kind].model()
    expected = following(model, cached(model))
    save_prompt_cache(tmp_path / "c.safetensors", cached(model), tokens=PROMPT)
    cache, metadata = load_prompt_cache(tmp_path / "c.safetensors", return_metadata=True)
    session = Session(cache, tokens_in(metadata, cache))
    decoder = PromptLookupDecoder(model, demo().tokenizer)
    responses = list(decoder.stream([*PROMPT, *NEXT], 9, session=session))
    assert [response.token for response in responses] == expected[: len(responses)]
    assert responses[0].reused_tokens == len(PROMPT)
    # A prompt that diverges from the cache works, too.
    other = [*PROMPT[:20], *NEXT]
    truth = [int(t) for t, _ in generate_step(mx.array(other), model, max_tokens=9)]
    parted = [r.token for r in decoder.stream(other, 9, session=Session(cache, PROMPT))]
    assert parted == truth[: len(parted)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_that_was_saved_goes_on_where_it_ended(kind: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[kind].model()
    decoder = PromptLookupDecoder(model, demo().tokenizer)
    session = Session()
    output = [response.token for response in decoder.stream(PROMPT, 25, session=session)]
    session.save(tmp_path / "c.safetensors")
    context = [*PROMPT, *output, *NEXT]
    expected = [int(t) for t, _ in generate_step(mx.array(context), model, max_tokens=9)]
    loaded = Session.load(tmp_path / "c.safetensors")
    responses = list(decoder.stream(context, 9, session=loaded))
    assert [response.token for response in responses] == expected[: len(responses)]
    assert responses[0].reused_tokens == len(PROMPT) + len(output) - 1
    # The session has changed since it was saved.
    responses = list(decoder.stream(context, 9, session=session))
    assert [response.token for response in responses] == expected[: len(responses)]


def test_a_session_without_a_cache_and_a_file_without_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no cache to save"):
        Session().save(tmp_path / "c")
    save_prompt_cache(tmp_path / "c", cached(ARCHITECTURES["llama3"].model()))
    with pytest.raises(FileError, match="does not list its cache"):
        Session.load(tmp_path / "c.safetensors")
    cache = load_prompt_cache(tmp_path / "c.safetensors")
    for nonsense in ("[1, 2]", "{}", "x", '["a"]'):
        assert tokens_in({"tokens": nonsense}, cache) == []


def test_a_cache_of_other_layers_shapes_or_quantisation_is_refused() -> None:
    model = ARCHITECTURES["llama3"].model()
    check_fits(cached(model), model, "file")
    more_heads = replace(ARCHITECTURES["llama3"], config={"num_key_value_heads": 4})
    for other in (ARCHITECTURES["mamba2"], ARCHITECTURES["deepseek_v3"], more_heads):
        with pytest.raises(FileError, match=r"file was made by a different model: "):
            check_fits(cached(other.model()), model, "file")
    wide = replace(ARCHITECTURES["llama3"], config={"head_dim": 32}).model()
    quantized = cached(wide, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    check_fits(quantized, wide, "file")
    with pytest.raises(FileError, match="a different model"):
        check_fits(quantized, model, "file")
    with pytest.raises(FileError, match="a different model"):
        check_fits(cached(model)[:1], model, "file")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama3"].model()
    path = tmp_path / "cache.safetensors"
    with pytest.raises(FileError, match="no such file"):
        load_prompt_cache(path)
    save_prompt_cache(path, cached(model))
    whole = path.read_bytes()
    for damaged in (whole[:1000], whole[: len(whole) // 2], b"", b"\0" * 200, b"text"):
        path.write_bytes(damaged)
        with pytest.raises(FileError, match="make it again"):
            load_prompt_cache(path)
    mx.save_safetensors(str(path), {"weight": mx.ones(3)}, {"format": "mlx"})
    with pytest.raises(FileError, match="not a prompt cache"):
        load_prompt_cache(path)


def test_what_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cached(ARCHITECTURES["llama3"].model())
    with pytest.raises(FileError, match="cannot be written"):
        save_prompt_cache(tmp_path / "none" / "cache", cache)
    save_prompt_cache(tmp_path / "cache", cache)
    before = (tmp_path / "cache.safetensors").read_bytes()

    def full(*_: object) -> None:
        raise RuntimeError("[write] Unable to write 42 bytes to file.")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(FileError, match="Unable to write"):
        save_prompt_cache(tmp_path / "cache", cache)
    assert (tmp_path / "cache.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_draft_model_s_caches_behind_the_model_s_own_may_be_shorter(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama3"].model()
    own, drafts = cached(model), cached(model)
    trim_prompt_cache(drafts, 1)  # like after mlx-lm's speculative decoding
    mlx_lm_save(str(tmp_path / "c.safetensors"), [*own, *drafts])
    loaded = load_prompt_cache(tmp_path / "c.safetensors")
    assert [cache.offset for cache in loaded] == [cache.offset for cache in (*own, *drafts)]
