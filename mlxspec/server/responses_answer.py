"""Answers in the form of OpenAI's Responses API: items, and events for their pieces."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic_core import from_json

from .answer import ApiAnswer, ChatChoice
from .body import ApiError, refuse, without_lone_surrogates
from .openai import TokenNames
from .output import Delta, OutputFormat, OutputParser
from .responses import ResponsesRequest, StoredResponse, Tool, new_id
from .worker import Ended, Piece

ResponseEvent = dict[str, Any]


class ResponsesAnswer(ApiAnswer):
    """The answer of ``/v1/responses``.

    Events are numbered by ``sequence_number``. The keep-alive is an event too,
    ``response.in_progress`` once more, since some clients count only events. The stream ends with
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
        self._pending: list[dict[str, Any]] = []
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
        for kind, group in groupby(said, key=lambda one: one[0].kind):
            if kind == "call":
                for delta, _ in group:
                    events += self._begin_call(delta)
                continue
            parts = list(group)
            if kind != "arguments":
                events += self._ensure("message" if kind == "text" else "reasoning")
            text = "".join(delta.text for delta, _ in parts)
            logprobs = [one for _, some in parts for one in some]
            events += self._events(self._items[-1].add(text, logprobs))
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
            "output": []
            if self._status == "in_progress"
            else [one.as_json() for one in self._items],
            "usage": self._usage(),
            **self._request.repeated,
        }

    def finished(self, index: int) -> bool:
        return self._choice.parser.finished

    def framed(self, chunk: ResponseEvent) -> str:
        return f"event: {chunk['type']}\n{super().framed(chunk)}"

    def keep_alive(self) -> str:
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
                self._pending += self._names.of_chat(some)
            for delta, _ in self._choice.read(some, None if some else end):
                self._choice.add(delta)
                said.append((delta, self._pending if delta.kind == "text" else []))
                self._pending = []
        return said

    def _begin_call(self, delta: Delta) -> list[ResponseEvent]:
        tool = self._request.known_tools.get(delta.name, Tool(delta.name))
        call = _Item("custom_tool_call" if tool.custom else "function_call", delta.id, tool)
        return [*self._end_item("completed"), *self._begin_item(call)]

    def _ensure(self, kind: str) -> list[ResponseEvent]:
        """Begin an item of this kind, unless the last one is."""
        if self._items and self._items[-1].kind == kind:
            return []
        return [*self._end_item("completed"), *self._begin_item(_Item(kind))]

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
        events = [] if self._items else self._begin_item(_Item("message"))
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
        return self._event(kind, output_index=index, item=self._items[-1].as_json())

    def _events(self, events: Sequence[tuple[str, dict[str, Any]]]) -> list[ResponseEvent]:
        """Events of the last item."""
        place = {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}
        return [self._event(f"response.{kind}", **place, **fields) for kind, fields in events]

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

_ItemEvents = list[tuple[str, dict[str, Any]]]
"""Kinds of events and their fields, but for those that say which item it is."""

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}


class _Item:
    """An item of the output: a message, reasoning, or a call.

    Args:
        kind: of the item, as the API names it.
        call_id: by which the client returns a call's result.
        tool: that is called.

    Attributes:
        status: "in_progress", "completed" or "incomplete".
    """

    def __init__(self, kind: str, call_id: str = "", tool: Tool | None = None) -> None:
        self.kind = kind
        self.id = new_id(_PREFIXES[kind])
        self.status = "in_progress"
        self._call_id = call_id
        self._tool = tool
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._written = ""
        """The arguments of a custom call, whose text is in one of them."""

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @property
    def _field(self) -> str:
        """The field with a call's text."""
        return "input" if self.kind == "custom_tool_call" else "arguments"

    def as_json(self) -> dict[str, Any]:
        """The item as it is now."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        if self._tool:
            item |= {"call_id": self._call_id, "name": self._tool.name, self._field: self._text}
            space = self._tool.namespace
            return item if space is None else item | {"namespace": space}
        item["content"] = [] if self.status == "in_progress" else [self._part()]
        if self.kind == "message":
            return item | {"role": "assistant"}
        return item | {"summary": [], "encrypted_content": None}

    def _part(self) -> dict[str, Any]:
        """The one part of the content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        more: dict[str, Any] = {"annotations": [], "logprobs": [*self._logprobs]}
        return {"type": "output_text", "text": self._text, **more}

    def begun(self) -> _ItemEvents:
        """The events after it was added."""
        if self._tool:
            return []
        return [("content_part.added", {"content_index": 0, "part": self._part()})]

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> _ItemEvents:
        """Take more of its text; returns the events for it."""
        if self.kind == "custom_tool_call":
            self._written += text
            return self._add(_input_so_far(self._written).removeprefix(self._text), [])
        return self._add(text, logprobs)

    def _add(self, text: str, logprobs: list[dict[str, Any]]) -> _ItemEvents:
        if self._tool and not text:
            return []
        self._texts.append(text)
        self._logprobs += logprobs
        if self._tool:
            return [(f"{self.kind}_{self._field}.delta", {"delta": text})]
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if self.kind == "message":
            return [("output_text.delta", fields | {"logprobs": logprobs})]
        return [("reasoning_text.delta", fields)]

    def ended(self) -> _ItemEvents:
        """The events before it is done."""
        if not self._tool:
            part = self._part()
            fields = {name: value for name, value in part.items() if name in ("text", "logprobs")}
            return [
                (f"{part['type']}.done", {"content_index": 0, **fields}),
                ("content_part.done", {"content_index": 0, "part": part}),
            ]
        events = []
        if self.kind == "custom_tool_call":
            events = self._add(_whole_input(self._written).removeprefix(self._text), [])
        named = {"name": self._tool.name} if self.kind == "function_call" else {}
        return [*events, (f"{self.kind}_{self._field}.done", {self._field: self._text, **named})]


def _input_so_far(written: str) -> str:
    """The text for a custom tool, from arguments that may go on; "" where it has not begun."""
    try:
        value = from_json(_mended(written), allow_partial="trailing-strings")["input"]
    except (ValueError, LookupError, TypeError):
        return ""
    return value if isinstance(value, str) else ""


def _mended(written: str) -> str:
    """JSON whose strings have no unknown escapes: models write regular expressions as they are."""
    return _ESCAPE.sub(lambda found: found[0] if found[1] else r"\\", written)


_ESCAPE = re.compile(r'\\(["\\/bfnrtu])|\\(?=.)')


def _whole_input(written: str) -> str:
    """The text for a custom tool, or whatever else the model has written."""
    try:
        value = json.loads(_mended(written), strict=False)["input"]
    except (ValueError, LookupError, TypeError, RecursionError):
        value = None
    return without_lone_surrogates(value) if isinstance(value, str) else written


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
