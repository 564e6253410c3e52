"""Prompt caches that somebody has made to do harm are refused, or are what mlx-lm reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.cache import save_prompt_cache as mlx_lm_save

from mlxspec import load_prompt_cache, save_prompt_cache
from mlxspec.engine.prompt_cache_file import check_fits, check_lengths, tokens_in
from mlxspec.errors import FileError
from tests.support.architectures import ARCHITECTURES
from tests.support.examples import examples
from tests.support.hostile import harmless, json_values, mutated

pytestmark = pytest.mark.slow

PROMPT = [token * 7 % 60 + 3 for token in range(40)]
KINDS = ["llama3", "gemma3", "mamba2", "llama4", "deepseek_v32", "quantised"]
OWN_CLASS = {"deepseek_v41"}  # which mlx-lm cannot load from a file either

Arrays = dict[str, mx.array]
Metadata = dict[str, str]


@cache
def model_of(kind: str) -> nn.Module:
    if kind == "quantised":
        return (
            ARCHITECTURES["llama3"]
            .__class__(**{**vars(ARCHITECTURES["llama3"]), "config": {"head_dim": 32}})
            .model()
        )
    return ARCHITECTURES[kind].model()


def cached(kind: str) -> list:
    """The prompt in mlx-lm's cache."""
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    model = model_of(kind)
    cache = make_prompt_cache(model)
    options = options if kind == "quantised" else {}
    list(generate_step(mx.array(PROMPT), model, max_tokens=0, prompt_cache=cache, **options))
    return cache


@cache
def content(kind: str) -> tuple[Arrays, Metadata]:
    """The arrays and the metadata of a file."""
    path = directory() / f"{kind}.safetensors"
    save_prompt_cache(path, cached(kind), {"model": "m"}, tokens=PROMPT)
    return mx.load(str(path), return_metadata=True)


@cache
def whole(kind: str) -> bytes:
    content(kind)
    return (directory() / f"{kind}.safetensors").read_bytes()


@cache
def directory() -> Path:
    return Path(os.environ["MLXSPEC_CACHE_DIR"])  # which the tests remove


def used(kind: str, path: Path) -> bool:
    """Go on with a file as a decoder would; whether that gives what it should."""
    loaded, metadata = load_prompt_cache(path, return_metadata=True)
    assert all(isinstance(value, str) for pair in metadata.items() for value in pair)
    assert all(0 <= token < 2**31 for token in tokens_in(loaded, metadata))
    model = model_of(kind)
    check_fits(loaded, model, "file")
    check_lengths(loaded, "file")
    logits = model(mx.array([[5]]), cache=loaded)
    mx.eval(logits)
    return logits.shape[:2] == (1, 1)


def written(arrays: Arrays, metadata: Metadata) -> Path:
    path = directory() / "hostile.safetensors"
    mx.save_safetensors(str(path), arrays, metadata)
    return path


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES.keys() - OWN_CLASS))
def test_every_architecture_s_caches_are_read(kind: str, tmp_path: Path) -> None:
    mlx_lm_save(str(tmp_path / "c.safetensors"), cached(kind))
    assert used(kind, tmp_path / "c.safetensors")


def offset(value: object, type: str = "scalar") -> Callable[[Arrays, Metadata], None]:
    """Another offset in the first of the caches."""

    def change(arrays: Arrays, metadata: Metadata) -> None:
        arrays["0.2"] = value if isinstance(value, mx.array) else mx.array(value)
        metadata["2.1.1"] = type

    return change


def all_offsets(value: int) -> Callable[[Arrays, Metadata], None]:
    def change(arrays: Arrays, metadata: Metadata) -> None:
        arrays |= {name: mx.array(value) for name in ("0.2", "1.2")}
        metadata.pop("0.tokens")

    return change


def key(name: str, value: str = "x") -> Callable[[Arrays, Metadata], None]:
    return lambda arrays, metadata: metadata.update({name: value})


def array(name: str, value: mx.array) -> Callable[[Arrays, Metadata], None]:
    return lambda arrays, metadata: arrays.update({name: value})


REFUSED = {
    "a far scalar": key("2.99999999.0"),
    "a far class": key("1.99999999"),
    "a far layer": array("99999999.0", mx.ones(1)),
    "a far value": array("0.99999999", mx.ones(1)),
    "a negative layer": array("-1.0", mx.ones(1)),
    "a class without a state": key("1.2", "KVCache"),
    "no class of a cache's": key("1.0", "PromptTrie"),
    "another class": key("1.0", "RotatingKVCache"),
    "a batch's class": key("1.0", "BatchKVCache"),
    "a scalar that is not there": key("2.1.0", "7.7"),
    "an unknown type": key("2.1.1", "object"),
    "infinite": offset(float("inf")),
    "no number": offset(float("nan")),
    "negative": offset(-1),
    "bool": offset(True),
    "fraction": offset(40.0),
    "complex": offset(1j),
    "null": offset([], "none"),
    "text": offset([52, 48], "string"),
    "an array": offset(mx.array([40])),
    "too large": offset(2**40),
    "beyond the end": all_offsets(257),
    "at the beginning": all_offsets(0),
    "one of two": offset(39),
    "not the tokens' number": key("0.tokens", "[1, 2]"),
    "keys of integers": array("0.0", mx.zeros((1, 2, 256, 8), mx.int32)),
    "keys in two dimensions": array("0.0", mx.zeros((256, 8))),
    "keys of no position": array("0.0", mx.zeros((1, 2, 0, 8))),
    "fewer keys than values": array("0.0", mx.zeros((1, 2, 255, 8))),
    "other heads": lambda arrays, metadata: arrays.update(
        {name: mx.zeros((1, 4, 256, 8)) for name in ("0.0", "0.1")}
    ),
    "two sequences": lambda arrays, metadata: arrays.update(
        {name: mx.zeros((2, 2, 256, 8)) for name in ("0.0", "0.1")}
    ),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_what_no_cache_can_be_is_refused_in_one_line(
    change: Callable[[Arrays, Metadata], None],
) -> None:
    arrays, metadata = map(dict, content("llama3"))
    change(arrays, metadata)
    path = written(arrays, metadata)
    error = harmless(lambda: used("llama3", path))
    assert isinstance(error, FileError)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [("0.tokens.0", "1"), ("0.tokens", "[" * 100_000), ("0.tokens", "[[1]]"), ("0.0", "x")],
)
def test_metadata_of_others_is_no_list_of_tokens(name: str, value: str) -> None:
    arrays, metadata = map(dict, content("llama3"))
    metadata.pop("0.tokens")
    metadata[name] = value
    path = written(arrays, metadata)
    assert harmless(lambda: used("llama3", path)) is True
    loaded, held = load_prompt_cache(path, return_metadata=True)
    assert held[name[2:]] == value
    assert tokens_in(loaded, held) == []


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull), tmp_path / ("x" * 300)):
        error = harmless(lambda path=path: load_prompt_cache(path))
        assert isinstance(error, FileError)


def test_a_large_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    for header in (
        b"[" * 5_000_000,
        b'{"__metadata__":{' + b'"a":"",' * 2_000_000 + b'"a":""}}',
        b" " * 40_000_000,
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert isinstance(harmless(lambda: load_prompt_cache(path)), FileError)


@st.composite
def edits(draw: st.DrawFn, kind: str) -> tuple[Arrays, Metadata]:
    """A file's arrays and metadata with some left out, changed or put elsewhere."""
    arrays, metadata = map(dict, content(kind))
    values = st.one_of(
        st.sampled_from(list(metadata.values())),
        json_values.map(json.dumps),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    )
    held = st.one_of(st.sampled_from(list(arrays.values())), st.sampled_from(HOSTILE_ARRAYS))
    for entries, value in ((metadata, values), (arrays, held)):
        for _ in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from(sorted(entries)))
            kind_of_edit = draw(st.sampled_from(["leave out", "change", "rename", "add"]))
            old = entries[name]
            if kind_of_edit in ("leave out", "rename"):
                del entries[name]
            if kind_of_edit == "change":
                entries[name] = draw(value)
            elif kind_of_edit in ("rename", "add") and entries:
                moved = old if kind_of_edit == "rename" else draw(value)
                entries[draw(names(list(entries)))] = moved
            if not entries:
                entries[name] = old
    return arrays, metadata


def names(known: list[str]) -> st.SearchStrategy[str]:
    number = st.sampled_from(["0", "1", "2", "3", "-1", "01", "99999999", "x", ""])
    return st.one_of(
        st.sampled_from(known),
        st.builds("{}.{}".format, st.sampled_from(known), number),
        st.lists(number, min_size=1, max_size=10).map(".".join),
    )


HOSTILE_ARRAYS = [
    *map(mx.array, (0, -1, 1, 39, 41, 256, 257, 2**31 - 1, 2**40, -(2**62), True, 0.5, 1j)),
    *map(mx.array, (float("inf"), float("nan"))),
    *(mx.zeros(shape) for shape in ((0,), (1,), (1, 2, 256, 8), (1, 2, 0, 8), (2, 2, 16, 8))),
    *(mx.zeros((1, 2, 256, 8), dtype) for dtype in (mx.int32, mx.uint32, mx.float16)),
    mx.array([ord(letter) for letter in "CacheList"]),
    mx.zeros((1,) * 20),
]


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_file_s_entries_it_is_refused_or_goes_on(kind: str) -> None:
    @settings(max_examples=examples(33))
    @given(edits(kind))
    def check(changed: tuple[Arrays, Metadata]) -> None:
        path = written(*changed)
        result = harmless(lambda: used(kind, path))
        assert result is True or isinstance(result, FileError)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_file_s_bytes_it_is_refused_or_goes_on(kind: str) -> None:
    data = whole(kind)
    end = 8 + int.from_bytes(data[:8], "little")

    @settings(max_examples=examples(33))
    @given(mutated(data[:end]))
    def check(header: bytes) -> None:
        path = directory() / "hostile.safetensors"
        path.write_bytes(header + data[end:])
        result = harmless(lambda: used(kind, path))
        assert result is True or isinstance(result, FileError)

    check()
