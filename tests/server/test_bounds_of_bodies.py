"""Bodies with too many or invalid values get each API's error, before anything is built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.server.body import MOST_VALUES, ApiError, parse
from mlxspec.server.messages import MessagesBody
from mlxspec.server.openai import ChatBody, CompletionBody
from mlxspec.server.prompts import chat_prompt, check_length, completion_prompts
from mlxspec.server.responses import parse_responses
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.demo import demo
from tests.support.examples import examples
from tests.support.hostile import harmless
from tests.support.serving import running_server, served_with_tools

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
RESPONSES, INPUT = "/v1/responses", "/v1/responses/input_tokens"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2},
    TEXT: {"prompt": "Once", "max_tokens": 2},
    TOKENIZE: {"prompt": "Once"},
    DETOKENIZE: {"tokens": [1, 300]},
    RESPONSES: {"input": "Hello", "max_output_tokens": 16},
    INPUT: {"input": "Hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 2},
    COUNT: {"messages": HELLO},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MANY = MOST_VALUES + 1


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A client of a server whose model takes tools."""
    with (
        running_server(served_with_tools()) as running,
        httpx.Client(base_url=running.address, timeout=60) as client,
    ):
        yield client


def error_of(path: str, answer: httpx.Response) -> dict[str, Any]:
    """Return an answer's error; check that it has the form of the path's API."""
    body = answer.json()
    fields = {"type", "message"} if path in (MESSAGES, COUNT) else {"message", "param"}
    assert fields <= set(body["error"])
    assert ("request_id" in body) == (path in (MESSAGES, COUNT))
    error: dict[str, Any] = body["error"]
    return error


# --- too many values ---


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_is_ignored_has_its_bounds(http: httpx.Client, path: str) -> None:
    body = json.dumps({"nobody_knows": "HERE", **BODIES[path]})
    assert http.post(path, content=body).status_code == 200
    for values in ("[" + "{}," * MANY + "{}]", "[" + "[0]," * (MANY // 2) + "0]"):
        answer = http.post(path, content=body.replace('"HERE"', values))
        assert answer.status_code == 413
        assert f"{MOST_VALUES:,} values" in error_of(path, answer)["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": HELLO * (MANY // 3)}, None),
        (MESSAGES, {"messages": HELLO * (MANY // 3)}, None),
        (RESPONSES, {"input": HELLO * (MANY // 3)}, None),
        (DETOKENIZE, {"tokens": [5] * MANY}, None),
        (TEXT, {"prompt": [5] * MANY}, None),
        (CHAT, {"logit_bias": {str(token): 1 for token in range(MANY)}}, None),
        (CHAT, {"logit_bias": {str(token): 1 for token in range(10_001)}}, "logit_bias"),
        (TEXT, {"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        (RESPONSES, {"stop_token_ids": [5] * 1025}, "stop_token_ids"),
    ],
)
def test_messages_ids_and_biases_have_their_bounds(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str | None
) -> None:
    answer = http.post(path, json={**BODIES[path], **fields})
    error = error_of(path, answer)
    assert answer.status_code == (400 if param else 413)
    assert error.get("param") == param
    assert ("at most" if param else "values") in error["message"]


@pytest.mark.slow
def test_what_the_arguments_of_calls_hold_counts_together() -> None:
    def calling(arguments: str, times: int) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "tool_calls": [call] * times}, *HELLO]}

    arguments = json.dumps({"a": [0] * 100_000})
    for message in parse(ChatBody, calling(arguments, 2)).conversation[:1]:
        assert [len(call["function"]["arguments"]["a"]) for call in message["tool_calls"]] == [
            *[100_000] * 2
        ]
    for times in (3, 10):
        with pytest.raises(ApiError, match="values") as caught:
            parse(ChatBody, calling(arguments, times))
        assert caught.value.status == 413
    for no_json in ('{"a": NaN}', '{"a": 1e999}', '{"a": 1', "[1]"):  # as a model may write it
        (message, _) = parse(ChatBody, calling(no_json, 1)).conversation
        assert message["tool_calls"][0]["function"]["arguments"] == no_json


def test_a_schema_that_is_a_text_is_not_parsed_if_it_is_long() -> None:
    schema = '{"enum": [' + "{}," * 1_000_000 + "no JSON"
    format = {"type": "json_schema", "schema": schema}
    with pytest.raises(ApiError, match=r"3,000,0.. characters"):
        parse(ChatBody, {"messages": HELLO, "response_format": format})


MANY_TEXTS = [{"type": "text", "text": "x" * 1500}] * 20_000
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (
            partial(parse, MessagesBody),
            {"messages": [{"role": "user", "content": "x" * 1500}] * 20_000},
        ),
        (partial(parse, MessagesBody), {"messages": [{"role": "user", "content": MANY_TEXTS}]}),
        (
            parse_responses,
            {"input": [CALL, *[{"role": "assistant", "content": "x" * 1500}] * 20_000]},
        ),
        (
            parse_responses,
            {"input": [{"type": "reasoning", "content": MANY_TEXTS[:1]}] * 20_000},
        ),
        (
            parse_responses,
            {
                "input": "Hello",
                "tools": [{"type": "function", "name": f"f{n}"} for n in range(10_000)],
                "tool_choice": {"type": "function", "name": "f9999"},
            },
        ),
    ],
)
def test_many_parts_of_one_message_take_no_longer_than_their_length(parse: Any, body: Any) -> None:
    harmless(lambda: parse({"max_tokens": 1, **body}))


# --- too long ---


def refuse_to_tokenize(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    """Fail if a text is tokenized."""

    def encode(text: str, **options: Any) -> list[int]:
        pytest.fail(f"{len(text)} characters are tokenized")

    monkeypatch.setattr(tokenizer._tokenizer, "encode", encode)


LONG = "abcdefgh ij " * 20_000
CALLED = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LONG})}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [CALLED]}, *HELLO]},
        {"tools": [{**TOOL, "function": {"name": "f", "description": LONG}}]},
        {"chat_template_kwargs": {"note": LONG}},
    ],
)
def test_what_the_template_makes_is_measured_before_it_is_tokenized(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{{ note }}{% for m in messages %}{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}{{ tools | tojson if tools }}"
    )
    tokenizer = chat_tokenizer("json_tools", template=template)
    refuse_to_tokenize(monkeypatch, tokenizer)
    with pytest.raises(ApiError) as caught:
        chat_prompt(parse(ChatBody, {"messages": HELLO, **fields}), tokenizer, 1000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_contents_are_measured_before_the_template_runs() -> None:
    tokenizer = chat_tokenizer("json_tools", template="{{ raise_exception('it runs') }}")
    called = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    for length, expected in ((128_000, "it runs"), (128_001, "the 128,001 characters of messages")):
        messages = [called, {"role": "user", "content": "a" * length}]
        with pytest.raises(ApiError, match=expected):
            chat_prompt(parse(ChatBody, {"messages": messages}), tokenizer, 1000)


def test_a_prompt_and_a_suffix_are_measured_before_they_are_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_to_tokenize(monkeypatch, demo().tokenizer)
    for fields in ({"prompt": LONG}, {"prompt": [LONG, "Once"]}, {"suffix": LONG}):
        request = parse(CompletionBody, {"prompt": "Once", **fields})
        with pytest.raises(ApiError, match="is too long"):
            completion_prompts(request, demo().tokenizer, 1000)


@pytest.mark.slow
@settings(max_examples=examples(50, 1_000))
@given(
    st.text(min_size=1, max_size=12)
    | st.sampled_from([" ", "a", " the", "\n", "日", "<s>", "</s>", "." * 9, "0"]),
    st.integers(1, 40),
)
def test_no_text_that_fits_is_refused(part: str, longest: int) -> None:
    tokenizer = demo().tokenizer
    text = part * (60 * longest)
    if len(tokenizer.encode(text, add_special_tokens=False)) <= longest:
        check_length(len(text), "prompt", longest)


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token", "unk_token", "cls_token"])
def test_special_tokens_are_not_the_clients_to_set(http: httpx.Client, name: str) -> None:
    fields = {"chat_template_kwargs": {name: "x"}}
    for path in (CHAT, TOKENIZE, RESPONSES, INPUT):
        prompt = {"messages": HELLO} if path in (CHAT, TOKENIZE) else {"input": "Hello"}
        answer = http.post(path, json={**prompt, **fields})
        assert answer.status_code == 400
        assert error_of(path, answer)["param"] == f"chat_template_kwargs.{name}"
    for path in (MESSAGES, COUNT):
        answer = http.post(path, json={**BODIES[path], **fields})
        assert answer.status_code == 400
        assert name in error_of(path, answer)["message"]


def test_the_operator_may_set_special_tokens() -> None:
    tokenizer = chat_tokenizer(template="{{ bos_token }}{{ note }}{{ messages[0].content }}")
    request = parse(ChatBody, {"messages": HELLO, "chat_template_kwargs": {"note": " b"}})
    prompt = chat_prompt(request, tokenizer, arguments={"bos_token": "a", "note": " c"})
    assert tokenizer.decode(prompt.tokens) == f"a b{HELLO[0]['content']}"


# --- numbers that are not JSON ---

NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "9" * 5000]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("number", NUMBERS)
def test_invalid_numbers_are_refused(http: httpx.Client, path: str, number: str) -> None:
    body = json.dumps({"nobody_knows": {"a": ["HERE"]}, **BODIES[path]})
    answer = http.post(path, content=body.replace('"HERE"', number))
    assert answer.status_code == 400
    assert "not JSON" in error_of(path, answer)["message"]


def test_they_are_refused_where_they_were_found_too_late(http: httpx.Client) -> None:
    strict = {"name": "f", "strict": True, "parameters": {"type": "object", "required": ["HERE"]}}
    schema = {"type": "object", "properties": {"a": {"default": "HERE"}}}
    format = {"type": "json_schema", "name": "x", "schema": schema}
    for path, fields in (
        (CHAT, {"tools": [{"type": "function", "function": strict}]}),
        (RESPONSES, {"text": {"format": format}}),
        (RESPONSES, {"tools": [{"type": "function", **strict}], "stream": True}),
    ):
        body = json.dumps({**BODIES[path], **fields}).replace('"HERE"', "NaN")
        assert http.post(path, content=body).status_code == 400


# --- headers ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["模型", "modèle", "a/b c", "a\r\nx-evil: 1", "100 %"])
def test_any_name_of_a_model_has_its_header(name: str) -> None:
    model = served_with_tools()
    model.name = name
    with (
        running_server(model) as running,
        httpx.Client(base_url=running.address, timeout=60) as client,
    ):
        for path in (MESSAGES, COUNT):
            answer = client.post(path, json={**BODIES[path], "model": name})
            assert answer.status_code == 200
            header = answer.headers["x-mlxspec-model"]
            assert header.isascii()
            assert unquote(header) == name
            assert "x-evil" not in answer.headers
