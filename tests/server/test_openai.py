"""Answers match OpenAI's API, checked with the types of its client library."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from mlxspec.server.body import parse
from mlxspec.server.openai import (
    ChatAnswer,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    detokenized,
)
from mlxspec.server.output_parser import OutputFormat
from mlxspec.server.worker import Ended, Event, Piece
from tests.support.chat_tokenizer import chat_tokenizer

TOKENIZER = chat_tokenizer()
EOS = TOKENIZER.eos_token_id
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
CALLS = (
    '<think>\nHm.\n</think>\nI ask. <tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n'
    '</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


def chat(**fields: Any) -> ChatAnswer:
    request = parse(ChatBody, {"messages": [{"role": "user", "content": "?"}], **fields})
    format = replace(
        OutputFormat(TOKENIZER, request.tools_shown), several_calls=request.parallel_tool_calls
    )
    made = ChatAnswer(request, "model")
    made.read_with(TOKENIZER, format)
    return made


def completion(**fields: Any) -> CompletionAnswer:
    made = CompletionAnswer(parse(CompletionBody, {"prompt": "Hi", **fields}), "model")
    made.read_with(TOKENIZER, None)
    return made


def pieces(text: str, index: int = 0, length: int = 3, **fields: Any) -> list[Event]:
    """Split a text into tokens of a few characters; every second one comes from a draft."""
    return [
        Piece(index, text[at : at + length], 65 + at % 20, accepted=at // length % 2 == 1, **fields)
        for at in range(0, len(text), length)
    ]


def ended(index: int = 0, reason: str = "stop", **figures: int) -> Ended:
    return Ended(index, reason, **{"prompt_tokens": 5, "completion_tokens": 7, **figures})


def valid(kind: type[BaseModel], answer: dict[str, Any]) -> Any:
    """Parse an answer with the client library; assert that its only extra fields are ours."""
    parsed = kind.model_validate(json.loads(json.dumps(answer, allow_nan=False)))
    assert extras(parsed) <= {"reasoning_content", "mlxspec"}
    return parsed


def extras(value: Any) -> set[str]:
    """Return the names of a parsed answer's fields that its type lacks."""
    if isinstance(value, list):
        return set().union(*map(extras, value))
    if not isinstance(value, BaseModel):
        return set()
    inner = (getattr(value, name) for name in type(value).model_fields)
    return set(value.model_extra or ()).union(*map(extras, inner))


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


# --- chat ---


def test_a_streamed_chat_has_one_role_and_one_end() -> None:
    answer = chat(stream=True)
    chunks = answer.begin() + [
        c for e in [*pieces("Hello world"), ended()] for c in answer.feed([e])
    ]
    for chunk in chunks:
        valid(ChatCompletionChunk, chunk)
        assert "usage" not in chunk
    assert answer.done
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    first, *rest, last = deltas(chunks)
    assert first == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in rest) == "Hello world"
    assert last == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


def test_usage_comes_last_in_a_chunk_without_choices() -> None:
    answer = chat(stream=True, stream_options={"include_usage": True})
    chunks = answer.feed([*pieces("Hello"), ended(cached_tokens=3, drafted=4, accepted=2)])
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    usage = valid(ChatCompletionChunk, chunks[-1]).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 7, 12)
    assert usage.prompt_tokens_details.cached_tokens == 3
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 2)
    assert details.reasoning_tokens == 0


def test_a_whole_chat() -> None:
    answer = chat()
    answer.feed([*pieces("Hello"), ended(reason="length")])
    whole = valid(ChatCompletion, answer.whole())
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello")
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert whole.usage.total_tokens == 12
    assert whole.model == "model"
    assert whole.system_fingerprint.startswith("mlxspec-")


def test_an_empty_answer_is_an_empty_text() -> None:
    answer = chat()
    answer.feed([ended()])
    assert valid(ChatCompletion, answer.whole()).choices[0].message.content == ""


def test_calls_and_reasoning_whole() -> None:
    answer = chat(tools=TOOLS)
    answer.feed([*pieces(CALLS), ended()])
    choice = valid(ChatCompletion, answer.whole()).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I ask."
    assert choice.message.reasoning_content == "Hm."
    assert [
        (call.function.name, call.function.arguments) for call in choice.message.tool_calls
    ] == [
        ("f", '{"a": "é"}'),
        ("g", "{}"),
    ]
    assert answer.usage()["completion_tokens_details"]["reasoning_tokens"] > 3


@pytest.mark.parametrize("made", [chat, completion])
def test_tokens_of_the_stop_string_have_no_logprobs(made: Any) -> None:
    answer = made(logprobs=True if made is chat else 1)
    texts = ["Hi", "", "\u00e9", "!\n", "", ""]
    tokens: list[Event] = [Piece(0, text, 65, logprob=-1.0, top=((65, -1.0),)) for text in texts]
    for event in (*tokens, replace(ended(), stop="END")):
        answer.feed([event])
    logprobs = answer.whole()["choices"][0]["logprobs"]
    assert len(logprobs["content"] if made is chat else logprobs["tokens"]) == 4


def test_content_is_null_beside_calls_alone() -> None:
    answer = chat(tools=TOOLS)
    answer.feed([Piece(0, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', 65), ended()])
    assert valid(ChatCompletion, answer.whole()).choices[0].message.content is None


def test_an_answer_that_was_cut_off_says_so() -> None:
    answer = chat(tools=TOOLS)
    answer.feed([Piece(0, '<tool_call>{"name": "f", "arguments": {"a', 65), ended(reason="length")])
    assert valid(ChatCompletion, answer.whole()).choices[0].finish_reason == "length"


def test_one_call_is_enough_where_only_one_may_be() -> None:
    answer = chat(tools=TOOLS, parallel_tool_calls=False)
    assert not answer.finished(0)
    answer.feed(pieces(CALLS))
    assert answer.finished(0)
    answer.feed([ended(reason="length")])
    choice = valid(ChatCompletion, answer.whole()).choices[0]
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("at_once", [1, 5, 100])
def test_what_the_model_writes_after_the_one_call_is_not_sent(at_once: int) -> None:
    answer = chat(tools=TOOLS, parallel_tool_calls=False, logprobs=True)
    written = pieces(CALLS, logprob=-0.5)
    for start in range(0, len(written), at_once):
        answer.feed(written[start : start + at_once])
    answer.feed([ended(completion_tokens=len(written))])
    whole = valid(ChatCompletion, answer.whole())
    assert whole.choices[0].message.content == "I ask."
    assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["f"]
    assert 0 < len(whole.choices[0].logprobs.content) < CALLS.index("}") // 3


@pytest.mark.slow
@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # the simplest request
@given(
    st.lists(st.sampled_from([CALLS, "Hello", "", "<think>x"]), min_size=1, max_size=3),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_the_client_puts_the_chunks_together_to_the_whole_answer(
    outputs: list[str], length: int, random: Random
) -> None:
    """OpenAI's own accumulation does it, for any batches of events."""
    answer = chat(
        stream=True,
        n=len(outputs),
        tools=TOOLS,
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
    )
    left: list[list[Event]] = [
        [*pieces(text, index, length, logprob=-0.5, top=((65, -0.5),)), ended(index)]
        for index, text in enumerate(outputs)
    ]
    state: Any = ChatCompletionStreamState()
    for chunk in answer.begin():
        state.handle_chunk(valid(ChatCompletionChunk, chunk))
    while any(left):
        batch: list[Event] = []
        for _ in range(random.randint(1, 9)):
            if waiting := [events for events in left if events]:
                batch.append(random.choice(waiting).pop(0))
        for chunk in answer.feed(batch):
            state.handle_chunk(valid(ChatCompletionChunk, chunk))
    joined = json.loads(state.current_completion_snapshot.model_dump_json())
    whole = json.loads(ChatCompletion.model_validate(answer.whole()).model_dump_json())
    assert joined["usage"] == whole["usage"]
    for ours, theirs in zip(whole["choices"], joined["choices"], strict=True):
        for call in theirs["message"]["tool_calls"] or ():
            call.pop("index")
            call["function"].pop("parsed_arguments", None)
        assert theirs["message"]["content"] == (ours["message"]["content"] or "")
        assert theirs["message"].get("reasoning_content") == ours["message"].get(
            "reasoning_content"
        )
        assert (theirs["message"]["tool_calls"] or None) == ours["message"]["tool_calls"]
        assert (theirs["logprobs"] or {"content": []})["content"] == ours["logprobs"]["content"]
        assert theirs["finish_reason"] == ours["finish_reason"]


def test_a_prompt_of_several_choices_counts_once() -> None:
    answer = chat(n=2)
    answer.feed([ended(1, cached_tokens=4), ended(0, cached_tokens=1)])
    usage = answer.usage()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 14)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1
    answers = completion(prompt=["a", "b"], n=2)
    answers.feed([ended(index) for index in range(4)])
    assert answers.usage()["prompt_tokens"] == 10


def test_drafts_are_reported_if_requested() -> None:
    events = [Piece(0, "The", 65), Piece(0, " qu", 66, True), Piece(0, "ick", 67, True)]
    answer = chat(stream=True, mlxspec={"drafts": True})
    chunks = answer.feed([*events, ended()])
    assert [chunk["choices"][0].get("mlxspec") for chunk in chunks] == [
        {"drafts": [["The", False], [" quick", True]]},
        None,
    ]
    text = completion(stream=True, mlxspec={"drafts": True}, echo=True)
    (echo,), (first, _) = text.begin(), text.feed([*events, ended()])
    assert echo["choices"][0]["mlxspec"] == {"drafts": [["Hi", False]]}
    assert first["choices"][0]["mlxspec"] == {"drafts": [["The", False], [" quick", True]]}


def test_the_choices_begin_before_any_token() -> None:
    answer = chat(stream=True, n=2)
    chunks = answer.begin()
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1]
    assert [delta["role"] for delta in deltas(chunks)] == ["assistant"] * 2
    assert deltas(answer.feed([Piece(1, "a", 65)])) == [{"content": "a"}]


# --- log-probabilities ---


def test_logprobs_of_a_chat_have_the_bytes_of_tokens() -> None:
    e_acute = TOKENIZER.encode("é", add_special_tokens=False)
    assert len(e_acute) == 2
    letter = TOKENIZER.encode("a", add_special_tokens=False)[0]
    events = [
        Piece(0, "", e_acute[0], logprob=-0.25, top=((e_acute[0], -0.25), (letter, -2.0))),
        Piece(0, "é", e_acute[1], logprob=float("-inf")),
        Piece(0, "", EOS, logprob=-0.1),
    ]
    answer = chat(stream=True, logprobs=True, top_logprobs=2)
    chunks = answer.feed([*events, ended()])
    streamed = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    content = valid(ChatCompletion, answer.whole()).choices[0].logprobs.content
    assert [entry.model_dump() for entry in content] == streamed
    assert [(one.token, one.bytes, one.logprob) for one in content] == [
        ("\\xc3", [0xC3], -0.25),
        ("\\xa9", [0xA9], -9999.0),
    ]
    assert [(one.token, one.logprob) for one in content[0].top_logprobs] == [
        ("\\xc3", -0.25),
        ("a", -2.0),
    ]


def test_logprobs_of_completions_have_offsets_into_the_text() -> None:
    a, b = TOKENIZER.encode("ab", add_special_tokens=False)
    events = [
        Piece(0, "a", a, logprob=-1.0, top=((b, -0.5),)),
        Piece(0, "b", b, logprob=-2.0, top=((b, -2.0),)),
    ]
    answer = completion(logprobs=1)
    for event in [*events, Piece(0, "", EOS, logprob=0.0), ended()]:
        answer.feed([event])
    logprobs = valid(Completion, answer.whole()).choices[0].logprobs
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-1.0, -2.0]
    assert logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs == [{"b": -0.5, "a": -1.0}, {"b": -2.0}]
    without = completion(logprobs=0)
    without.feed([*events, ended()])
    assert valid(Completion, without.whole()).choices[0].logprobs.top_logprobs is None


# --- completions ---


def test_a_streamed_completion() -> None:
    answer = completion(stream=True, stream_options={"include_usage": True}, logprobs=1)
    events = [*pieces("Hello", logprob=-1.0), ended()]
    chunks = [chunk for event in events for chunk in answer.feed([event])]
    for chunk in chunks:
        if chunk["choices"] and chunk["choices"][0]["finish_reason"] is None:
            chunk = json.loads(json.dumps(chunk))  # the library's type only covers complete answers
            chunk["choices"][0]["finish_reason"] = "stop"
        valid(Completion, chunk)
    *texts, end, usage = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in texts) == "Hello"
    assert end["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 12)
    offsets = [at for chunk in texts for at in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 3]


def test_choices_of_several_prompts_stand_in_their_order() -> None:
    ids = TOKENIZER.encode("Yo", add_special_tokens=False)
    answer = completion(prompt=["Hi", ids], n=2, echo=True)
    for index in (2, 0, 3, 1):
        answer.feed([Piece(index, str(index), 65), ended(index)])
    whole = valid(Completion, answer.whole())
    assert [choice.text for choice in whole.choices] == ["Hi0", "Hi1", "Yo2", "Yo3"]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.id.startswith("cmpl-")


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_comes_once(stream: bool) -> None:
    answer = completion(echo=True, stream=stream)
    chunks = answer.begin() + answer.feed(pieces("Hello")) + answer.feed([ended()])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "HiHello"
    assert answer.whole()["choices"][0]["text"] == "HiHello"


# --- tokens ---


def test_the_text_of_tokens() -> None:
    ids = TOKENIZER.encode("é", add_special_tokens=False)
    assert detokenized(TOKENIZER, [*ids, 10**6]) == "é"
    assert detokenized(TOKENIZER, []) == ""
