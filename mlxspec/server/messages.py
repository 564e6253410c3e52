"""Anthropic's Messages API: request bodies and answers.

A conversation becomes the same tokens as in OpenAI's API, except that messages of one role that
follow each other are joined. Fields that only concern Anthropic's own servers, such as
``cache_control`` and ``service_tier``, have no effect.
"""

from __future__ import annotations

import operator
import re
import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import AliasPath, BeforeValidator, Field, PlainValidator, TypeAdapter

from ..engine.params import Constraint
from .answer import ApiAnswer
from .api_body import ApiBody, Function, OutputOptions, Stops, ToolOutput, merged
from .body import ApiError, Body, Items, Name, new_request_id, read_json, without_nulls
from .choice import Choice, TextRun
from .output_parser import Part
from .worker import Begun, Ended

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""The first line of Claude Code's system prompt, usually in its own block. It differs in each
request, so a prompt that has it would never match a cached prefix.
"""


class _Block(Body):
    """A content block of any type. Only text, thinking, calls and results are supported."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: Name = "-"
    name: Name = "-"
    input: dict[str, Any] = {}
    tool_use_id: Name = "-"
    is_error: bool = False
    content: ToolOutput = ""

    needed = {"text": ("text",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}

    def result(self) -> dict[str, Any]:
        """The chat message with a tool's result."""
        error = "Error: " if self.is_error else ""  # templates have no other place for it
        content = [error + self.content]
        return {"role": "tool", "content": content, "tool_call_id": self.tool_use_id}


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_Blocks = Annotated[Items[_Block], BeforeValidator(_as_blocks)]


class _Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: _Blocks = []

    needed = {"user": ("content",), "assistant": ("content",)}


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name = "-"

    needed = {"tool": ("name",)}


_thinking = TypeAdapter(Literal["enabled", "adaptive", "between_tools", "disabled"]).validate_python


class MessagesBody(ApiBody):
    """A body of ``/v1/messages`` or ``/v1/messages/count_tokens``."""

    system: _Blocks = []
    messages: Annotated[Items[_Turn], Field(min_length=1)]
    tools: Items[Function] = []
    tool_choice: _ToolChoice = _ToolChoice(type="auto")
    parallel_tool_calls: Annotated[bool, BeforeValidator(operator.not_)] = Field(
        True, validation_alias=AliasPath("tool_choice", "disable_parallel_tool_use")
    )
    enable_thinking: Annotated[
        bool | None, PlainValidator(lambda value: _thinking(value) != "disabled")
    ] = Field(None, validation_alias=AliasPath("thinking", "type"))
    reasoning: OutputOptions = Field(OutputOptions(), validation_alias="output_config")
    stop: Stops = Field([], validation_alias="stop_sequences")

    unsupported = ("all", "/v1/messages")
    format_param = "output_config.format"

    @property
    def constraint(self) -> Constraint | None:
        return self.reasoning.format

    def for_template(self) -> list[dict[str, Any]]:
        text = "".join(_BILLING.sub("", block.text) for block in self.system)
        system = [{"role": "system", "content": [text]}] if text else []
        messages = (message for turn in self.messages for message in _messages_of(turn))
        return merged([*system, *messages])

    def offered(self) -> Sequence[dict[str, Any]]:
        # All tools are shown to the model from the start, whatever ``defer_loading`` is: tools
        # added later would change the prompt's prefix.
        functions = [tool.model_dump(exclude={"type", "arguments"}) for tool in self.tools]
        return [{"type": "function", "function": without_nulls(function)} for function in functions]

    @property
    def tool_mode(self) -> tuple[str, str | None]:
        choice = self.tool_choice
        if choice.type == "tool":
            return "function", choice.name
        return "required" if choice.type == "any" else choice.type, None


# --- messages ---


def _messages_of(turn: _Turn) -> Iterator[dict[str, Any]]:
    """Convert one of Anthropic's messages into chat messages whose contents are lists."""
    if turn.role == "assistant":
        yield _answer(turn.content)
        return
    for is_result, group in groupby(turn.content, key=lambda block: block.type == "tool_result"):
        if is_result:
            yield from (block.result() for block in group)
            continue
        yield {"role": turn.role, "content": ["".join(block.text for block in group)]}


def _answer(blocks: Sequence[_Block]) -> dict[str, Any]:
    """An assistant's chat message, without the thinking that only Anthropic can decrypt."""
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = ["".join(block.text for block in blocks)]
    if reasoning := [block.thinking for block in blocks if block.thinking]:
        message["reasoning_content"] = reasoning
    calls = [
        {
            "type": "function",
            "id": block.id,
            "function": {"name": block.name, "arguments": block.input},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    return message | ({"tool_calls": calls} if calls else {})


# --- answers ---

_SIGNATURE = "mlxspec"
"""The signature of thinking. Clients expect one and send it back; the server ignores it."""

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""By the kind of part: the type of its deltas, and the name of their text field."""


def _block(part: Part, text: str) -> dict[str, Any]:
    """The content block for a part, with this text."""
    if part.kind == "text":
        return {"type": "text", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": _SIGNATURE if text else ""}
    # The id has the model's form, not Anthropic's: chat templates must accept it when the client
    # sends it back.
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": _read_input(text) or {}}


def _whole_block(part: Part, cut: bool) -> dict[str, Any]:
    """The content block for a whole part. A call with invalid arguments is text.

    Args:
        cut: whether the answer was cut off, and so the last call's arguments may be; they are then
            left out.
    """
    if part.kind == "call" and not cut and _read_input(part.text) is None:
        return {"type": "text", "text": part.text}
    return _block(part, part.text)


def _read_input(text: str) -> dict[str, Any] | None:
    """A call's arguments; None if they are not an object."""
    try:
        arguments, _ = read_json(text.encode())
    except (ValueError, ApiError):
        return None
    return arguments if isinstance(arguments, dict) else None


class MessagesAnswer(ApiAnswer):
    """The answer of ``/v1/messages``.

    A stream begins with the first token, when the number of cached tokens is known. Until then,
    pings keep it alive. ``input_tokens`` counts the prompt tokens that were not cached.
    ``cache_creation_input_tokens`` is always 0, since caching is free here.

    Args:
        model: the model's real name, which the answer shows.
    """

    def __init__(self, body: MessagesBody, model: str) -> None:
        super().__init__()
        self.headers = messages_headers(model)
        self._body = body
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def choice_begun(self, event: Begun) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": {**self._message, "usage": _usage(event)}}]

    def feed_choice(self, choice: Choice, runs: Sequence[TextRun]) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        for run in runs:
            deltas = [(*_DELTAS[run.part.kind], run.text)] if run.text else []
            if run.begins:
                block = _block(run.part, "")
                chunks.append(_block_event("start", run, content_block=block))
            if run.ends and run.part.kind == "reasoning":
                deltas.append(("signature_delta", "signature", _SIGNATURE))
            for kind, name, text in deltas:
                chunks.append(_block_event("delta", run, delta={"type": kind, name: text}))
            if run.ends:
                chunks.append(_block_event("stop", run))
        if choice.end:
            ending = self._ending(choice, choice.end)
            usage = ending.pop("usage")
            chunks.append({"type": "message_delta", "delta": ending, "usage": usage})
            chunks.append({"type": "message_stop"})
        return chunks

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        assert choice.end
        content = [_whole_block(part, choice.cut) for part in choice.parts]
        ending = self._ending(choice, choice.end)
        if not any(block["type"] == "tool_use" for block in content):
            # Calls with invalid arguments have become text.
            ending["stop_reason"] = ending["stop_reason"].replace("tool_use", "end_turn")
        return {**self._message, "content": content, **ending}

    def keep_alive(self) -> list[dict[str, Any]]:
        return [{"type": "ping"}]

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.messages_body(self.headers["request-id"])

    def _ending(self, choice: Choice, end: Ended) -> dict[str, Any]:
        """The fields that say why the message has ended, and its usage."""
        reason = _STOP_REASONS[choice.finish_reason]
        stop = end.stop if reason == "end_turn" else None
        if stop is not None:
            reason = "stop_sequence"
        elif reason == "max_tokens" and end.completion_tokens < (self._body.max_tokens or 0):
            reason = "model_context_window_exceeded"
        usage = _usage(end, end.completion_tokens, choice.reasoning_tokens)
        return {"stop_reason": reason, "stop_sequence": stop, "usage": usage}


_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


def _block_event(kind: str, run: TextRun, **fields: Any) -> dict[str, Any]:
    return {"type": f"content_block_{kind}", "index": run.position, **fields}


def _usage(event: Begun | Ended, output: int = 0, thinking: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": event.prompt_tokens - event.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": event.cached_tokens,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thinking},
    }


def messages_headers(model: str) -> dict[str, str]:
    """The response's headers: a request id, and the real name of the model that answers."""
    # Headers allow only Latin-1, and clients disagree about anything beyond ASCII.
    return {"request-id": new_request_id(), "x-mlxspec-model": quote(model, safe=" /:@+,=")}
