"""Bodies become validated requests, or errors that name the field."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec import Constraint, SamplingParams
from mlxspec.server.api_body import ApiBody, check_ids
from mlxspec.server.body import ApiError, parse, read_body
from mlxspec.server.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_tokenize,
)
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.examples import examples
from tests.support.hostile import json_values

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


parse_chat = partial(parse, ChatBody)
parse_completion = partial(parse, CompletionBody)
parse_detokenize = partial(parse, DetokenizeBody)


def chat(**fields: Any) -> ChatBody:
    return parse_chat({"messages": HELLO, **fields})


def completion(**fields: Any) -> CompletionBody:
    return parse_completion({"prompt": "Once", **fields})


def effect(request: ApiBody) -> dict[str, Any]:
    """Return all settings of a request, independent of its notation."""
    return request.model_dump()


@pytest.mark.parametrize(
    ("format", "constraint"),
    [
        ({"type": "json_object"}, Constraint.json_object()),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            Constraint.json_schema(SCHEMA),
        ),
        ({"type": "json_object", "schema": SCHEMA}, Constraint.json_schema(SCHEMA)),
        ({"type": "text"}, None),
    ],
)
def test_a_format_is_a_constraint(format: dict[str, Any], constraint: Constraint | None) -> None:
    empty = {"grammar": "", "guided_choice": [], "guided_json": {}, "structured_outputs": {}}
    for fields in ({}, empty):
        assert chat(response_format=format, **fields).constraint == constraint
        assert completion(response_format=format, **fields).constraint == constraint


def param_of(body: object, parse: Any = parse_chat) -> str | None:
    """Return the field that the error names."""
    with pytest.raises(ApiError) as caught:
        parse(body)
    error = caught.value
    assert error.status == 400
    assert error.param is None or error.param in error.message
    assert error.message.endswith(".")
    json.dumps(error.body, ensure_ascii=False).encode()
    return error.param


def test_a_request_without_options_has_the_defaults_of_generate() -> None:
    request = chat()
    assert request.conversation == [{"role": "user", "content": "Hello"}]
    assert (request.n, request.max_tokens, request.stop, request.stream) == (1, None, [], False)
    assert (request.top, request.constraint, request.template_kwargs) == (None, None, {})
    params = request.sampling()
    assert (params.temp, params.top_p, params.top_k, params.seed) == (0.0, 1.0, 0, None)
    assert params.logit_bias is None
    assert params.repetition_penalty is None


def test_every_option_of_sampling_arrives() -> None:
    body = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 7,
        "logit_bias": {"5": -100, "12": 2.5},
        "repetition_penalty": 1.1,
        "repetition_context_size": 64,
        "presence_penalty": 0.5,
        "presence_context_size": 0,
        "frequency_penalty": -0.5,
        "frequency_context_size": 8,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
    }
    params = chat(**body).sampling(xtc_special_tokens=[1])
    assert params.temp == 0.7
    assert params.logit_bias == {5: -100.0, 12: 2.5}
    assert params.xtc_special_tokens == (1,)
    for name in body.keys() - {"temperature", "logit_bias"}:
        assert getattr(params, name) == body[name], name


def test_null_is_absent() -> None:
    names = """temperature top_p top_k min_p seed stop logit_bias max_tokens max_completion_tokens n
        logprobs top_logprobs stream stream_options user metadata store service_tier tools
        tool_choice parallel_tool_calls prediction chat_template_kwargs reasoning_effort
        response_format audio modalities functions function_call web_search_options model mlxspec
        prompt_cache_key verbosity presence_penalty frequency_penalty"""
    assert effect(chat(**dict.fromkeys(names.split()))) == effect(chat())
    names = "suffix echo best_of logprobs n stop seed"
    assert effect(completion(**dict.fromkeys(names.split()))) == effect(completion())


def test_null_is_absent_within_objects_too() -> None:
    fields = {"stream_options": {"include_usage": None}, "mlxspec": {"drafts": None}}
    fields |= {"logit_bias": {"5": None}}
    assert effect(chat(**fields)) == effect(chat())


def test_what_no_server_knows_is_ignored() -> None:
    assert effect(chat(frobnicate=[1], **{"": 0})) == effect(chat())
    nested = {"format": {"type": "json_object"}}  # these objects lack the field
    for name in ("stream_options", "prediction", "mlxspec", "reasoning"):
        assert effect(chat(**{name: nested})) == effect(chat()), name


def test_unknown_options_of_a_stream_are_ignored() -> None:
    request = chat(stream_options={"include_usage": True, "of_tomorrow": "x"})
    assert request.stream_options.include_usage


def test_errors_call_objects_objects() -> None:
    for fields in (
        {"stream_options": 5},
        {"tool_choice": {"type": "function"}},
        {"messages": ["x"]},
    ):
        with pytest.raises(ApiError) as caught:
            chat(**fields)
        assert caught.value.message.endswith("it should be an object.")


def test_what_the_clients_of_other_servers_send_is_taken() -> None:
    request = chat(
        max_tokens=50,
        max_completion_tokens=50.0,
        guided_decoding_backend="guidance",
        top_k=-1,
        seed=-1,
        stop="END",
        stream=True,
        stream_options={},
        repeat_penalty=1,
        n=1.0,
        store=True,
        user="me",
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="k",
        response_format={"type": "text"},
        modalities=["text"],
        add_special_tokens=False,
        skip_special_tokens=True,
        options={},
    )
    assert request.max_tokens == 50
    assert request.sampling() == SamplingParams(seed=None)
    assert request.stop == ["END"]
    assert (request.stream, request.stream_options.include_usage) == (True, False)
    assert chat(max_tokens=-1).max_tokens is None
    assert chat(max_tokens=2**70).max_tokens == 2**31 - 1
    assert chat(stream_options={"include_usage": True}).stream_options.include_usage
    assert chat(stop=["a", "b"]).stop == ["a", "b"]
    assert chat(stop=[]).stop == []
    assert chat(mlxspec={"drafts": True}).mlxspec.drafts


def test_choices_have_seeds_of_their_own_and_the_first_has_the_clients() -> None:
    request = chat(seed=2**64 - 1, n=3)
    assert [request.sampling(choice).seed for choice in range(3)] == [
        2**64 - 1,
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2**70}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": []}, "min_p"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": True}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"stop": "a" * 1001}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": []}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1e400}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": False}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": 5}, "model"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format",
        ),
        ({"response_format": {}}, "response_format.type"),
        *(
            ({name: value}, name)
            for name, value in {
                **{"guided_json": SCHEMA, "guided_regex": "a", "guided_choice": ["a"]},
                **{"guided_grammar": "start: /x/", "structured_outputs": {"regex": "a"}},
                **{"grammar": "start: /x/", "json_schema": SCHEMA, "format": "json"},
                **{"regex": "a", "ebnf": 'root ::= "x"'},
            }.items()
        ),
        ({"response_format": "text"}, "response_format"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"verbosity": "huge"}, "verbosity"),
        ({"options": {"temperature": 0}}, "options"),
        ({"think": False}, "think"),
        ({"system": "Be brief."}, "system"),
        ({"instructions": "Be brief."}, "instructions"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"n_predict": 5}, "n_predict"),
        ({"chat_template": "x"}, "chat_template"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"mlxspec": {"drafts": 1}}, "mlxspec.drafts"),
        ({"prediction": "x"}, "prediction"),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            "prediction.content[0].type",
        ),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": [WEATHER, {"type": "function", "function": {"name": "f", "parameters": 1}}]},
            "tools[1].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always", "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [WEATHER]}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice.function"),
        (
            {
                "tool_choice": {"type": "function", "function": {"name": "x"}},
                "tools": [WEATHER],
            },
            "tool_choice",
        ),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "messages[0].images",
        ),
        ({"continue_final_message": "no"}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": 5, "function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[0].tool_calls[0].type",
        ),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
    ],
)
def test_what_is_wrong_or_cannot_be_done_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    assert param_of({"messages": HELLO, **fields}) == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [WEATHER]},
            "tool_choice is 'x': name one of the tools.",
        ),
        (
            {"guided_regex": "a+"},
            "guided_regex is 'a+': send a JSON Schema as response_format (text.format in "
            "/v1/responses, output_config.format in /v1/messages).",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content is 5: it should be a string or a list.",
        ),
        ({"messages": "Hello"}, "messages is 'Hello': it should be a valid list."),
        ({"stop": 5}, "stop is 5: it should be a string or a list."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type is 'image_url': leave it out, since this server reads "
            "only text.",
        ),
    ],
)
def test_errors_say_what_was_sent_and_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.message == message


@pytest.mark.parametrize("body", [None, [], "x", 5, True, float("nan")])
def test_a_body_must_be_an_object(body: object) -> None:
    for read in (parse_chat, parse_completion, parse_tokenize, parse_detokenize):
        assert param_of(body, read) is None


# --- messages ---


def test_messages_come_in_the_form_of_chat_templates() -> None:
    arguments = '{"city": "Paris"}'
    request = parse_chat(
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": arguments},
                        },
                        {"id": "2", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
                        {"id": "3", "function": {"name": "weather", "arguments": '{"city'}},
                        {"id": "4", "function": {"name": "weather", "arguments": ""}},
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "sunny"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "assistant", "content": None, "refusal": "No."},
            ]
        }
    )
    system, user, calls, tool, *refusals = request.conversation
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "ab"}
    assert (calls["content"], calls["reasoning_content"]) == ("", "Hm.")
    assert [call["function"]["arguments"] for call in calls["tool_calls"]] == [
        {"city": "Paris"},
        {"city": "Rome"},
        '{"city',
        {},
    ]
    assert calls["tool_calls"][0]["id"] == "1"
    assert tool == {"role": "tool", "content": "sunny", "tool_call_id": "1"}
    assert [refusal["content"] for refusal in refusals] == ["No.", "No."]


def test_a_trailing_message_of_the_assistant_is_gone_on_with() -> None:
    prefill = [*HELLO, {"role": "assistant", "content": "Well,"}]
    assert chat(messages=prefill).continued
    assert chat(messages=prefill, add_generation_prompt=False).continued  # as vLLM needs it
    assert not chat(messages=prefill, continue_final_message=False).continued
    assert not chat().continued
    empty = chat(messages=[*HELLO, {"role": "assistant", "content": ""}])
    assert empty.conversation == chat().conversation
    assert not empty.continued


def test_tools_and_their_choice() -> None:
    assert chat(tools=[]).tools_shown == []
    request = chat(tools=[WEATHER])
    assert (request.tools_shown, request.demands_call) == ([WEATHER], False)
    assert chat(tools=[WEATHER], tool_choice="none").tools_shown == []
    assert chat(tools=[WEATHER], tool_choice="required").demands_call
    named = {"type": "function", "function": {"name": "weather"}}
    request = chat(tools=[WEATHER], tool_choice=named, parallel_tool_calls=False)
    assert (request.demands_call, request.forced_tool) == (True, "weather")
    assert not request.parallel_tool_calls


def test_thinking_can_be_requested_under_several_names() -> None:
    assert chat(chat_template_kwargs={"a": 1, "b": None}).template_kwargs == {"a": 1}
    assert chat(enable_thinking=False).template_kwargs == {"enable_thinking": False}
    assert chat(reasoning={"effort": "low"}, verbosity="high").template_kwargs == {
        "reasoning_effort": "low",
        "verbosity": "high",
    }
    assert chat(reasoning_effort="none").template_kwargs == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }


def test_a_prediction_is_a_text_or_parts() -> None:
    assert chat(prediction={"type": "content", "content": "x"}).prediction.content == "x"
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert chat(prediction={"type": "content", "content": parts}).prediction.content == "xy"


# --- completions ---


def test_prompts_are_texts_or_ids() -> None:
    assert completion(prompt="").prompt == [""]
    assert completion(prompt=["a", "b"]).prompt == ["a", "b"]
    assert completion(prompt=[1, 2.0]).prompt == [[1, 2]]
    assert completion(prompt=[[1, 2], "a", [3]]).prompt == [[1, 2], "a", [3]]
    request = completion(suffix=" end", echo=True, best_of=1, n=2, logprobs=None)
    assert (request.suffix, request.echo, request.n) == (" end", True, 2)
    assert completion(logprobs=0).top == 0
    assert completion().top is None
    assert [chat(top_logprobs=n).top for n in (0, 3)] == [None, 3]
    assert chat(logprobs=True).top == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [1, True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [float("nan")]}, "prompt[0]"),
        ({"prompt": [2**70]}, "prompt[0]"),
        ({"prompt": [[1, 2**40]]}, "prompt[0][1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": "x"}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "echo"),
        ({"suffix": 5}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids[0]"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_completions_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    assert param_of({"prompt": "Once", **fields}, parse_completion) == param


def test_texts_and_ids_to_convert() -> None:
    asked = parse_tokenize({"prompt": "a"})
    assert asked == TokenizeBody(prompt="a", add_special_tokens=True)
    asked = parse_tokenize({"prompt": "", "add_special_tokens": False})
    assert asked == TokenizeBody(prompt="", add_special_tokens=False)
    assert parse_tokenize({"messages": HELLO}) == chat()
    assert param_of({}, parse_tokenize) == "prompt"
    assert parse_detokenize({"tokens": [1, 2]}).tokens == [1, 2]
    assert parse_detokenize({"tokens": []}).tokens == []
    assert param_of({"tokens": [1, "a"]}, parse_detokenize) == "tokens[1]"
    assert param_of({}, parse_detokenize) == "tokens"


# --- fuzzing ---

FULL_CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ],
    "temperature": 1,
    "top_p": 1,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["a"],
    "stop_token_ids": [1],
    "logit_bias": {"1": 1},
    "repetition_penalty": 1,
    "presence_penalty": 1,
    "frequency_context_size": 1,
    "xtc_threshold": 0.1,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "n": 1,
    "logprobs": True,
    "top_logprobs": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]},
    "chat_template_kwargs": {"a": 1},
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": None,
    "functions": None,
    "function_call": None,
    "mlxspec": {"drafts": True},
    "metadata": {},
    "user": "u",
}
FULL_COMPLETION = {
    **{name: FULL_CHAT[name] for name in FULL_CHAT.keys() - {"messages", "tools", "logprobs"}},
    "prompt": ["a", [1, 2]],
    "suffix": "s",
    "echo": True,
    "best_of": 1,
    "logprobs": None,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all parts of a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def hostile(body: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Generate a body with some values replaced by others or by those of another place."""
    everywhere = places(body)[1:]
    values = json_values | st.sampled_from(everywhere).map(lambda place: _at(body, place))
    edits = st.lists(st.tuples(st.sampled_from(everywhere), values), min_size=1, max_size=3)
    return edits.map(lambda all_edits: _edited(body, all_edits))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _edited(body: Any, edits: list[tuple[tuple[Any, ...], Any]]) -> Any:
    body = copy.deepcopy(body)
    for path, value in edits:
        try:
            _at(body, path[:-1])[path[-1]] = copy.deepcopy(value)
        except (TypeError, KeyError, IndexError):
            continue  # an earlier edit removed the place
    return body


def test_the_bodies_that_are_made_hostile_are_right_before() -> None:
    assert isinstance(parse_chat(FULL_CHAT), ApiBody)
    assert isinstance(parse_completion(FULL_COMPLETION), ApiBody)


@pytest.mark.slow
@settings(max_examples=examples(150, 10_000))
@given(hostile(FULL_CHAT) | json_values)
def test_any_chat_body_is_a_request_or_a_400(body: Any) -> None:
    check_any(parse_chat, body)


@settings(max_examples=examples(100, 10_000))
@given(hostile(FULL_COMPLETION) | json_values)
def test_any_completion_body_is_a_request_or_a_400(body: Any) -> None:
    check_any(parse_completion, body)


def check_any(parse: Any, body: Any) -> None:
    """Assert that a body is read or refused with an error that can be sent."""
    try:
        request = parse(read_body(json.dumps(body).encode()))
        request.sampling(request.n - 1)
    except ApiError as refused:
        error = refused
    else:
        repr(request).encode()  # no lone surrogates
        return
    assert error.status == 400
    json.dumps(error.body, ensure_ascii=False, allow_nan=False).encode()


def test_ids_are_those_that_the_model_has() -> None:
    check_ids([0, 63], 64, "tokens")
    with pytest.raises(ApiError, match="tokens has the id 64: send ids from 0 to 63"):
        check_ids([63, 64], 64, "tokens")


def test_a_text_s_token_that_the_model_lacks_is_named() -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer.encode("a<|im_start|>", add_special_tokens=False)
    error = rf"messages has the token <\|im_start\|> \(id {ids[-1]}\), which the model lacks: leave"
    with pytest.raises(ApiError, match=error):
        check_ids(ids, ids[-1], "messages", tokenizer)
    with pytest.raises(ApiError, match="prompt has the id 9999: send ids from 0 to 63"):
        check_ids([9999], 64, "prompt", tokenizer)
