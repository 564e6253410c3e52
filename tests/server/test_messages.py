"""Clients of Anthropic's API against the server.

Outputs are compared with plain decoding of the same prompt, and with the server's answers over
OpenAI's API.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message

from mlxspec.server.served_model import ServedModel
from tests.server.test_endpoints import HELLO, PIECES, answer_alone, ids_of, scripted_caller
from tests.server.test_messages_answer import EVENT, extras
from tests.server.test_messages_requests import FULL_MESSAGES, WEATHER
from tests.support.brake import braked, wait_until
from tests.support.serving import (
    Running,
    memory_with_room,
    running_server,
    served,
    served_with_tools,
)

pytestmark = pytest.mark.slow

PATHS = ("/v1/messages", "/v1/messages/count_tokens")


def client_of(server: Running, **options: Any) -> Anthropic:
    """Return an Anthropic client that does not retry."""
    given = {"auth_token": "none", "max_retries": 0, **options}
    return Anthropic(base_url=server.address, **given)


@pytest.fixture(scope="module")
def client(server: Running) -> Anthropic:
    return client_of(server)


@pytest.fixture(scope="module")
def agent() -> Iterator[Running]:
    """A server of a model that takes tools and writes meaningless text."""
    with running_server(served_with_tools()) as running:
        yield running


def message(client: Anthropic, **fields: Any) -> Message:
    given = {"model": "claude-opus-4-8", "messages": HELLO, "max_tokens": 24, **fields}
    return client.messages.create(**given)  # type: ignore[call-overload, no-any-return]


def streamed(client: Anthropic, **fields: Any) -> Message:
    given = {"model": "claude-opus-4-8", "messages": HELLO, "max_tokens": 24, **fields}
    with client.messages.stream(**given) as stream:
        return stream.get_final_message()


def text_of(given: Message) -> str:
    return "".join(block.text for block in given.content if block.type == "text")


# --- messages ---


def test_a_message_is_what_plain_decoding_writes(client: Anthropic) -> None:
    prompt = ids_of(HELLO)
    for made in (message(client), streamed(client)):
        assert text_of(made) == answer_alone()
        assert (made.role, made.stop_reason, made.stop_sequence) == (
            "assistant",
            "max_tokens",
            None,
        )
        usage = made.usage
        assert (usage.input_tokens + (usage.cache_read_input_tokens or 0)) == len(prompt)
        assert usage.output_tokens == 24
        assert made.model == "small"
    raw = client.messages.with_raw_response.create(
        model="claude-haiku-4-5", messages=HELLO, max_tokens=1
    )
    assert raw.headers["x-mlxspec-model"] == "small"
    assert raw.headers["request-id"].startswith("req_")


def test_the_same_chat_has_the_same_tokens_over_both_apis(agent: Running) -> None:
    weather = {**WEATHER, "parameters": WEATHER["input_schema"]}
    del weather["input_schema"]
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "I ask.",
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": weather}],
        "max_tokens": 16,
    }
    result = {"type": "tool_result", "tool_use_id": "abcdefghi", "content": "sunny"}
    body = {
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "mlxspec"},
                    {"type": "text", "text": "I ask."},
                    {
                        "type": "tool_use",
                        "id": "abcdefghi",
                        "name": "weather",
                        "input": {"city": "Rome"},
                    },
                ],
            },
            {"role": "user", "content": [result]},
        ],
        "tools": [WEATHER],
        "max_tokens": 16,
    }
    with httpx.Client(base_url=agent.address, timeout=60) as http:
        prompt = http.post("/v1/tokenize", json=chat).json()["tokens"]
        first = http.post("/v1/chat/completions", json=chat).json()
        second = http.post("/v1/messages", json=body).json()
        count = http.post("/v1/messages/count_tokens", json=body).json()
    assert count == {"input_tokens": len(prompt)}
    assert second["usage"]["cache_read_input_tokens"] == len(prompt) - 1
    assert second["usage"]["input_tokens"] == 1
    (block,) = second["content"]
    assert block["text"] == first["choices"][0]["message"]["content"]


def test_tokens_are_counted_as_they_are_used(client: Anthropic) -> None:
    for fields in ({}, {"system": "Be brief."}):
        given: Any = {"model": "claude-opus-4-8", "messages": HELLO, **fields}
        count = client.messages.count_tokens(**given)
        usage = message(client, **fields).usage
        assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert count.input_tokens == len(ids_of([{"role": "system", "content": "Be brief."}, *HELLO]))


def test_stop_sequences_end_the_text_and_are_reported(client: Anthropic) -> None:
    whole = answer_alone()
    stop = whole[30:34]
    sequences = ["never written", stop, whole[40:44]]
    for made in (
        message(client, stop_sequences=sequences),
        streamed(client, stop_sequences=sequences),
    ):
        assert text_of(made) == whole[: whole.index(stop)]
        assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_is_gone_on_with(client: Anthropic) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    expected = ids_of(messages, add_generation_prompt=False, continue_final_message=True)
    usage = message(client, messages=messages).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(expected)


def test_an_answer_has_the_tokens_that_the_context_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = len(ids_of(HELLO)) + 9
    monkeypatch.setattr(ServedModel, "context_length", longest)
    with running_server() as server:
        client = client_of(server)
        made = streamed(client, max_tokens=64000)
        assert made.usage.output_tokens == 9
        assert made.stop_reason == "model_context_window_exceeded"
        assert streamed(client, max_tokens=9).stop_reason == "max_tokens"


def test_an_answer_has_the_tokens_that_memory_has_room_for() -> None:
    model = served()
    need = model.memory.needs(256)
    memory = memory_with_room(model, need.caches + need.forward)
    with running_server(model, memory=memory) as server:
        made = streamed(client_of(server), max_tokens=64000)
    assert made.stop_reason == "model_context_window_exceeded"
    assert 20 < made.usage.output_tokens < 256


# --- tools and thinking ---


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model thinks, calls a tool for the weather in Paris, then says it is sunny."""
    script = ("<think>", "I ask.", "</think>", *PIECES)
    with scripted_caller(tmp_path_factory.mktemp("tools") / "m", script) as running:
        yield running


@pytest.mark.parametrize("make", [message, streamed])
def test_a_tool_is_called_and_its_result_answered(caller: Running, make: Any) -> None:
    client = client_of(caller)
    asked = make(client, tools=[WEATHER], thinking={"type": "adaptive"})
    thinking, call = asked.content
    assert (thinking.type, thinking.thinking) == ("thinking", "I ask.")
    assert thinking.signature
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
    assert asked.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result]},
    ]
    answer = make(client, tools=[WEATHER], messages=messages)
    assert (text_of(answer), answer.stop_reason) == ("It is sunny.", "end_turn")


def test_a_tool_has_to_be_called(caller: Running) -> None:
    made = message(client_of(caller), tools=[WEATHER], tool_choice={"type": "any"})
    (call,) = made.content
    assert (call.type, call.input) == ("tool_use", {"city": "Paris"})  # type: ignore[union-attr]
    none = message(client_of(caller), tools=[WEATHER], tool_choice={"type": "none"})
    assert text_of(none) == "It is sunny."


@pytest.mark.parametrize("kind", ["any", "auto"])
@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_a_call_that_is_cut_off_leaves_no_text(caller: Running, kind: str, max_tokens: int) -> None:
    fields = {"tools": [WEATHER], "tool_choice": {"type": kind}, "max_tokens": max_tokens}
    for make in (message, streamed):
        made = make(client_of(caller), **fields)
        assert "text" not in [block.type for block in made.content]


def test_the_clients_runner_of_tools_comes_to_its_end(caller: Running) -> None:
    cities = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    runner = client_of(caller).beta.messages.tool_runner(
        model="claude-opus-4-8", max_tokens=24, messages=HELLO, tools=[weather]
    )
    assert runner.until_done().content[0].text == "It is sunny."  # type: ignore[union-attr]
    assert cities == ["Paris"]


# --- Claude Code ---


def test_a_request_of_claude_code_is_answered(agent: Running) -> None:
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,context-management-2025-06-27",
        "authorization": "Bearer none",
    }
    body = {**FULL_MESSAGES, "max_tokens": 8}
    path = f"{agent.address}/v1/messages?beta=true"
    streamed = httpx.post(path, json=body, headers=headers, timeout=60)
    assert streamed.status_code == 200
    *events, end = streamed.text.split("\n\n")
    assert end == ""
    kinds = []
    for event in events:
        name, data = event.split("\n")
        parsed = EVENT.validate_python(json.loads(data.removeprefix("data: ")))
        assert not extras(parsed)
        assert name == f"event: {parsed.type}"
        kinds.append(parsed.type)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_a_conversation_of_ten_turns_with_tools_runs_each_token_once(agent: Running) -> None:
    """The model's forwards and the usage both show it."""
    body: dict[str, Any] = copy.deepcopy(FULL_MESSAGES)
    body |= {"max_tokens": 1, "stream": False, "temperature": 0}
    before = ran_in_all = 0
    with braked(agent.decoder.model) as brake, httpx.Client(timeout=60) as http:
        for turn in range(10):
            line = f"x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch={turn};"
            body["system"][0]["text"] = line
            brake.rows.clear()
            answer = http.post(f"{agent.address}/v1/messages?beta=true", json=body).json()
            usage = answer["usage"]
            ran, cached = usage["input_tokens"], usage["cache_read_input_tokens"]
            assert sum(brake.rows) in (ran, ran + 1)  # the last step may run ahead
            assert cached >= before - 1
            before, ran_in_all = ran + cached, ran_in_all + ran
            call_id = f"call{turn:05}"
            call = {"type": "tool_use", "id": call_id, "name": "weather", "input": {"city": "Rome"}}
            result = {"type": "tool_result", "tool_use_id": call_id, "content": "sunny " * 20}
            body["messages"] += [
                {"role": "assistant", "content": [*answer["content"], call]},
                {"role": "user", "content": [result]},
            ]
    assert ran_in_all <= before + 10


# --- errors ---


def test_errors_are_the_clients_exceptions(client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        message(client, extra_body={"temperature": 5000})
    assert bad.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert bad.value.request_id == bad.value.body["request_id"]  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        streamed(client, messages=[{"role": "pirate", "content": "x"}])
    with pytest.raises(anthropic.NotFoundError):
        client.post("/v1/messages/batches", body={}, cast_to=object)
    with pytest.raises(anthropic.APIStatusError) as wrong:
        client.get("/v1/messages", cast_to=object)
    assert wrong.value.status_code == 405
    assert wrong.value.body["type"] == "error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as bad:
        message(client, tools=[WEATHER])
    assert "tools" in bad.value.message


def test_a_prompt_that_is_too_long_gives_the_error_that_claude_code_reads(
    client: Anthropic, server: Running
) -> None:
    """Its regular expression finds the numbers, with which it shortens the conversation."""
    longest = server.worker.models["small"].context_length
    words = [{"role": "user", "content": "word " * (longest or 0)}]
    n_prompt = client.messages.count_tokens(model="claude-x", messages=words).input_tokens  # type: ignore[arg-type]
    with pytest.raises(anthropic.BadRequestError) as bad:
        message(client, messages=words)
    numbers = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", bad.value.message)
    assert numbers
    assert numbers.groups() == (str(n_prompt), str((longest or 0) - 1))
    endless = [{"role": "user", "content": "a b " * 1_100_000}]
    for ask in (message, streamed):
        with pytest.raises(anthropic.BadRequestError) as bad:
            ask(client, messages=endless)
        assert "prompt is too long" in bad.value.message


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("path", PATHS)
def test_the_gates_errors_have_the_form_too(path: str) -> None:
    def error_of(answer: httpx.Response) -> tuple[int, str]:
        body = answer.json()
        assert body["type"] == "error"
        assert body["request_id"] == answer.headers["request-id"]
        return answer.status_code, body["error"]["type"]

    with running_server(keys=["secret"], hosts=["127.0.0.1"]) as server:
        address = server.address + path
        key = {"x-api-key": "secret"}
        assert error_of(httpx.post(address)) == (401, "authentication_error")
        elsewhere = {**key, "host": "example.org"}
        assert error_of(httpx.post(address, headers=elsewhere)) == (403, "permission_error")
        assert error_of(httpx.post(address, headers=key, content=b"{")) == (
            400,
            "invalid_request_error",
        )
        long = b" " * (33 << 20)
        refused = httpx.post(address, headers=key, content=long)
        assert error_of(refused) == (413, "request_too_large")
        for how in ({"auth_token": "secret"}, {"auth_token": None, "api_key": "secret"}):
            assert text_of(message(client_of(server, **how), max_tokens=4))
        with pytest.raises(anthropic.AuthenticationError):
            message(client_of(server))
        # Errors of other paths keep OpenAI's form.
        assert "type" not in httpx.post(f"{server.address}/v1/chat/completions").json()


def test_a_full_queue_and_an_ending_server_are_errors() -> None:
    with (
        running_server(limits={"active": 1, "queued": 1}) as server,
        braked(server.decoder.model) as brake,
        ThreadPoolExecutor() as pool,
    ):
        client = client_of(server)
        with brake.holding():
            accepted = []
            for count in (1, 2):
                accepted.append(pool.submit(message, client))
                wait_until(lambda count=count: len(server.worker.requests) == count)  # type: ignore[misc]
                wait_until(lambda: server.worker.requests[0].state != "queued")
            with pytest.raises(anthropic.RateLimitError) as refused:
                message(client)
            assert int(refused.value.response.headers["Retry-After"]) > 0
        for answer in accepted:
            assert text_of(answer.result()) == answer_alone()
        server.worker.stop()
        with pytest.raises(anthropic.InternalServerError) as ending:
            message(client)
        assert ending.value.status_code == 503
        assert ending.value.body["error"]["type"] == "api_error"  # type: ignore[index]


def test_a_stream_says_that_it_lives_and_how_it_fails() -> None:
    with (
        running_server(keep_alive=0.05) as server,
        braked(server.decoder.model) as brake,
        ThreadPoolExecutor() as pool,
    ):
        body = {"messages": HELLO, "max_tokens": 24, "stream": True}
        with brake.holding():
            answer = pool.submit(httpx.post, f"{server.address}/v1/messages", json=body, timeout=60)
            wait_until(lambda: server.worker.requests)
            time.sleep(0.3)
        events = [event.split("\n")[0] for event in answer.result().text.split("\n\n")]
        assert events[0] == "event: ping"
        first = next(event for event in events if event != "event: ping")
        assert first == "event: message_start"
        brake.fault = RuntimeError("out of order")
        with pytest.raises(anthropic.APIStatusError) as failed:
            streamed(client_of(server), messages=[{"role": "user", "content": "Another one"}])
        assert "out of order" in failed.value.message
