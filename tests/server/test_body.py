"""Parsing a body's JSON like Python, within limits."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.server.app import Endpoints
from mlxspec.server.body import MOST_VALUES, ApiError, body_of, parse, read_body, read_json
from mlxspec.server.openai import ChatBody
from tests.server.test_api_body import FULL_CHAT
from tests.support.examples import examples
from tests.support.hostile import json_values, mutated

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(-(10**300), 10**300) | st.floats(allow_nan=False, allow_infinity=False)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=examples(200, 5_000))
@given(values, st.booleans(), st.sampled_from([None, 0, 3]))
def test_json_is_read_as_python_reads_it(value: Any, escaped: bool, indent: int | None) -> None:
    written = json.dumps(value, ensure_ascii=escaped, indent=indent)
    assert repr(read_body(written.encode())) == repr(json.loads(written))


@pytest.mark.slow
@settings(max_examples=examples(300, 6_000))
@given(mutated(json.dumps(FULL_CHAT, indent=1).encode()))
def test_invalid_json_is_refused_as_in_python(data: bytes) -> None:
    try:
        expected = json.dumps(json.loads(data), allow_nan=False)
    except (ValueError, RecursionError):
        with pytest.raises(ApiError):
            read_body(data)
        return
    try:
        found = read_body(data)
    except ApiError:  # other limits and encodings
        assert b"[" * 64 in data or b'{"":' * 64 in data or b"\0" in data or b"\xed" in data
        return
    half = "\\ud800" in expected or "\\udc" in expected
    assert half or json.dumps(found) == expected


@settings(max_examples=examples(50, 1_000))
@given(
    st.integers(0, 2100),
    st.sampled_from(["a", "é", "語", "😀", "\n", "\\", '"', "\x01"]),
    st.sampled_from(["", "é", "😀", "\n", "\\", '"', "\ud83d"]),
    st.booleans(),
)
def test_a_long_text_is_read_in_pieces(before: int, one: str, other: str, escaped: bool) -> None:
    text = "x" * before + one * 1001 + other + one * 1001
    try:
        written = json.dumps([text], ensure_ascii=escaped).encode()
    except UnicodeEncodeError:  # a lone surrogate can only be escaped
        return
    assert read_body(written) == [text.replace("\ud83d", "\ufffd")]


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    assert read_body(rb'["a\ud83d b \ud83d\ude00", {"\udc00": "\ude00\ud83d"}]') == [
        "a\ufffd b 😀",
        {"\ufffd": "\ufffd\ufffd"},
    ]


def test_half_pairs_are_replaced_in_every_piece_of_a_long_text() -> None:
    written = json.dumps(["😀\ud83d" * 50_000 + "\ude00"]).encode()
    assert read_body(written) == ["😀\ufffd" * 49_999 + "😀😀"]


@pytest.mark.parametrize(
    "number",
    [
        *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "9" * 5000),
        *("01", "1.", ".5", "+1", "1e", "-", "0x10", "1_0", "tru", "True", "nulll"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(number: str) -> None:
    for written in (number, f"[{number}]", f'{{"a": {number}}}'):
        with pytest.raises(ApiError, match="the body is not JSON") as caught:
            read_body(written.encode())
        assert caught.value.status == 400
        assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b" ", b"[", b"[1", b"[1,", b"[1,]", b"[,1]", b"[1 2]", b"]", b"[1]]", b"[1}"),
        *(b"{", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,', b'{"a":1,}', b"{a:1}", b"{1:1}"),
        *(b'"', b'"a', b'"\\"', b'"\\x"', b'"\\u12"', b'"\n"', b'"\xff"', b'"\xc3"', b"'a'"),
        *('["a"]'.encode("utf-16"), b"\x0b1", b"1 x", b'{"a" 1}', b'{"a":1 "b":2}'),
    ],
)
def test_invalid_json_is_refused_with_its_place(data: bytes) -> None:
    with pytest.raises(ApiError, match=r"not JSON \(.*(char|position) [0-9]"):
        read_body(data)


def test_a_mark_of_the_encoding_is_passed_over() -> None:
    assert read_body("\ufeff[1]".encode()) == [1]


def test_what_is_nested_deeply_is_refused() -> None:
    assert read_body(b"[" * 100 + b"]" * 100)
    for opening in (b"[", b'{"a":'):
        for depth in (101, 1_000_000):
            with pytest.raises(ApiError, match="nested more than 100 levels"):
                read_body(opening * depth)


# --- the number of values ---

PARTS: dict[str, tuple[bytes, int]] = {
    "objects": (b"{}", 1),
    "lists": (b"[]", 1),
    "ids": (b"17", 1),
    "numbers": (b"-1.5e3", 1),
    "texts": (b'","', 1),
    "words": (b"null", 1),
    "messages": (b'{"role": "user", "content": "a, b: [c]"}', 3),
    "lists of lists": (b"[[[]]]", 3),
}


@settings(max_examples=examples(100, 3_000))
@given(st.sampled_from(sorted(PARTS)), st.integers(0, 60), st.integers(0, 70), st.booleans())
def test_so_many_values_are_read_and_no_more(
    kind: str, count: int, most: int, biases: bool
) -> None:
    part, each = PARTS[kind]
    if biases:
        data = b"{" + b",".join(b'"%d":%b' % (index, part) for index in range(count)) + b"}"
    else:
        data = b"[" + b",".join([part] * count) + b"]"
    if 1 + count * each <= most:
        assert read_json(data, most) == (json.loads(data), most - (1 + count * each))
        return
    with pytest.raises(ApiError, match="values") as caught:
        read_json(data, most)
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(PARTS))
def test_the_rest_of_too_many_values_is_not_even_read(kind: str) -> None:
    part, each = PARTS[kind]
    for count, refusal in ((MOST_VALUES // each - 1, "not JSON"), (MOST_VALUES + 1, "values")):
        with pytest.raises(ApiError, match=refusal):
            read_body(b"[" + b",".join([part] * count) + b"] and what is no JSON")


# --- the thread that parses ---


def read(data: bytes, parse: Callable[[Any], Any]) -> Any:
    """Parse a body with a function, as an endpoint does."""

    class Sent:
        headers: dict[str, str] = {}  # noqa: RUF012

        async def stream(self) -> Any:
            for start in range(0, len(data), 1 << 16):
                yield data[start : start + (1 << 16)]

    async def ask() -> Any:
        catalog: Any = SimpleNamespace(worker=None)
        sent: Any = Sent()
        return await Endpoints(catalog, 10, 10.0).read(sent, parse)

    return asyncio.run(ask())


@pytest.mark.parametrize("length", [1, 1 << 21])
def test_a_body_is_read_and_checked_beside_the_event_loop(length: int) -> None:
    def parse(body: Any) -> tuple[Any, bool]:
        return body, threading.current_thread() is threading.main_thread()

    text = "x" * length
    assert read(json.dumps([text]).encode(), parse) == ([text], False)


@settings(max_examples=examples(20, 500))
@given(json_values)
def test_errors_of_what_checks_a_body_come_through(body: Any) -> None:
    with pytest.raises(ApiError):
        read(json.dumps([body]).encode(), partial(parse, ChatBody))


def test_a_body_in_small_pieces_takes_no_more_memory_than_its_bytes() -> None:
    class Sent:
        async def stream(self) -> Any:
            for _ in range(30_000):
                yield bytes(2)

    tracemalloc.start()
    data = asyncio.run(body_of(cast(Any, Sent())))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data == bytes(60_000)
    assert peak < 600_000


@pytest.mark.parametrize(
    ("headers", "most"),
    [
        ({"content-length": str(1 << 16)}, 200),
        ({"content-length": str(1 << 20)}, 128),
        ({"content-length": str(32 << 20)}, 4),
        ({"transfer-encoding": "chunked"}, 4),
    ],
)
def test_few_large_bodies_are_read_at_the_same_time(headers: dict[str, str], most: int) -> None:
    reading: set[object] = set()

    async def ask() -> list[Any]:
        rest = asyncio.Event()

        class Sent:
            def __init__(self) -> None:
                self.headers = headers

            async def stream(self) -> Any:
                reading.add(self)
                yield b"[1"
                await rest.wait()
                yield b"]"

        catalog: Any = SimpleNamespace(worker=None)
        endpoints, all_sent = Endpoints(catalog, 10, 10.0), [Sent() for _ in range(200)]
        reads = [
            asyncio.create_task(endpoints.read(cast(Any, sent), lambda body: body))
            for sent in all_sent
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        assert reading == {*all_sent[:most]}
        rest.set()
        return await asyncio.gather(*reads)

    assert asyncio.run(ask()) == [[1]] * 200
