"""Parsing output into text, reasoning and calls, however it is split into segments."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import glm47, json_tools, kimi_k2, mistral, pythonic, qwen3_coder

from mlxspec.server.output_parser import (
    OutputFormat,
    OutputParser,
    Part,
)
from tests.support.chat_tokenizer import chat_tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("weather", "write")
]

Call = tuple[str, Any]


def format_of(parser: str | None = "json_tools", **changes: Any) -> OutputFormat:
    format = OutputFormat(chat_tokenizer(parser), TOOLS if parser else ())
    return replace(format, **changes)


def joined(deltas: Iterable[Part]) -> list[Part]:
    """Merge neighbouring deltas of the same kind."""
    result: list[Part] = []
    for delta in deltas:
        last = result[-1] if result else Part("")
        if delta.kind != "call" and (last.kind, last.index) == (delta.kind, delta.index):
            result[-1] = replace(last, text=last.text + delta.text)
        else:
            result.append(delta)
    return result


def read(format: OutputFormat, *segments: str) -> list[Part]:
    """Parse an output into merged deltas."""
    parser = OutputParser(format)
    deltas = [delta for segment in segments for delta in parser.feed(segment)]
    return joined(deltas + parser.finish())


def anonymous(deltas: list[Part]) -> list[object]:
    """Remove the calls' random ids."""
    return [(delta.index, delta.name) if delta.kind == "call" else delta for delta in deltas]


def calls_of(deltas: list[Part]) -> list[Call]:
    """Return the calls with parsed arguments."""
    names = [delta.name for delta in deltas if delta.kind == "call"]
    texts = [""] * len(names)
    for delta in deltas:
        if delta.kind == "arguments":
            texts[delta.index] += delta.text
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def text_of(deltas: list[Part]) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == "text")


ARGUMENTS = '{"city": "Pa\\"r}is\\\\", "days": [1, {"a": "{"}]}'
WEATHER = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
WRITE = '<tool_call>{"name":"write","arguments":{}}</tool_call>'

OUTPUTS = {
    "json_tools": [
        "Hello  world\n",
        "<think>\nHm.\n\nWell.\n</think>\n\nHello <b>",
        f"I look.\n\n{WEATHER}\n{WRITE}",
        f"<think>a</think>{WEATHER}",
        f"<think>never closed {WEATHER}",
        "<tool_call>\nno JSON\n</tool_call> and on",
        '<tool_call>{"arguments": {"a": 1}, "name": "write"}</tool_call>',
        '<tool_call>{"name": "write", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"name": "wr\\u0069te", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "write", "arguments": {"a": 1}, "id": "x"}</tool_call>',
        '<tool_call>{"name": "write", "arguments": {"a": 1',
        '<tool_call>{"name": "wri',
        f"{WEATHER[:-12]}</tool_cal",
        "<tool_call>[]</tool_call><tool_call>5</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "write", "arguments": {"a": "\\ud800"}} x</tool_call>',
        "<tool",
        "",
    ],
    "mistral": [
        f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
        f"So:[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]write[ARGS]{{}}",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]',
        "[TOOL_CALLS]nothing",
        '[TOOL_CALLS]weather[ARGS]{"city',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=days>\nmany\n</parameter>\n</function>"
        "\n</tool_call>",
    ],
    "pythonic": [
        '<|tool_call_start|>[weather(city="Paris", days=3), write()]<|tool_call_end|>',
        "<|tool_call_start|>[weather(<|tool_call_end|>",
    ],
    "glm47": [
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ],
}
CASES = [(parser, output) for parser, outputs in OUTPUTS.items() for output in outputs]
MODULES = {
    "json_tools": json_tools,
    "mistral": mistral,
    "qwen3_coder": qwen3_coder,
    "pythonic": pythonic,
    "glm47": glm47,
    "kimi_k2": kimi_k2,
}


@pytest.mark.parametrize(("parser", "output"), CASES)
def test_calls_are_those_that_mlx_lm_reads(parser: str, output: str) -> None:
    module = MODULES[parser]
    start, end = module.tool_call_start, module.tool_call_end
    expected: list[Call] = []
    for span in output.split(start)[1:] if end else output.split(start, 1)[1:]:
        try:
            parsed = module.parse_tool_call(span.split(end)[0] if end else span, TOOLS)
        except Exception:
            continue
        for one in parsed if isinstance(parsed, list) else [parsed]:
            if isinstance(one, dict) and isinstance(one.get("name"), str):
                arguments = one["arguments"]
                expected.append(
                    (
                        one["name"],
                        json.loads(arguments) if isinstance(arguments, str) else arguments,
                    )
                )
    deltas = read(format_of(parser), output)
    try:
        found = calls_of(deltas)
    except json.JSONDecodeError:
        assert not expected  # the output ended within the arguments
    else:
        assert [*found[: len(expected)]] == expected


@given(st.data())
def test_the_cuts_between_segments_make_no_difference(data: st.DataObject) -> None:
    parser, output = data.draw(st.sampled_from(CASES))
    changes = data.draw(
        st.sampled_from([{}, {"several_calls": False}, {"trims_space": True}, None])
    )
    if changes is None:
        format = OutputFormat(chat_tokenizer(parser))
    else:
        format = format_of(parser, **changes)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(output)), max_size=12)))
    segments = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    assert anonymous(read(format, *segments)) == anonymous(read(format, output))
    assert anonymous(read(format, *output)) == anonymous(read(format, output))


@given(st.text(alphabet='<>tol_ca/{}"name:\\ \nhik[]', max_size=60))
def test_text_without_markers_arrives_as_it_is(output: str) -> None:
    assert text_of(read(format_of(), output)) == output


def test_reasoning_and_text_lose_the_white_space_beside_markers_alone() -> None:
    deltas = read(format_of(), " <think>\n a\n b \n</think>\n\n c\n d \n")
    assert deltas == [Part("reasoning", "a\n b"), Part("text", "c\n d \n")]
    deltas = read(format_of(initial="reasoning"), "\na\n</think>\nb")
    assert deltas == [Part("reasoning", "a"), Part("text", "b")]
    deltas = read(format_of(), f"  I look.\n{WRITE}\n{WRITE}\n")
    assert [delta.kind for delta in deltas] == ["text", *("call", "arguments") * 2]
    assert deltas[0] == Part("text", "  I look.")


def test_long_arguments_come_while_they_are_written() -> None:
    line = "a line\\n"
    parser = OutputParser(format_of())
    assert parser.feed('<tool_call>{"name": "write", "arguments": {"city": "') == []
    assert parser.feed(200 * line) == []
    begun, *first = parser.feed(200 * line)
    assert begun.kind == "call"
    assert (begun.index, begun.name) == (0, "write")
    assert len(begun.id) == 9
    assert begun.id.isalnum()
    assert joined(parser.feed(line)) == [Part("arguments", line, 0)]
    last = parser.feed('"}}</tool_call>') + parser.finish()
    assert "".join(part.text for part in first + last).endswith('a line\\n"}')


def test_long_arguments_that_turn_out_to_be_invalid_come_as_they_are_written() -> None:
    arguments = '{"city": "' + 900 * "a\\n" + '", "days": 1, 2}'
    output = f'<tool_call>{{"name": "write", "arguments": {arguments}</tool_call> So.'
    whole = read(format_of(), output)
    assert whole[1:] == [Part("arguments", arguments, 0), Part("text", "So.")]
    assert anonymous(read(format_of(), *output)) == anonymous(whole)
    short = output.replace(900 * "a\\n", "")
    assert read(format_of(), short) == [Part("text", short)]


def test_what_cannot_be_read_comes_back_as_text() -> None:
    for output in ("<tool_call>\nno JSON\n</tool_call>", "<tool_call>[]</tool_call>"):
        assert read(format_of(), output) == [Part("text", output)]
    assert read(format_of(), '<tool_call>{"name": "wri') == [
        Part("text", '<tool_call>{"name": "wri')
    ]
    assert read(format_of("mistral"), "a[TOOL_CALLS]b") == [Part("text", "a[TOOL_CALLS]b")]


@pytest.mark.parametrize("cut", ["<tool_call>", f'{WEATHER}<tool_call>{{"name": "wri', WRITE[:-4]])
def test_a_call_that_is_cut_off_is_no_text(cut: str) -> None:
    parser = OutputParser(format_of())
    assert text_of(parser.feed(cut) + parser.finish(cut=True)) == ""


def test_without_tools_calls_are_text() -> None:
    format = OutputFormat(chat_tokenizer())
    expected = [Part("reasoning", "a"), Part("text", WEATHER)]
    assert read(format, f"<think>a</think>{WEATHER}") == expected


def test_a_model_without_markers_writes_text() -> None:
    tokenizer = chat_tokenizer(None, markers=("<a>", "<b>"))
    expected = [Part("text", f"<think>{WEATHER}")]
    assert read(OutputFormat(tokenizer, TOOLS), "<think>", WEATHER) == expected


def test_headers_between_messages_are_no_text() -> None:
    tokenizer = chat_tokenizer("muse_spark", module="muse_spark")
    call = (
        '<atem:function_calls><atem:invoke name="f"><atem:parameter name="a">1</atem:parameter>'
        "</atem:invoke></atem:function_calls>"
    )
    thought = " to=self<|message|>Hm.<|eom|><|start|>assistant to="
    said = f"{thought}user<|message|>Hi.<|eot|>"
    for tools in (TOOLS, []):
        format = replace(OutputFormat(tokenizer, tools), initial="header")
        assert read(format, said) == [Part("reasoning", "Hm."), Part("text", "Hi.")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    deltas = read(replace(OutputFormat(tokenizer, tools), initial="header"), thought + call)
    assert calls_of(deltas) == [("f", {"a": 1})]


def test_after_the_one_call_that_there_may_be_nothing_follows() -> None:
    for parser, output in (
        ("json_tools", WEATHER + WRITE + "text"),
        ("mistral", OUTPUTS["mistral"][1]),
        ("pythonic", OUTPUTS["pythonic"][0]),
    ):
        reader = OutputParser(format_of(parser, several_calls=False))
        assert not reader.finished
        deltas = reader.feed(output) + reader.finish()
        assert reader.finished
        assert [name for name, _ in calls_of(deltas)] == ["weather"]
        assert text_of(deltas) in ("", "So:")


def test_a_space_of_the_tokenizer_is_dropped_once() -> None:
    assert read(format_of(trims_space=True), "", " ", " a") == [Part("text", " a")]
    assert read(format_of(trims_space=True), "a", " b") == [Part("text", "a b")]


@pytest.mark.parametrize(
    ("parser", "output"),
    [
        ("json_tools", f'\n{{"name": "write", "arguments": {ARGUMENTS}}}\n</tool_call>'),
        ("mistral", f'[{{"name": "write", "arguments": {ARGUMENTS}}}]'),
        ("mistral", f"write[ARGS]{ARGUMENTS}"),
        (
            "qwen3_coder",
            "\n<function=write>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        ),
        ("pythonic", "[write(city='Rome')]<|tool_call_end|>"),
    ],
)
def test_a_call_whose_marker_the_prompt_has_is_read(parser: str, output: str) -> None:
    ((called, arguments),) = calls_of(read(format_of(parser, initial="tool"), *output))
    assert called == "write"
    assert arguments in (json.loads(ARGUMENTS), {"city": "Rome"})


def test_of_a_begun_call_only_what_the_model_wrote_comes_back() -> None:
    assert read(format_of(initial="tool"), " no</tool_call>") == [Part("text", " no</tool_call>")]
