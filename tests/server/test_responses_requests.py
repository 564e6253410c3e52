"""Bodies of the Responses API become chat requests, or errors that name the field."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from openai.types.responses import Response

from mlxspec.server.body import ApiError, parse
from mlxspec.server.openai import ChatBody
from mlxspec.server.responses import ResponsesBody, ResponseStore, parse_responses
from tests.server.test_api_body import check_any, hostile, param_of
from tests.support.examples import examples
from tests.support.hostile import json_values

FIRST = {"role": "user", "content": "Before"}
KEPT: dict[str, Any] = {"id": "msg_1_0", "type": "message", "role": "assistant"}
KEPT |= {"status": "completed", "content": [{"type": "output_text", "text": "Kept"}]}
STORE = ResponseStore()
STORE.put("", {"id": "resp_1", "output": [KEPT]}, [FIRST])
EXEC = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{**EXEC, "name": "spawn"}, {**EXEC, "name": "close"}],
}
CODEX: dict[str, Any] = {
    "model": "small",
    "instructions": "",
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [
            {"type": "input_text", "text": "You are an agent."}
        ]},
        {"type": "message", "role": "developer", "content": [
            {"type": "input_text", "text": "There are no skills."}
        ]},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "<environment_context>"},
            {"type": "input_text", "text": "</environment_context>"},
        ]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "Hm."}
        ], "encrypted_content": None},
        {"type": "message", "role": "assistant", "phase": "commentary", "content": [
            {"type": "output_text", "text": "I look."}
        ]},
        {"type": "function_call", "id": "fc_1", "call_id": "abcdefghi", "name": "exec_command",
         "arguments": '{"cmd": "ls"}'},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** x"},
        {"type": "function_call", "call_id": "call_3", "name": "spawn", "namespace": "agents",
         "arguments": "{}"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": "a.txt"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done"},
        {"type": "function_call_output", "call_id": "call_3", "output": [
            {"type": "input_text", "text": "Look: "},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        ]},
    ],
    "tools": [EXEC, PATCH, AGENTS, {"type": "web_search", "external_web_access": True}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a-b-c",
    "text": {"verbosity": "low", "format": {"type": "text"}},
    "client_metadata": {"session_id": "a-b-c"},
    "service_tier": "auto",
}  # fmt: skip
"""A body that Codex sends in the middle of a turn."""

FULL = {
    **CODEX,
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [{**AGENTS, "name": "more"}]},
        *CODEX["input"],
        {"type": "item_reference", "id": "msg_1_0"},
    ],
    "max_output_tokens": 9,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "previous_response_id": "resp_1",
    "safety_identifier": "s",
    "seed": 5,
    "stream_options": {"include_obfuscation": False},
    "temperature": 0.5,
    "tool_choice": {"type": "custom", "name": "apply_patch"},
    "top_logprobs": 2,
    "top_p": 0.9,
    "truncation": "auto",
    "user": "u",
}  # fmt: skip


def parsed(body: object) -> ResponsesBody:
    return parse_responses(body, partial(STORE.response, ""))


def asked(**fields: Any) -> ResponsesBody:
    return parsed({"input": "Hello", **fields})


def test_an_item_is_inserted_once() -> None:
    reference = {"type": "item_reference", "id": "msg_1_0"}
    assert asked(input=[reference]).items == [KEPT]
    assert asked(input=[{"id": "msg_1_0"}]).items == [KEPT]
    with pytest.raises(ApiError, match="was used before") as caught:
        asked(input=[reference, reference])
    assert caught.value.param == "input[1].id"


def wrong(**fields: Any) -> str | None:
    """Return the field that the error names."""
    return param_of({"input": "Hello", **fields}, parsed)


def test_a_text_is_a_message_of_the_user() -> None:
    request = asked()
    chat = parse(ChatBody, {"messages": [{"role": "user", "content": "Hello"}]})
    names = """model max_tokens n stop stream conversation continued tools_shown
        tool_mode parallel_tool_calls template_kwargs constraint top"""
    for name in names.split():
        assert getattr(request, name) == getattr(chat, name), name
    assert request.sampling() == chat.sampling()
    assert request.store
    items = [{"role": "user", "content": "Hello"}]
    assert asked(input=items).conversation == request.conversation


def test_what_codex_sends_is_a_chat() -> None:
    request = parsed(CODEX)
    assert [message["role"] for message in request.conversation] == [
        *("system", "system", "user", "assistant", "tool", "tool", "tool")
    ]
    instructions, skills, user, answer, *results = request.conversation
    assert instructions["content"] == "You are an agent."
    assert skills["content"] == "There are no skills."
    assert user["content"] == "<environment_context></environment_context>\n\nGo on"
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "I look.")
    assert [(call["id"], call["function"]) for call in answer["tool_calls"]] == [
        ("abcdefghi", {"name": "exec_command", "arguments": {"cmd": "ls"}}),
        ("call_2", {"name": "apply_patch", "arguments": {"input": "*** x"}}),
        ("call_3", {"name": "agents__spawn", "arguments": {}}),
    ]
    assert [result["tool_call_id"] for result in results] == ["abcdefghi", "call_2", "call_3"]
    assert results[2]["content"] == "Look: [image: left out, since this model reads only text]"
    names = [tool["function"]["name"] for tool in request.tools_shown]
    assert names == ["exec_command", "apply_patch", "agents__spawn", "agents__close"]
    assert request.tools_shown[0]["function"] == {
        name: EXEC[name] for name in EXEC if name != "type"
    }
    assert "lark" in json.dumps(request.tools_shown[1])
    assert [tool["type"] for tool in request.repeated()["tools"]] == [
        "function",
        "custom",
        "namespace",
    ]
    assert not request.store
    assert request.stream
    assert request.template_kwargs == {"reasoning_effort": "medium", "verbosity": "low"}


def test_what_is_kept_is_the_whole_conversation() -> None:
    request = parsed({**FULL, "input": CODEX["input"]})
    assert request.items == [FIRST, KEPT, *CODEX["input"]]
    whole = {"id": "r", "object": "response", "created_at": 0, "model": "m", "output": []}
    response = Response.model_validate({**whole, **request.repeated()})
    assert response.temperature == 0.5
    assert response.metadata == {"a": "b"}
    assert (response.truncation, response.text and response.text.verbosity) == ("disabled", "low")


def test_options_are_those_of_a_chat() -> None:
    request = parsed(FULL)
    assert request.max_tokens == 9
    assert (request.sampling().temp, request.sampling().top_p) == (0.5, 0.9)
    assert request.sampling().seed == 5
    assert request.top == 2
    assert asked(include=["message.output_text.logprobs"]).top == 0
    assert asked().top is None
    assert asked(extra="?", input="x", top_k=3, stop="y").stop == ["y"]
    assert asked(input="x", top_k=3).sampling().top_k == 3


def test_null_is_absent() -> None:
    expected = asked().repeated()
    assert asked(**dict.fromkeys(FULL.keys() - {"input", "metadata"})).repeated() == expected
    nulls = ("background", "conversation", "prompt", "n", "response_format", "mlxspec")
    assert asked(**dict.fromkeys(nulls)).repeated() == expected
    assert asked(background=False, conversation=None).repeated() == expected


def test_tools_may_be_named_and_bounded() -> None:
    tools = [EXEC, PATCH, AGENTS]

    def chosen(choice: Any) -> tuple[str, str | None, int]:
        request = asked(tools=tools, tool_choice=choice)
        return *request.tool_mode, len(request.tools_shown)

    assert chosen("required") == ("required", None, 4)
    assert chosen("none") == ("none", None, 0)
    assert chosen({"type": "function", "name": "exec_command"}) == ("function", "exec_command", 4)
    assert chosen({"type": "custom", "name": "apply_patch"}) == ("function", "apply_patch", 4)
    assert chosen({"type": "function", "name": "close"}) == ("function", "agents__close", 4)


def test_a_conversation_adds_tools() -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, PATCH, EXEC]}
    body = {"input": [more, {"role": "user", "content": "?"}, more], "tools": [EXEC]}
    request = parsed(body)
    assert [*request.known_tools] == [
        *("exec_command", "agents__spawn", "agents__close", "apply_patch")
    ]
    assert len(request.tools_shown) == 4
    assert [message["role"] for message in request.conversation] == ["user"]
    assert [tool["name"] for tool in request.repeated()["tools"]] == ["exec_command"]
    broken = {**more, "tools": [{**AGENTS, "tools": [{"type": "mcp", "name": "m"}]}]}
    assert wrong(input=[broken]) == "input[0].tools[0].tools"


def test_names_of_namespaces_do_not_double_their_underscores() -> None:
    request = asked(tools=[{**AGENTS, "name": "mcp__fs__"}])
    assert [*request.known_tools] == ["mcp__fs__spawn", "mcp__fs__close"]


def test_an_answer_is_a_message_of_its_own() -> None:
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Well"}]
    assert not asked(input=said).continued
    twice = asked(input=[*said, {"role": "assistant", "content": "So"}]).conversation
    assert [message["content"] for message in twice] == ["?", "Well\n\nSo"]


def test_reasoning_of_others_is_their_summary() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}
    (_, answer) = asked(input=[{"role": "user", "content": "?"}, reasoning]).conversation
    assert answer["reasoning_content"] == "Hm"
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    request = asked(input=[{"role": "user", "content": "?"}, hidden])
    assert [message["role"] for message in request.conversation] == ["user"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "pirate", "content": ""}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"id": "msg_0"}]}, "input[0].id"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]},
         "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}]},
         "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ["x"]}]},
         "input[0].output[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"previous_response_id": "resp_2"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": [5]}, "include[0]"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "none"}, "tools"),
        ({"tools": [EXEC, {"type": "mcp"}]}, "tools"),
        ({"tools": [EXEC, {"type": "local_shell"}]}, "tools"),
        ({"tools": [{**EXEC, "name": ""}]}, "tools[0].name"),
        ({"tools": [{**EXEC, "parameters": 5}]}, "tools[0].parameters"),
        ({"tools": [{**AGENTS, "tools": [{"type": "namespace", "name": "a"}]}]},
         "tools"),
        ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "x"}}]},
         "tools[0].format.syntax"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [EXEC], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [EXEC], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [EXEC], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [EXEC], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [EXEC], "tool_choice": {"type": "allowed_tools", "tools": [EXEC]}},
         "tool_choice"),
        ({"tools": [EXEC], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [EXEC], "tool_choice": 5}, "tool_choice"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"instructions": "a", "system": "b"}, "system"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named(fields: dict[str, Any], param: str) -> None:
    assert wrong(**fields) == param


def test_an_empty_text_and_an_empty_id_are_taken() -> None:
    assert asked(input="").conversation[0]["content"] == ""
    (message,) = asked(input=[{"role": "user", "content": "Hello", "id": ""}]).conversation
    assert message["content"] == "Hello"


def test_null_is_an_empty_text_in_an_output() -> None:
    output = [{"type": "input_text", "text": None}]
    called = {"type": "function_call_output", "call_id": "c", "output": output}
    (message,) = asked(input=[called]).conversation
    assert message["content"] == ""


def test_an_unknown_response_has_a_code() -> None:
    with pytest.raises(ApiError) as caught:
        asked(previous_response_id="resp_2")
    assert caught.value.code == "previous_response_not_found"


def test_the_tests_that_follow_begin_with_good_bodies() -> None:
    for body in (CODEX, FULL):
        before = copy.deepcopy(body)
        parsed(body)
        assert body == before


@pytest.mark.slow
@settings(max_examples=examples(150, 5_000))
@given(hostile(FULL) | json_values)
def test_any_body_is_a_request_or_a_400(body: Any) -> None:
    check_any(parsed, body)
