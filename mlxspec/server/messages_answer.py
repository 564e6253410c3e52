"""Answers in the form of Anthropic's Messages API."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from .answer import Answer, ChatChoice
from .body import JsonReader
from .errors import ApiError, new_request_id
from .events import Begun, Ended, Piece
from .output import Delta, OutputFormat, OutputParser, Reasoning, Text, ToolCallBegun
from .requests import ChatRequest

_SIGNATURE = "mlxspec"
"""Of thinking. Clients expect one and send it back; nothing is read from it."""


@dataclass
class _Block:
    """A block of the content.

    Attributes:
        start: the block as it begins.
        kind: of its deltas.
        name: of the field that has the text of a delta.
        texts: what it has so far.
    """

    start: dict[str, Any]
    kind: str
    name: str
    texts: list[str] = field(default_factory=list)

    def takes(self, delta: Delta) -> bool:
        """Whether a delta goes on with it."""
        if isinstance(delta, ToolCallBegun):
            return False
        kinds = {Text: "text_delta", Reasoning: "thinking_delta"}
        return kinds.get(type(delta), "input_json_delta") == self.kind

    def whole(self) -> dict[str, Any]:
        """The block in one piece."""
        text = "".join(self.texts)
        if self.kind == "input_json_delta":
            return self.start | {"input": _read_input(text)}
        signed = {"signature": _SIGNATURE} if self.kind == "thinking_delta" else {}
        return self.start | {self.name: text} | signed


def _new_block(delta: Delta) -> _Block:
    start: dict[str, Any]
    if isinstance(delta, Text):
        return _Block({"type": "text", "text": ""}, "text_delta", "text")
    if isinstance(delta, Reasoning):
        start = {"type": "thinking", "thinking": "", "signature": ""}
        return _Block(start, "thinking_delta", "thinking")
    assert isinstance(delta, ToolCallBegun)
    # The id stays the one that chat templates take when it comes back.
    start = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
    return _Block(start, "input_json_delta", "partial_json")


def _read_input(text: str) -> dict[str, Any]:
    """The arguments of a call; none where they were cut off, or are no object."""
    try:
        arguments = JsonReader(text.encode()).read()
    except (ValueError, ApiError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


class MessagesAnswer(Answer):
    """The answer of ``/v1/messages``.

    A stream begins with the first token, when it is known how much of the prompt was cached;
    until then it says with pings that it lives. ``input_tokens`` are those that ran, without the
    cached ones. Nothing is counted as ``cache_creation_input_tokens``, since all that runs is
    kept and nobody pays for it.

    Args:
        request: what was asked.
        model: the name that the answer gives the model, which is its own.
        format: of the model's output.
    """

    def __init__(self, request: ChatRequest, model: str, format: OutputFormat) -> None:
        super().__init__(1)
        self.id = f"msg_{uuid.uuid4().hex}"
        self._request_id = new_request_id()
        self.headers = messages_headers(model, self._request_id)
        self._request = request
        self._model = model
        self._choice = ChatChoice(OutputParser(format))
        self._blocks: list[_Block] = []

    def finished(self, index: int) -> bool:
        return self._choice.parser.finished

    def begin(self) -> list[dict[str, Any]]:
        return []

    def choice_begun(self, event: Begun) -> list[dict[str, Any]]:
        message = self._message([], _usage(event.prompt_tokens, event.cached_tokens))
        message |= {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": message}]

    def feed_choice(
        self, index: int, pieces: Sequence[Piece], end: Ended | None
    ) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        for delta, _ in self._choice.read(pieces, end):
            if not self._blocks or not self._blocks[-1].takes(delta):
                chunks += self._stop_block()
                block = _new_block(delta)
                self._blocks.append(block)
                chunks.append(self._of_block("content_block_start", content_block=block.start))
            if not isinstance(delta, ToolCallBegun):
                block = self._blocks[-1]
                block.texts.append(delta.text)
                chunks.append(self._delta({"type": block.kind, block.name: delta.text}))
        if end := self._choice.counted(end):
            self.ends[index] = end
            chunks += self._stop_block()
            usage = self._usage(end)
            chunks.append({"type": "message_delta", "delta": self._stop(end), "usage": usage})
            chunks.append({"type": "message_stop"})
        return chunks

    def whole(self) -> dict[str, Any]:
        (end,) = self.ends
        assert end
        content = [block.whole() for block in self._blocks]
        return self._message(content, self._usage(end)) | self._stop(end)

    def framed(self, chunk: dict[str, Any]) -> str:
        return f"event: {chunk['type']}\n{super().framed(chunk)}"

    def life_sign(self) -> str:
        return self.framed({"type": "ping"})

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.messages_body(self._request_id)

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": usage,
        }

    def _stop_block(self) -> list[dict[str, Any]]:
        """The chunks that end the last block."""
        if not self._blocks:
            return []
        chunks = [self._of_block("content_block_stop")]
        if self._blocks[-1].kind == "thinking_delta":
            chunks.insert(0, self._delta({"type": "signature_delta", "signature": _SIGNATURE}))
        return chunks

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    def _stop(self, end: Ended) -> dict[str, Any]:
        """Why the message has ended."""
        reason, sequence = self._choice.finish_reason(end), None
        if reason == "tool_calls":
            reason = "tool_use"
        elif reason == "length":
            wanted = self._request.max_tokens
            cut = wanted is not None and end.completion_tokens < wanted
            reason = "model_context_window_exceeded" if cut else "max_tokens"
        elif end.stop in self._request.stop:
            reason, sequence = "stop_sequence", end.stop
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, end: Ended) -> dict[str, Any]:
        usage = _usage(end.prompt_tokens, end.cached_tokens)
        thinking = {"thinking_tokens": self._choice.reasoning_tokens}
        return usage | {
            "output_tokens": end.completion_tokens,
            "output_tokens_details": thinking,
        }


def _usage(prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": 0,
    }


def messages_headers(model: str, request_id: str) -> dict[str, str]:
    """Headers of an answer: its id, and the model that is behind whatever name was asked for."""
    # A header is Latin-1 at most, and clients disagree beyond ASCII.
    return {"request-id": request_id, "x-mlxspec-model": quote(model, safe=_PRINTABLE)}


_PRINTABLE = "".join(map(chr, range(ord(" "), ord("~") + 1)))
