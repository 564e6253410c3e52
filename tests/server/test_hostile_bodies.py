"""Fuzzed requests get a valid answer or a 4xx, and the server answers the next request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

import mlxspec
from tests.server.test_api_body import FULL_CHAT, FULL_COMPLETION, hostile
from tests.server.test_messages_answer import EVENT
from tests.server.test_messages_requests import FULL_MESSAGES
from tests.server.test_responses_answer import valid
from tests.server.test_responses_requests import CODEX
from tests.support.demo import stand_in_decoder
from tests.support.examples import examples
from tests.support.hostile import json_values, mutated
from tests.support.serving import running_server, served_with_tools

pytestmark = pytest.mark.slow

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
RESPONSES, INPUT = "/v1/responses", "/v1/responses/input_tokens"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PATHS = [CHAT, TEXT, TOKENIZE, DETOKENIZE, RESPONSES, INPUT, MESSAGES, COUNT]
MOST = 12
"""The most tokens of an answer, so that each is fast."""

SHORT = {"max_tokens": MOST, "max_completion_tokens": MOST}
CHAT_BODY = {**FULL_CHAT, "model": "small", **SHORT}
TEXT_BODY = {**FULL_COMPLETION, "model": "small", **SHORT, "suffix": None}
RESPONSES_BODY = {**CODEX, "store": True, "max_output_tokens": MOST, "top_logprobs": 1}
MESSAGES_BODY = {**FULL_MESSAGES, "model": "small", "max_tokens": MOST}

bodies: st.SearchStrategy[tuple[str, Any]] = st.one_of(
    st.tuples(st.just(CHAT), hostile(CHAT_BODY)),
    st.tuples(st.just(TEXT), hostile(TEXT_BODY)),
    st.tuples(st.just(TOKENIZE), hostile({"prompt": "x", "add_special_tokens": True})),
    st.tuples(st.just(TOKENIZE), hostile({"messages": FULL_CHAT["messages"]})),
    st.tuples(st.just(DETOKENIZE), hostile({"tokens": [1, 300], "model": "small"})),
    st.tuples(st.sampled_from([RESPONSES, INPUT]), hostile(RESPONSES_BODY)),
    st.tuples(st.sampled_from([MESSAGES, COUNT]), hostile(MESSAGES_BODY)),
    st.tuples(st.sampled_from(PATHS), json_values),
)
"""Valid JSON bodies, for each endpoint that takes one."""

raw_bodies: st.SearchStrategy[tuple[str, bytes]] = st.one_of(
    st.tuples(st.just(CHAT), mutated(json.dumps(CHAT_BODY).encode())),
    st.tuples(st.just(TEXT), mutated(json.dumps(TEXT_BODY).encode())),
    st.tuples(st.just(RESPONSES), mutated(json.dumps(RESPONSES_BODY).encode())),
    st.tuples(st.just(MESSAGES), mutated(json.dumps(MESSAGES_BODY).encode())),
    st.tuples(st.sampled_from(PATHS), st.binary(max_size=40)),
)
"""Bytes that are barely JSON, or not JSON."""


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A client of a server whose model takes tools."""
    with (
        running_server(served_with_tools(), max_tokens=MOST) as running,
        httpx.Client(base_url=running.address, timeout=60) as client,
    ):
        yield client


def test_the_bodies_that_are_made_hostile_are_answered_before(http: httpx.Client) -> None:
    for path, body in (
        (CHAT, CHAT_BODY),
        (CHAT, {**CHAT_BODY, "stream": False}),
        (TEXT, TEXT_BODY),
        (TEXT, {**TEXT_BODY, "stream": False}),
        (TOKENIZE, {"messages": FULL_CHAT["messages"]}),
        (DETOKENIZE, {"tokens": [1, 300]}),
        (RESPONSES, RESPONSES_BODY),
        (RESPONSES, {**RESPONSES_BODY, "stream": False}),
        (INPUT, RESPONSES_BODY),
        (MESSAGES, MESSAGES_BODY),
        (MESSAGES, {**MESSAGES_BODY, "stream": False}),
        (COUNT, MESSAGES_BODY),
    ):
        assert check(http, path, json.dumps(body).encode()), path


@pytest.mark.nightly
@settings(max_examples=examples(40, 6_000))
@given(bodies)
def test_any_json_gets_a_right_answer_or_a_4xx(http: httpx.Client, sent: tuple[str, Any]) -> None:
    path, body = sent
    check(http, path, json.dumps(shortened(body)).encode())


@settings(max_examples=examples(25, 4_000))
@given(raw_bodies)
def test_any_bytes_get_a_right_answer_or_a_4xx(http: httpx.Client, sent: tuple[str, bytes]) -> None:
    path, body = sent
    try:
        value = json.loads(body)
    except ValueError:
        check(http, path, body)
    else:
        check(http, path, json.dumps(shortened(value)).encode())


def shortened(body: Any) -> Any:
    """Shorten the answer that a body asks for, if it asks for one."""
    if not isinstance(body, dict):
        return body
    bounds = {
        name: MOST
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
        if isinstance(body.get(name), (int, float)) and MOST < body[name] < 2**31
    }
    return {**body, **bounds}


def check(http: httpx.Client, path: str, body: bytes) -> bool:
    """Send a body and check the answer; return whether it is not an error."""
    answer = http.post(path, content=body)
    if answer.status_code == 200:
        check_answer(path, json.loads(body), answer)
    else:
        assert 400 <= answer.status_code < 500, answer.text
        refusal = strictly(answer.content)
        error = refusal["error"]
        if path in (MESSAGES, COUNT):
            assert set(refusal) == {"type", "error", "request_id"}
            assert set(error) - {"details"} == {"type", "message"}
        else:
            assert set(refusal) == {"error"}
            assert set(error) == {"message", "type", "param", "code"}
        assert 0 < len(error["message"]) < 1000
    following = http.post(TEXT, json={"prompt": "Once", "max_tokens": 4})
    assert following.json()["choices"][0]["text"] == ONCE
    return answer.status_code == 200


ONCE = "".join(
    response.text for response in stand_in_decoder(mlxspec.Decoder).stream("Once", max_tokens=4)
)


def check_answer(path: str, body: Any, answer: httpx.Response) -> None:
    if path == TOKENIZE:
        found = strictly(answer.content)
        assert found["count"] == len(found["tokens"])
        assert all(type(token) is int for token in found["tokens"])
        return
    if path == DETOKENIZE:
        assert isinstance(strictly(answer.content)["prompt"], str)
        return
    if path in (INPUT, COUNT):
        assert strictly(answer.content)["input_tokens"] > 0
        return
    if path == RESPONSES:
        check_response(body, answer)
        return
    if path == MESSAGES:
        check_message(body, answer)
        return
    if body.get("stream"):
        *events, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        chunks = [strictly(event.removeprefix("data: ")) for event in events]
        if path == CHAT:
            chunks = [ChatCompletionChunk.model_validate(chunk).model_dump() for chunk in chunks]
    else:  # in streams, completions have null as reasons, unlike the library's type
        answer_type = ChatCompletion if path == CHAT else Completion
        chunks = [answer_type.model_validate(strictly(answer.content)).model_dump()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ends) == list(range(n_choices(path, body)))


def check_response(body: Any, answer: httpx.Response) -> None:
    if not body.get("stream"):
        response = Response.model_validate(strictly(answer.content))
    else:
        *texts, end = answer.text.split("\n\n")
        assert end == ""
        events = [valid(strictly(text.partition("\ndata: ")[2])) for text in texts]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        response = events[-1].response
    assert response.status in ("completed", "incomplete")


def check_message(body: Any, answer: httpx.Response) -> None:
    if not body.get("stream"):
        assert Message.model_validate(strictly(answer.content)).stop_reason
        return
    *events, end = answer.text.split("\n\n")
    assert end == ""
    parsed = [strictly(event.partition("\ndata: ")[2]) for event in events]
    kinds = [EVENT.validate_python(event).type for event in parsed]
    assert (kinds[0], *kinds[-2:]) == ("message_start", "message_delta", "message_stop")


def n_choices(path: str, body: Any) -> int:
    """Return the number of choices that a body asks for."""
    n, prompt = int(body.get("n") or 1), body.get("prompt")
    several = path == TEXT and isinstance(prompt, list) and isinstance(prompt[0], (str, list))
    return n * len(prompt) if several else n


def strictly(text: bytes | str) -> Any:
    """Parse standard JSON, without NaN and infinities."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
