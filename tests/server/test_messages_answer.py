"""Answers match Anthropic's API, checked with the types of its client library."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from mlxspec.server.body import ApiError, parse
from mlxspec.server.messages import MessagesAnswer, MessagesBody
from mlxspec.server.output_parser import OutputFormat
from mlxspec.server.sending import framed
from mlxspec.server.worker import Begun, Event
from tests.server.test_openai import CALLS, TOKENIZER, ended, extras, pieces
from tests.support.examples import examples

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]


def answer(**fields: Any) -> MessagesAnswer:
    hello = [{"role": "user", "content": "?"}]
    request = parse(MessagesBody, {"messages": hello, "max_tokens": 100, **fields})
    format = replace(
        OutputFormat(TOKENIZER, request.tools_shown), several_calls=request.parallel_tool_calls
    )
    made = MessagesAnswer(request, "model")
    made.read_with(TOKENIZER, format)
    return made


def events(text: str, length: int = 3, **figures: Any) -> list[Event]:
    begun = Begun(0, figures.get("prompt_tokens", 5), figures.get("cached_tokens", 0))
    return [begun, *pieces(text, length=length), ended(**figures)]


def streamed(made: MessagesAnswer, happened: list[Event]) -> list[dict[str, Any]]:
    """Parse chunks with the client library's types."""
    chunks = [chunk for event in happened for chunk in made.feed([event])]
    for chunk in chunks:
        event = EVENT.validate_python(json.loads(json.dumps(chunk, allow_nan=False)))
        assert not extras(event)
        name, data, *_ = framed(chunk).split("\n")
        assert name == f"event: {chunk['type']}"
        assert json.loads(data.removeprefix("data: ")) == chunk
    return chunks


def whole(made: MessagesAnswer, happened: list[Event]) -> Message:
    made.feed(happened)
    message = Message.model_validate(json.loads(json.dumps(made.whole(), allow_nan=False)))
    assert not extras(message)
    return message


def test_a_whole_call_with_invalid_arguments_is_text_that_ends_the_turn() -> None:
    arguments = json.dumps({"a": "x" * 2100})[:-1] + ", 'b': 1}"
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    message = whole(answer(tools=TOOLS), events(text, length=50))
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "end_turn"


def test_a_streamed_text() -> None:
    chunks = streamed(answer(), events("Hello world", cached_tokens=3))
    assert [chunk["type"] for chunk in chunks] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = chunks[0]["message"], chunks[-2]
    assert start["content"] == []
    for usage in (start["usage"], end["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (2, 3)
        assert usage["cache_creation_input_tokens"] == 0
    assert end["usage"]["output_tokens"] == 7
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_thinking_is_signed_and_calls_have_blocks_of_their_own() -> None:
    chunks = streamed(answer(tools=TOOLS), events(CALLS))
    starts = [chunk for chunk in chunks if chunk["type"] == "content_block_start"]
    kinds = ["thinking", "text", "tool_use", "tool_use"]
    assert [start["content_block"]["type"] for start in starts] == kinds
    assert [start["index"] for start in starts] == [0, 1, 2, 3]
    deltas = [[c["delta"] for c in chunks if "delta" in c and c.get("index") == n] for n in (0, 2)]
    assert [delta["type"] for delta in deltas[0]][-2:] == ["thinking_delta", "signature_delta"]
    assert json.loads("".join(delta["partial_json"] for delta in deltas[1])) == {"a": "é"}
    assert chunks[-2]["delta"]["stop_reason"] == "tool_use"
    assert chunks[-2]["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_a_whole_message() -> None:
    thinking, text, *calls = (message := whole(answer(tools=TOOLS), events(CALLS))).content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert (thinking.thinking, text.text) == ("Hm.", "I ask.")
    assert thinking.signature
    assert [(call.name, call.input) for call in calls] == [("f", {"a": "é"}), ("g", {})]
    assert (message.stop_reason, message.model, message.role) == ("tool_use", "model", "assistant")
    assert whole(answer(), events("")).content == []


@settings(max_examples=examples(40, 2_000))
@given(st.sampled_from([CALLS, "Hello", "", "<think>x"]), st.integers(1, 40))
def test_the_client_puts_a_stream_together_to_the_whole(text: str, length: int) -> None:
    """The client library's own accumulation does it."""
    made = answer(tools=TOOLS)
    message: Any = None
    arguments: dict[int, bytes] = {}
    for chunk in streamed(made, events(text, length, cached_tokens=2)):
        event = EVENT.validate_python(chunk)
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=arguments)
    expected = Message.model_validate(made.whole())
    given = {**expected.model_dump(), "content": [b.model_dump() for b in expected.content]}
    found = message.model_dump(exclude={"parsed_output"})
    for block in found["content"]:
        block.pop("parsed_output", None)
    assert found == given


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({}, ("end_turn", None)),
        ({"stop": "END"}, ("stop_sequence", "END")),
        ({"reason": "length", "completion_tokens": 100}, ("max_tokens", None)),
        ({"reason": "length"}, ("model_context_window_exceeded", None)),
    ],
)
def test_why_a_message_has_ended(end: dict[str, Any], expected: tuple[str, str | None]) -> None:
    made = answer(stop_sequences=["STOP", "END"])
    message = whole(made, [Begun(0, 5, 0), *pieces("Hi"), ended(**end)])
    assert (message.stop_reason, message.stop_sequence) == expected


def test_a_call_that_was_cut_off() -> None:
    cut = '<tool_call>{"name": "f", "arguments": {"a'
    message = whole(answer(tools=TOOLS), events(cut, reason="length", completion_tokens=100))
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.content[0].input == {}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": [NaN, -Infinity, 1e999]}', {"a": ["NaN", "-Infinity", "1e999"]}),
        ('{"a": "\\ud800"}', {"a": "\ufffd"}),
    ],
)
def test_a_call_can_be_sent_whatever_its_arguments_are(written: str, read: object) -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    made = answer(tools=TOOLS)
    made.feed(events(call, length=1))
    # Like Starlette.
    sent = json.dumps(made.whole(), ensure_ascii=False, allow_nan=False).encode()
    calls = [block for block in json.loads(sent)["content"] if block["type"] == "tool_use"]
    assert [block["input"] for block in calls] == [read]


def test_a_long_call_that_turns_out_to_be_invalid_is_not_lost() -> None:
    written = '{"a": "' + 3000 * "x" + '" 1}'
    call = f'<tool_call>{{"name": "f", "arguments": {written}</tool_call>'
    message = whole(answer(tools=TOOLS), events(call))
    assert [(block.type, block.text) for block in message.content] == [("text", written)]


def test_one_call_is_enough_where_only_one_may_be() -> None:
    made = answer(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    made.feed([Begun(0, 5, 0), *pieces(CALLS)])
    assert made.finished(0)
    message = whole(made, [ended(reason="length")])
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.stop_reason == "tool_use"


def test_a_stream_says_that_it_lives_and_how_it_has_failed() -> None:
    made = answer()
    assert made.feed([]) == []
    assert framed(*made.keep_alive()) == 'event: ping\ndata: {"type": "ping"}\n\n'
    failed = made.failed(ApiError("out of order", status=500))
    assert framed(failed).startswith("event: error\n")
    assert failed["request_id"] == made.headers["request-id"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
    ],
)
def test_errors_have_the_types_of_their_status(status: int, kind: str) -> None:
    body = ApiError("wrong", status=status, param="x").messages_body("req_1")
    error = ErrorResponse.model_validate(body)
    assert not extras(error)
    assert (error.error.type, error.error.message, error.request_id) == (kind, "wrong", "req_1")


def test_a_body_that_is_too_long_has_a_type_of_its_own() -> None:
    """The API's reference has this type, the library's types lack it."""
    error = ApiError("long", status=413).messages_body("req_1")["error"]
    assert error == {"type": "request_too_large", "message": "long"}
