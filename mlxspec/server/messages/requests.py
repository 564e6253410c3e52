"""What clients of Anthropic's Messages API ask for, in the terms of a request for a chat.

A body becomes one of ``/v1/chat/completions``, so that a conversation has the same tokens over
both. As there, a field that nobody knows is ignored, and one that is known and cannot be honoured
is an error that names it. Fields that only say how Anthropic's own servers should do their work,
such as ``cache_control`` and ``service_tier``, are taken without effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import NO_THREADS, ApiError
from ..fields import Fields, as_integer, checked_body
from ..requests import ChatRequest, left_out, parse_as_chat, refuse_unsupported

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""The first line of Claude Code's system prompt, mostly in a block of its own. Some of it differs
from request to request, and then no prefix would ever be found in the cache."""

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


@dataclass(frozen=True)
class MessagesRequest(ChatRequest):
    """A request for a message.

    Attributes:
        cuts_max_tokens: clients of this API ask for what the largest of models can write.
    """

    cuts_max_tokens: ClassVar[bool] = True


def parse_messages(body: object, *, to_count: bool = False) -> MessagesRequest:
    """Read a body of ``/v1/messages``.

    Args:
        body: as it was sent.
        to_count: it is one of ``/v1/messages/count_tokens``, which needs no ``max_tokens``.

    Raises:
        ApiError: a field is missing or wrong, or asks for what this server does not do.
    """
    fields = Fields(checked_body(body))
    refuse_unsupported(fields, _UNSUPPORTED)
    if fields["thread"] is not None:
        raise ApiError(
            "thread: the server keeps no conversations; leave it out, and send all messages.",
            param="thread",
            code=NO_THREADS,
        )
    for name in ("metadata", "context_management", "cache_control"):
        fields.object(name)
    fields.text("service_tier")
    if not to_count and (as_integer(fields["max_tokens"]) or 0) < 1:
        fields.refuse("max_tokens", "choose an integer of 1 or more")
    chat: dict[str, Any] = {name: fields[name] for name in _SAME}
    chat["messages"] = [*_system(fields), *_turns(fields)]
    chat["tools"], names = [], dict(_NAMES)
    for index, tool in enumerate(fields.items("tools") or []):
        chat["tools"].append(_tool(Fields(tool, f"tools[{index}]")))
        names[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    chat |= _tool_choice(fields) | _thinking(fields)
    config = fields.object("output_config") or Fields({})
    chat["reasoning_effort"] = config.word("effort", _EFFORTS)
    format = config.object("format") or fields.object("output_format")
    if format is not None:
        chat["response_format"] = _response_format(format)
        names |= {"response_format.json_schema": format.path, "response_format": format.path}
    chat["stop"] = fields.items("stop_sequences")
    return MessagesRequest(**parse_as_chat(chat, names))


_SAME = (
    *("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "chat_template_kwargs"),
)
"""Fields that are the same in both APIs, or that no client of this API sends by chance."""

_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "compaction": ((), "leave it out, since the server sums up no conversations"),
    "container": ((), "leave it out, since the server runs no code"),
    "mcp_servers": (([],), "leave it out, since the server calls no tools; offer them in tools"),
}

_NAMES = {"stop": "stop_sequences", "tool_choice.function": "tool_choice"}
"""What fields of a chat are called here."""


# --- messages ---


def _system(fields: Fields) -> list[dict[str, Any]]:
    """What comes before the conversation."""
    text = _text_of(fields, "system", lambda block: _BILLING.sub("", _text_in(block)))
    return [{"role": "system", "content": text}] if text else []


def _turns(fields: Fields) -> list[dict[str, Any]]:
    """The messages of a chat."""
    given = fields.items("messages")
    if not given:
        fields.refuse("messages", "send a list with one message or more")
    turns: list[dict[str, Any]] = []
    for index, one in enumerate(given):
        for turn in _turns_of(Fields(one, f"messages[{index}]")):
            _append(turns, turn)
    for turn in turns:
        turn["content"] = "\n\n".join(filter(None, turn["content"]))
        if "reasoning_content" in turn:
            turn["reasoning_content"] = "".join(turn["reasoning_content"])
    return turns


_TEXTS = ("content", "reasoning_content")


def _append(turns: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Add a turn, to the last one where the same speaks on, as Anthropic's API does.

    The texts of a turn are lists, which are joined in the end: ten thousand turns may be one.
    """
    turn = turn | {name: [turn[name]] for name in _TEXTS if name in turn}
    last = turns[-1] if turns else {}
    if turn["role"] == "tool" or last.get("role") != turn["role"] or "tool_calls" in last:
        turns.append(turn)
        return
    for name in _TEXTS:
        if name in turn:
            last.setdefault(name, []).extend(turn[name])
    if "tool_calls" in turn:
        last["tool_calls"] = turn["tool_calls"]


def _turns_of(fields: Fields) -> list[dict[str, Any]]:
    role = fields.word("role", ("user", "assistant", "system"))
    if role == "assistant":
        return [_answer(fields)]
    if role == "user":
        return _asked(fields)
    if role is None:
        fields.refuse("role", "choose user, assistant or system")
    # Within a conversation few chat templates take it. This is how Claude Code marks what it
    # says for the user, where it cannot say it so.
    text = _text_of(fields, "content")
    marked = f"<system-reminder>\n{text}\n</system-reminder>"
    return [{"role": "user", "content": marked}] if text else []


def _asked(fields: Fields) -> list[dict[str, Any]]:
    """What the user says, and results of tools, in their order."""
    turns: list[dict[str, Any]] = []
    texts: list[str] = []  # since the last result
    for block in _blocks(fields, "content"):
        if block.text("type") == "tool_result":
            turns += [*_said(texts), _tool_result(block)]
            texts = []
        else:
            texts.append(_text_in(block))
    return [*turns, *_said(texts)]


def _said(texts: Sequence[str]) -> list[dict[str, Any]]:
    """A turn of the user, if there are texts for one."""
    return [{"role": "user", "content": "".join(texts)}] if texts else []


def _tool_result(block: Fields) -> dict[str, Any]:
    text = _text_of(block, "content", _text_in_result)
    if block.flag("is_error"):
        text = f"Error: {text}"  # which templates have no other place for
    return {"role": "tool", "content": text, "tool_call_id": block.needed_text("tool_use_id")}


def _text_in_result(block: Fields) -> str:
    kind = block.needed_text("type")
    if kind == "tool_reference":  # to a tool that has been offered already
        return block.needed_text("tool_name")
    return _text_in(block) if kind == "text" else left_out(kind)


def _answer(fields: Fields) -> dict[str, Any]:
    """A message of the assistant."""
    content, reasoning = "", ""
    calls = []
    for block in _blocks(fields, "content"):
        kind = block.text("type")
        if kind == "thinking":
            reasoning += block.text("thinking") or ""
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind != "redacted_thinking":  # which nobody but Anthropic can read
            content += _text_in(block)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Fields) -> dict[str, Any]:
    name, call_id = block.needed_text("name"), block.needed_text("id")
    block.object("input")
    function = {"name": name, "arguments": block["input"] or {}}
    return {"type": "function", "id": call_id, "function": function}


def _blocks(fields: Fields, name: str) -> Iterable[Fields]:
    """A content's blocks; a string is one with a text."""
    content = fields[name]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        fields.refuse(name, "send a string, or a list of blocks")
    for index, block in enumerate(content):
        yield Fields(block, f"{fields.at(name)}[{index}]")


def _text_in(block: Fields) -> str:
    if block.text("type") != "text":
        block.refuse("type", 'send blocks of the type "text", since the model reads text alone')
    text = block.text("text")
    if text is None:
        block.refuse("text", "send a string")
    return text


def _text_of(fields: Fields, name: str, read: Callable[[Fields], str] = _text_in) -> str:
    """The text of a string or of blocks, "" where there is none."""
    return "" if fields[name] is None else "".join(map(read, _blocks(fields, name)))


# --- tools, thinking, output ---


def _tool(fields: Fields) -> dict[str, Any]:
    """A tool in OpenAI's form.

    One that should only be loaded later (``defer_loading``) is there at once: the prefix is the
    same in all requests so.
    """
    kind = fields.text("type")
    if kind not in (None, "custom"):
        fields.refuse("type", "leave it out, and send the tool with its input_schema")
    function: dict[str, Any] = {"name": fields.needed_text("name")}
    if (description := fields.text("description")) is not None:
        function["description"] = description
    if fields.object("input_schema") is None:
        fields.refuse("input_schema", "send a JSON Schema")
    function["parameters"] = fields["input_schema"]
    if (strict := fields.flag("strict")) is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def _tool_choice(fields: Fields) -> dict[str, Any]:
    choice = fields.object("tool_choice")
    if choice is None:
        return {}
    kind = choice.word("type", ("auto", "any", "tool", "none"))
    if kind is None:
        choice.refuse("type", "choose one of auto, any, tool, none")
    if kind == "any" and not fields["tools"]:
        choice.refuse("type", "send tools with it")
    several = not choice.flag("disable_parallel_tool_use")
    if kind == "tool":
        function = {"name": choice.needed_text("name")}
        named = {"type": "function", "function": function}
        return {"tool_choice": named, "parallel_tool_calls": several}
    word = "required" if kind == "any" else kind
    return {"tool_choice": word, "parallel_tool_calls": several}


def _thinking(fields: Fields) -> dict[str, Any]:
    """Whether to think, for templates that have a switch; a budget has no effect."""
    thinking = fields.object("thinking")
    if thinking is None:
        return {}
    kind = thinking.word("type", tuple(_THINKING))
    if kind is None:
        thinking.refuse("type", f"choose one of {', '.join(_THINKING)}")
    thinking.integer("budget_tokens", 0, 2**63)
    return {"enable_thinking": _THINKING[kind]}


def _response_format(format: Fields) -> dict[str, Any]:
    """What the output has to be, as a chat has it."""
    if format.text("type") != "json_schema":
        format.refuse("type", 'send "json_schema" with a schema')
    return {"type": "json_schema", "json_schema": {"schema": format["schema"], "strict": True}}
