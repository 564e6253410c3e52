"""Third-party clients against the server.

Outputs are compared with plain decoding of the same prompt, without drafts or other requests.
"""

from __future__ import annotations

import gc
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import mlxspec
from mlxspec.server.served_model import ServedModel
from tests.support.brake import wait_until
from tests.support.chat_tokenizer import with_tools
from tests.support.demo import FLAT, given_costs, stand_in_decoder
from tests.support.scripted_model import write_scripted_model
from tests.support.serving import Running, running_server, served

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.client()


def ids_of(messages: list[Any], **options: Any) -> list[int]:
    """Return the tokens of messages in the model's own chat template."""
    tokenizer = stand_in_decoder(mlxspec.Decoder).tokenizer
    how = {"add_generation_prompt": True, **options}
    return list(tokenizer.apply_chat_template(messages, **how))


def alone(prompt: str | Sequence[int], max_tokens: int, **options: Any) -> list[Any]:
    """Return plain decoding's responses."""
    return list(stand_in_decoder(mlxspec.Decoder).stream(prompt, max_tokens, **options))


def text_alone(prompt: str | Sequence[int], max_tokens: int, **options: Any) -> str:
    return "".join(response.text for response in alone(prompt, max_tokens, **options))


def answer_alone(messages: list[Any] = HELLO, max_tokens: int = 24, **options: Any) -> str:
    """Return plain decoding's answer without the tokenizer's leading space."""
    return text_alone(ids_of(messages), max_tokens, **options).removeprefix(" ")


def chat(client: OpenAI, **fields: Any) -> ChatCompletion:
    given = {"model": "small", "messages": HELLO, "max_tokens": 24, **fields}
    return client.chat.completions.create(**given)  # type: ignore[call-overload, no-any-return]


def said(client: OpenAI, **fields: Any) -> str:
    (choice,) = chat(client, **fields).choices
    return choice.message.content or ""


def streamed(client: OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    given = {"model": "small", "messages": HELLO, "max_tokens": 24, "stream": True, **fields}
    return list(client.chat.completions.create(**given))  # type: ignore[call-overload]


def joined(chunks: Sequence[ChatCompletionChunk], index: int = 0) -> str:
    """Return the text of a choice."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


# --- chat ---


def test_a_chat_is_what_plain_decoding_writes(client: OpenAI) -> None:
    answer = chat(client)
    (choice,) = answer.choices
    prompt = ids_of(HELLO)
    assert choice.message.content == text_alone(prompt, 24)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.model == "small"
    assert answer.usage
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(prompt) + 24


def test_a_streamed_chat_joins_to_the_same(client: OpenAI) -> None:
    chunks = streamed(client, stream_options={"include_usage": True})
    assert joined(chunks) == answer_alone()
    roles = [choice.delta.role for chunk in chunks for choice in chunk.choices]
    assert roles[0] == "assistant"
    assert not any(roles[1:])
    *_, last, usage = chunks
    assert [choice.finish_reason for choice in last.choices] == ["length"]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert len(reasons) - reasons.count(None) == 1
    assert usage.choices == []
    assert usage.usage
    assert usage.usage.completion_tokens == 24
    assert not any(chunk.usage for chunk in chunks[:-1])
    assert not any(chunk.usage for chunk in streamed(client))


def test_sampling_with_a_seed_is_that_of_a_generation_alone(client: OpenAI) -> None:
    fields = {"temperature": 0.8, "top_p": 0.95, "seed": 11}
    expected = answer_alone(temp=0.8, top_p=0.95, seed=11)
    assert expected != answer_alone()
    assert said(client, **fields) == expected
    assert said(client, **fields) == expected
    assert joined(streamed(client, **fields)) == expected
    assert said(client, **{**fields, "seed": 12}) != expected


def test_several_choices_have_the_seeds_that_follow(client: OpenAI) -> None:
    expected = [answer_alone(temp=0.8, seed=5 + choice) for choice in range(3)]
    assert len({*expected}) == 3
    answer = chat(client, n=3, temperature=0.8, seed=5)
    assert [choice.message.content for choice in answer.choices] == expected
    assert answer.usage
    assert answer.usage.completion_tokens == 3 * 24
    assert answer.usage.prompt_tokens == len(ids_of(HELLO))
    chunks = streamed(client, n=3, temperature=0.8, seed=5)
    assert [joined(chunks, index) for index in range(3)] == expected


def test_log_probabilities_are_the_models(client: OpenAI) -> None:
    expected = alone(ids_of(HELLO), 12, temp=0.8, seed=3)
    answer = chat(client, max_tokens=12, temperature=0.8, seed=3, logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    assert choice.logprobs
    assert choice.logprobs.content
    assert len(choice.logprobs.content) == 12
    for token, response in zip(choice.logprobs.content, expected, strict=True):
        model_s = response.token_logprobs(3)
        assert token.logprob == pytest.approx(model_s.logprob, abs=1e-3)
        tops = [top.logprob for top in token.top_logprobs]
        assert tops == pytest.approx([logprob for _, logprob in model_s.top], abs=1e-3)
        assert bytes(token.bytes or []).decode() == token.token
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    chunks = streamed(client, max_tokens=12, temperature=0.8, seed=3, logprobs=True)
    contents = [c.logprobs.content for k in chunks for c in k.choices if c.logprobs]
    logprobs = [token.logprob for content in contents for token in content or []]
    assert logprobs == pytest.approx([token.logprob for token in choice.logprobs.content], abs=1e-3)


def test_stop_strings_end_the_text_before_them(client: OpenAI) -> None:
    whole = answer_alone()
    stop = whole[30:34]
    for given in (stop, ["never written", stop]):
        answer = chat(client, stop=given)
        assert answer.choices[0].message.content == whole[: whole.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
    assert joined(streamed(client, stop=stop)) == whole[: whole.index(stop)]


def test_bias_and_penalties_are_those_of_generate(client: OpenAI) -> None:
    first = alone(ids_of(HELLO), 1)[0].token
    for fields, options in (
        ({"logit_bias": {str(first): -100}}, {"logit_bias": {first: -100.0}}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"frequency_penalty": 0.7}, {"frequency_penalty": 0.7}),
        ({"extra_body": {"repetition_penalty": 1.3}}, {"repetition_penalty": 1.3}),
        ({"extra_body": {"top_k": 2}, "temperature": 1, "seed": 1}, {"top_k": 2}),
        ({"extra_body": {"min_p": 0.3}, "temperature": 1, "seed": 1}, {"min_p": 0.3}),
    ):
        sampled = {"temp": 1.0, "seed": 1} if "seed" in fields else {}
        expected = answer_alone(**sampled, **options)
        assert expected != answer_alone(**sampled), options
        assert said(client, **fields) == expected, options


def test_both_names_of_the_bound_bind(client: OpenAI) -> None:
    for fields in (
        {"max_tokens": 5},
        {"max_tokens": None, "max_completion_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": 5},
    ):
        usage = chat(client, **fields).usage
        assert usage
        assert usage.completion_tokens == 5


def test_an_answer_is_gone_on_with(client: OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    prompt = ids_of(messages, add_generation_prompt=False, continue_final_message=True)
    assert said(client, messages=messages) == text_alone(prompt, 24)


def test_a_right_prediction_is_accepted_and_changes_nothing(client: OpenAI) -> None:
    fields = {"temperature": 1.0, "seed": 8, "max_tokens": 60}
    expected = answer_alone(max_tokens=60, temp=1.0, seed=8)
    for prediction in (expected, [{"type": "text", "text": expected}]):
        answer = chat(client, **fields, prediction={"type": "content", "content": prediction})
        assert answer.choices[0].message.content == expected
        assert answer.usage
        assert answer.usage.completion_tokens_details
        accepted = answer.usage.completion_tokens_details.accepted_prediction_tokens
        assert accepted
        assert accepted > 30
    wrong = chat(client, **fields, prediction={"type": "content", "content": "No. " * 40})
    assert wrong.choices[0].message.content == expected


def test_a_prediction_is_ignored_where_no_draft_comes_from_it() -> None:
    decoder = stand_in_decoder(mlxspec.PromptLookupDecoder)
    decoder.costs = given_costs(FLAT)
    with running_server(ServedModel("small", decoder)) as server:
        client = server.client()
        without = chat(client).choices[0].message.content
        answer = chat(client, prediction={"type": "content", "content": "Yes"})
        assert answer.choices[0].message.content == without


# --- completions ---


def test_completions_are_what_plain_decoding_writes(client: OpenAI) -> None:
    expected = text_alone("Once upon", 16)
    answer = client.completions.create(model="small", prompt="Once upon", max_tokens=16)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected, "length")
    chunks = list(
        client.completions.create(model="small", prompt="Once upon", max_tokens=16, stream=True)
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
    echoed = client.completions.create(model="small", prompt="Once upon", max_tokens=16, echo=True)
    assert echoed.choices[0].text == "Once upon" + expected


def test_prompts_are_texts_or_ids_one_or_several(client: OpenAI) -> None:
    ids = [1, 400, 500]
    texts = [text_alone(prompt, 8) for prompt in ("Once", ids)]
    one = client.completions.create(model="small", prompt=ids, max_tokens=8)
    assert one.choices[0].text == texts[1]
    two = client.completions.create(model="small", prompt=[ids, [1, 600]], max_tokens=8)
    assert two.choices[0].text == texts[1]
    answer = client.completions.create(model="small", prompt=["Once", "So"], n=2, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [texts[0]] * 2 + [text_alone("So", 8)] * 2
    assert [choice.text for choice in answer.choices] == expected


def test_completions_have_their_own_form_of_log_probabilities(client: OpenAI) -> None:
    expected = alone("Once upon", 6)
    answer = client.completions.create(model="small", prompt="Once upon", max_tokens=6, logprobs=2)
    (choice,) = answer.choices
    assert choice.logprobs
    assert choice.logprobs.token_logprobs == pytest.approx(
        [response.token_logprobs(0).logprob for response in expected], abs=1e-3
    )
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.text_offset == [
        len("".join(response.text for response in expected[:at])) for at in range(6)
    ]


# --- models, tokens, health ---


def test_models_report_their_context(client: OpenAI, server: Running) -> None:
    (model,) = client.models.list().data
    assert model.id == "small"
    assert model.model_dump()["context_length"] == server.worker.models["small"].context_length
    assert client.models.retrieve("small") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_models_have_openais_form(server: Running) -> None:
    answer = httpx.get(f"{server.address}/v1/models")
    assert answer.status_code == 200
    assert answer.json().keys() == {"object", "data"}
    assert answer.json()["object"] == "list"
    (model,) = answer.json()["data"]
    length = server.worker.models["small"].context_length
    assert isinstance(model.pop("created"), int)
    assert model == {
        "id": "small",
        "object": "model",
        "owned_by": "mlxspec",
        "state": "loaded",
        "context_length": length,
        "max_model_len": length,
    }
    one = httpx.get(f"{server.address}/v1/models/small").json()
    assert {**one, "created": 0} == {**model, "created": 0}
    missing = httpx.get(f"{server.address}/v1/models/large")
    assert missing.status_code == 404
    assert missing.json()["error"].keys() == {"message", "type", "param", "code"}


def test_tokens_and_texts_convert_into_each_other(server: Running) -> None:
    tokenizer = server.decoder.tokenizer
    text = "Once upon a time, ünïcödé 日本 👩‍🚀\n\tend"
    with httpx.Client(base_url=server.address) as http:
        tokens = http.post("/v1/tokenize", json={"prompt": text}).json()["tokens"]
        assert tokens == tokenizer.encode(text)
        assert http.post("/v1/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
        answer = http.post("/v1/tokenize", json={"messages": HELLO}).json()
        assert answer["tokens"] == ids_of(HELLO)
        assert answer["count"] == len(answer["tokens"])


def test_the_server_reports_its_state(server: Running, client: OpenAI) -> None:
    said(client)
    with httpx.Client(base_url=server.address) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json() == {"status": "ok"}
        status = http.get("/status").json()
        assert status["requests"] == []
        assert all(status["memory"][kind] >= 0 for kind in ("active", "cache", "peak"))
        generated = status["totals"]["generated"]
        metrics = http.get("/metrics").text
        assert f"mlxspec_generated_tokens_total {generated:.1f}" in metrics
        (share,) = re.findall(r"^mlxspec_planning_share (\S+)$", metrics, re.MULTILINE)
        assert 0 < float(share) < 1
        page = http.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"


def test_what_is_counted_is_what_clients_were_told() -> None:
    names = ("prompt_tokens", "cached_tokens", "generated_tokens", "first_token_seconds_count")
    with running_server() as server, httpx.Client(base_url=server.address) as http:
        client = server.client()
        usages = [chat(client, max_tokens=length).usage for length in (5, 7, 5)]
        metrics = http.get("/metrics").text
    told = [
        sum(usage.prompt_tokens for usage in usages if usage),
        sum(
            u.prompt_tokens_details.cached_tokens or 0
            for u in usages
            if u and u.prompt_tokens_details
        ),
        5 + 7 + 5,
        3,
    ]
    assert told[1] > 0
    for name, count in zip(names, told, strict=True):
        total = name if name.endswith("_count") else f"{name}_total"
        assert f"\nmlxspec_{total} {count:.1f}\n" in metrics
    assert '\nmlxspec_generations_total{outcome="length"} 3.0\n' in metrics


# --- errors ---


def test_an_only_model_answers_under_any_name(server: Running, client: OpenAI) -> None:
    messages: Any = {"messages": HELLO, "max_tokens": 4}
    bodies = {
        "/v1/chat/completions": messages,
        "/v1/completions": {"prompt": "Once", "max_tokens": 4},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
        "/v1/messages": messages,
    }
    others: dict[str, Any] = {
        "/v1/messages/count_tokens": {"messages": HELLO},
        "/v1/responses/input_tokens": {"input": "Hello"},
        "/v1/tokenize": {"prompt": "Hello"},
        "/v1/detokenize": {"tokens": [5]},
    }
    with (
        running_server(strict_model_names=True) as strict,
        httpx.Client(timeout=60) as http,
    ):
        for path, body in [*bodies.items(), *others.items()]:
            for model in ("gpt-5", "claude-opus-4-8", "default"):
                sent = {**body, "model": model}
                answer = http.post(f"{server.address}{path}", json=sent)
                assert answer.status_code == 200, answer.text
                if path in bodies:
                    assert answer.json()["model"] == "small"
                refused = http.post(f"{strict.address}{path}", json=sent)
                assert refused.status_code == 404
                assert "use small" in refused.json()["error"]["message"]
        with pytest.raises(openai.NotFoundError) as missing:
            chat(strict.client(), model="large")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_errors_are_the_clients_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, temperature=-1)
    assert bad.value.param == "temperature"
    assert "-1" in bad.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        streamed(client, messages=[{"role": "pirate", "content": "x"}])
    assert bad.value.param == "messages[0].role"
    with pytest.raises(openai.NotFoundError):
        client.post("/nowhere", cast_to=object)
    with pytest.raises(openai.APIStatusError) as wrong:
        client.get("/chat/completions", cast_to=object)
    assert wrong.value.status_code == 405


def test_a_context_that_is_too_long_is_an_error_with_numbers(
    client: OpenAI, server: Running
) -> None:
    longest = server.worker.models["small"].context_length
    assert longest
    for n_prompt in (longest, longest + 1):
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="small", prompt=[5] * n_prompt)
        assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "prompt")
        assert f"{n_prompt} tokens > {longest - 1}, since" in bad.value.message
    # So long that tokenizing it, which would be slow, is skipped.
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="small", prompt="a b " * 1_100_000)
    assert "4,400,000 characters" in bad.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, messages=[{"role": "user", "content": "a b " * 1_100_000}])
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("most", [10, 32_000, 10**12])
def test_an_answer_is_cut_to_what_the_context_has_room_for(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Agents ask for as many tokens as the largest models can write."""
    n_prompt = len(ids_of(HELLO))
    monkeypatch.setattr(ServedModel, "context_length", n_prompt + 9)
    with running_server() as server, httpx.Client(base_url=server.address, timeout=60) as http:
        for path, name, prompt in (
            ("chat/completions", "max_tokens", {"messages": HELLO}),
            ("chat/completions", "max_completion_tokens", {"messages": HELLO}),
            ("completions", "max_tokens", {"prompt": ids_of(HELLO)}),
        ):
            answer = http.post(f"/v1/{path}", json={**prompt, name: most}).json()
            assert answer["usage"]["completion_tokens"] == 9
            assert answer["choices"][0]["finish_reason"] == "length"
        body = {"input": HELLO, "max_output_tokens": most}
        answer = http.post("/v1/responses", json=body).json()
        assert answer["usage"]["output_tokens"] == 9
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        body = {"messages": HELLO, "max_tokens": most}
        answer = http.post("/v1/messages", json=body).json()
        assert answer["usage"]["output_tokens"] == 9
        assert answer["stop_reason"] == "model_context_window_exceeded"


def test_a_key_is_required() -> None:
    with running_server(keys=["secret", "other"]) as server:
        for key in ("none", "", "secre", "sécret"):
            answer = httpx.get(f"{server.address}/v1/models", headers={"x-api-key": key.encode()})
            assert answer.status_code == 401, key
        with pytest.raises(openai.AuthenticationError) as refused:
            said(server.client())
        assert refused.value.code == "invalid_api_key"
        assert said(server.client(api_key="other"), max_tokens=2)
        given = httpx.get(f"{server.address}/v1/models", headers={"x-api-key": "secret"})
        assert given.status_code == 200
        for path in ("/metrics", "/status", "/v1/models/small"):
            assert httpx.get(server.address + path).status_code == 401
        for path in ("/", "/health", "/ready"):
            assert httpx.get(server.address + path).status_code == 200


def test_what_one_key_has_sent_is_not_found_by_another() -> None:
    """Otherwise an answer's speed would reveal what others have asked."""
    prompt = [1, *range(300, 400)]

    def cached(client: OpenAI) -> int:
        answer = client.completions.create(model="small", prompt=prompt, max_tokens=1)
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    with running_server(keys=["a", "b"]) as server:
        assert cached(server.client(api_key="a")) == 0
        assert cached(server.client(api_key="b")) == 0
        assert cached(server.client(api_key="a")) == len(prompt) - 1


SECRET = [f"word{number}" for number in range(24)]
"""An answer without repetition, which can only be drafted from memory."""


@contextmanager
def secretive(directory: Path, **options: Any) -> Iterator[Running]:
    """Run a server with memory whose model always answers SECRET and whose drafts are free."""
    model, tokenizer = mlxspec.load(str(write_scripted_model(directory, SECRET, ends=True)))
    decoder = mlxspec.AutoDecoder(model, tokenizer)
    decoder.costs = given_costs({1: 1.0, 64: 1.0})
    with running_server(ServedModel("small", decoder), **options) as running:
        yield running


def accepted(server: Running, key: str) -> int:
    """Return the number of accepted draft tokens in an answer, as reported to the client."""
    client = server.client(api_key=key)
    answer = client.completions.create(model="small", prompt="a question", max_tokens=40)
    assert answer.choices[0].text.split("word")[1:] == [str(n) for n in range(24)]
    assert answer.usage
    assert answer.usage.completion_tokens_details
    return answer.usage.completion_tokens_details.accepted_prediction_tokens or 0


def test_what_one_key_was_answered_is_not_drafted_for_another(tmp_path: Path) -> None:
    """Otherwise accepted drafts would reveal that the answer was given before."""
    with secretive(tmp_path / "m", keys=["a", "b"]) as server:
        for key in ("a", "b"):
            assert accepted(server, key) == 0
            wait_until(lambda key=key: accepted(server, key) > 12)  # it remembers soon


def test_without_keys_all_draft_from_one_memory(tmp_path: Path) -> None:
    with secretive(tmp_path / "m") as server:
        assert accepted(server, "whoever") == 0
        wait_until(lambda: accepted(server, "another") > 12)


def test_of_many_keys_those_are_forgotten_that_ask_no_more() -> None:
    model = served()
    model.decoder = stand_in_decoder(mlxspec.AutoDecoder)

    def memories() -> int:
        gc.collect()
        return sum(thread.name == "mlxspec memory" for thread in threading.enumerate())

    before = memories()
    for number in range(100):
        for key in ("often", f"key {number}"):
            decoder = model._decoder_of(key)
            assert decoder.memory is not model.decoder.memory
    assert model._decoder_of("key 99") is decoder
    assert model._decoder_of("often") is not decoder
    assert model._decoder_of("key 0") not in (decoder, model.decoder)
    assert model._decoder_of("") is model.decoder
    wait_until(lambda: memories() <= before + 32)


# --- tools ---

PIECES = (
    *("<tool_call>", '{"name": "weather", ', '"arguments":', ' {"city": ', '"Paris"}', "}"),
    *("</tool_call>", "</s>", "<result>", "It is", " sunny."),
)
TEMPLATE = """\
{% if tools %}{{ tools | length }} tools {% endif %}
{%- for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}
{%- if messages[-1].role == 'tool' %}<result>{% elif tools %}<ask> {% else %}<result>{% endif %}"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@contextmanager
def scripted_caller(directory: Path, script: Sequence[str]) -> Iterator[Running]:
    """Run a server of a scripted model that calls tools."""
    model, tokenizer = mlxspec.load(str(write_scripted_model(directory, script, ends=True)))
    tokenizer = with_tools(tokenizer, "json_tools", TEMPLATE)
    decoder = mlxspec.AutoDecoder(model, tokenizer, memory_tokens=0)
    decoder.costs = given_costs(FLAT)
    with running_server(ServedModel("caller", decoder)) as running:
        yield running


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model calls a tool for the weather in Paris, then says that it is sunny."""
    with scripted_caller(tmp_path_factory.mktemp("tools") / "m", PIECES) as running:
        yield running


@pytest.mark.parametrize("choice", ["auto", "required", None])
def test_tools_are_called(caller: Running, choice: Any) -> None:
    client = caller.client()
    fields = {"model": "caller", "tools": [WEATHER], "tool_choice": choice}
    (answer,) = chat(client, **fields).choices
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    chunks = streamed(client, **fields)
    deltas = [call for k in chunks for c in k.choices for call in c.delta.tool_calls or []]
    assert [delta.index for delta in deltas] == [0] * len(deltas)
    assert deltas[0].id
    assert deltas[0].function
    assert deltas[0].function.name == "weather"
    arguments = "".join(d.function.arguments or "" for d in deltas if d.function)
    assert json.loads(arguments) == {"city": "Paris"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_a_call_that_is_cut_off_leaves_no_text(
    caller: Running, choice: Any, max_tokens: int
) -> None:
    fields = {"model": "caller", "tools": [WEATHER], "tool_choice": choice}
    fields["max_tokens"] = max_tokens
    (answer,) = chat(caller.client(), **fields).choices
    assert not answer.message.content
    calls = answer.message.tool_calls or []
    assert [call.function.name for call in calls if call.type == "function"] in ([], ["weather"])
    chunks = streamed(caller.client(), **fields)
    assert joined(chunks) == ""
    assert chunks[-1].choices[0].finish_reason == answer.finish_reason


def test_a_stop_string_in_a_call_leaves_no_text(caller: Running) -> None:
    fields = {"model": "caller", "tools": [WEATHER], "tool_choice": "required", "stop": "arg"}
    assert not said(caller.client(), **fields)


def test_a_call_that_a_stop_string_cuts_does_not_ask_to_be_run(caller: Running) -> None:
    fields = {"model": "caller", "tools": [WEATHER], "tool_choice": "required", "stop": "Par"}
    (answer,) = chat(caller.client(), **fields).choices
    assert answer.finish_reason == "stop"
    assert streamed(caller.client(), **fields)[-1].choices[0].finish_reason == "stop"


def test_no_tool_is_called_where_none_may_be(caller: Running) -> None:
    answer = chat(caller.client(), model="caller", tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == "It is sunny."
    assert answer.choices[0].finish_reason == "stop"


def test_results_of_tools_are_answered(caller: Running) -> None:
    client = caller.client()
    (answer,) = chat(client, model="caller", tools=[WEATHER]).choices
    (call,) = answer.message.tool_calls or []
    messages = [
        *HELLO,
        answer.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert said(client, model="caller", tools=[WEATHER], messages=messages) == "It is sunny."


def test_a_model_without_tools_says_so(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, tools=[WEATHER])
    assert bad.value.param == "tools"


# --- other clients ---


@pytest.mark.slow  # slow imports
def test_langchain_talks_to_the_server(server: Running, caller: Running) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    def model(running: Running, name: str, temperature: float) -> Any:
        return ChatOpenAI(
            model=name,
            base_url=f"{running.address}/v1",
            api_key="none",  # type: ignore[arg-type]
            temperature=temperature,
            seed=4,
            max_tokens=24,  # type: ignore[call-arg]
            max_retries=0,
            stream_usage=True,
        )

    expected = answer_alone(temp=0.8, seed=4)
    small = model(server, "small", 0.8)
    answer = small.invoke("Hello there")
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] == 24
    chunks = list(small.stream("Hello there"))
    assert "".join(chunk.content for chunk in chunks) == expected
    assert sum(k.usage_metadata["output_tokens"] for k in chunks if k.usage_metadata) == 24

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    asking = model(caller, "caller", 0).bind_tools([weather])
    (call,) = asking.invoke("Weather?").tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})


@pytest.mark.slow  # slow import
def test_an_agent_of_pydantic_ai_calls_its_tool_and_ends(caller: Running) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{caller.address}/v1", api_key="none")
    agent = Agent(OpenAIChatModel("caller", provider=provider), system_prompt="Be brief.")
    cities = []

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    assert agent.run_sync("Weather?").output == "It is sunny."
    result = agent.run_stream_sync("Weather?")
    assert "".join(result.stream_text(delta=True, debounce_by=None)) == "It is sunny."
    assert cities == ["Paris", "Paris"]


def test_chunks_are_server_sent_events(server: Running) -> None:
    """Another library can read them."""
    from httpx_sse import connect_sse

    body = {"messages": HELLO, "max_tokens": 8, "stream": True}
    with (
        httpx.Client() as http,
        connect_sse(http, "POST", f"{server.address}/v1/chat/completions", json=body) as source,
    ):
        events = list(source.iter_sse())
    assert {event.event for event in events} == {"message"}
    *chunks, done = [event.data for event in events]
    assert done == "[DONE]"
    texts = [json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(texts) == answer_alone(max_tokens=8)
