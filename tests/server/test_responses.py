"""OpenAI's client at ``/v1/responses``, and equality with chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.server.test_endpoints import PIECES, WEATHER, answer_alone, ids_of, scripted_caller
from tests.server.test_responses_answer import valid
from tests.server.test_responses_requests import CODEX
from tests.support.brake import braked
from tests.support.serving import Running, running_server, served_with_tools

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]
TOOL: Any = {"type": "function", **WEATHER["function"], "strict": None}
CUSTOM: Any = {"type": "custom", "name": "weather", "description": "The weather of a city."}


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.client()


def made(client: OpenAI, **fields: Any) -> Response:
    given = {"model": "small", "input": "Hello there", "max_output_tokens": 24, **fields}
    return client.responses.create(**given)  # type: ignore[no-any-return]


def events_of(server: Running, **fields: Any) -> list[Any]:
    """Return a raw stream's events; check that each has its name in both places."""
    body = {"model": "small", "input": "Hello there", "stream": True, **fields}
    answer = httpx.post(f"{server.address}/v1/responses", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *texts, end = answer.text.split("\n\n")
    assert end == ""
    events = []
    for number, text in enumerate(texts):
        name, data = text.split("\n")
        events.append(valid(json.loads(data.removeprefix("data: "))))
        assert name == f"event: {events[-1].type}"
        assert events[-1].sequence_number == number
    return events


# --- one response ---


def test_a_response_is_what_plain_decoding_writes(client: OpenAI) -> None:
    response = made(client)
    assert response.output_text == answer_alone()
    assert (response.status, response.model, response.object) == ("incomplete", "small", "response")
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage
    assert response.usage.input_tokens == len(ids_of(HELLO))
    assert response.usage.output_tokens == 24
    assert response.usage.total_tokens == len(ids_of(HELLO)) + 24
    assert made(client, input=HELLO).output_text == response.output_text


def test_a_streamed_response_joins_to_the_same(client: OpenAI, server: Running) -> None:
    events = events_of(server, max_output_tokens=24)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer_alone() == events[-1].response.output_text
    streamed = list(made(client, stream=True))  # type: ignore[call-overload]
    assert [event.type for event in streamed][-1] == "response.incomplete"
    stop = answer_alone()[30:34]
    fields: Any = {"model": "small", "input": HELLO, "extra_body": {"stop": stop}}
    with client.responses.stream(**fields) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == answer_alone()[: answer_alone().index(stop)]
    assert final.status == "completed"


def test_options_are_those_of_a_chat(client: OpenAI) -> None:
    fields = {"temperature": 0.8, "top_p": 0.95, "extra_body": {"seed": 11}}
    assert made(client, **fields).output_text == answer_alone(temp=0.8, top_p=0.95, seed=11)
    instructed = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert made(client, instructions="Be brief.").output_text == answer_alone(instructed)
    response = made(client, top_logprobs=2, include=["message.output_text.logprobs"])
    (content,) = response.output[0].content  # type: ignore[union-attr]
    logprobs = content.logprobs
    assert "".join(one.token for one in logprobs) == response.output_text
    assert {len(one.top_logprobs) for one in logprobs} == {2}


def test_responses_are_kept_and_deleted(client: OpenAI) -> None:
    response = made(client, instructions="Be brief.", metadata={"a": "b"})
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    for gone in (response.id, made(client, store=False).id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError) as unknown:
            made(client, previous_response_id=gone)
        assert unknown.value.code == "previous_response_not_found"


def test_a_response_goes_on_from_an_earlier_one(client: OpenAI) -> None:
    first = made(client, instructions="Be brief.")
    second = made(client, input="And then?", previous_response_id=first.id)
    messages = [
        *HELLO,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert second.output_text == answer_alone(messages)  # without the instructions
    assert second.previous_response_id == first.id
    referred = {"type": "item_reference", "id": first.output[0].id}
    again = [*HELLO, referred, {"role": "user", "content": "And then?"}]
    assert made(client, input=again).output_text == second.output_text


def test_a_response_is_its_keys_own() -> None:
    with running_server(keys=["a", "b"]) as server:
        response = made(server.client(api_key="a"))
        assert server.client(api_key="a").responses.retrieve(response.id) == response
        with pytest.raises(openai.NotFoundError):
            server.client(api_key="b").responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError):
            made(server.client(api_key="b"), previous_response_id=response.id)


def test_tokens_are_counted(client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="small", input="Hello there")
    assert counted.input_tokens == len(ids_of(HELLO))
    assert counted.object == "response.input_tokens"


def test_errors_are_the_clients_exceptions(client: OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        made(client, background=True)
    assert bad.value.param == "background"
    with pytest.raises(openai.BadRequestError) as bad:
        made(client, stream=True, input=[{"role": "pirate", "content": "x"}])
    assert bad.value.param == "input[0].role"
    for text in ("a b " * 20_000, "a b " * 1_100_000):
        with pytest.raises(openai.BadRequestError) as bad:
            made(client, input=text)
        assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(made(client).id)
    with pytest.raises(openai.APIStatusError) as wrong:
        client.get("/responses", cast_to=object)
    assert wrong.value.status_code == 405
    assert "allows no GET here: send POST" in str(wrong.value)
    with pytest.raises(openai.APIStatusError) as wrong:
        client.put(f"/responses/{made(client).id}", cast_to=object)
    assert {*wrong.value.response.headers["allow"].split(", ")} == {"GET", "HEAD", "DELETE"}


@pytest.mark.parametrize(
    "path", ["embeddings", "audio/speech", "images/generations", "files", "batches", "rerank"]
)
def test_an_unknown_path_is_a_404_that_names_the_others(server: Running, path: str) -> None:
    for ask in (httpx.get, httpx.post):
        answer = ask(f"{server.address}/v1/{path}")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["type"] == "not_found_error"
        assert "has no such path: use /v1/chat/completions," in error["message"]


def test_keep_alives_come_before_the_first_token() -> None:
    """They are events, since some clients ignore comments."""
    body = {"input": "Hello there", "stream": True, "max_output_tokens": 2}
    with (
        running_server(keep_alive=0.02) as server,
        braked(server.decoder.model) as brake,
        brake.holding(),
        httpx.stream("POST", f"{server.address}/v1/responses", json=body, timeout=60) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line.startswith("event:"))
        assert [next(lines) for _ in range(4)] == [
            "event: response.created",
            *["event: response.in_progress"] * 3,
        ]


# --- tools ---


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model calls a tool for the weather in Paris, then says that it is sunny."""
    with scripted_caller(tmp_path_factory.mktemp("tools") / "m", PIECES) as running:
        yield running


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The same, with a model that calls a custom tool."""
    pieces = [piece.replace("city", "input").replace("Paris", r"Par\u00efs\n") for piece in PIECES]
    with scripted_caller(tmp_path_factory.mktemp("tools") / "m", pieces) as running:
        yield running


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_functions_result_is_answered(caller: Running, choice: Any) -> None:
    client = caller.client()
    fields = {"model": "caller", "tools": [TOOL], "tool_choice": choice}
    first = made(client, **fields)
    (call,) = first.output
    assert call.type == "function_call"
    assert call.name == "weather"
    assert json.loads(call.arguments) == {"city": "Paris"}
    assert first.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [*HELLO, call.model_dump(exclude_none=True), result]
    asked = {"model": "caller", "tools": [TOOL]}
    for said in ({"input": history}, {"input": [result], "previous_response_id": first.id}):
        assert made(client, **asked, **said).output_text == "It is sunny."
    events = events_of(caller, **fields)
    assert [event.type.removeprefix("response.") for event in events][2:4] == [
        *("output_item.added", "function_call_arguments.delta")
    ]
    assert json.loads(events[-1].response.output[0].arguments) == {"city": "Paris"}


def test_a_call_that_a_stop_string_cuts_is_not_complete(caller: Running) -> None:
    fields: Any = {"model": "caller", "tools": [TOOL], "tool_choice": "required"}
    answer = made(caller.client(), extra_body={"stop": "Par"}, **fields)
    assert answer.status == "incomplete"
    assert [item.status for item in answer.output] == ["incomplete"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_a_call_that_is_cut_off_leaves_no_text(
    caller: Running, choice: str, max_tokens: int
) -> None:
    fields = {"model": "caller", "tools": [TOOL], "tool_choice": choice}
    fields["max_output_tokens"] = max_tokens
    assert made(caller.client(), **fields).output_text == ""
    assert events_of(caller, **fields)[-1].response.output_text == ""


def test_a_tool_of_a_namespace_is_called_by_its_own_name(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tools = [{"type": "namespace", "name": "crm", "description": "C.", "tools": [TOOL]}]
    pieces = [piece.replace("weather", "crm__weather") for piece in PIECES]
    with scripted_caller(tmp_path_factory.mktemp("tools") / "m", pieces) as server:
        first = made(server.client(), model="caller", tools=tools)
        (call,) = first.output
        assert call.type == "function_call"
        assert (call.name, call.namespace) == ("weather", "crm")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        asked = {"model": "caller", "tools": tools, "previous_response_id": first.id}
        assert made(server.client(), **asked, input=[result]).output_text == "It is sunny."


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_custom_tool_gets_a_text(writer: Running, choice: Any) -> None:
    client = writer.client()
    fields = {"model": "caller", "tools": [CUSTOM], "tool_choice": choice}
    first = made(client, **fields)
    (call,) = first.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("weather", "Parïs\n")
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "sunny"}
    asked = {"model": "caller", "tools": [CUSTOM], "previous_response_id": first.id}
    assert made(client, **asked, input=[result]).output_text == "It is sunny."
    events = events_of(writer, **fields)
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == "Parïs\n"


# --- as chats ---


@pytest.fixture(scope="module")
def chatml() -> Iterator[Running]:
    """A server whose model takes tools and writes arbitrary text."""
    with running_server(served_with_tools()) as running:
        yield running


def as_chat(turns: int) -> tuple[list[Any], list[Any]]:
    """Return a conversation with tools as messages and as items."""
    messages: list[Any] = [
        {"role": "developer", "content": "You are an agent."},
        {"role": "user", "content": "Look at the files."},
    ]
    items = [*messages]
    for turn in range(turns):
        function = {"name": "weather", "arguments": json.dumps({"city": f"c{turn}"})}
        call = {"id": f"call{turn}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": f"I look {turn}.", "tool_calls": [call]})
        result = f"The tool returns {turn}: " + "x y z " * 20
        messages.append({"role": "tool", "tool_call_id": f"call{turn}", "content": result})
        items += [
            {"role": "assistant", "content": f"I look {turn}."},
            {"type": "function_call", "call_id": f"call{turn}", **function},
            {"type": "function_call_output", "call_id": f"call{turn}", "output": result},
        ]
    return messages, items


def test_a_chat_and_its_response_are_the_same(chatml: Running) -> None:
    messages, items = as_chat(3)
    client = chatml.client()
    chat_tool = {"type": "function", "function": {n: TOOL[n] for n in TOOL if TOOL[n] is not None}}
    del chat_tool["function"]["type"]
    with httpx.Client(base_url=chatml.address) as http:
        body = {"messages": messages, "tools": [chat_tool]}
        tokens = http.post("/v1/tokenize", json=body).json()["tokens"]
    counted = client.responses.input_tokens.count(model="small", input=items, tools=[TOOL])
    assert counted.input_tokens == len(tokens)
    chat = client.chat.completions.create(
        model="small", messages=messages, tools=[chat_tool], max_tokens=16
    )
    assert chat.usage
    assert chat.usage.prompt_tokens == len(tokens)
    response = made(client, input=items, tools=[TOOL], max_output_tokens=16)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage
    # The chat's whole prompt is cached, since the ids are the same.
    assert response.usage.input_tokens_details.cached_tokens >= len(tokens) - 1


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("by_id", [False, True])
def test_an_agent_of_ten_turns_runs_each_token_once(chatml: Running, by_id: bool) -> None:
    client = chatml.client()
    history: list[Any] = [
        {"role": "system", "content": f"You are agent {by_id}. " + "Use the tools. " * 20},
        {"role": "user", "content": "Look at the files."},
    ]
    new, previous = [*history], None
    before = ran = 0
    for turn in range(10):
        how: Any = {"previous_response_id": previous} if by_id else {"store": False}
        how["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
        response = made(
            client, input=new if by_id else history, tools=[TOOL], max_output_tokens=1, **how
        )
        assert response.usage
        usage = response.usage
        assert usage.input_tokens_details.cached_tokens >= before - 1
        ran += usage.input_tokens - usage.input_tokens_details.cached_tokens
        before, previous = usage.input_tokens, response.id
        call_id = f"call{turn}"
        called: list[Any] = [
            {
                "type": "function_call",
                "call_id": call_id,
                "name": "weather",
                "arguments": '{"city": "Paris"}',
            },
            {
                "type": "function_call_output",
                "call_id": call_id,
                "output": [{"type": "input_text", "text": f"{turn}: " + "x y z " * 20}],
            },
        ]
        history += [item.model_dump(exclude_none=True) for item in response.output] + called
        new = called
    assert ran <= before + 10


def test_what_codex_sends_is_answered(chatml: Running) -> None:
    events = events_of(chatml, **{**CODEX, "max_output_tokens": 8})
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.usage.output_tokens == 8
