"""Answers in the form of OpenAI's Responses API: items, and the events that tell them in pieces."""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .answer import Answer, ChatChoice
from .body import refuse, without_lone_surrogates
from .errors import ApiError
from .events import Ended, Piece
from .openai_answer import TokenNames
from .output import Delta, OutputFormat, OutputParser, Text, ToolCallArguments, ToolCallBegun
from .response_store import StoredResponse
from .responses import ResponsesRequest, Tool, new_id

ResponseEvent = dict[str, Any]


class ResponsesAnswer(Answer):
    """The answer of ``/v1/responses``.

    An event follows the other by ``sequence_number``. What says that all is well is an event too,
    ``response.in_progress`` once more, since some clients count only those. The stream ends with
    ``response.completed``, ``response.incomplete`` where the output was cut off, or
    ``response.failed``.

    Log-probabilities are those of the text alone.

    Args:
        request: what was asked.
        model: the name that the answer gives the model.
        tokenizer: the model's.
        format: of the model's output.
        keep: is given the response at its end, where it may be kept.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        tokenizer: TokenizerWrapper,
        format: OutputFormat,
        keep: Callable[[StoredResponse], None],
    ) -> None:
        super().__init__(1)
        self.id = new_id("resp")
        self._request = request
        self._keep = keep
        self._names = TokenNames(tokenizer)
        self._choice = ChatChoice(OutputParser(format))
        self._untold: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text has not come yet."""
        self._items: list[_Item] = []
        self._sent = 0
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._model = model
        self._created = int(time.time())
        self._completed: int | None = None

    # --- as other answers ---

    def begin(self) -> list[ResponseEvent]:
        if self._sent:
            return []
        return [self._lifecycle("response.created"), self._lifecycle("response.in_progress")]

    def feed_choice(
        self, index: int, pieces: Sequence[Piece], end: Ended | None
    ) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        said = self._read(pieces, end)
        for kind, group in groupby(said, key=lambda one: type(one[0])):
            if kind is ToolCallBegun:
                for delta, _ in group:
                    events += self._begin_call(delta)
                continue
            told = [(delta.text, logprobs) for delta, logprobs in group]  # type: ignore[union-attr]
            text = "".join(text for text, _ in told)
            if kind is not ToolCallArguments:
                events += self._ensure(_Message if kind is Text else _Reasoning)
            events += self._events(self._items[-1].add(text, [p for _, some in told for p in some]))
        if end := self._choice.counted(end):
            self.ends[index] = end
            events += self._finish(self._choice.finish_reason(end) == "length")
        return events

    def close(self) -> list[ResponseEvent]:
        if self._request.store:
            self._keep(StoredResponse(self.whole(), self._request.items))
        return [self._lifecycle(f"response.{self._status}")]

    def whole(self) -> dict[str, Any]:
        cut_off = self._status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "model": self._model,
            "output": [] if self._status == "in_progress" else [one.told() for one in self._items],
            "usage": self._usage(),
            **self._request.repeated,
        }

    def finished(self, index: int) -> bool:
        return self._choice.parser.finished

    def framed(self, chunk: ResponseEvent) -> str:
        return f"event: {chunk['type']}\n{super().framed(chunk)}"

    def life_sign(self) -> str:
        events = self.begin() or [self._lifecycle("response.in_progress")]
        return "".join(map(self.framed, events))

    def failed(self, error: ApiError) -> dict[str, Any]:
        self._status = "failed"
        self._error = {"code": _error_code(error), "message": error.message}
        if self._items and self._items[-1].status == "in_progress":
            self._items[-1].status = "incomplete"
        return self._lifecycle("response.failed") if self._request.stream else self.whole()

    # --- what is said ---

    def _read(
        self, pieces: Sequence[Piece], end: Ended | None
    ) -> list[tuple[Delta, list[dict[str, Any]]]]:
        """What the tokens say, and the log-probabilities of those that are text."""
        said: list[tuple[Delta, list[dict[str, Any]]]] = []
        for some in (*([piece] for piece in pieces), []):
            if self._request.logprobs is not None and not self._choice.parser.reasoning:
                self._untold += self._names.of_chat(some)
            for delta, _ in self._choice.read(some, None if some else end):
                self._choice.add(delta)
                said.append((delta, self._untold if isinstance(delta, Text) else []))
                self._untold = []
        return said

    def _begin_call(self, delta: Delta) -> list[ResponseEvent]:
        assert isinstance(delta, ToolCallBegun)
        tool = self._request.known_tools.get(delta.name, Tool(delta.name))
        call = (_CustomCall if tool.custom else _FunctionCall)(delta.id, tool)
        return [*self._end_item("completed"), *self._begin_item(call)]

    def _ensure(self, kind: type[_Item]) -> list[ResponseEvent]:
        """Let the last item be of this kind."""
        if self._items and isinstance(self._items[-1], kind):
            return []
        return [*self._end_item("completed"), *self._begin_item(kind())]

    def _begin_item(self, item: _Item) -> list[ResponseEvent]:
        self._items.append(item)
        return [self._of_item("response.output_item.added"), *self._events(item.begun())]

    def _end_item(self, status: str) -> list[ResponseEvent]:
        """End the last item, if there is one."""
        if not self._items:
            return []
        item = self._items[-1]
        events = self._events(item.ended())
        item.status = status
        return [*events, self._of_item("response.output_item.done")]

    def _finish(self, cut_off: bool) -> list[ResponseEvent]:
        events = [] if self._items else self._begin_item(_Message())
        self._status = "incomplete" if cut_off else "completed"
        self._completed = None if cut_off else int(time.time())
        return [*events, *self._end_item(self._status)]

    # --- events ---

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _lifecycle(self, kind: str) -> ResponseEvent:
        return self._event(kind, response=self.whole())

    def _of_item(self, kind: str) -> ResponseEvent:
        index = len(self._items) - 1
        return self._event(kind, output_index=index, item=self._items[-1].told())

    def _events(self, told: Sequence[tuple[str, dict[str, Any]]]) -> list[ResponseEvent]:
        """Events of the last item."""
        place = {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}
        return [self._event(f"response.{kind}", **place, **fields) for kind, fields in told]

    def _usage(self) -> dict[str, Any] | None:
        """None until the answer has ended."""
        end = self.ends[0]
        if end is None:
            return None
        return {
            "input_tokens": end.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": end.cached_tokens,
                # All that runs is kept for prompts that follow.
                "cache_write_tokens": end.prompt_tokens - end.cached_tokens,
            },
            "output_tokens": end.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._choice.reasoning_tokens},
            "total_tokens": end.prompt_tokens + end.completion_tokens,
        }


def _error_code(error: ApiError) -> str:
    """The nearest of the codes that clients know."""
    if error.code == "context_length_exceeded":
        return error.code
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"


# --- items ---

Told = list[tuple[str, dict[str, Any]]]
"""Kinds of events and their fields, but for those that say which item it is."""


class _Item(ABC):
    """An item of the output.

    Attributes:
        id: of the item.
        status: "in_progress", "completed" or "incomplete".
    """

    prefix = ""

    def __init__(self) -> None:
        self.id = new_id(self.prefix)
        self.status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """What it has so far."""
        return "".join(self._texts)

    @abstractmethod
    def told(self) -> dict[str, Any]:
        """The item as it is now."""

    def begun(self) -> Told:
        """The events after it was added."""
        return []

    @abstractmethod
    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Told:
        """Take more of its text; returns the events for it."""

    @abstractmethod
    def ended(self) -> Told:
        """The events before it is done."""


class _Spoken(_Item):
    """An item whose text is a part of its content."""

    kind = ""

    def part(self) -> dict[str, Any]:
        """The part as it is now."""
        return {"type": self.kind, "text": self.text}

    def content(self) -> list[dict[str, Any]]:
        """The parts of an item that has begun, which has none at first."""
        return [] if self.status == "in_progress" else [self.part()]

    def begun(self) -> Told:
        return [("content_part.added", {"content_index": 0, "part": self.part()})]

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Told:
        self._texts.append(text)
        return [(f"{self.kind}.delta", {"content_index": 0, "delta": text})]

    def ended(self) -> Told:
        return [
            (f"{self.kind}.done", {"content_index": 0, "text": self.text}),
            ("content_part.done", {"content_index": 0, "part": self.part()}),
        ]


class _Message(_Spoken):
    prefix, kind = "msg", "output_text"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[dict[str, Any]] = []

    def part(self) -> dict[str, Any]:
        return super().part() | {"annotations": [], "logprobs": [*self._logprobs]}

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Told:
        self._logprobs += logprobs
        ((kind, fields),) = super().add(text, logprobs)
        return [(kind, fields | {"logprobs": logprobs})]

    def ended(self) -> Told:
        (kind, fields), part = super().ended()
        return [(kind, fields | {"logprobs": [*self._logprobs]}), part]

    def told(self) -> dict[str, Any]:
        item = {"id": self.id, "type": "message", "status": self.status, "role": "assistant"}
        return item | {"content": self.content()}


class _Reasoning(_Spoken):
    prefix, kind = "rs", "reasoning_text"

    def told(self) -> dict[str, Any]:
        item = {"id": self.id, "type": "reasoning", "status": self.status, "summary": []}
        return item | {"content": self.content(), "encrypted_content": None}


class _Call(_Item):
    """A call of a tool.

    Args:
        call_id: by which the client returns the result.
        tool: that is called.
    """

    kind = name = ""

    def __init__(self, call_id: str, tool: Tool) -> None:
        super().__init__()
        self._call_id = call_id
        self._tool = tool

    def told(self) -> dict[str, Any]:
        item = {"id": self.id, "type": self.kind, "status": self.status}
        item |= {"call_id": self._call_id, "name": self._tool.name}
        if self._tool.namespace is not None:
            item["namespace"] = self._tool.namespace
        return item | {self.name: self.text}

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Told:
        self._texts.append(text)
        return [(f"{self.kind}_{self.name}.delta", {"delta": text})]

    def ended(self) -> Told:
        return [(f"{self.kind}_{self.name}.done", {self.name: self.text})]


class _FunctionCall(_Call):
    prefix, kind, name = "fc", "function_call", "arguments"

    def ended(self) -> Told:
        ((kind, fields),) = super().ended()
        return [(kind, fields | {"name": self._tool.name})]


class _CustomCall(_Call):
    """A call of a tool that takes a text, which the model has written as its one argument."""

    prefix, kind, name = "ctc", "custom_tool_call", "input"

    def __init__(self, call_id: str, tool: Tool) -> None:
        super().__init__(call_id, tool)
        self._written = ""
        self._read: int | None = None
        """How far the text has been read, once it has begun."""

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Told:
        self._written += text
        if self._read is None:
            if not (opening := _OPENING.match(self._written)):
                return []
            self._read = opening.end()
        rest = _CHARACTERS.match(self._written, self._read)
        assert rest  # at least of nothing
        self._read = rest.end()
        return super().add(_unescaped(rest[0]), []) if rest[0] else []

    def ended(self) -> Told:
        # Whatever it has written where that is no such argument.
        events = [] if self._read is not None else super().add(self._whole_input(), [])
        return [*events, *super().ended()]

    def _whole_input(self) -> str:
        try:
            value = json.loads(self._written, strict=False)["input"]
        except (ValueError, LookupError, TypeError, RecursionError):
            value = None
        return without_lone_surrogates(value) if isinstance(value, str) else self._written


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(
    r"""(?:
        [^"\\]+
        | \\[^u]
        | \\u(?![dD][89abAB]).{4}
        | \\u[dD][89abAB].{2}\\u.{4}        # two halves of a character
        | \\u[dD][89abAB].{2}(?=[^\\]|\\[^u])
    )*""",
    re.DOTALL | re.VERBOSE,
)
"""Whole characters of a JSON string: no part of an escape, nor half a character."""


def _unescaped(text: str) -> str:
    """What characters of a JSON string mean."""
    try:
        return without_lone_surrogates(json.loads(f'"{text}"', strict=False))
    except ValueError:  # an escape that JSON has not
        return text


# --- what led to a response ---

_MOST_LISTED = 100


def input_items_answer(given: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The answer of ``/v1/responses/ID/input_items``, the latest items first.

    Args:
        given: the items, in order.
        query: ``limit``, ``order`` ("asc" or "desc"), ``after`` (an item's id).

    Raises:
        ApiError: one of them is wrong.
    """
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= _MOST_LISTED:
        refuse("limit", limit, f"choose an integer from 1 to {_MOST_LISTED}")
    if order not in ("asc", "desc"):
        refuse("order", order, "choose asc or desc")
    items = list(given) if order == "asc" else list(reversed(given))
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            refuse("after", after, "send the id of an item of this response")
        items = items[ids.index(after) + 1 :]
    data = items[: int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > len(data),
    }
