"""Anthropic's Messages API: request bodies and answers.

A conversation becomes the same tokens as with OpenAI's API. Fields that only concern Anthropic's
own servers, such as ``cache_control`` and ``service_tier``, have no effect.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BeforeValidator, Field

from ..engine.params import Constraint
from .answer import ApiAnswer, Choice, OutputFormat, Part, TextRun, framed
from .body import ApiError, Body, Items, Name, blaming, parse, read_json, refuse, without_nulls
from .requests import (
    ApiRequest,
    Function,
    MaxTokens,
    Options,
    SamplingBody,
    Stops,
    ToolOutput,
    as_parts,
    chosen_tool,
    conversation,
    merged,
    template_kwargs,
    text_of_output,
)
from .worker import Begun, Ended

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""The first line of Claude Code's system prompt, usually in a block of its own. It differs from
request to request, so no prompt with it would match a cached prefix."""

_TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


class _Block(Body):
    """A content block of any type. Only text is supported beside thinking and calls."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: Name = "-"
    name: Name = "-"
    input: dict[str, Any] = {}
    tool_use_id: Name = "-"
    is_error: bool = False
    content: ToolOutput = []

    needed = {"text": ("text",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}

    def result(self) -> dict[str, Any]:
        """The message of a tool's result."""
        error = "Error: " if self.is_error else ""  # templates have no other place for it
        text = error + text_of_output(self.content)
        return {"role": "tool", "content": [text], "tool_call_id": self.tool_use_id}


_Blocks = Annotated[Items[_Block], BeforeValidator(as_parts)]


class _Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: _Blocks = []

    needed = {"user": ("content",), "assistant": ("content",)}


class MessagesBody(SamplingBody):
    """A body of ``/v1/messages`` or ``/v1/messages/count_tokens``."""

    model: str | None = None
    max_tokens: MaxTokens = None
    system: _Blocks = []
    messages: Annotated[Items[_Turn], Field(min_length=1)]
    tools: Items[Function] = []
    tool_choice: dict[str, Any] = {"type": "auto"}
    thinking: dict[str, Any] | None = None
    output_config: Options = Options()
    stop_sequences: Stops = []
    stream: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    unsupported = ("all", "/v1/messages")


def parse_messages(body: object, *, to_count: bool = False) -> ApiRequest:
    """Parse a body of ``/v1/messages``.

    Args:
        body: the JSON value of the body.
        to_count: the body is for ``/v1/messages/count_tokens``, which needs no ``max_tokens``.

    Raises:
        ApiError: a field is missing, wrong or unsupported.
    """
    asked = parse(MessagesBody, body)
    if asked.max_tokens is None and not to_count:
        refuse("max_tokens", None, "choose an integer of 1 or more")
    # All tools are shown to the model at once, whatever ``defer_loading`` is: it should not change
    # the prompt's prefix.
    functions = [tool.model_dump(exclude={"type", "arguments"}) for tool in asked.tools]
    tools = [{"type": "function", "function": without_nulls(one)} for one in functions]
    text = "".join(_BILLING.sub("", block.text) for block in asked.system)
    system = [{"role": "system", "content": [text]}] if text else []
    messages = (message for turn in asked.messages for message in _messages_of(turn))
    choice = asked.tool_choice
    word = _TOOL_CHOICES.get(str(choice.get("type")))
    if word is None:
        refuse("tool_choice.type", choice.get("type"), f"choose one of {', '.join(_TOOL_CHOICES)}")
    named = str(choice.get("name")) if word == "function" else None
    thinking = None
    if asked.thinking is not None:
        thinking = _THINKING.get(str(kind := asked.thinking.get("type")))
        if thinking is None:
            refuse("thinking.type", kind, f"choose one of {', '.join(_THINKING)}")
    place, format = "output_config.format", asked.output_config.format
    with blaming(place):
        constraint = Constraint.json_schema(format.schema_at(place)) if format else None
    return ApiRequest(
        model=asked.model,
        sampling=asked.sampling,
        max_tokens=asked.max_tokens,
        cuts_max_tokens=True,  # clients ask for what the largest models can write
        stop=tuple(asked.stop_sequences),
        stream=asked.stream,
        constraint=constraint,
        constrained_by=place if constraint else "",
        **conversation(merged([*system, *messages]), "messages"),
        **chosen_tool(word, named, tools, "tool_choice.name" if named else "tool_choice.type"),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
        template_kwargs=template_kwargs(
            asked.output_config.effort, thinking, asked.chat_template_kwargs
        ),
    )


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
        text = "".join(block.text for block in group)
        if turn.role == "system":
            # Few chat templates accept a system message within a conversation. Claude Code marks
            # such text in a user message this way.
            text = f"<system-reminder>\n{text}\n</system-reminder>"
        yield {"role": "user", "content": [text]}


def _answer(blocks: Sequence[_Block]) -> dict[str, Any]:
    """The assistant's message, without thinking that only Anthropic can read."""
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
"""By the kind of a part: the type of its deltas, and the name of their text field."""


def _block(part: Part, text: str) -> dict[str, Any]:
    """The content block of a part with the given text."""
    if part.kind == "text":
        return {"type": "text", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": _SIGNATURE if text else ""}
    # The id is the model's, since chat templates must accept it when the client sends it back.
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": _read_input(text)}


def _read_input(text: str) -> dict[str, Any]:
    """A call's arguments; empty if they were cut off or are not an object."""
    try:
        arguments, _ = read_json(text.encode())
    except (ValueError, ApiError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


class MessagesAnswer(ApiAnswer):
    """The answer of ``/v1/messages``.

    A stream begins with the first token, when the number of cached tokens is known. Until then,
    pings keep it alive. ``input_tokens`` counts the prompt tokens that were not cached.
    ``cache_creation_input_tokens`` is always 0, since everything is cached at no charge.

    Args:
        request: the client's request.
        model: the model's own name, which the answer shows.
        format: the format of the model's output.
        request_id: the request's id, which a header and errors repeat.
    """

    def __init__(
        self, request: ApiRequest, model: str, format: OutputFormat | None, request_id: str
    ) -> None:
        super().__init__([Choice(0, format)])
        self.headers = messages_headers(model, request_id)
        self._request_id = request_id
        self._request = request
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
        return {
            **self._message,
            "content": [_block(part, part.text) for part in choice.parts],
            **self._ending(choice, choice.end),
        }

    def keep_alive(self) -> str:
        return framed({"type": "ping"})

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.messages_body(self._request_id)

    def _ending(self, choice: Choice, end: Ended) -> dict[str, Any]:
        """The fields that say why the message has ended, and its usage."""
        reason = _STOP_REASONS[choice.finish_reason]
        stop = end.stop if reason == "end_turn" else None
        if stop is not None:
            reason = "stop_sequence"
        elif reason == "max_tokens" and end.completion_tokens < (self._request.max_tokens or 0):
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


def messages_headers(model: str, request_id: str) -> dict[str, str]:
    """The response's headers: the request's id, and the own name of the model that answers."""
    # Headers may only have Latin-1 characters, and clients disagree beyond ASCII.
    return {"request-id": request_id, "x-mlxspec-model": quote(model, safe=" /:@+,=")}
