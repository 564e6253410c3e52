"""Chat completion requests of agents and editors, and the fields that they read of answers.

The bodies have the fields that opencode (through the AI SDK's provider for compatible servers),
Cline and Zed send: a first request, and the one after a tool call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.support.serving import running_server, served_with_tools

pytestmark = pytest.mark.slow

READ = {
    "name": "read",
    "description": "Reads a file.",
    "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"path": {"type": "string", "description": "where it is"}},
        "required": ["path"],
        "additionalProperties": False,
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read", "arguments": '{"path": "a.txt"}'},
}
SYSTEM, QUESTION, CONTENT = "You are an agent.", "What is in a.txt?", "Nothing."

OPENCODE: dict[str, Any] = {
    "model": "small",
    "max_tokens": 12,
    "temperature": 0,
    "top_p": 1,
    "messages": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ],
    "tools": [{"type": "function", "function": READ}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
OPENCODE_RESULT: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": CONTENT},
]
CLINE: dict[str, Any] = {
    "model": "small",
    "messages": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ],
    "temperature": 0,
    "max_tokens": 12,
    "reasoning_effort": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {**READ, "strict": False}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
}
CLINE_RESULT: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": CONTENT}]},
]
ZED: dict[str, Any] = {
    "model": "small",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 12,
    "stop": [],
    "temperature": 0.0,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "tools": [{"type": "function", "function": READ}],
    "prompt_cache_key": "thread-1",
}
ZED_RESULT: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": CONTENT, "tool_call_id": "call_1"},
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A client of a server whose model takes tools."""
    with (
        running_server(served_with_tools()) as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("body", "result"),
    [(OPENCODE, OPENCODE_RESULT), (CLINE, CLINE_RESULT), (ZED, ZED_RESULT)],
    ids=["opencode", "cline", "zed"],
)
def test_what_clients_send_is_answered_as_they_read_it(
    http: httpx.Client, body: dict[str, Any], result: list[dict[str, Any]]
) -> None:
    first = chunks_of(http, body)
    usage = check(first)
    assert usage.completion_tokens_details
    assert usage.completion_tokens_details.accepted_prediction_tokens is not None
    before = usage.prompt_tokens
    following = {**body, "messages": [*body["messages"], *result]}
    usage = check(chunks_of(http, following))
    assert usage.prompt_tokens_details
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert before - 16 <= cached < usage.prompt_tokens  # all but the opening chunk


def test_their_conversations_have_the_same_tokens(http: httpx.Client) -> None:
    counts = set()
    for body, result in ((OPENCODE, OPENCODE_RESULT), (CLINE, CLINE_RESULT), (ZED, ZED_RESULT)):
        messages = [*body["messages"], *result]
        asked = {"messages": messages, "tools": OPENCODE["tools"]}
        counts.add(tuple(http.post("/v1/tokenize", json=asked).json()["tokens"]))
    assert len(counts) == 1


def test_an_error_is_where_they_look_for_it(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={**ZED, "max_completion_tokens": "x"})
    assert answer.status_code == 400
    assert "max_completion_tokens" in answer.json()["error"]["message"]


def chunks_of(http: httpx.Client, body: dict[str, Any]) -> list[ChatCompletionChunk]:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [
        ChatCompletionChunk.model_validate(json.loads(event.removeprefix("data: ")), strict=True)
        for event in events
    ]


def check(chunks: list[ChatCompletionChunk]) -> Any:
    """Check a stream as clients read it; return its usage."""
    *parts, last = chunks
    choices = [choice for chunk in parts for choice in chunk.choices]
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert "".join(choice.delta.content or "" for choice in choices)
    assert len({chunk.id for chunk in chunks}) == 1
    assert not last.choices
    assert last.usage
    total = last.usage.prompt_tokens + last.usage.completion_tokens
    assert last.usage.total_tokens == total
    return last.usage
