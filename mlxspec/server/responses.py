"""OpenAI's Responses API: request bodies, stored conversations and answers."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BeforeValidator,
    Field,
    model_validator,
)

from ..engine.params import Constraint
from ..errors import OptionError
from ..jsonl import without_lone_surrogates
from .answer import ApiAnswer
from .api_body import ApiBody, OutputOptions, Text, TextPart, ToolOutput, Verbosity, merged
from .body import (
    ApiError,
    Body,
    Dictionary,
    Items,
    Name,
    StringOr,
    parse,
    refuse,
    shown,
    without_nulls,
)
from .choice import Choice, TextRun
from .openai import Top, chat_logprobs
from .output_parser import Part
from .worker import Ended

_INPUT = "input"  # the argument with the text for a custom tool
_HOSTED = ("web_search", "image_generation", "tool_search")
"""Type prefixes of tools that run in OpenAI's servers. Agents offer them besides their own
tools.
"""


def _callable(tools: list[_ToolBody]) -> list[_ToolBody]:
    """The functions and custom tools in a list of tools, including those in namespaces.

    Agents such as Codex offer OpenAI's web search, besides their own tools, to any server. They
    work without it, so it is left out.
    """
    result: list[_ToolBody] = []
    for tool in tools:
        if tool.type == "namespace":
            update = {"namespace": tool.name}
            result += [inner.model_copy(update=update) for inner in tool.tools]
        elif tool.type in ("function", "custom"):
            result.append(tool)
        elif not tool.type.startswith(_HOSTED):
            raise OptionError(
                f"the type {shown(tool.type)} is not supported; offer tools of type "
                '"function" or "custom", or a "namespace" of them'
            )
    return result


class _ToolBody(Body):
    """A tool, its format, a namespace of tools, or a tool choice."""

    type: str
    name: Name = "-"
    namespace: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: _ToolBody | None = None
    syntax: Literal["lark", "regex"] = "lark"
    definition: str = ""
    tools: _Tools = []

    needed = dict.fromkeys(("function", "custom", "namespace"), ("name",))

    def for_chat(self) -> dict[str, Any]:
        """The tool in OpenAI's form for chats."""
        custom = self.type == "custom"
        function = {
            "name": _flat_name(self),
            "description": self.description,
            "parameters": _text_schema(self.format) if custom else self.parameters,
            "strict": self.strict,
        }
        return {"type": "function", "function": without_nulls(function)}


_Tools = Annotated[Items[_ToolBody], AfterValidator(_callable)]


def _flat_name(tool: _ToolBody | _InputItem) -> str:
    """A tool's name as the model sees it, which includes the namespace."""
    if tool.namespace is None:
        return tool.name
    return f"{tool.namespace.removesuffix('__')}__{tool.name}"


def _text_schema(format: _ToolBody | None) -> dict[str, Any]:
    """The parameters of the function that stands for a custom tool: a single text.

    A grammar is shown to the model but not enforced.
    """
    about = "The text to pass to the tool, unchanged."
    if format and format.type == "grammar":
        about += f" It follows this {format.syntax} grammar:\n{format.definition}"
    text = {"type": "string", "description": about}
    return {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}


class _InputItem(Body):
    """An item of the input, of any type."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "additional_tools",
        "web_search_call",
        "file_search_call",
        "image_generation_call",
    ] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: Text = ""
    summary: Items[TextPart] = []
    call_id: str = ""
    name: Name = "-"
    namespace: str | None = None
    arguments: dict[str, Any] | str = ""
    input: str = ""
    output: ToolOutput = ""
    tools: _Tools = []

    needed = {
        **dict.fromkeys(("message", "user", "assistant"), ("content",)),
        **dict.fromkeys(("function_call", "custom_tool_call"), ("name",)),
    }

    @model_validator(mode="before")
    @classmethod
    def _with_content_of_system(cls, value: Any) -> Any:
        """Some clients send system messages without content; they are left out."""
        if isinstance(value, dict) and value.get("role") in ("system", "developer"):
            return {"content": "", **without_nulls(value)}
        return value


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(ApiBody):
    """A body of ``/v1/responses``, with references to stored items replaced by the items.

    Attributes:
        earlier: the conversation that led to the previous response, and that response.
    """

    earlier: Items[_InputItem] = []
    input: Annotated[Items[_InputItem], BeforeValidator(_as_items)] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: _Tools = []
    tool_choice: StringOr[Literal["none", "auto", "required"], _ToolBody] = "auto"
    include: Items[str] = []
    top_logprobs: Top = 0
    metadata: Annotated[Dictionary[str, str], Field(max_length=16)] = {}  # OpenAI's limit
    store: bool = True
    text: OutputOptions = OutputOptions()
    verbosity: Verbosity | None = Field(
        None, validation_alias=AliasChoices(AliasPath("text", "verbosity"), "verbosity")
    )

    unsupported = (*ApiBody.unsupported, "chats", "/v1/responses")
    param = "input"
    format_param = "text.format"
    continues = False  # in this API, an answer is always a new message

    @property
    def top(self) -> int | None:
        included = "message.output_text.logprobs" in self.include
        return self.top_logprobs or (0 if included else None)

    @property
    def constraint(self) -> Constraint | None:
        return self.text.format

    @property
    def items(self) -> list[dict[str, Any]]:
        """The conversation in this API's form, as it was sent."""
        return [*self.sent["earlier"], *(_as_items(self.sent.get("input")) or ())]

    def for_template(self) -> list[dict[str, Any]]:
        system = {"role": "system", "content": [self.instructions]}
        messages = map(_message, [*self.earlier, *self.input])
        return merged(filter(None, [system if self.instructions else None, *messages]))

    @cached_property
    def known_tools(self) -> dict[str, _ToolBody]:
        """The offered tools, by the names that the model sees."""
        known: dict[str, _ToolBody] = {}
        for tools in (self.tools, *(item.tools for item in [*self.earlier, *self.input])):
            for tool in tools:
                known.setdefault(_flat_name(tool), tool)
        if not known and (sent := self.sent.get("tools")):
            refuse("tools", sent, "offer functions, since the server runs no tools itself")
        return known

    def offered(self) -> Sequence[dict[str, Any]]:
        return [tool.for_chat() for tool in self.known_tools.values()]

    @property
    def tool_mode(self) -> tuple[str, str | None]:
        choice = self.tool_choice
        if isinstance(choice, str):
            return choice, None
        known = self.known_tools.items()
        names = [flat for flat, tool in known if choice.name in (tool.name, flat)]
        unknown = choice.type if choice.name == "-" else choice.name  # this name is then refused
        return "function", next(iter(names), unknown)

    def repeated(self) -> dict[str, Any]:
        """The body's fields that the response repeats, with their values in use."""
        tools = self.sent.get("tools") or ()
        return {
            **{name: getattr(self, name) for name in _REPEATED},
            "max_output_tokens": self.max_tokens,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "service_tier": "default",
            "text": {
                "format": self.sent["text"]["format"] if self.text.format else {"type": "text"},
                "verbosity": self.verbosity or "medium",
            },
            "tool_choice": self.sent.get("tool_choice") or "auto",
            "tools": [tool for tool in tools if not tool["type"].startswith(_HOSTED)],
            "truncation": "disabled",
        }


_REPEATED = (
    *("frequency_penalty", "instructions", "metadata", "parallel_tool_calls", "presence_penalty"),
    *("previous_response_id", "store", "temperature", "top_logprobs", "top_p"),
)


Stored = tuple[dict[str, Any], list[dict[str, Any]]]
"""A stored response, and the items before it."""

Find = Callable[[str], Stored | None]
"""Returns the client's stored response with an id; None if it is not stored."""


def parse_responses(body: Any, find: Find = lambda response_id: None) -> ResponsesBody:
    """Parse a body of ``/v1/responses``.

    Raises:
        ApiError: a field is missing, wrong or unsupported, or a response or an item that the body
            refers to is not stored.
    """
    if isinstance(body, dict):
        body = body | _from_store(body, find)
    return parse(ResponsesBody, body)


# --- the conversation ---


def _from_store(body: dict[str, Any], find: Find) -> dict[str, Any]:
    """The fields ``earlier`` (the conversation so far) and ``input``, with references resolved."""
    earlier: list[dict[str, Any]] = []
    if isinstance(previous := body.get("previous_response_id"), str):
        stored = find(previous)
        if not stored:
            raise ApiError(
                f"previous_response_id is {shown(previous)}, but no such response is stored: "
                "send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        response, given = stored
        earlier = [*given, *response["output"]]
    if not isinstance(items := body.get("input"), list):
        return {"earlier": earlier}
    ids = {index: item["id"] for index, item in enumerate(items) if _is_reference(item)}
    known = _stored_items({*ids.values()}, find)
    items = items.copy()
    for index, item_id in ids.items():
        if item_id not in known:
            remedy = "send the item itself: its id is not stored, or was used before"
            refuse(f"input[{index}].id", item_id, remedy)
        items[index] = known.pop(item_id)  # only once, or a short body could expand to gigabytes
    return {"earlier": earlier, "input": items}


def _stored_items(ids: Set[str], find: Find) -> dict[str, dict[str, Any]]:
    """By id: the items of stored answers that have any of the given ids."""
    known: dict[str, dict[str, Any]] = {}
    for number in {item_id.split("_")[1] for item_id in ids if "_" in item_id}:
        if stored := find(f"resp_{number}"):  # one at a time: it may be a large conversation
            known |= {item["id"]: item for item in stored[0]["output"] if item["id"] in ids}
    return known


def _is_reference(item: Any) -> bool:
    """Whether an item of the input is only the id of a stored item."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _message(item: _InputItem) -> dict[str, Any] | None:
    """An item as a chat message whose content is a list; None if the model cannot use it."""
    if item.type == "message":
        role = "system" if item.role == "developer" else item.role
        if role == "system" and not item.content:
            return None
        return {"role": role, "content": [item.content]}
    if item.type.endswith("_output"):
        return {"role": "tool", "content": [item.output], "tool_call_id": item.call_id}
    answer: dict[str, Any] = {"role": "assistant", "content": []}
    if item.type in ("function_call", "custom_tool_call"):
        custom = item.type == "custom_tool_call"
        arguments = {_INPUT: item.input} if custom else item.arguments or {}
        function = {"name": _flat_name(item), "arguments": arguments}
        call = {"type": "function", "function": function, "id": item.call_id}
        return answer | {"tool_calls": [call]}
    reasoning = item.content or "\n\n".join(part.text for part in item.summary)
    return answer | {"reasoning_content": [reasoning]} if reasoning else None


class ResponseStore:
    """Stores the most recently used responses in memory, with their conversations.

    A partition finds only its own responses. Any thread may call the store.

    Args:
        most_bytes: the most bytes of all responses with their conversations, as JSON.

    Attributes:
        nbytes: the bytes of all stored responses with their conversations, as JSON.
    """

    def __init__(self, most_bytes: int = 64 * 2**20) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """The JSON by partition and response id; as objects it would take three times the
        memory.
        """
        self.nbytes = 0
        self._changing = threading.Lock()

    def put(
        self, partition: str, response: dict[str, Any], given: Sequence[dict[str, Any]]
    ) -> None:
        """Store a response and all items before it; the least recently used responses are
        dropped.
        """
        text = json.dumps([response, [*given]]).encode()
        with self._changing:
            self._kept[partition, response["id"]] = text
            self.nbytes += len(text)
            while self.nbytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def response(self, partition: str, response_id: str) -> Stored | None:
        """The partition's response with this id; None if it is not stored."""
        key = partition, response_id
        with self._changing:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            text = self._kept[key]
        response, given = json.loads(text)
        return response, given

    def delete(self, partition: str, response_id: str) -> None:
        """Delete a response, if it is stored."""
        with self._changing:
            self._drop((partition, response_id))

    def _drop(self, key: tuple[str, str]) -> None:
        self.nbytes -= len(self._kept.pop(key, b""))


# --- answers ---


class ResponsesAnswer(ApiAnswer):
    """The answer of ``/v1/responses``.

    Events are numbered by ``sequence_number``. The keep-alive repeats ``response.in_progress``,
    since some clients do not accept comments as keep-alives. The stream ends with
    ``response.completed``, with ``response.incomplete`` if the output was cut off, or with
    ``response.failed``.

    Log-probabilities are sent for the text only.

    Args:
        keep: called with the finished response and the items before it, if it is to be stored.
    """

    def __init__(
        self,
        body: ResponsesBody,
        model: str,
        keep: Callable[[dict[str, Any], Sequence[dict[str, Any]]], None],
    ) -> None:
        super().__init__()
        self._body = body
        self._keep = keep
        self._sent = 0
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            **body.repeated(),
        }

    def begin(self) -> list[dict[str, Any]]:
        if self._sent:  # it has begun with a keep-alive
            return []
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def feed_choice(self, choice: Choice, runs: Sequence[TextRun]) -> list[dict[str, Any]]:
        if choice.end:
            if not choice.parts:
                choice.parts.append(Part("text"))
                runs = [TextRun(choice.parts[0], 0, begins=True, ends=True)]
            too_long = choice.finish_reason == "length"
            cut_off = too_long or choice.cut_in_call
            status = "incomplete" if cut_off else "completed"
            self._response |= {
                "status": status,
                "completed_at": None if cut_off else int(time.time()),
                "incomplete_details": {"reason": "max_output_tokens"} if too_long else None,
                "output": self._output(status),
                "usage": _usage(choice, choice.end),
            }
        return [event for run in runs for event in self._events_of(run)]

    def close(self) -> list[dict[str, Any]]:
        if self._body.store:
            self._keep(self._response, self._body.items)
        return [self._lifecycle(self._response["status"])]

    def whole(self) -> dict[str, Any]:
        return self._response

    def keep_alive(self) -> list[dict[str, Any]]:
        return self.begin() or [self._lifecycle("in_progress")]

    def failed(self, error: ApiError) -> dict[str, Any]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        if error.code == "context_length_exceeded" or error.status == 429:
            code = error.code or "rate_limit_exceeded"
        self._response |= {
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "output": self._output("incomplete"),
        }
        return self._lifecycle("failed")

    def _output(self, status: str) -> list[dict[str, Any]]:
        """All items, the last one with the given status."""
        parts = enumerate(self.choices[0].parts)
        items = [self._item(position, part, "completed") for position, part in parts]
        for last in items[-1:]:
            last["status"] = status
        return items

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": f"response.{kind}", "sequence_number": self._sent - 1, **fields}

    def _lifecycle(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=self._response.copy())

    def _events_of(self, run: TextRun) -> Iterator[dict[str, Any]]:
        """The events for a run of an item's text; an item has at most one content part."""
        position, text = run.position, run.text
        kind = self._kind_of(run.part)
        name = _ITEMS[kind][1]
        empty = replace(run.part, text="", pieces=[])
        item = self._item(position, empty, "in_progress")
        has_content = "content" in item
        place = {"item_id": item["id"], "output_index": position}
        place |= {"content_index": 0} if has_content else {}
        if run.begins:
            yield self._event("output_item.added", output_index=position, item=item)
            if has_content:
                yield self._event("content_part.added", **place, part=self._content(empty))
        if kind == "custom":  # its JSON cannot be parsed before it ends
            text = _whole_input(run.part.text) if run.ends else ""
        if text:
            logprobs = chat_logprobs(self._tokenizer, run.pieces) if kind == "text" else None
            delta = without_nulls({"delta": text, "logprobs": logprobs})
            yield self._event(f"{name}.delta", **place, **delta)
        if not run.ends:
            return
        is_last = run.part is self.choices[0].parts[-1]
        item = self._item(position, run.part, self._response["status"] if is_last else "completed")
        texts = item["content"][0] if has_content else item
        done = {key: texts[key] for key in _DONE if key in texts}
        yield self._event(f"{name}.done", **place, **done)
        if has_content:
            yield self._event("content_part.done", **place, part=item["content"][0])
        yield self._event("output_item.done", output_index=position, item=item)

    def _kind_of(self, part: Part) -> str:
        """The kind of a part; "custom" for the call of a custom tool."""
        tool = self._body.known_tools.get(part.name)
        return "custom" if tool and tool.type == "custom" else part.kind

    def _item(self, position: int, part: Part, status: str) -> dict[str, Any]:
        """The item of a part; without content if it is in progress."""
        prefix, _, fields = _ITEMS[self._kind_of(part)]
        number = self._response["id"].partition("_")[2]
        item = {"id": f"{prefix}_{number}_{position}", "status": status, **fields}
        if "content" in item:
            return item | {"content": [self._content(part)] if status != "in_progress" else []}
        tool = self._body.known_tools.get(part.name)
        name, namespace = (tool.name, tool.namespace) if tool else (part.name, None)
        item |= without_nulls({"call_id": part.id, "name": name, "namespace": namespace})
        custom = {"input": _whole_input(part.text)}
        return item | (custom if "input" in item else {"arguments": part.text})

    def _content(self, part: Part) -> dict[str, Any]:
        """The only content part of an item."""
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": part.text}
        logprobs = chat_logprobs(self._tokenizer, part.pieces)
        content = {"type": "output_text", "text": part.text}
        return content | {"annotations": [], "logprobs": logprobs}


_REASONING: dict[str, Any] = {
    "type": "reasoning",
    "content": [],
    "summary": [],
    "encrypted_content": None,
}
_ITEMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text": ("msg", "output_text", {"type": "message", "role": "assistant", "content": []}),
    "reasoning": ("rs", "reasoning_text", _REASONING),
    "call": ("fc", "function_call_arguments", {"type": "function_call", "arguments": ""}),
    "custom": ("ctc", "custom_tool_call_input", {"type": "custom_tool_call", "input": ""}),
}
"""By kind of item: the prefix of its id, the name of its text in events, and its initial fields."""

_DONE = ("text", "logprobs", "arguments", "input", "name")
"""Fields of an item or its content that are repeated in the event at the end of its text."""


def _usage(choice: Choice, end: Ended) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": end.cached_tokens,
            # Every token that was computed is cached for later prompts.
            "cache_write_tokens": end.prompt_tokens - end.cached_tokens,
        },
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


def _whole_input(written: str) -> str:
    """The text for a custom tool; if its JSON is invalid, everything that the model wrote."""
    try:
        value = json.loads(written)[_INPUT]
    except (ValueError, LookupError, TypeError, RecursionError):
        value = None
    return without_lone_surrogates(value) if isinstance(value, str) else written
