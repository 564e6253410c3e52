"""Answers match the Responses API, checked with the types of OpenAI's client library."""

from __future__ import annotations

import copy
import gc
import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mlxspec.server.body import ApiError
from mlxspec.server.output_parser import OutputFormat
from mlxspec.server.responses import (
    ResponsesAnswer,
    ResponseStore,
    _stored_items,
    parse_responses,
)
from mlxspec.server.sending import framed
from mlxspec.server.worker import Event, Piece
from tests.server.test_openai import TOKENIZER, ended, extras, pieces
from tests.server.test_responses_requests import CODEX

Stored = tuple[dict[str, Any], Sequence[dict[str, Any]]]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OURS = {"presence_penalty", "frequency_penalty", "store", "bytes", "status", "name"}
"""Fields of the API's description or of other APIs that the library's types lack."""

TOOLS = [
    {"type": "function", "name": "f", "parameters": None, "strict": None},
    {"type": "namespace", "name": "crm", "description": "C", "tools": [
        {"type": "function", "name": "g"}
    ]},
    {"type": "custom", "name": "patch"},
]  # fmt: skip
CALLS = (
    '<think>\nHm.\n</think>\nI ask. <tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n'
    '</tool_call>\n<tool_call>{"name": "crm__g", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "patch", "arguments": {"input": "*** \\"x\\"\\n\\u00e9\\ud83d\\ude00"}}'
    "</tool_call>"
)


def answered(kept: list[Stored] | None = None, **fields: Any) -> ResponsesAnswer:
    request = parse_responses({"input": "?", **fields})
    format = replace(
        OutputFormat(TOKENIZER, request.tools_shown), several_calls=request.parallel_tool_calls
    )

    def keep(*stored: Any) -> None:
        if kept is not None:
            kept.append(stored)

    made = ResponsesAnswer(request, "model", keep)
    made.read_with(TOKENIZER, format)
    return made


def valid(event: dict[str, Any]) -> Any:
    """Parse an event with the client library; assert that its only extra fields are ours."""
    parsed = EVENTS.validate_python(json.loads(json.dumps(event, allow_nan=False)))
    assert parsed.type == event["type"]
    assert extras(parsed) <= OURS
    return parsed


def all_events(answer: ResponsesAnswer, batches: Sequence[Sequence[Event]]) -> list[Any]:
    """Return all events of a stream; check them and their numbers."""
    events = answer.begin()
    for batch in batches:
        events += answer.feed(batch)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [valid(event) for event in events]


def types(events: Sequence[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


def test_a_text_has_the_events_of_a_message() -> None:
    answer = answered(stream=True)
    events = all_events(answer, [pieces("Hello"), [ended()]])
    assert types(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    assert events[-1].response.output_text == "Hello"
    assert events[-1].response.output == [events[-2].item]
    usage = events[-1].response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (5, 7, 12)
    assert events[0].response.usage is None
    assert events[0].response.status == "in_progress"
    assert answer.end == ""


def test_usage_reports_cached_and_reasoning_tokens() -> None:
    answer = answered()
    answer.feed([*pieces("<think>\nHm, well.\n</think>\nYes", length=1), ended(cached_tokens=3)])
    usage = Response.model_validate(answer.whole()).usage
    assert usage
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens > 5


def test_reasoning_calls_and_text_are_items() -> None:
    answer = answered(stream=True, tools=TOOLS)
    events = all_events(answer, [[event] for event in (*pieces(CALLS, length=5), ended())])
    reasoning, message, f, g, patch = events[-1].response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == (
        "reasoning",
        "Hm.",
        [],
    )
    assert message.content[0].text == "I ask."
    assert (f.type, f.name, f.arguments, f.namespace) == ("function_call", "f", '{"a": "é"}', None)
    assert (g.name, g.arguments, g.namespace) == ("g", "{}", "crm")
    assert (patch.type, patch.name) == ("custom_tool_call", "patch")
    assert patch.input == '*** "x"\né😀'
    assert [event.item for event in events if event.type.endswith("item.done")] == (
        events[-1].response.output
    )
    for kind, text in (
        ("reasoning_text", "Hm."),
        ("output_text", "I ask."),
        ("custom_tool_call_input", patch.input),
    ):
        deltas = [event for event in events if event.type == f"response.{kind}.delta"]
        assert "".join(event.delta for event in deltas) == text
    arguments = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert {e.item_id: e.output_index for e in arguments} == {f.id: 2, g.id: 3}
    assert "".join(e.delta for e in arguments if e.output_index == 2) == f.arguments


@pytest.mark.slow
@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.sampled_from([CALLS, "Hello", "", "<think>x", '<tool_call>{"name": "patch", "argu']),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["stop", "length"]),
)
def test_the_client_puts_the_events_together_to_the_whole_response(
    output: str, length: int, batch: int, reason: str
) -> None:
    """OpenAI's own accumulation does it, for any batches of tokens."""
    fields = {"tools": TOOLS, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    happening = [*pieces(output, 0, length, logprob=-0.5, top=((65, -0.5),)), ended(reason=reason)]
    answer = answered(stream=True, **fields)
    batches = [happening[at : at + batch] for at in range(0, len(happening), batch)]
    events = all_events(answer, batches)
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(event)
    assert events[-1].type == ("response.completed" if reason == "stop" else "response.incomplete")
    whole = Response.model_validate(answer.whole())
    assert events[-1].response == whole
    finished = [event.item for event in events if event.type == "response.output_item.done"]
    assert finished == whole.output
    last = whole.output[-1]
    assert getattr(last, "status", None) == whole.status
    at_once = answered(**fields)
    at_once.feed(happening)
    assert at_once.whole()["usage"] == answer.whole()["usage"]
    assert [bare(item) for item in at_once.whole()["output"]] == [
        bare(item) for item in answer.whole()["output"]
    ]


def bare(item: dict[str, Any]) -> dict[str, Any]:
    """Remove an item's random ids."""
    return {name: item[name] for name in item if name not in ("id", "call_id")}


@given(st.text(), st.booleans(), st.integers(1, 7))
def test_the_input_of_a_custom_tool_is_read_as_it_comes(
    text: str, ascii: bool, length: int
) -> None:
    """The standard library's JSON parser is the reference."""
    written = json.dumps({"input": text}, ensure_ascii=ascii)
    output = f'<tool_call>{{"name": "patch", "arguments": {written}}}</tool_call>'
    answer = answered(stream=True, tools=TOOLS)
    happening = [Piece(0, output[at : at + length], 65) for at in range(0, len(output), length)]
    events = all_events(answer, [[event] for event in (*happening, ended())])
    expected = json.loads(written)["input"].encode("utf-16", "surrogatepass")
    (call,) = events[-1].response.output
    assert call.input.encode("utf-16") == expected
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input


def test_a_custom_tool_gets_whatever_the_model_has_written() -> None:
    for arguments, expected in (
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"a": 1, "input": "x"}', "x"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "a\\qb"}', "a\\qb"),
        ('{"input": "\\ud83d"}', "�"),
        ('{"input": "\\ud83d\\n\\ude00"}', "�\n�"),
        ('{"input": "x", "more": {"input": "y"}}', "x"),
    ):
        answer = answered(tools=TOOLS)
        text = f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>'
        answer.feed([*pieces(text, length=1), ended()])
        (call,) = Response.model_validate(answer.whole()).output
        assert call.type == "custom_tool_call"
        assert call.input == expected


def test_logprobs_are_those_of_the_text() -> None:
    answer = answered(stream=True, tools=TOOLS, top_logprobs=1)
    letters = [Piece(0, c, TOKENIZER.encode(c)[0], logprob=-1.0, top=((66, -1.0),)) for c in "Hi!"]
    start, end = TOKENIZER.convert_tokens_to_ids(["<think>", "</think>"])
    think = [
        Piece(0, "<think>", start, logprob=-0.5),
        Piece(0, "x", 88, logprob=-0.5),
        Piece(0, "</think>", end, logprob=-0.5),
    ]
    events = all_events(answer, [[event] for event in (*think, *letters, ended())])
    content = events[-1].response.output[-1].content[0]
    assert [one.token for one in content.logprobs] == ["H", "i", "!"]
    assert [len(one.top_logprobs) for one in content.logprobs] == [1, 1, 1]
    deltas = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    assert [[one.token for one in logprobs] for logprobs in deltas] == [["H"], ["i"], ["!"]]


def test_one_call_is_enough_where_only_one_may_be() -> None:
    answer = answered(tools=TOOLS, parallel_tool_calls=False)
    answer.feed(pieces(CALLS))
    assert answer.finished(0)
    answer.feed([ended(reason="length")])
    whole = Response.model_validate(answer.whole())
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.status == "completed"


def test_keep_alives_are_events() -> None:
    answer = answered(stream=True)
    assert types([valid(event) for event in answer.begin()]) == ["created", "in_progress"]
    name, data = framed(*answer.keep_alive()).strip().split("\n")
    event = valid(json.loads(data.removeprefix("data: ")))
    assert (name, event.type) == ("event: response.in_progress", "response.in_progress")
    rest = answer.feed([*pieces("Hi"), ended()])
    assert [event["sequence_number"] for event in rest] == [*range(3, 3 + len(rest))]
    assert types([valid(event) for event in rest])[0] == "output_item.added"


def test_an_error_in_the_midst_is_a_failed_response() -> None:
    for error, code in (
        (ApiError("broken", status=500), "server_error"),
        (ApiError("busy", status=429), "rate_limit_exceeded"),
        (ApiError("large", status=413), "invalid_prompt"),
    ):
        answer = answered(stream=True)
        answer.feed(pieces("Hello"))
        failed = valid(answer.failed(error))
        assert failed.type == "response.failed"
        assert failed.response.status == "failed"
        assert (failed.response.error.code, failed.response.error.message) == (code, error.message)
        assert failed.response.output[0].status == "incomplete"
        assert failed.response.output_text == "Hello"
    # The types lack this code, but agents check it.
    event = answered(stream=True).failed(ApiError("long", code="context_length_exceeded"))
    assert event["response"]["error"]["code"] == "context_length_exceeded"


def test_a_response_is_kept_unless_it_should_not_be() -> None:
    for fields, count in (({}, 1), ({"store": False}, 0)):
        kept: list[Stored] = []
        answer = answered(kept, **fields)
        answer.feed(pieces("Hello"))
        assert kept == []
        answer.feed([ended()])
        assert [response for response, _ in kept] == [answer.whole()] * count


# --- the store ---


def items(store: ResponseStore, partition: str, ids: set[str]) -> Any:
    return _stored_items(ids, partial(store.response, partition))


def stored(number: int, *given: dict[str, Any]) -> Stored:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}_0"}]}, given


def test_responses_are_their_partitions_own() -> None:
    store = ResponseStore()
    store.put("a", *stored(1, {"id": "i"}))
    item = {"id": "msg_1_0"}
    assert store.response("a", "resp_1") == ({"id": "resp_1", "output": [item]}, [{"id": "i"}])
    assert items(store, "a", {"msg_1_0"}) == {"msg_1_0": item}
    assert items(store, "a", {"i", "msg_2_0", "", "_"}) == {}
    assert store.response("b", "resp_1") is None
    assert items(store, "b", {"msg_1_0"}) == {}
    store.delete("b", "resp_1")
    assert store.response("a", "resp_1")
    store.delete("a", "resp_1")
    store.delete("a", "resp_1")
    assert store.response("a", "resp_1") is None
    assert items(store, "a", {"msg_1_0"}) == {}
    assert store.nbytes == 0


def test_those_used_last_stay() -> None:
    store = ResponseStore(most_bytes=2 * len(json.dumps(stored(1))))
    store.put("", *stored(1))
    store.put("", *stored(2))
    items(store, "", {"msg_1_0"})
    store.put("", *stored(3))
    assert [bool(store.response("", f"resp_{n}")) for n in (1, 2, 3)] == [True, False, True]
    assert items(store, "", {"msg_2_0"}) == {}


def test_bytes_are_bounded() -> None:
    store = ResponseStore(most_bytes=1000)
    for number in range(50):
        store.put("", *stored(number, {"id": f"i{number}", "text": "x" * 300}))
        assert store.nbytes <= 1000
    store.put("", *stored(50, {"id": "large", "text": "x" * 1000}))
    assert store.nbytes == 0
    assert items(store, "", {"msg_50_0"}) == {}


@pytest.mark.slow
def test_memory_is_bounded_as_the_bytes_are() -> None:
    """As Python objects, an agent's tools in each of its responses take four times their bytes."""
    kept: list[Stored] = []
    store = ResponseStore()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            answer = answered(kept, **copy.deepcopy({**CODEX, "store": True}))
            answer.feed([*pieces("Hello"), ended()])
            store.put("", *kept.pop())
            del answer
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert store.nbytes > 100_000
    assert taken < 2.5 * store.nbytes
