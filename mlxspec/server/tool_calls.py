"""The formats in which models write tool calls, and how to read them.

``CALL_FORMATS`` has them under the names of mlx-lm's parsers. What a chat template writes is read
back as it was: a string keeps every character that the template puts between its markers, other
values are JSON, and the tool's schema distinguishes them. The name must be a tool's. What is not a
call in its format raises :class:`~mlxspec.server.text_reader.Unexpected`, and stays text.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ..jsonl import without_lone_surrogates
from .text_reader import Reading, TextReader, Unexpected, Unfinished


class Calls(Protocol):
    """Takes the calls that have been read."""

    def add(self, name: str, arguments: str, call_id: str = "") -> None:
        """Take a call.

        Args:
            arguments: the arguments as JSON.
            call_id: the call's id, if the model has written one.
        """

    def grow(self, name: str, call_id: str = "") -> Callable[[str], None]:
        """A function that takes a call's arguments, piece by piece, before :meth:`add` has all."""


class Tools(dict[str, dict[str, Any]]):
    """The schemas of the arguments of a request's tools, by name."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        super().__init__(
            (function["name"], function.get("parameters") or {}) for function in functions
        )

    def checked(self, name: object) -> str:
        """The name of a tool; raises Unexpected for others."""
        if not isinstance(name, str) or name not in self:
            raise Unexpected
        return name

    def value(self, name: str, key: str, text: str) -> Any:
        """An argument's value that was written as ``text``, without quotes if it is a string."""
        return typed(text, property_of(self[name], key), self[name])


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls.

    Attributes:
        markers: the texts that may begin calls.
        read: reads the calls after a marker. It takes the reader, the tools, what takes the
            calls, and the marker, which is empty if the prompt has it.
    """

    markers: tuple[str, ...]
    read: Callable[[TextReader, Tools, Calls, str], Reading[None]]


# --- values ---

_TYPES = {name: name for name in ("string", "integer", "number", "boolean", "array", "object")}
_TYPES |= {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "null": "null"}
_TYPES |= {"dict": "object", "list": "array"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_JSON_WORD = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_DEEPEST = 64  # levels of values


def property_of(schema: object, key: str) -> Any:
    """The schema of an object's property."""
    if not isinstance(schema, dict):
        return {}
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, dict) else None
    return schema.get("additionalProperties", {}) if declared is None else declared


def types_of(
    schema: object, root: Mapping[str, Any], known: dict[str, frozenset[str]] | None = None
) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it allows any.

    Args:
        root: the schema that has it, in which references are resolved.
        known: the types of references that have been resolved. One that refers to itself allows
            any.
    """
    if not isinstance(schema, dict):
        return frozenset()
    known = {} if known is None else known
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = frozenset()
            known[reference] = types_of(_referred(reference, root), root, known)
        return known[reference]
    inside = partial(types_of, root=root, known=known)
    types: set[str] = set()
    stated = schema.get("type")
    for name in [stated] if isinstance(stated, str) else _listed(stated):
        kind = _TYPES.get(str(name).lower())
        if kind is None:
            return frozenset()
        types.add(kind)
    if not types:
        types.update(map(_type_of, _listed(schema.get("enum"))))
        if "const" in schema:
            types.add(_type_of(schema["const"]))
    for key in () if types else ("anyOf", "oneOf"):
        cases = [inside(case) for case in _listed(schema.get(key))]
        if not all(cases):
            return frozenset()
        types.update(*cases)
    for case in () if types else _listed(schema.get("allOf")):
        types |= inside(case)
    if types and schema.get("nullable") is True:
        types.add("null")
    return frozenset(types)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    node: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        node = node.get(step) if isinstance(node, dict) else None
    return node


def _type_of(value: object) -> str:
    for kind, name in _KINDS:
        if isinstance(value, kind):
            return name
    return "null"


_KINDS: Sequence[tuple[type, str]] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


def typed(text: str, schema: object, root: Mapping[str, Any]) -> Any:
    """The value that was written as ``text``, without quotes if it is a string.

    A text that is JSON of a type that the schema allows is that value. Otherwise it is a string if
    the schema allows strings, and also if it is no JSON at all.

    Args:
        root: the schema that has it, in which references are resolved.
    """
    types = types_of(schema, root)
    if types == {"string"}:
        return text
    try:
        value = _value(text.strip(), types)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    kind = _type_of(value)
    if kind == "number" and "integer" in types and value.is_integer() and abs(value) < 2**53:
        return int(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if fits or "string" not in types else text


def _value(text: str, types: frozenset[str]) -> Any:
    """The value other than a string that a text stands for; raises an error if there is none."""
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = json.loads(_PYTHON.get(text, text), strict=False)
    except ValueError:
        if text[:1] not in ("{", "["):
            raise
        value = ast.literal_eval(text)
    if isinstance(value, str):
        raise ValueError("a string in quotes")
    json.dumps(value, allow_nan=False)
    return value


def _put(arguments: dict[str, Any], key: str, value: Any) -> None:
    """Add an argument; raises Unexpected if it has another value already, which would be lost."""
    if arguments.setdefault(key, value) != value:
        raise Unexpected


def written(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # halves of characters, which UTF-8 cannot express
        return json.dumps(arguments, allow_nan=False)
    return text


# --- JSON ---


Put = Callable[[str], None]
_NOT_JSONS_SPACE = re.compile(r"[^ \t\r\n]")


def _space(read: TextReader) -> Reading[str]:
    return _NOT_JSONS_SPACE.sub(" ", (yield from read.space()))


def json_text(read: TextReader, put: Put) -> Reading[None]:
    """Read a JSON value, and pass it on as it is written.

    Models put three things into JSON that do not belong there: raw line breaks and tabs in strings,
    which are escaped, bare words such as dates, which become strings, and other white space than
    JSON's, such as an ideographic space, which becomes a space.
    """
    closers: list[str] = []
    expected = "value"
    while True:
        put((yield from _space(read)))
        character = yield from read.peek()
        if expected in ("name", "item") and closers and character == closers[-1]:
            put((yield from read.one_of(closers.pop())))
        elif expected in ("name", "next name"):
            yield from _string(read, put)
            put((yield from _space(read)))
            put((yield from read.one_of(":")))
            expected = "value"
            continue
        elif expected in ("value", "item"):
            if character in ("{", "["):
                put((yield from read.one_of(character)))
                closers.append("}" if character == "{" else "]")
                expected = "name" if character == "{" else "item"
                continue
            yield from (_string if character == '"' else _word)(read, put)
        else:
            mark = yield from read.one_of(",", closers[-1])
            put(mark)
            if mark == ",":
                expected = "next name" if closers[-1] == "}" else "value"
                continue
            closers.pop()
        if not closers:
            return
        expected = "end"


def _string(read: TextReader, put: Put) -> Reading[None]:
    """Read a JSON string, and pass it on with control characters and lone backslashes escaped."""
    put((yield from read.one_of('"')))
    mark = ""
    while mark != '"':
        text, mark = yield from read.find(*_IN_STRING)
        if mark == "\\":
            following = yield from read.peek()
            if following == "u":
                following = yield from read.peek(5)
            if _ESCAPE.fullmatch(following):
                mark += yield from read.one_of(following)
            elif not following:
                raise Unfinished
            else:  # models forget to escape backslashes in regular expressions
                mark = "\\\\"
        elif mark != '"':
            mark = json.dumps(mark)[1:-1]
        put(text + mark)


_IN_STRING = ('"', "\\", *map(chr, range(32)))
_ESCAPE = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{4}')


def _word(read: TextReader, put: Put) -> Reading[None]:
    """Read a number, true, false or null, or a bare word, which becomes a string."""
    word = yield from read.run(_BARE)
    if not word:
        raise read.refused()
    word = _PYTHON.get(word, word)
    if not _JSON_WORD.fullmatch(word) or math.isinf(float(word) if word[-1].isdigit() else 0):
        word = json.dumps(word, ensure_ascii=False)
    put(word)


_BARE = re.compile(r"[\w.:+/-]")


def _object(read: TextReader, put: Put) -> Reading[str]:
    """Read a call's arguments: a JSON object, or null for none."""
    yield from read.space()
    pieces: list[str] = []
    if (yield from read.maybe("null")):
        return "{}"
    if (yield from read.peek()) != "{":
        raise read.refused()

    def keep(piece: str) -> None:
        pieces.append(piece)
        put(piece)

    yield from json_text(read, keep)
    return "".join(pieces)


def _json_call(read: TextReader, tools: Tools, calls: Calls) -> Reading[None]:
    """Read ``{"name": ..., "arguments": {...}}``, with its keys in any order."""
    yield from read.one_of("{")
    fields: dict[str, str] = {}
    mark = ","
    while mark == ",":
        yield from read.space()
        pieces: list[str] = []
        yield from _string(read, pieces.append)
        key = json.loads("".join(pieces))
        if key in fields:
            raise Unexpected
        yield from read.space()
        yield from read.one_of(":")
        yield from read.space()
        is_first = key in _ARGUMENTS and not fields.keys() & {*_ARGUMENTS}
        if is_first and "name" in fields and (yield from read.peek()) == "{":
            fields[key] = yield from _object(read, calls.grow(_text_of(fields["name"])))
        else:
            pieces = []
            yield from json_text(read, pieces.append)
            fields[key] = "".join(pieces)
        if key == "name":
            tools.checked(_text_of(fields[key]))
        yield from read.space()
        mark = yield from read.one_of(",", "}")
    name = tools.checked(_text_of(fields.get("name", "")))
    if fields.keys().isdisjoint(_ARGUMENTS) and not fields.keys() <= _WITHOUT_ARGUMENTS:
        raise Unexpected  # the arguments may be under another key: {} would lose them
    # If both are there, the first counts, which may have been sent already.
    arguments = next((fields[key] for key in fields if key in _ARGUMENTS), "{}")
    if arguments.startswith('"'):  # some models write the object as a string
        arguments = yield from _object(_reader_of(_text_of(arguments) or "{}"), _nowhere)
    elif arguments == "null":
        arguments = "{}"
    if not arguments.startswith("{"):
        raise Unexpected
    call_id = _text_of(fields.get("id", ""))
    calls.add(name, arguments, call_id if _ID.fullmatch(call_id) else "")


_ID = re.compile(r"[\w.:-]+", re.ASCII)
_ARGUMENTS = ("arguments", "parameters")
_WITHOUT_ARGUMENTS = {"name", "id", "type"}  # keys of calls without arguments


def _text_of(value: str) -> str:
    """The string that JSON text stands for; an empty one if it is another value."""
    return without_lone_surrogates(json.loads(value)) if value.startswith('"') else ""


def _nowhere(piece: str) -> None:
    pass


def _reader_of(text: str) -> TextReader:
    read = TextReader()
    read.text, read.ended = text, True
    return read


def _json_calls(
    read: TextReader, tools: Tools, calls: Calls, marker: str = "", end: str = ""
) -> Reading[None]:
    """Read objects, one after another or in a list, and the marker that ends them."""
    yield from read.space()
    in_list = yield from read.maybe("[")
    while True:
        yield from read.space()
        yield from _json_call(read, tools, calls)
        yield from read.space()
        if in_list:
            if (yield from read.one_of(",", "]")) == "]":
                break
        elif (yield from read.peek()) != "{":
            break
    if end:
        yield from read.space()
        yield from read.one_of(end)


def _mistral(read: TextReader, tools: Tools, calls: Calls, marker: str) -> Reading[None]:
    """Read a list of objects, or ``name[ARGS]{...}``, perhaps with ``[CALL_ID]id`` in between.

    No marker ends calls.
    """
    yield from read.space()
    if (yield from read.peek()) == "[":
        yield from _json_calls(read, tools, calls)
        return
    while True:
        name = yield from read.one_of(*tools)
        call_id = ""
        yield from read.space()
        if (yield from read.maybe("[CALL_ID]")):
            call_id = yield from read.run(_WORD)
            yield from read.space()
            yield from read.one_of("[ARGS]")
        else:
            yield from read.maybe("[ARGS]")
        arguments = yield from _object(read, calls.grow(name, call_id))
        calls.add(name, arguments, call_id)
        end = read.at
        yield from read.space()
        character = yield from read.peek()
        if not any(name.startswith(character) for name in tools if character):
            read.at = end
            return


_WORD = re.compile(r"[\w-]")


def _kimi_k2(read: TextReader, tools: Tools, calls: Calls, marker: str) -> Reading[None]:
    """Read calls with ids such as ``functions.name:0``, each with a JSON object."""
    ends: tuple[str, ...] = ()  # a section without calls is text
    while True:
        yield from read.space()
        mark = yield from read.one_of("<|tool_call_begin|>", *ends)
        if mark in ends:
            return
        ends = ("<|tool_calls_section_end|>",)
        yield from read.space()
        prefix = yield from read.maybe("functions.")
        name = yield from read.one_of(*tools)
        call_id = prefix + name + (yield from read.one_of(":")) + (yield from read.run(_WORD))
        yield from read.space()
        yield from read.one_of("<|tool_call_argument_begin|>")
        arguments = yield from _object(read, calls.grow(name, call_id))
        yield from read.space()
        yield from read.one_of("<|tool_call_end|>")
        calls.add(name, arguments, call_id)


HARMONY_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?\s*(?:to=(?P<to>[^\s<]+))?\s*"
    r"(?:<\|channel\|>\s*(?P<channel>\w*))?\s*(?:to=(?P<then_to>[^\s<]+))?\s*"
    r"(?:<\|constrain\|>)?\s*\w*\s*"
)
"""The header of gpt-oss's message; a recipient may come before or after the channel."""


def _harmony(read: TextReader, tools: Tools, calls: Calls, marker: str) -> Reading[None]:
    """Read a message to a function, whose header is the marker."""
    header = HARMONY_HEADER.fullmatch(marker.strip().removesuffix("<|message|>"))
    recipient = (header["to"] or header["then_to"] or "") if header else ""
    name = tools.checked(recipient.removeprefix("functions."))
    calls.add(name, (yield from _object(read, calls.grow(name))))
    yield from read.space()
    yield from read.one_of("<|call|>", "<|end|>", "<|return|>", "")


# --- elements ---


@dataclass(frozen=True)
class _Tags:
    """How a format writes calls whose arguments are elements.

    Attributes:
        call: the beginning of the tag that opens a call and has its name.
        parameter: the beginning of the tag that opens an argument.
        call_end: the tag that closes a call.
        parameter_end: the tag that closes an argument.
        end: the marker that ends the calls; empty if there is none.
        lines: whether a line break after the opening and before the closing tag belongs to them.
        cdata: whether a value may be in a CDATA section.
    """

    call: str
    parameter: str
    call_end: str
    parameter_end: str
    end: str = ""
    lines: bool = False
    cdata: bool = False

    def read(self, read: TextReader, tools: Tools, calls: Calls, marker: str) -> Reading[None]:
        """Read calls, as :class:`CallFormat` says."""
        if marker != self.call:
            yield from read.space()
            if self.lines and (yield from read.peek()) in ("{", "["):
                yield from _json_calls(read, tools, calls, end=self.end)
                return
            if marker or self.end:
                yield from read.one_of(self.call)
        while True:
            name = tools.checked((yield from _name(read)))
            arguments: dict[str, Any] = {}
            while True:
                yield from read.space()
                mark = yield from read.one_of(self.parameter, self.call_end)
                if mark == self.call_end:
                    break
                key = yield from _name(read)
                _put(arguments, key, tools.value(name, key, (yield from self._value(read))))
            calls.add(name, written(arguments))
            after = read.at
            yield from read.space()
            if marker == self.call:  # an end may follow a call whose beginning was left out
                mark = yield from read.maybe(self.call, *filter(None, [self.end]))
            else:
                mark = yield from read.one_of(self.call, self.end)
            if mark != self.call:
                if not mark:
                    read.at = after
                return

    def _value(self, read: TextReader) -> Reading[str]:
        start = read.at
        if self.cdata:
            yield from read.space()
            if (yield from read.maybe("<![CDATA[")):
                text = yield from read.enclosed("]]>", self.parameter_end)
                yield from read.space()
                yield from read.one_of(self.parameter_end)
                return text
            read.at = start
        text = yield from read.enclosed(self.parameter_end, self.parameter, self.call_end)
        return text.removeprefix("\n").removesuffix("\n") if self.lines else text


def _name(read: TextReader) -> Reading[str]:
    """Read the rest of an opening tag; return the name in it."""
    rest, _ = yield from read.find(">", limit=_LONGEST_TAG)
    match = _NAME.fullmatch(rest)
    if not match:
        raise Unexpected
    return match[2]


_LONGEST_TAG = 300  # characters
_NAME = re.compile(r"""(?:[^<>]*\bname\s*=)?\s*(["']?)([^<>"']+?)\1\s*(?:\s[\w:-]+=[^<>]*)?""")


def _pairs(tag: str) -> Callable[[TextReader, Tools, Calls, str], Reading[None]]:
    """A reader for calls that are a name, and elements for keys and values."""
    key_tag, value_tag = f"<{tag}arg_key>", f"<{tag}arg_value>"
    key_end, value_end = f"</{tag}arg_key>", f"</{tag}arg_value>"
    end = f"</{tag}tool_call>"

    def read_calls(read: TextReader, tools: Tools, calls: Calls, marker: str) -> Reading[None]:
        yield from read.space()
        if (yield from read.peek()) in ("{", "["):
            yield from _json_calls(read, tools, calls, end=end)
            return
        name = yield from read.one_of(*tools)
        arguments: dict[str, Any] = {}
        while True:
            yield from read.space()
            ends = (end, "") if arguments else (end,)
            if (yield from read.one_of(key_tag, *ends)) != key_tag:
                break
            key, _ = yield from read.find(key_end, limit=_LONGEST_TAG)
            yield from read.space()
            yield from read.one_of(value_tag)
            value = yield from read.enclosed(value_end, key_tag, end)
            _put(arguments, key.strip(), tools.value(name, key.strip(), value))
        calls.add(name, written(arguments))

    return read_calls


def _kimi_k3(read: TextReader, tools: Tools, calls: Calls, marker: str) -> Reading[None]:
    """Read calls whose arguments are elements that name their types, or are one JSON object."""
    ends: tuple[str, ...] = ()
    while True:
        yield from read.space()
        mark = yield from read.one_of("<|open|>call", *ends)
        if mark in ends:
            return
        ends = ("<|close|>tools<|sep|>",)
        name = tools.checked((yield from _attributes(read)).get("tool"))
        arguments: dict[str, Any] = {}
        text = None
        while True:
            yield from read.space()
            mark = yield from read.one_of(
                "<|open|>argument", "<|open|>json", "<|close|>call<|sep|>"
            )
            if mark == "<|close|>call<|sep|>":
                break
            attributes = yield from _attributes(read)
            if mark == "<|open|>json":
                text = yield from _object(read, _nowhere)
                yield from read.space()
                yield from read.one_of("<|close|>json<|sep|>")
                continue
            value, _ = yield from read.find("<|close|>argument<|sep|>")
            schema = {"type": attributes.get("type", "string")}
            _put(arguments, attributes.get("key", ""), typed(value, schema, {}))
        calls.add(name, text or written(arguments))


def _attributes(read: TextReader) -> Reading[dict[str, str]]:
    rest, _ = yield from read.find("<|sep|>", limit=_LONGEST_TAG)
    if not _ATTRIBUTES.fullmatch(rest):
        raise Unexpected
    pairs = re.findall(r'(\w+)="([^"]*)"', rest)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in pairs}


_ATTRIBUTES = re.compile(r'(\s*\w+="[^"]*")*\s*')


# --- objects of Gemma, calls of Python ---


def _gemma(quote: str, end: str) -> Callable[[TextReader, Tools, Calls, str], Reading[None]]:
    """A reader for ``call:name{key:value}``.

    Args:
        quote: the marker before and after a string.
        end: the marker that ends the calls.
    """

    def read_calls(read: TextReader, tools: Tools, calls: Calls, marker: str) -> Reading[None]:
        yield from read.space()
        mark = yield from read.one_of("call:")
        while mark == "call:":
            name = yield from read.one_of(*tools)
            yield from read.space()
            yield from read.one_of("{")
            values = yield from _gemma_object(read, quote, tools[name], tools[name])
            calls.add(name, written(values))
            yield from read.space()
            mark = yield from read.one_of("call:", end)

    return read_calls


def _gemma_object(
    read: TextReader, quote: str, schema: object, root: Mapping[str, Any], depth: int = 0
) -> Reading[dict[str, Any]]:
    result: dict[str, Any] = {}
    yield from read.space()
    mark = yield from read.maybe("}")
    while mark != "}":
        yield from read.space()
        key = yield from _gemma_key(read, quote, schema)
        inner = property_of(schema, key)
        _put(result, key, (yield from _gemma_value(read, quote, inner, root, depth)))
        yield from read.space()
        mark = yield from read.one_of(",", "}")
    return result


def _gemma_key(read: TextReader, quote: str, schema: object) -> Reading[str]:
    for mark in (quote, '"', "'"):
        if (yield from read.maybe(mark)):
            key, _ = yield from read.find(mark, limit=_LONGEST_TAG)
            yield from read.space()
            yield from read.one_of(":", "=")
            return key
    properties = schema.get("properties") if isinstance(schema, dict) else None
    known = [*properties] if isinstance(properties, dict) else []
    key, mark = yield from read.find(":", "=", limit=_LONGEST_TAG)
    while any(name.startswith(key + mark) for name in known):
        more, following = yield from read.find(":", "=", limit=_LONGEST_TAG)
        key, mark = key + mark + more, following
    key = key.strip()
    if not key or (key not in known and re.search(r"[{}\[\],\n]", key)):
        raise Unexpected
    return key


def _gemma_value(
    read: TextReader, quote: str, schema: object, root: Mapping[str, Any], depth: int
) -> Reading[Any]:
    if depth > _DEEPEST:
        raise Unexpected
    yield from read.space()
    if (yield from read.maybe(quote)):
        return (yield from read.find(quote))[0]
    for mark in ('"', "'"):
        if (yield from read.maybe(mark)):
            text = yield from read.enclosed(mark, ",", "}", "]")
            return _unquoted(text) if mark == '"' else text
    if (yield from read.maybe("{")):
        return (yield from _gemma_object(read, quote, schema, root, depth + 1))
    if (yield from read.maybe("[")):
        items: list[Any] = []
        inner = schema.get("items") if isinstance(schema, dict) else None
        yield from read.space()
        mark = yield from read.maybe("]")
        while mark != "]":
            items.append((yield from _gemma_value(read, quote, inner, root, depth + 1)))
            yield from read.space()
            mark = yield from read.one_of(",", "]")
        return items
    text = yield from read.run(_UNTIL_END)
    if not text.strip():
        raise read.refused()
    return typed(text.strip(), schema, root)


_UNTIL_END = re.compile(r"[^,{}\[\]]")


def _unquoted(text: str) -> str:
    """The string that is written between double quotes, with or without JSON's escapes."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _pythonic(read: TextReader, tools: Tools, calls: Calls, marker: str) -> Reading[None]:
    """Read ``[name(key="value", other=1)]``, or the list of objects of older models."""
    yield from read.space()
    yield from read.one_of("[")
    yield from read.space()
    if (yield from read.peek()) == "{":
        read.at = read.text.rindex("[", 0, read.at)
        yield from _json_calls(read, tools, calls, end="<|tool_call_end|>")
        return
    mark = ","
    while mark == ",":
        yield from read.space()
        name = yield from read.one_of(*tools)
        yield from read.space()
        yield from read.one_of("(")
        arguments: dict[str, Any] = {}
        yield from read.space()
        close = yield from read.maybe(")")
        while close != ")":
            yield from read.space()
            key = yield from read.run(_WORD)
            yield from read.space()
            if not key:
                raise read.refused()
            yield from read.one_of("=")
            yield from read.space()
            schema = property_of(tools[name], key)
            _put(arguments, key, (yield from _python_value(read, schema, tools[name])))
            yield from read.space()
            close = yield from read.one_of(",", ")")
        calls.add(name, written(arguments))
        yield from read.space()
        mark = yield from read.one_of(",", "]")
    yield from read.space()
    yield from read.one_of("<|tool_call_end|>", "")


def _python_value(read: TextReader, schema: object, root: Mapping[str, Any]) -> Reading[Any]:
    """Read an argument: a string in quotes, a list, a dictionary, or a bare word."""
    start = read.at
    if quote := (yield from read.maybe('"', "'")):
        yield from _python_string(read, quote, ",", ")")
        text = read.text[start : read.at]
        try:
            return str(ast.literal_eval(text))
        except (ValueError, SyntaxError):  # templates write strings without escapes
            return text[1:-1]
    depth = 0
    while character := (yield from read.peek()):
        if not depth and character in ",)":
            break
        read.at += 1
        if character in "'\"":
            yield from _python_string(read, character, ",", ":", "]", "}", ")")
        depth += (character in "[{(") - (character in "]})")
    if read.at == start:
        raise read.refused()
    return typed(read.text[start : read.at], schema, root)


def _python_string(read: TextReader, quote: str, *followers: str) -> Reading[None]:
    """Read the rest of a string whose opening quote has been read."""
    while True:
        text = yield from read.enclosed(quote, *followers)
        slashes = len(text) - len(text.rstrip("\\"))
        if slashes % 2 == 0:
            return


# --- the table ---


_QWEN = _Tags(
    "<function=", "<parameter=", "</function>", "</parameter>", "</tool_call>", lines=True
)
_MINIMAX = _Tags("<invoke", "<parameter", "</invoke>", "</parameter>", "</minimax:tool_call>")
_MINICPM = _Tags("<function name=", "<param name=", "</function>", "</param>", cdata=True)
_MUSE = _Tags(
    *("<atem:invoke", "<atem:parameter", "</atem:invoke>", "</atem:parameter>"),
    end="</atem:function_calls>",
)

CALL_FORMATS: Mapping[str, CallFormat] = {
    "json_tools": CallFormat(("<tool_call>",), partial(_json_calls, end="</tool_call>")),
    "mistral": CallFormat(("[TOOL_CALLS]",), _mistral),
    "qwen3_coder": CallFormat(("<tool_call>", "<function="), _QWEN.read),
    "glm47": CallFormat(("<tool_call>",), _pairs("")),
    "longcat": CallFormat(("<longcat_tool_call>",), _pairs("longcat_")),
    "minimax_m2": CallFormat(("<minimax:tool_call>",), _MINIMAX.read),
    "minicpm5": CallFormat(("<function name=",), _MINICPM.read),
    "muse_spark": CallFormat(("<atem:function_calls>",), _MUSE.read),
    "gemma4": CallFormat(("<|tool_call>",), _gemma('<|"|>', "<tool_call|>")),
    "function_gemma": CallFormat(
        ("<start_function_call>",), _gemma("<escape>", "<end_function_call>")
    ),
    "pythonic": CallFormat(("<|tool_call_start|>",), _pythonic),
    "harmony": CallFormat((), _harmony),
    "kimi_k2": CallFormat(("<|tool_calls_section_begin|>",), _kimi_k2),
    "kimi_k3": CallFormat(("<|open|>tools<|sep|>",), _kimi_k3),
}
"""The formats, by mlx-lm's names; gpt-oss's, "harmony", has none."""
