"""Answers match a request's schema, and so do calls of strict tools."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, Field

import mlxspec
from mlxspec import Constraint
from mlxspec.engine import compiling
from mlxspec.generation.chat_prompt import in_answer
from tests.support.chains import CHAINS
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.demo import stand_in_decoder
from tests.support.serving import Running, running_server, served_random

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]


class Person(BaseModel):
    """The type that answers are parsed into."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)
    mood: Literal["fine", "tired"]


SCHEMA: dict[str, Any] = {**Person.model_json_schema(), "additionalProperties": False}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "strict": True, "schema": SCHEMA},
}


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.client()


def chat(client: OpenAI, **fields: Any) -> Any:
    given = {"model": client_model(client), "messages": HELLO, "max_tokens": 80, **fields}
    return client.chat.completions.create(**given)


def client_model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def test_an_answer_is_what_plain_constrained_decoding_writes(client: OpenAI) -> None:
    decoder = stand_in_decoder(mlxspec.Decoder)
    prompt = decoder.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)
    constraint = in_answer(
        mlxspec.Constraint.json_schema(SCHEMA), decoder.tokenizer, reasons=False, trims_space=True
    )
    for temp in (0.0, 0.9):
        expected = "".join(
            response.text
            for response in decoder.stream(prompt, 80, constraint=constraint, temp=temp, seed=3)
        ).removeprefix(" ")
        fields = {"response_format": FORMAT, "temperature": temp, "seed": 3}
        answer = chat(client, **fields).choices[0]
        assert answer.message.content == expected
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(expected), SCHEMA)
        chunks = chat(client, **fields, stream=True)
        texts = [c.delta.content or "" for chunk in chunks for c in chunk.choices]
        assert "".join(texts) == expected


def test_sdks_parse_answers_into_their_types(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="small", messages=HELLO, max_tokens=80, response_format=Person
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Person)
    assert parsed.mood in ("fine", "tired")


def test_answers_that_run_at_once_each_have_their_form(client: OpenAI) -> None:
    answer = chat(client, response_format=FORMAT, n=4, temperature=1.0, seed=1)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    for text in texts:
        Person.model_validate_json(text)


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ({"enum": ["yes", "no"]}, '"(yes|no)"'),
        ({"type": "string", "pattern": "^[a-c]{3}, ok$"}, '"[a-c]{3}, ok"'),
        ({"enum": [1, 22]}, "1|22"),
    ],
)
def test_chats_and_completions_have_their_form(
    client: OpenAI, schema: dict[str, Any], pattern: str
) -> None:
    fields = {"response_format": {"type": "json_object", "schema": schema}}
    answer = chat(client, extra_body=fields).choices[0]
    assert re.fullmatch(pattern, answer.message.content)
    assert answer.finish_reason == "stop"
    text = client.completions.create(
        model="small", prompt="Once upon", max_tokens=20, extra_body=fields
    )
    assert re.fullmatch(pattern, text.choices[0].text)


def test_a_json_object_is_one_or_has_not_ended(client: OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


def test_what_cannot_be_kept_is_a_400_and_others_are_answered(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {**FORMAT, "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format=wrong)
    assert caught.value.param == "response_format"
    assert "uniqueItems" in str(caught.value)
    hostile = [
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
        {"type": "string", "pattern": "(.*x.{15}y.*|.*z.{20}q.*){5}"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"enum": [f"value {i}" for i in range(20_000)]},
        {"type": "array", "minItems": 10**9},
    ]
    for schema in hostile:
        format = {"type": "json_schema", "schema": schema}
        body = {"messages": HELLO, "max_tokens": 8, "response_format": format}
        with monkeypatch.context() as patched:
            patched.setattr(compiling, "_SECONDS", 0.5)
            answer = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]
    assert Person.model_validate_json(
        chat(client, response_format=FORMAT).choices[0].message.content
    )


@pytest.mark.parametrize("kind", [kind for kind in CHAINS if CHAINS[kind](1).kind == "json_schema"])
def test_chains_of_references_cost_their_own_request_alone(server: Running, kind: str) -> None:
    format = {"type": "json_schema", "schema": json.loads(CHAINS[kind](2500).text)}
    body = {"messages": HELLO, "max_tokens": 4, "response_format": format}
    answer = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert "cannot be used" in answer.json()["error"]["message"]


def test_a_constraint_that_takes_long_holds_up_no_other(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def compile_slowly(constraint: Constraint, outline: compiling.Outline) -> str:
        if "slow" in constraint.text:
            goes_on.wait(60)
        return original(constraint, outline)

    original = compiling.compile_in_subprocess
    monkeypatch.setattr(compiling, "compile_in_subprocess", compile_slowly)

    def answered(word: str) -> str:
        format: Any = {"type": "json_object", "schema": {"const": word}}
        return str(json.loads(chat(client, response_format=format).choices[0].message.content))

    assert answered("first") == "first"
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(answered, "slow")
        assert [answered(word) for word in ("one", "two", "three")] == ["one", "two", "three"]
        assert not slow.done()
        goes_on.set()
        assert slow.result() == "slow"


# --- reasoning and tools ---

MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
FIND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"type": "string", "maxLength": 5},
                "where": {"enum": ["here", "there"]},
            },
            "required": ["what", "where"],
            "additionalProperties": False,
        },
    },
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "other"}}


@pytest.fixture(scope="module")
def thinker() -> Iterator[Running]:
    """A random byte-level model that reasons and calls tools."""
    with running_server(served_random(MARKERS, "thinker")) as running:
        yield running


def token(name: str) -> int:
    return int(chat_tokenizer("json_tools", markers=MARKERS).get_vocab()[name])


def test_a_constraint_begins_after_the_reasoning(thinker: Running) -> None:
    client = thinker.client()
    fields = {
        "response_format": FORMAT,
        "temperature": 1.0,
        "seed": 2,
        "max_tokens": 400,
        # A random model's reasoning would rarely end.
        "logit_bias": {str(token("</think>")): 4, str(token("<|im_end|>")): 9},
        "extra_body": {"chat_template_kwargs": {"force_thinking": True}},
    }
    answer = chat(client, **fields).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.reasoning_content
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)


def test_a_model_that_opens_reasoning_itself_may(thinker: Running) -> None:
    client = thinker.client()
    fields = {"response_format": FORMAT, "temperature": 1.0, "seed": 2, "max_tokens": 400}
    opens = {str(token("<think>")): 5, str(token("</think>")): 5}
    answer = chat(client, **fields, logit_bias=opens).choices[0]
    assert answer.message.reasoning_content
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    # A bias cannot override the constraint.
    ends = {str(token("<|im_end|>")): 100, str(token("<think>")): -100}
    answer = chat(client, **fields, logit_bias=ends).choices[0]
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "find"}}, "auto"]
)
def test_arguments_of_strict_tools_are_valid(thinker: Running, choice: Any) -> None:
    client = thinker.client()
    bias = {str(token("<tool_call>")): 100} if choice == "auto" else {}
    strict = FIND["function"]["parameters"]
    for seed in range(3):
        answer = chat(
            client,
            tools=[FIND],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=1.0,
            seed=seed,
            max_tokens=300,
            logit_bias=bias,
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name == "find"
        jsonschema.validate(json.loads(call.function.arguments), strict)


@pytest.mark.parametrize("form", [{}, {"response_format": FORMAT}])
def test_a_call_may_end_the_reasoning(thinker: Running, form: dict[str, Any]) -> None:
    answer = chat(
        thinker.client(),
        tools=[FIND],
        parallel_tool_calls=False,
        temperature=1.0,
        seed=1,
        max_tokens=300,
        logit_bias={str(token("<tool_call>")): 100, str(token("</think>")): -100},
        extra_body={"chat_template_kwargs": {"force_thinking": True}},
        **form,
    ).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), FIND["function"]["parameters"])


LOOSE: dict[str, Any] = copy.deepcopy(FIND)
del LOOSE["function"]["strict"]
PARAMETERS = LOOSE["function"]["parameters"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_demanded_call_is_valid_without_strict(thinker: Running, choice: Any) -> None:
    for seed in range(3):
        fields = {"temperature": 1.0, "seed": seed, "max_tokens": 300}
        fields |= {"tools": [LOOSE], "parallel_tool_calls": False, "tool_choice": choice}
        answer = chat(thinker.client(), **fields).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name == "find"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "find"}])
def test_a_call_that_anthropics_clients_demand_is_valid(
    thinker: Running, choice: dict[str, Any]
) -> None:
    tool: Any = {"name": "find", "input_schema": PARAMETERS}
    client = Anthropic(base_url=thinker.address, api_key="none", max_retries=0)
    answer: Any = client.messages.create(
        model="claude",
        max_tokens=300,
        messages=HELLO,
        tools=[tool],
        tool_choice={**choice, "disable_parallel_tool_use": True},  # type: ignore[arg-type]
        extra_body={"temperature": 1.0, "seed": 1},
    )
    (block,) = answer.content
    assert (block.type, block.name, answer.stop_reason) == ("tool_use", "find", "tool_use")
    jsonschema.validate(block.input, PARAMETERS)


def test_a_demanded_response_is_a_valid_call(thinker: Running) -> None:
    tool: Any = {"type": "function", "name": "find", "parameters": PARAMETERS, "strict": False}
    for choice in ("required", {"type": "function", "name": "find"}):
        answer: Any = thinker.client().responses.create(
            model="thinker",
            input="Hello there",
            tools=[tool],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=1.0,
            max_output_tokens=300,
            extra_body={"seed": 2},
        )
        (item,) = answer.output
        assert (item.type, item.name) == ("function_call", "find")
        jsonschema.validate(json.loads(item.arguments), PARAMETERS)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_demanded_call_in_elements_has_the_parameters_of_the_schema(choice: Any) -> None:
    values = {
        "where": {"type": "string", "enum": ["here", "there"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "among": {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 3},
        "sure": {"type": "boolean"},
    }
    parameters = {
        **{"type": "object", "properties": values, "required": [*values][:-1]},
        **{"additionalProperties": False, "$defs": {"one": {"enum": [1, 2]}}},
    }
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    markers = tuple(marker for marker in MARKERS if "think" not in marker)
    with running_server(served_random(markers, parser="qwen3_coder")) as coder:
        for seed in range(3):
            fields = {"temperature": 1.0, "seed": seed, "max_tokens": 400}
            fields |= {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
            answer = chat(coder.client(), **fields).choices[0]
            (call,) = answer.message.tool_calls
            assert call.function.name == "find"
            jsonschema.validate(json.loads(call.function.arguments), parameters)


def test_unsupported_keywords_of_a_demanded_call_are_left_to_the_model(thinker: Running) -> None:
    """Sets of pydantic have uniqueItems."""
    where = {"type": "array", "items": {"enum": ["here", "there"]}, "uniqueItems": True}
    known = {**PARAMETERS, "properties": {"where": {**where, "maxItems": 3}}, "required": ["where"]}
    unknown = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    client = thinker.client()
    tool = {"type": "function", "function": {"name": "find", "parameters": known}}
    fields = {"parallel_tool_calls": False, "tool_choice": "required"}
    ends = {str(code): 5 for code in b'"}]'}
    answer = chat(client, tools=[tool], **fields, max_tokens=300, logit_bias=ends).choices[0]
    (call,) = answer.message.tool_calls
    assert {*json.loads(call.function.arguments)["where"]} <= {"here", "there"}
    for function in ({"parameters": unknown}, {"parameters": known, "strict": True}):
        tool = {"type": "function", "function": {"name": "find", **function}}
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, tools=[tool], tool_choice="required")
        assert caught.value.param == "tools"


def test_with_tools_an_answer_is_a_call_or_has_its_form(thinker: Running) -> None:
    client = thinker.client()
    fields: dict[str, Any] = {"tools": [FIND, OTHER], "response_format": FORMAT, "max_tokens": 300}
    texts = {str(token("<think>")): -100, str(token("<tool_call>")): -100}
    answer = chat(client, **fields, logit_bias=texts).choices[0]
    assert not answer.message.tool_calls
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    calls = chat(client, **fields, logit_bias={str(token("<tool_call>")): 100}).choices[0]
    assert calls.message.tool_calls
    assert calls.message.tool_calls[0].function.name in ("find", "other")


def test_a_schema_of_a_strict_tool_that_cannot_be_kept_is_named(thinker: Running) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {}}}}
    wrong = {"type": "function", "function": {"name": "w", "parameters": parameters}}
    strict = {**wrong, "function": {**wrong["function"], "strict": True}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(thinker.client(), tools=[OTHER, strict])
    assert caught.value.param == "tools"
    assert "not" in caught.value.message
    called = {"type": "function", "strict": True, "name": "w", "parameters": parameters}
    tools = [{"type": "function", **OTHER["function"]}, called]
    body = {"input": "?", "tools": tools}
    refused = httpx.post(f"{thinker.address}/v1/responses", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"
    tools = [
        {"name": "other", "input_schema": {"type": "object"}},
        {"name": "w", "strict": True, "input_schema": parameters},
    ]
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "?"}], "tools": tools}
    refused = httpx.post(f"{thinker.address}/v1/messages", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("tools: ")
    assert chat(thinker.client(), tools=[OTHER, wrong], max_tokens=4).choices
