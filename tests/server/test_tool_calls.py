"""Tool calls are parsed by their formats' definitions, however an output is split.

The references are writers that format a call like the models' chat templates, and outputs with
their expected events.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx_lm import tool_parsers

from mlxspec.server.output_parser import OutputFormat, OutputParser
from mlxspec.server.tool_calls import CALL_FORMATS, typed, types_of
from tests.support.chat_tokenizer import chat_tokenizer, harmony_tokenizer

Arguments = dict[str, Any]
Event = tuple[Any, ...]
"""("text", text), ("reasoning", text) or ("call", name, arguments)."""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


NULLABLE = {
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "switch": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "label": {"type": ["string", "null"]},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "all": {"type": "boolean"},
    "lines": {"type": "array", "items": {"type": "integer"}},
    "options": {"type": "object"},
    **NULLABLE,
}
TOOLS = [
    tool("read", **PROPERTIES),
    tool("read_all"),
    tool("mcp.read", **PROPERTIES),
    tool("crm-get", **{"first-name": {"type": "string"}, "a b": {"type": "string"}}),
]


def format_of(parser: str, **fields: Any) -> OutputFormat:
    if parser == "harmony":
        return OutputFormat(harmony_tokenizer(), TOOLS, **{"initial": "header", **fields})
    markers = ("<s>", "</s>", "[THINK]", "[/THINK]") if parser == "mistral" else _MARKERS
    if parser == "muse_spark":
        tokenizer = chat_tokenizer(parser, module=parser)
        return OutputFormat(tokenizer, TOOLS, **{"initial": "header", **fields})
    return OutputFormat(chat_tokenizer(parser, markers=markers), TOOLS, **fields)


_MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


def events(format: OutputFormat, *segments: str, cut: bool = False) -> list[Event]:
    parser = OutputParser(format)
    found: list[list[str]] = []
    parts = [part for segment in segments for part in parser.feed(segment)]
    for part in parts + parser.finish(cut):
        if part.kind == "call":
            found.append(["call", part.name, ""])
        elif part.kind == "arguments" or (found and found[-1][0] == part.kind):
            found[-1][-1] += part.text
        else:
            found.append([part.kind, part.text])
    return [
        ("call", one[1], json.loads(one[2])) if one[0] == "call" else tuple(one) for one in found
    ]


def read(format: OutputFormat, output: str, **fields: Any) -> list[Event]:
    """Parse an output; check that it gives the same events in two parts and by characters."""
    whole = events(format, output, **fields)
    assert events(format, *output, **fields) == whole
    step = max(1, len(output) // 150)
    for at in range(1, len(output), step):
        assert events(format, output[:at], output[at:], **fields) == whole
    return whole


# --- writers, after the chat templates ---


def json_of(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: object) -> str:
    return value if isinstance(value, str) else json_of(value)


def hermes(*calls: tuple[str, Arguments]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json_of(given)}}}\n</tool_call>'
        for name, given in calls
    )


def mistral(*calls: tuple[str, Arguments]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json_of(given)}" for name, given in calls)


def mistral_ids(*calls: tuple[str, Arguments]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{json_of(given)}" for name, given in calls
    )


def mistral_list(*calls: tuple[str, Arguments]) -> str:
    listed = [{"name": name, "arguments": given, "id": "a1b2c3d4e"} for name, given in calls]
    return f"[TOOL_CALLS]{json_of(listed)}"


def qwen(*calls: tuple[str, Arguments]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{raw(v)}\n</parameter>\n" for k, v in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    )


def glm(*calls: tuple[str, Arguments], tag: str = "") -> str:
    return "\n".join(
        f"<{tag}tool_call>{name}\n"
        + "".join(
            f"<{tag}arg_key>{k}</{tag}arg_key>\n<{tag}arg_value>{raw(v)}</{tag}arg_value>\n"
            for k, v in given.items()
        )
        + f"</{tag}tool_call>"
        for name, given in calls
    )


def longcat(*calls: tuple[str, Arguments]) -> str:
    return glm(*calls, tag="longcat_")


def minimax(*calls: tuple[str, Arguments]) -> str:
    return (
        "<minimax:tool_call>\n"
        + "".join(
            f'<invoke name="{name}">\n'
            + "".join(f'<parameter name="{k}">{raw(v)}</parameter>\n' for k, v in given.items())
            + "</invoke>\n"
            for name, given in calls
        )
        + "</minimax:tool_call>"
    )


def minicpm(*calls: tuple[str, Arguments]) -> str:
    def value(given: object) -> str:
        text = raw(given)
        return f"<![CDATA[{text}]]>" if any(one in text for one in "<&\n") else text

    return "".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{k}">{value(v)}</param>' for k, v in given.items())
        + "</function>"
        for name, given in calls
    )


def muse(*calls: tuple[str, Arguments]) -> str:
    return (
        "<atem:function_calls>\n"
        + "".join(
            f'<atem:invoke name="{name}">\n'
            + "".join(
                f'<atem:parameter name="{k}">{raw(v)}</atem:parameter>\n' for k, v in given.items()
            )
            + "</atem:invoke>\n"
            for name, given in calls
        )
        + "</atem:function_calls>"
    )


def gemma(*calls: tuple[str, Arguments], quote: str = '<|"|>') -> str:
    def value(given: object) -> str:
        if isinstance(given, str):
            return f"{quote}{given}{quote}"
        if isinstance(given, bool):
            return "true" if given else "false"
        if isinstance(given, dict):
            return f"{{{','.join(f'{k}:{value(v)}' for k, v in sorted(given.items()))}}}"
        if isinstance(given, list):
            return f"[{','.join(map(value, given))}]"
        return str(given)  # None for null

    start, end = ("<|tool_call>", "<tool_call|>")
    if quote == "<escape>":
        start, end = "<start_function_call>", "<end_function_call>"
    return "".join(f"{start}call:{name}{value(given)}{end}" for name, given in calls)


def function_gemma(*calls: tuple[str, Arguments]) -> str:
    return gemma(*calls, quote="<escape>")


def pythonic(*calls: tuple[str, Arguments]) -> str:
    written = [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for name, given in calls
    ]
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


def kimi_k2(*calls: tuple[str, Arguments]) -> str:
    return (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
            f"{json_of(given)}<|tool_call_end|>"
            for index, (name, given) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    )


def kimi_k3(*calls: tuple[str, Arguments]) -> str:
    def opened(tag: str, **attributes: str) -> str:
        written = "".join(f' {key}="{value}"' for key, value in attributes.items())
        return f"<|open|>{tag}{written}<|sep|>"

    def kind(value: object) -> str:
        names = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
        return names.get(type(value), "number")

    return (
        opened("tools")
        + "".join(
            opened("call", tool=name, index=str(index))
            + "".join(
                f"{opened('argument', key=k, type=kind(v))}{raw(v)}<|close|>argument<|sep|>"
                for k, v in given.items()
            )
            + "<|close|>call<|sep|>"
            for index, (name, given) in enumerate(calls)
        )
        + "<|close|>tools<|sep|>"
    )


def harmony(*calls: tuple[str, Arguments]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json_of(given)}"
        "<|call|>"
        for name, given in calls
    )


Writer = Callable[..., str]
WRITERS: Sequence[tuple[str, Writer]] = [
    *(("json_tools", hermes), ("mistral", mistral), ("mistral", mistral_ids)),
    *(("mistral", mistral_list), ("qwen3_coder", qwen), ("glm47", glm)),
    *(("longcat", longcat), ("minimax_m2", minimax), ("minicpm5", minicpm)),
    *(("gemma4", gemma), ("function_gemma", function_gemma), ("pythonic", pythonic)),
    *(("kimi_k2", kimi_k2), ("kimi_k3", kimi_k3), ("harmony", harmony), ("muse_spark", muse)),
]
BY_WRITER = pytest.mark.parametrize(
    ("parser", "write"), WRITERS, ids=[write.__name__ + "-" + parser for parser, write in WRITERS]
)


def test_every_format_has_a_writer() -> None:
    assert {parser for parser, _ in WRITERS} == {*CALL_FORMATS}


def test_every_parser_of_mlx_lm_has_a_format() -> None:
    names = [module.name for module in pkgutil.iter_modules(tool_parsers.__path__)]
    modules = [import_module(f"{tool_parsers.__name__}.{name}") for name in names]
    homes = {module.parse_tool_call.__module__.rpartition(".")[2] for module in modules}
    assert homes | {"harmony"} == {*CALL_FORMATS}


# --- written calls are read back ---

CODE = "    if x:\n        return 1\n"
ARGUMENTS: Sequence[Arguments] = [
    {},
    {"path": "a.txt"},
    {"path": CODE, "count": 3},
    {"path": "\n\n  \n"},
    {"path": ""},
    {"path": "123", "label": "123", "note": "123"},
    {"path": "null", "label": None, "note": None, "maybe": None, "switch": None},
    {"path": "true", "all": False, "switch": True},
    {"count": 9007199254740993, "maybe": -9007199254740993},
    {"share": 0.1, "maybe": 5},
    {"path": '{"a": [1]}', "options": {"a": [1, {"b": None}], "c": "}"}, "lines": [1, 2]},
    {"path": "é\u2028 \U0001f600 'x' \\n \"y\" </s> <b>&amp;</b>"},
    {"path": "a, b) } ] : = ; call:x{y}", "lines": []},
    {"path": "<tool_call>x</tool_call> </parameter> </arg_value> </param> `</think>`"},
    {"path": "[TOOL_CALLS]read[ARGS]{} <function=read></function> <|call|>"},
]


@pytest.mark.slow
@BY_WRITER
def test_what_a_template_writes_is_read_back(parser: str, write: Writer) -> None:
    format = format_of(parser)
    for number, arguments in enumerate(ARGUMENTS):
        name = ("read", "mcp.read")[number % 2]
        written = write((name, arguments), ("read_all", {}))
        expected = [("call", name, arguments), ("call", "read_all", {})]
        assert read(format, written) == expected


@pytest.mark.slow
@BY_WRITER
def test_calls_stand_between_text(parser: str, write: Writer) -> None:
    call = write(("read", {"path": CODE}))
    expected: list[Event] = [("text", "I look."), ("call", "read", {"path": CODE})]
    before, after = "I look. \n\n", "\n Done.\n"
    if parser == "harmony":
        before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        after = f"<|start|>assistant<|channel|>final<|message|>{after}<|return|>"
    elif parser == "muse_spark":
        before = " to=user<|message|>I look.<|eom|><|start|>assistant to=read<|message|>"
    assert read(format_of(parser), before + call) == expected
    assert read(format_of(parser), before + call + after) in (
        [*expected, ("text", "Done.\n")],
        [*expected, ("text", "Done.")],
    )


@BY_WRITER
def test_names_that_no_tool_has_are_text(parser: str, write: Writer) -> None:
    output = write(("delete", {"path": "x"}))
    (found,) = read(format_of(parser), output)
    assert found == ("text", output.removesuffix("<|call|>"))


@BY_WRITER
def test_an_argument_with_two_values_keeps_both(parser: str, write: Writer) -> None:
    written = write(("read", {"path": "first", "note": "second"})).replace("note", "path")
    parts = OutputParser(format_of(parser))
    text = "".join(part.text for part in parts.feed(written) + parts.finish())
    assert "first" in text
    assert "second" in text


@pytest.mark.slow
@BY_WRITER
def test_an_output_that_ends_within_a_call_is_text(parser: str, write: Writer) -> None:
    output = write(("read", {"path": "a.txt", "lines": [1, 2]}))
    format = format_of(parser)
    for length in range(1, len(output), 3):
        found = events(format, output[:length])
        assert events(format, *output[:length]) == found
        if found[0][0] == "call":
            assert found[0][2].items() <= {"path": "a.txt", "lines": [1, 2]}.items()
        else:
            assert found == [("text", output[:length])]


@BY_WRITER
def test_what_may_be_one_call_is_one(parser: str, write: Writer) -> None:
    output = write(("read", {"count": 1}), ("read_all", {})) + "more"
    found = read(format_of(parser, several_calls=False), output)
    assert found == [("call", "read", {"count": 1})]


finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | finite
pieces_of_text = st.sampled_from(
    ["</", "<", ">", '"', "'", "\\", "{", "}", "[", "]", ",", ":", "=", "(", ")", "\n", " ", "null"]
)
texts = st.lists(st.text(max_size=4) | pieces_of_text, max_size=6).map("".join)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "path": texts,
    "count": st.integers(),
    "share": finite | st.integers(),
    "all": st.booleans(),
    "lines": st.lists(st.integers(), max_size=3),
    "options": st.dictionaries(
        st.from_regex(r"[a-z_]{1,5}", fullmatch=True), scalars | st.just("text"), max_size=3
    ),
    "maybe": st.none() | st.integers(),
    "switch": st.none() | st.booleans(),
    "label": st.none() | texts.filter(lambda text: text.strip() not in ("null", "None")),
}


@pytest.mark.slow
@given(
    st.sampled_from(WRITERS),
    st.fixed_dictionaries({}, optional=VALUES),
    st.sets(st.integers(0, 400), max_size=8),
)
def test_any_arguments_come_back(
    written_by: tuple[str, Writer], arguments: Arguments, cuts: set[int]
) -> None:
    parser, write = written_by
    options = arguments.get("options", {})
    if "gemma" in parser:  # whose objects are sorted and contain no null
        assume(None not in options.values())
    output = write(("read", arguments))
    ends = sorted({cut for cut in cuts if cut < len(output)})
    segments = [output[a:b] for a, b in zip([0, *ends], [*ends, len(output)], strict=True)]
    found = events(format_of(parser), *segments)
    assert found == [("call", "read", arguments)]
    assert json.dumps(found[0][2], sort_keys=True) == json.dumps(arguments, sort_keys=True)


@pytest.mark.slow
@given(st.sampled_from(WRITERS), st.data())
def test_damaged_outputs_are_the_same_at_every_cut(
    written_by: tuple[str, Writer], data: st.DataObject
) -> None:
    parser, write = written_by
    output = write(("read", {"path": CODE, "lines": [1]}), ("read_all", {}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(output)))
        length = data.draw(st.integers(0, 6))
        output = output[:at] + data.draw(pieces_of_text | st.just("")) + output[at + length :]
    format, cut = format_of(parser), data.draw(st.booleans())

    def texts_of(*segments: str) -> list[Any]:
        reader = OutputParser(format)
        parts = [part for segment in segments for part in reader.feed(segment)]
        joined: list[Any] = []
        for part in parts + reader.finish(cut):
            if joined and joined[-1][0] == part.kind:
                joined[-1][1] += part.text
            else:
                joined.append([part.kind, part.text, part.name])
        return joined

    whole = texts_of(output)
    assert texts_of(*output) == whole
    at = data.draw(st.integers(0, len(output)))
    assert texts_of(output[:at], output[at:]) == whole


# --- outputs and their events ---

PATH = "<tool_call>\n<function=read>\n<parameter={}>\n{}\n</parameter>\n</function>{}\n</tool_call>"


def called(name: str = "read", **arguments: Any) -> Event:
    return ("call", name, arguments)


# fmt: off
MEANINGS: dict[str, Sequence[tuple[str, Sequence[Event]]]] = {
    "json_tools": [
        ('<tool_call>{"name": "read", "arguments": {"path": "a\nb\tc"}}</tool_call>',
         [called(path="a\nb\tc")]),
        ('<tool_call>{"name": "read", "arguments": {"path": "</tool_call>"}}</tool_call>',
         [called(path="</tool_call>")]),
        ('<tool_call>{"name": "read", "parameters": {"path": "a"}}</tool_call>',
         [called(path="a")]),
        ('<tool_call>{"name": "read", "parameters": {"path": "a"}, "arguments": {}}</tool_call>',
         [called(path="a")]),
        ('<tool_call>{"name": "read", "arguments": {"count": 1\u0662}}</tool_call>',
         [called(count="1\u0662")]),
        ('<tool_call>{"name": "read", "arguments": null}</tool_call>', [called()]),
        ('<tool_call>{"name": "read"}</tool_call>', [called()]),
        ('<tool_call>{"name": "read", "arguments": "{\\"path\\": \\"a\\"}"}</tool_call>',
         [called(path="a")]),
        ('<tool_call>{"arguments": {"count": 1}, "name": "read", "id": "x"}</tool_call>',
         [called(count=1)]),
        ('<tool_call>{"name": "read", "arguments": {}}\n{"name": "read_all", "arguments": {}}\n'
         "</tool_call>", [called(), called("read_all")]),
        ('<tool_call>[{"name": "read"}, {"name": "read_all"}]</tool_call>',
         [called(), called("read_all")]),
        ('<tool_call>{"name": "read", "arguments": {"count": 2024-05-01}}</tool_call>',
         [called(count="2024-05-01")]),
        ('<tool_call>{"name": "read", "arguments": {"path": "\\d+\\n"}}</tool_call>',
         [called(path="\\d+\n")]),
        ('<tool_call>{"name": "read", "arguments": {"all": True}}</tool_call>', [called(all=True)]),
        *((text, [("text", text)]) for text in (
            "BEGIN `<think>` AFTER END",
            "A <think> in the middle",
            "Use <tool_call> to call.",
            "Use `<tool_call>` to call. ",
            "`<tool_call>`{}",
            "<tool_call> is GLM's tag.",
            "<tool_call>\n</tool_call>",
            '<tool_call>{"name": "delete", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "read", "arguments": {"path": "a" "b"}}</tool_call>',
            '<tool_call>{"name": "read", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "read", "arguments": {"path": 1,}}</tool_call>',
            '<tool_call>{"name": "read", "arguments": {]}}</tool_call>',
            '<tool_call>{"name": ["read"], "arguments": {}}</tool_call>',
            '<tool_call>{"name": "read", "argument": {"path": "a"}}</tool_call>',
            "<tool_call>" + 100 * "[",
        )),
        ('Use <tool_call>, so:\n<tool_call>{"name": "read"}</tool_call>',
         [("text", "Use <tool_call>, so:"), called()]),
        ('<tool_call>{"name": "read"} x</tool_call>', [called(), ("text", " x</tool_call>")]),
        ("<think>\na `</think>` b\n</think>\n\nc",
         [("reasoning", "a `</think>` b"), ("text", "c")]),
        ("<think>a</think>\n<think>b</think>c", [("reasoning", "ab"), ("text", "c")]),
        ('<think>a <tool_call>{"name": "read"}</tool_call> b</think>c',
         [("reasoning", "a"), called(), ("reasoning", "b"), ("text", "c")]),
    ],
    "mistral": [
        ('[TOOL_CALLS]read[CALL_ID]a1b2c3d4e[ARGS]{"path": "x.txt"}', [called(path="x.txt")]),
        ('[TOOL_CALLS]mcp.read[ARGS]{"path": "x"}', [called("mcp.read", path="x")]),
        ('[TOOL_CALLS]read{"path": "x"}', [called(path="x")]),
        ("[TOOL_CALLS]read_all[ARGS]{}read[ARGS]{}", [called("read_all"), called()]),
        ("[TOOL_CALLS]read[ARGS]null", [called()]),
        ("[TOOL_CALLS]read[ARGS]{} read it", [called(), ("text", " read it")]),
        ("[THINK]Hm. [TOOL_CALLS]?[/THINK]Yes",
         [("reasoning", "Hm. [TOOL_CALLS]?"), ("text", "Yes")]),
        ('[TOOL_CALLS] [{"name": "read", "arguments": {"count": 1}}]', [called(count=1)]),
        *((text, [("text", text)]) for text in (
            "[TOOL_CALLS] is Mistral's marker",
            "Say `[THINK]` or [THINK]",
            "[TOOL_CALLS]api.read[ARGS]{}",
            "[TOOL_CALLS]read[ARGS][1]",
        )),
    ],
    "qwen3_coder": [
        (PATH.format("count", "9007199254740993", ""), [called(count=9007199254740993)]),
        (PATH.format("count", "5.0", ""), [called(count=5)]),
        (PATH.format("count", "2024-05-01", ""), [called(count="2024-05-01")]),
        (PATH.format("maybe", "5", ""), [called(maybe=5)]),
        (PATH.format("switch", "true", ""), [called(switch=True)]),
        (PATH.format("switch", "False", ""), [called(switch=False)]),
        (PATH.format("label", "123", ""), [called(label="123")]),
        (PATH.format("label", "null", ""), [called(label=None)]),
        (PATH.format("path", "null", ""), [called(path="null")]),
        (PATH.format("path", "a", "  "), [called(path="a")]),
        (PATH.format("options", "{'a': None}", ""), [called(options={"a": None})]),
        ("<tool_call>\n<function=read>\n</function>\n<function=read_all>\n</function>\n"
         "</tool_call>", [called(), called("read_all")]),
        ("So: <function=read>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>\nDone",
         [("text", "So:"), called(path="x"), ("text", "Done")]),
        ('<tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call>', [called(path="a")]),
        *((text, [("text", text)]) for text in (
            "<function=delete></function>", "Write `<function=read>`.", "<function=read> is one",
        )),
    ],
    "glm47": [
        (f"<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>{CODE}</arg_value>\n</tool_call>",
         [called(path=CODE)]),
        ("<tool_call>read<arg_key>note</arg_key><arg_value>123</arg_value></tool_call>",
         [called(note="123")]),
        ("<tool_call>read_all</tool_call>", [called("read_all")]),
        ('<tool_call>{"name": "read", "arguments": {"count": 1}}</tool_call>', [called(count=1)]),
        *((text, [("text", text)]) for text in (
            "<tool_call> is GLM's tag.", "<tool_call>read", "<tool_call>read a=1</tool_call>",
        )),
    ],
    "minimax_m2": [
        (f'<minimax:tool_call><invoke name="read"><parameter name="path">{CODE}</parameter>'
         '<parameter name="label">null</parameter></invoke></minimax:tool_call>',
         [called(path=CODE, label=None)]),
        ("<minimax:tool_call><invoke name=read><parameter name='path'>null</parameter></invoke>"
         "</minimax:tool_call>", [called(path="null")]),
    ],
    "minicpm5": [
        ('<function name="read"><param name="path"><![CDATA[a</param>\n]]></param></function>',
         [called(path="a</param>\n")]),
    ],
    "gemma4": [
        ('<|tool_call>call:crm-get{first-name:<|"|>a}b<|"|>,a b:<|"|>c<|"|>,x.y:1}<tool_call|>',
         [("call", "crm-get", {"first-name": "a}b", "a b": "c", "x.y": 1})]),
        ("<|tool_call>call:mcp.read{path='it's',note=\"b\"}<tool_call|>",
         [called("mcp.read", path="it's", note="b")]),
        ("<|tool_call>call:read{path:Paris,count:3,all:true,maybe:None,lines:[1,2]}<tool_call|>",
         [called(path="Paris", count=3, all=True, maybe=None, lines=[1, 2])]),
        ('<|tool_call>call:read{<|"|>path<|"|>:<|"|><|"|>,options:{a:{b:[]}}}<tool_call|>',
         [called(path="", options={"a": {"b": []}})]),
        ("<|tool_call>call:read{}call:read_all{}<tool_call|>", [called(), called("read_all")]),
        *((text, [("text", text)]) for text in (
            "<|tool_call> is Gemma's.", "<|tool_call>call:read{path}<tool_call|>",
            "<|tool_call>call:read{path:a, b}<tool_call|>",
        )),
    ],
    "function_gemma": [
        ("<start_function_call>call:crm-get{first-name:<escape>a}b<escape>}<end_function_call>",
         [("call", "crm-get", {"first-name": "a}b"})]),
    ],
    "pythonic": [
        ("<|tool_call_start|>[read(path='it's'), read_all()]<|tool_call_end|>",
         [called(path="it's"), called("read_all")]),
        ("<|tool_call_start|>[read(path=\"a\nb\", lines=[1], maybe=None)]<|tool_call_end|>",
         [called(path="a\nb", lines=[1], maybe=None)]),
        ('<|tool_call_start|>[{"name": "read", "arguments": {"count": 1}}]<|tool_call_end|>',
         [called(count=1)]),
        ("<|tool_call_start|>[read(count=1)]", [called(count=1)]),
        *((text, [("text", text)]) for text in (
            "<|tool_call_start|>[read(1)]<|tool_call_end|>", "<|tool_call_start|>[]",
        )),
    ],
    "kimi_k2": [
        (text, [("text", text)]) for text in (
            "A:\n<|tool_calls_section_begin|>\n<|tool_calls_section_end|>\nB",
        )
    ],
    "kimi_k3": [
        (text, [("text", text)]) for text in (
            "A:\n<|open|>tools<|sep|>\n<|close|>tools<|sep|>\nB",
            '<|open|>tools<|sep|><|open|>call tool="read"<|sep|><|open|>argument key="path" type="|'
            "sep|>a<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        )
    ],
    "harmony": [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
         [("reasoning", "Hm."), ("text", "Hi")]),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.read"
         '<|channel|>commentary json<|message|>{"path": "a"}<|call|>',
         [("text", "I look."), called(path="a")]),
        (' to=functions.mcp.read<|channel|>commentary <|constrain|>json<|message|>{"path": "a"}',
         [called("mcp.read", path="a")]),
        ("<|channel|>commentary to=read<|message|>{}<|call|>", [called()]),
        *((text, [("text", text)]) for text in (
            "No header at all", "<|channel|>commentary to=functions.read<|message|>none",
            "<|channel|>commentary to=python<|message|>1 + 1",
        )),
    ],
}
# fmt: on


@pytest.mark.parametrize("parser", MEANINGS)
def test_outputs_mean_what_they_say(parser: str) -> None:
    for output, meaning in MEANINGS[parser]:
        assert read(format_of(parser), output) == [*meaning], output


def test_ids_of_the_model_are_kept() -> None:
    for parser, write, expected in (
        ("mistral", mistral_ids, "a1b2c3d4e"),
        ("mistral", mistral_list, "a1b2c3d4e"),
        ("kimi_k2", kimi_k2, "functions.read:0"),
    ):
        parsed = OutputParser(format_of(parser))
        parts = parsed.feed(write(("read", {}))) + parsed.finish()
        assert parts[0].id == expected
        parsed = OutputParser(format_of(parser))
        parts = parsed.feed(write(("read", {}), ("read", {}))) + parsed.finish()
        first, second = (part.id for part in parts if part.kind == "call")
        assert first == expected
        assert second != first  # with one id for both, no result could be told from the other


def test_white_space_that_json_does_not_have_becomes_spaces() -> None:
    arguments = {"path": "a\u3000b"}
    output = hermes(("read", arguments)).replace('"path": ', '\u3000"path"\xa0:\u3000')
    assert read(format_of("json_tools"), output) == [("call", "read", arguments)]


def test_the_schema_decides_what_a_text_is() -> None:
    root = {"$defs": {"n": {"type": "integer"}}, "type": "object"}
    for schema, text, value in (
        ({"$ref": "#/$defs/n"}, "7", 7),
        ({"$ref": "#/$defs/none"}, "7", 7),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "1", "1"),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "05", "05"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "integer"}, "null", None),
        ({"type": "integer"}, " 12\n", 12),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, 5000 * "9", 5000 * "9"),
        ({"type": "array"}, 5000 * "[", 5000 * "["),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "any"}, "[1]", [1]),
        ({"type": "dict"}, '{"a": "b\n"}', {"a": "b\n"}),
        ({}, "text", "text"),
        ({}, '"quoted"', '"quoted"'),
        (True, "5", 5),
        ({"type": 5, "anyOf": 3, "enum": "x"}, "5", 5),
    ):
        assert typed(text, schema, root) == value, (schema, text)
    loop: dict[str, Any] = {"$ref": "#/$defs/loop"}
    assert types_of(loop, {"$defs": {"loop": loop}}) == frozenset()
