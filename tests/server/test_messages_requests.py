"""Bodies of Anthropic's API become equivalent chat requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from mlxspec import Constraint
from mlxspec.server.body import ApiError, parse, read_body
from mlxspec.server.messages import MessagesBody
from mlxspec.server.openai import ChatBody
from tests.server.test_api_body import hostile
from tests.support.examples import examples
from tests.support.hostile import json_values

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
CACHED = {"cache_control": {"type": "ephemeral"}}
FULL_MESSAGES: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "max_tokens": 64000,
    "system": [
        {
            "type": "text",
            "text": "x-anthropic-billing-header: cc_version=2.1.197.0df; cc_entrypoint=cli;",
        },
        {"type": "text", "text": "You are Claude Code.", **CACHED},
        {"type": "text", "text": "\nYou help with tests.", **CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nIt is May.\n</system-reminder>\n"},
                {"type": "text", "text": "Weather?", **CACHED},
            ],
        },
        {"role": "system", "content": "Agents: none"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I ask.", "signature": "mlxspec"},
                {"type": "redacted_thinking", "data": "EmwKAhgB"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny", **CACHED},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no "}, {"type": "text", "text": "city"}],
                },
                {"type": "text", "text": "Well?"},
            ],
        },
    ],
    "tools": [{**WEATHER, **CACHED, "eager_input_streaming": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "metadata": {"user_id": '{"device_id":"x"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stop_sequences": ["</block>"],
    "temperature": 1,
    "top_p": 0.9,
    "top_k": 5,
    "service_tier": "auto",
    "stream": True,
}
"""A body like Claude Code 2.1's, with some more fields."""


def messages(**fields: Any) -> MessagesBody:
    return parse(MessagesBody, {"max_tokens": 100, "messages": HELLO, **fields})


def said(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [*messages(messages=list(given), **fields).conversation]


def test_a_request_of_claude_code_is_the_chat_that_it_means() -> None:
    """It has the same fields as the equivalent OpenAI chat."""
    weather = {**WEATHER, "parameters": SCHEMA}
    del weather["input_schema"]
    calls = [
        {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for id, arguments in (("toolu_1", '{"city": "Rome"}'), ("toolu_2", "{}"))
    ]
    reminded = "<system-reminder>\nIt is May.\n</system-reminder>\nWeather?"
    chat = parse(
        ChatBody,
        {
            "model": "claude-opus-4-8",
            "max_tokens": 64000,
            "messages": [
                {"role": "system", "content": "You are Claude Code.\nYou help with tests."},
                {"role": "user", "content": reminded},
                {"role": "developer", "content": "Agents: none"},
                {
                    "role": "assistant",
                    "content": "Let me see.",
                    "reasoning_content": "I ask.",
                    "tool_calls": calls,
                },
                {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
                {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no city"},
                {"role": "user", "content": "Well?"},
            ],
            "tools": [{"type": "function", "function": weather}],
            "parallel_tool_calls": False,
            "enable_thinking": True,
            "reasoning_effort": "high",
            "stop": "</block>",
            "temperature": 1,
            "top_p": 0.9,
            "top_k": 5,
            "stream": True,
        },
    )
    request = parse(MessagesBody, FULL_MESSAGES)
    names = """model max_tokens n stop stream conversation continued tools_shown
        tool_mode parallel_tool_calls template_kwargs constraint param top"""
    for name in names.split():
        assert getattr(request, name) == getattr(chat, name), name
    assert request.sampling() == chat.sampling()


@pytest.mark.parametrize(
    "line",
    [
        "x-anthropic-billing-header: cc_version=2.1.197.0df; cc_entrypoint=sdk-cli;",
        "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;",
        "x-anthropic-billing-header: cc_version=2.1.3; cc_entrypoint=cli; cc_is_subagent=true;",
    ],
)
def test_the_line_that_changes_with_each_request_is_left_out(line: str) -> None:
    for system in (
        [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": f"{line}\nBe brief."}],
        f"{line}\nBe brief.",
    ):
        assert messages(system=system).conversation[0] == {"role": "system", "content": "Be brief."}
    assert messages(system=line).conversation[0]["role"] == "user"
    quoted = f"This is one:\n{line}"
    assert messages(system=quoted).conversation[0]["content"] == quoted


def test_who_speaks_on_has_one_turn() -> None:
    user, assistant = ({"role": role, "content": "a"} for role in ("user", "assistant"))
    assert said(user, user, assistant, assistant, user) == [
        {"role": "user", "content": "a\n\na"},
        {"role": "assistant", "content": "a\n\na"},
        {"role": "user", "content": "a"},
    ]
    result = {"type": "tool_result", "tool_use_id": "1"}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
    turns = said(user, assistant, {"role": "assistant", "content": [call]}, {
        "role": "user", "content": [result]})  # fmt: skip
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool"]
    assert turns[1]["content"] == "a"
    assert turns[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert turns[2]["content"] == ""


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    request = messages(messages=[*HELLO, {"role": "assistant", "content": "Well, I"}])
    assert request.continued
    assert not messages().continued


def test_references_to_tools_are_their_names() -> None:
    content = [{"type": "tool_reference", "tool_name": "weather"}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": content}
    assert said({"role": "user", "content": [result]})[0]["content"] == "weather"


def test_a_note_stands_for_what_a_tool_has_shown() -> None:
    content = [{"type": "text", "text": "Look: "}, IMAGE]
    result = {"type": "tool_result", "tool_use_id": "1", "content": content}
    (turn,) = said({"role": "user", "content": [result]})
    assert turn["content"] == "Look: [image: left out, since this model reads only text]"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None, True)),
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
        ({"type": "tool", "name": "weather"}, ("function", "weather", True)),
    ],
)
def test_choices_of_tools(choice: Any, expected: tuple[Any, ...]) -> None:
    request = messages(tools=[WEATHER], tool_choice=choice)
    assert (*request.tool_mode, request.parallel_tool_calls) == expected
    assert len(request.tools_shown) == 1


def test_no_tool_may_be_called() -> None:
    assert messages(tools=[WEATHER], tool_choice={"type": "none"}).tools_shown == []


@pytest.mark.parametrize(
    ("thinking", "kwargs"),
    [
        (None, {}),
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True}),
        ({"type": "adaptive", "display": "summarized"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
)
def test_thinking_is_the_templates_switch(thinking: Any, kwargs: dict[str, Any]) -> None:
    assert messages(thinking=thinking).template_kwargs == kwargs


def test_what_only_anthropics_servers_do_is_taken() -> None:
    names = """metadata service_tier context_management cache_control container mcp_servers thread
        output_config output_format compaction thinking tools tool_choice system stop_sequences
        temperature top_p top_k stream model"""
    assert messages(**dict.fromkeys(names.split())).model_dump() == messages().model_dump()
    given = {"mcp_servers": [], "inference_geo": "eu", "speed": "fast", "betas": ["x"]}
    assert messages(**given, **CACHED).model_dump() == messages().model_dump()


def test_a_format_is_a_constraint() -> None:
    request = messages(output_config={"format": FORMAT})
    assert request.constraint == Constraint.json_schema(FORMAT["schema"])


def test_tokens_are_counted_without_a_bound() -> None:
    request = parse(MessagesBody, {"messages": HELLO})
    assert (request.conversation, request.max_tokens) == (HELLO, None)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
FORMAT: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [5]}]}]},
            "messages[0].content[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"system": 5}, "system"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"output_config": {"effort": "most"}}, "output_config.effort"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"stream": "yes"}, "stream"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"regex": "a+"}, "regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_wrong_or_cannot_be_done_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        messages(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message


def test_the_body_that_is_made_hostile_is_right_before() -> None:
    assert isinstance(parse(MessagesBody, FULL_MESSAGES), MessagesBody)


@pytest.mark.slow
@settings(max_examples=examples(150, 10_000))
@given(hostile(FULL_MESSAGES) | json_values)
def test_any_body_is_a_request_or_a_400(body: Any) -> None:
    try:
        request = parse(MessagesBody, read_body(json.dumps(body).encode()))
    except ApiError as refused:
        error = refused
    else:
        repr(request).encode()  # no lone surrogates
        return
    assert error.status == 400
    json.dumps(error.messages_body("req_1"), allow_nan=False).encode()
