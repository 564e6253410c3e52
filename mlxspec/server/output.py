"""From the text that a model writes to what it means: answer, reasoning, calls of tools.

mlx-lm knows the markers of each family of models (``TextStateMachine``) and how to read its calls
(``tool_parsers``). Here is the one place that uses them.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.constraint import ONE_LINE, Constraint
from ..engine.grammar import token_of


@dataclass(frozen=True)
class Delta:
    """A further part of an answer.

    Attributes:
        kind: "text", "reasoning", "call" for the begin of a tool call, or "arguments" for more
            of its arguments, a JSON text.
        text: of the part.
        index: of the call among those of the answer.
        id: by which the client returns a call's result.
        name: the function's.
    """

    kind: str
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The deltas, with neighbours of one kind made one."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else Delta("")
        if delta.kind != "call" and (last.kind, last.index) == (delta.kind, delta.index):
            result[-1] = replace(last, text=last.text + delta.text)
        else:
            result.append(delta)
    return result


@dataclass(frozen=True)
class CallFormat:
    """How a model writes the calls of tools.

    Attributes:
        start: the marker before a call.
        end: the marker after it; empty where a call extends to the output's end.
        parse: mlx-lm's parser, from the text between the markers and the tools to a call or
            several.
        header: what comes before arguments that stand there as a JSON object, with the
            function's name as its first group; None for formats whose arguments are not JSON.
        tools: as the client sent them.
    """

    start: str
    end: str
    parse: Callable[[str, Any], Any]
    header: re.Pattern[str] | None
    tools: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class OutputFormat:
    """How to read an output.

    Attributes:
        machine: knows the markers, and which state each leads to.
        initial: the state in which the output begins: "normal", "reasoning", "tool", or one of
            the model's own.
        calls: how calls are written; None where no tools were offered.
        call_begun: what the prompt has of the first call, after its marker.
        several_calls: an answer may have more than one.
        trims_space: the output begins with a space that the tokenizer has put there.
    """

    machine: TextStateMachine
    initial: str = "normal"
    calls: CallFormat | None = None
    call_begun: str = ""
    several_calls: bool = True
    trims_space: bool = False


_HEADERS = {
    "json_tools": re.compile(
        r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'
    ),
    "mistral": re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w-]+)\s*\[ARGS\]\s*(?=\{)"),
}
"""By mlx-lm's parsers: the formats whose arguments are handed on while they are written."""

_LONGEST_HEADER = 1000  # characters; a longer header is read once the call has ended


def output_format(
    tokenizer: TokenizerWrapper, tools: Sequence[dict[str, Any]] = ()
) -> OutputFormat:
    """The format of a model's outputs.

    Args:
        tokenizer: the model's.
        tools: those that the model has been offered. Without any, markers of calls are text.
    """
    known: Any = tokenizer
    calls = None
    if tools and tokenizer.has_tool_calling:
        calls = CallFormat(
            tokenizer.tool_call_start,
            tokenizer.tool_call_end,
            tokenizer.tool_parser,
            _HEADERS.get(parser_name(tokenizer)),
            tools,
        )
    else:
        known = SimpleNamespace(
            has_thinking=tokenizer.has_thinking,
            think_start=tokenizer.think_start,
            think_end=tokenizer.think_end,
            has_tool_calling=False,
            structural_markers=tokenizer.structural_markers,
            response_transitions={
                state: kept
                for state, edges in tokenizer.response_transitions.items()
                if (kept := [edge for edge in edges if edge[1] != "tool"])
            },
        )
    return OutputFormat(make_text_state_machine(known), calls=calls)


def call_opening(tokenizer: TokenizerWrapper, name: str | None) -> str | None:
    """How a call begins, after the marker, so that the model has to continue it.

    Args:
        tokenizer: the model's.
        name: the function's; None for whichever the model takes.

    Returns:
        None where it is not known.
    """
    if not tokenizer.has_tool_calling or tokenizer.response_initial_state:
        return None
    if name is None:
        return ""
    # Without the space before the arguments, which is part of the token that begins them.
    as_json = f'{{"name": {json.dumps(name)}, "arguments":'
    parser = parser_name(tokenizer)
    if parser == "json_tools":
        return f"\n{as_json}"
    if parser == "qwen3_coder":
        return f"\n<function={name}>\n"
    if parser == "mistral":
        return f"{name}[ARGS]" if "[ARGS]" in tokenizer.get_vocab() else f"[{as_json}"
    return None


def parser_name(tokenizer: TokenizerWrapper) -> str:
    """mlx-lm's name of the way in which a model calls tools."""
    return str(getattr(tokenizer.tool_parser, "__module__", "")).rpartition(".")[2]


class OutputParser:
    """Reads one output as it comes, in segments of any length.

    White space next to a marker is dropped: it belongs to the format, and chat templates put it
    there again.

    Attributes:
        n_calls: how many calls have begun.
        finished: the answer has the one call that it may have; what follows is dropped.
    """

    def __init__(self, format: OutputFormat) -> None:
        self.n_calls = 0
        self.finished = False
        self._format = format
        self._machine_state = format.machine.make_state(format.initial)
        self._state = format.initial
        self._gap = ""  # white space that is dropped if a marker follows
        self._after_marker = format.initial == "reasoning"
        self._trims_space = format.trims_space
        self._call = _CallText(start="", begun=len(format.call_begun))
        self._ready = self._add(format.call_begun) if format.initial == "tool" else []

    @property
    def reasoning(self) -> bool:
        """Whether the output has come to a piece of reasoning that has not ended."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Delta]:
        """Take the next segment of the output."""
        if text and self._trims_space:
            self._trims_space = False
            text = text.removeprefix(" ")
        self._machine_state, segments = TextStateMachine.split(self._machine_state, text)
        deltas, self._ready = self._ready, []
        for index, (state, segment) in enumerate(segments):
            if index:
                deltas += self._enter(state)
            deltas += self._add(segment)
        return joined(deltas)

    def finish(self, cut: bool = False) -> list[Delta]:
        """The output has ended: what was held back.

        Args:
            cut: it was not the model that ended it. A call that has only begun is dropped then:
                it is not text, and the client sees from the end why it is missing.
        """
        self._machine_state, held, _ = TextStateMachine.flush(self._machine_state)
        deltas = self._ready + self._add(held)
        if self._state == "tool":
            deltas += self._end_call("", cut)
        elif self._gap:
            deltas += [self._said(self._gap)]
        self._ready, self._gap = [], ""
        return joined(deltas)

    def _enter(self, state: str) -> list[Delta]:
        """A marker has been passed."""
        calls = self._format.calls
        deltas = self._end_call(calls.end) if calls and self._state == "tool" else []
        self._state, self._gap, self._after_marker = state, "", True
        if calls and state == "tool":
            self._call = _CallText(calls.start)
        return deltas

    def _add(self, text: str) -> list[Delta]:
        if self.finished:
            return []
        if self._state == "tool":
            return self._add_to_call(text)
        if self._state not in ("normal", "reasoning"):
            return []  # a header between messages
        if self._after_marker:
            text = text.lstrip()
        text = self._gap + text
        solid = text.rstrip()
        self._gap = text[len(solid) :]
        if not solid:
            return []
        self._after_marker = False
        return [self._said(solid)]

    def _said(self, text: str) -> Delta:
        return Delta("reasoning" if self.reasoning else "text", text)

    # --- calls ---

    def _add_to_call(self, text: str) -> list[Delta]:
        call, calls = self._call, self._format.calls
        call.text += text
        deltas: list[Delta] = []
        while calls and calls.header and not self.finished:
            if not call.in_arguments:
                end = call.taken + _LONGEST_HEADER
                header = calls.header.match(call.text, call.taken, end)
                if not header:
                    break
                deltas.append(self._begin(header[1]))
                call.begin_arguments(header.end())
            if arguments := call.take_arguments():
                deltas.append(Delta("arguments", arguments, self.n_calls - 1))
            if call.in_arguments:
                break
            self.finished = not self._format.several_calls
        return deltas

    def _begin(self, name: str, call_id: object = None) -> Delta:
        self.n_calls += 1
        call_id = call_id if isinstance(call_id, str) else new_call_id()
        return Delta("call", index=self.n_calls - 1, id=call_id, name=name)

    def _end_call(self, marker: str, cut: bool = False) -> list[Delta]:
        """The calls that are not known yet; what cannot be read as a call is text."""
        call, calls = self._call, self._format.calls
        if self.finished or not calls or call.in_arguments:
            return []
        try:
            parsed = [_read_call(one) for one in _as_list(calls.parse(call.text, calls.tools))]
        except Exception:  # the parsers raise whatever a text makes them raise
            return [] if cut else self._as_text(marker)
        if call.taken:
            return []
        deltas: list[Delta] = []
        for name, arguments, call_id in parsed:
            if self.finished:
                break
            deltas += [self._begin(name, call_id), Delta("arguments", arguments, self.n_calls - 1)]
            self.finished = not self._format.several_calls
        return deltas

    def _as_text(self, marker: str) -> list[Delta]:
        """What follows the last call that could be read; all of it, markers too, if none could."""
        call = self._call
        if not call.taken:
            return [Delta("text", call.start + call.text[call.begun :] + marker)]
        rest = call.text[call.taken :]
        return [Delta("text", rest)] if rest.strip(_CLOSING) else []


_CLOSING = "}] \t\r\n"  # what may follow the arguments of a call


class _CallText:
    """The text between two markers of calls, and how much of it has been handed on.

    Args:
        start: the marker before it, unless that stands in the prompt.
        begun: how many of its characters do.

    Attributes:
        text: all of it so far.
        taken: where the part begins that has not been handed on.
        in_arguments: that part is of a JSON object that has not ended.
    """

    def __init__(self, start: str, begun: int = 0) -> None:
        self.text = ""
        self.start = start
        self.begun = begun
        self.taken = 0
        self.in_arguments = False

    def begin_arguments(self, at: int) -> None:
        """A JSON object stands from here on."""
        self.taken = at
        self.in_arguments = True
        self._depth = 0
        self._in_string = self._escaped = False

    def take_arguments(self) -> str:
        """As much of the object as is there."""
        begin = self.taken
        for at in range(begin, len(self.text)):
            self._pass(self.text[at])
            self.taken = at + 1
            if not self._depth:
                self.in_arguments = False
                break
        return self.text[begin : self.taken]

    def _pass(self, character: str) -> None:
        if self._in_string:
            if self._escaped or character == "\\":
                self._escaped = not self._escaped
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1


def _as_list(parsed: Any) -> list[Any]:
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls:
        raise ValueError("no call")
    return calls


def _read_call(call: dict[str, Any]) -> tuple[str, str, object]:
    """Name, arguments as JSON, and id of a call that mlx-lm has parsed.

    Raises:
        Exception: of any kind, if it is not a call.
    """
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("a function without a name")
    if not isinstance(arguments, str):  # as a string they are JSON already
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + arguments).encode()  # raises for half a surrogate pair, which no answer can hold
    return name, arguments, call.get("id")


def new_call_id() -> str:
    """An id for a call: nine letters and digits, since Mistral's templates accept no other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def is_strict(tool: dict[str, Any]) -> bool:
    """Whether a tool asks for arguments that are valid under its schema."""
    return bool(tool["function"].get("strict"))


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    schema: dict[str, Any] = tool["function"].get("parameters") or {}
    return {"type": "object", **schema}


def calls_constraint(
    tokenizer: TokenizerWrapper,
    tools: Sequence[dict[str, Any]],
    *,
    forced: str | None = None,
    several: bool = True,
) -> Constraint | None:
    """What follows the marker of a call, to the end of the output.

    Args:
        tokenizer: the model's.
        tools: those that may be called.
        forced: the function whose call the prompt has begun, as
            :func:`mlxspec.server.output.call_opening` writes it.
        several: whether there may be more than one call.

    Returns:
        None where the arguments of a call are not JSON.
    """
    parser, has_args = parser_name(tokenizer), "[ARGS]" in tokenizer.get_vocab()
    start = _literal(tokenizer, tokenizer.tool_call_start)
    names = [tool["function"]["name"] for tool in tools]
    as_json = [
        f'{_quoted(head)} args_{number} "}}"'
        for number, name in enumerate(names)
        for head in [f'{{"name": {json.dumps(name)}, "arguments": ']
    ]
    if parser == "json_tools":
        calls, separator = as_json, f"WS? {start} WS?"
        before, after = "WS? ", f" WS? {_literal(tokenizer, tokenizer.tool_call_end)}"
        begun = 'SPACE? {args} "}}"' + after
    elif parser == "mistral" and has_args:
        args = _literal(tokenizer, "[ARGS]")
        calls = [f"{_quoted(name)} {args} args_{number}" for number, name in enumerate(names)]
        before, separator, after, begun = "", start, "", "{args}"
    elif parser == "mistral":
        calls, before, separator, after = as_json, '"[" ', '", "', ' "]"'
        begun = 'SPACE? {args} "}}" "]"'
    else:
        return None
    if forced is not None:
        rule = begun.format(args=f"args_{names.index(forced)}")
    elif parser == "mistral" and not has_args:  # one list of all calls
        rule = f"{before}call{f' ({separator} call)*' if several else ''}{after}"
    else:
        one = f"{before}call{after}"
        rule = f"{one}{f' ({separator} call{after})*' if several else ''}"
    schemas = [parameters_of(tool) if is_strict(tool) else {"type": "object"} for tool in tools]
    lark = [
        f"start: {rule}",
        *(["call: " + " | ".join(calls)] if forced is None else []),
        *(
            f"args_{number}: %json {json.dumps({'x-guidance': ONE_LINE, **schema})}"
            for number, schema in enumerate(schemas)
            if forced in (None, names[number])
        ),
        *(["WS: /[ \\n]{1,2}/"] if "WS" in rule else []),
        *(['SPACE: " "'] if "SPACE" in rule else []),
    ]
    return Constraint("lark", "\n".join(lark))


def _literal(tokenizer: TokenizerWrapper, marker: str) -> str:
    """A marker in a grammar: the token that it is, or its text."""
    token = token_of(tokenizer, marker)
    if not marker:
        return ""
    return _quoted(marker) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
