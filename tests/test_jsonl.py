"""Reading conversations from the log records of various programs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.jsonl import conversation_of, json_lines

QUESTION = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "answer"}


def test_lines_are_numbered_and_those_that_are_no_json_hold_nothing() -> None:
    lines = ['{"a": 1}', " ", "{", "[" * 100_000, '"\u2028"', "3"]
    expected = [(1, {"a": 1}), (3, None), (4, None), (5, "\u2028"), (6, 3)]
    assert list(json_lines(lines)) == expected
    assert list(json_lines([line.encode() for line in lines])) == expected
    assert list(json_lines([b"\xff"])) == [(1, None)]


def content(**message: object) -> str:
    (read,), _ = conversation_of({"messages": [{"role": "assistant", **message}]})
    return read["content"]


def test_the_assistant_s_messages_are_the_model_s_unless_completions_name_others() -> None:
    messages = [QUESTION, ANSWER, {"role": "bot", "content": "chosen"}, ANSWER]
    assert conversation_of({"messages": messages})[1] == [1, 3]
    assert conversation_of({"messages": messages, "completions": [2]})[1] == [2]


def test_a_content_is_a_text_parts_or_nothing() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image_url"}, {"type": "text", "text": "2"}]
    assert content(content="text") == "text"
    assert content(content=parts) == "one2"
    assert content(content=None) == content() == ""


def test_calls_of_tools_are_what_the_model_wrote_a_line_each() -> None:
    function = {"type": "function", "function": {"name": "f", "arguments": '{"x":  "é"}'}}
    parsed = {"function": {"name": "g", "arguments": {"y": [1]}}}
    assert content(content=None, tool_calls=[function, function]) == (
        '{"name": "f", "arguments": {"x":  "é"}}\n{"name": "f", "arguments": {"x":  "é"}}'
    )
    assert content(content="Now:", tool_calls=[parsed]) == (
        'Now:\n{"name": "g", "arguments": {"y": [1]}}'
    )


@pytest.mark.parametrize(
    "record",
    [
        *(None, 3, [], {}, {"messages": 3}, {"messages": ["text"]}),
        *({"messages": [{"content": "a"}]}, {"messages": [{"role": 3, "content": "a"}]}),
        *({"messages": [{**ANSWER, "content": value}]} for value in (3, {"a": 1}, ["text"])),
        *({"messages": [{**ANSWER, "tool_calls": value}]} for value in ({"a": 1}, [3], [{}])),
        *({"messages": [ANSWER], "completions": value} for value in (3, [1], [-1], [True], ["0"])),
    ],
)
def test_an_invalid_conversation_is_refused(record: object) -> None:
    with pytest.raises(ValueError, match=r"message|completions|tool"):
        conversation_of(record)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "role", "content", "completions", "tool_calls", "function", "text"]
            ),
            inner | st.just("assistant"),
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_any_json_is_a_conversation_or_refused(record: object) -> None:
    try:
        messages, completions = conversation_of(record)
    except ValueError:
        return
    assert all(isinstance(messages[index]["content"], str) for index in completions)
