"""OpenAI's Responses API: request bodies, stored conversations and answers."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic import BeforeValidator, Field, model_validator

from .answer import ApiAnswer, Choice, OutputFormat, Part, TextRun, framed
from .body import (
    ApiError,
    Body,
    Dictionary,
    Integer,
    Items,
    Name,
    StringOr,
    parse,
    refuse,
    shown,
    without_lone_surrogates,
    without_nulls,
)
from .openai import chat_logprobs
from .requests import (
    ChatRequest,
    CommonBody,
    Options,
    Texts,
    ToolOutput,
    chosen_tool,
    conversation,
    joined,
    merged,
    text_of_output,
)
from .worker import Ended

_INPUT = "input"  # the argument with the text for a custom tool
_HOSTED = ("web_search", "image_generation", "tool_search")
"""Type prefixes of optional tools that the server would run. Agents offer them beside their own."""


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
    definition: Name = "-"
    mode: Literal["auto", "required"] = "auto"
    tools: Items[_ToolBody] = []

    needed = {
        **dict.fromkeys(("function", "custom", "namespace"), ("name",)),
        "grammar": ("syntax", "definition"),
    }

    @property
    def hosted(self) -> bool:
        """Whether the server would have to run the tool."""
        return self.type.startswith(_HOSTED)

    def for_chat(self) -> dict[str, Any]:
        """The tool in OpenAI's form for chats."""
        custom = self.type == "custom"
        function = {
            "name": _flat_name(self.name, self.namespace),
            "description": self.description,
            "parameters": _text_schema(self.format) if custom else self.parameters,
            "strict": self.strict,
        }
        return {"type": "function", "function": without_nulls(function)}


def _flat_name(name: str, namespace: str | None) -> str:
    """A tool's name for the model. Models have no namespaces."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _text_schema(format: _ToolBody | None) -> dict[str, Any]:
    """The parameters of the function that stands for a custom tool: one text.

    A grammar is shown to the model but not enforced.
    """
    about = "The text that the tool takes, as it is."
    if format and format.type == "grammar":
        about += f" It follows this {format.syntax} grammar:\n{format.definition}"
    text = {"type": "string", "description": about}
    return {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}


@dataclass(frozen=True)
class ResponsesRequest(ChatRequest):
    """A request for a response.

    Attributes:
        items: the conversation in this API's form, including the one that led to the previous
            response. Each item has an id.
        known_tools: the tools by their names for the model.
        store: whether to store the response for later requests.
        repeated: the request's fields that the response repeats.
    """

    param: ClassVar[str] = "input"

    items: tuple[dict[str, Any], ...] = ()
    known_tools: Mapping[str, _ToolBody] = field(default_factory=dict)
    store: bool = True
    repeated: Mapping[str, Any] = field(default_factory=dict)


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
        "item_reference",
        "web_search_call",
        "file_search_call",
        "image_generation_call",
    ]
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: Texts = []
    summary: Texts = []
    call_id: Name = "-"
    name: Name = "-"
    namespace: str | None = None
    arguments: dict[str, Any] | str = ""
    input: str = ""
    output: ToolOutput = []
    tools: Items[_ToolBody] = []

    needed = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name"),
        "custom_tool_call": ("call_id", "name"),
        "function_call_output": ("call_id",),
        "custom_tool_call_output": ("call_id",),
    }

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type") is not None:
            return value
        return value | {"type": "item_reference" if value.get("role") is None else "message"}


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(CommonBody):
    """A body of ``/v1/responses``."""

    input: Annotated[Items[_InputItem], BeforeValidator(_as_items)] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Items[_ToolBody] = []
    tool_choice: StringOr[Literal["none", "auto", "required"], _ToolBody] = "auto"
    include: Items[str] = []
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] = 0
    metadata: Annotated[Dictionary[str, str], Field(max_length=16)] = {}  # OpenAI's limit
    store: bool = True
    text: Options = Options()

    unsupported = (*CommonBody.unsupported, "chats", "/v1/responses")


def parse_responses(
    body: Any, store: ResponseStore | None = None, partition: str = ""
) -> ResponsesRequest:
    """Parse a body of ``/v1/responses``.

    Args:
        body: the JSON value of the body.
        store: the stored responses that the body may refer to.
        partition: the part of the store that the client may use.

    Raises:
        ApiError: a field is missing, wrong or unsupported.
    """
    asked = parse(ResponsesBody, body)
    stored = _conversation(asked, _as_items(body.get("input")), store or ResponseStore(), partition)
    if not stored:
        refuse("input", body.get("input"), "send a string, or a list with at least one item")
    items = [_InputItem.model_validate(item) for item in stored]
    known = _known_tools([*asked.tools, *(tool for item in items for tool in item.tools)])
    if asked.tools and not known:
        refuse("tools", body["tools"], "offer functions, since the server runs no tools itself")
    word, named, kept = _tool_choice(asked.tool_choice, known)
    top = asked.top_logprobs
    asks_logprobs = top or "message.output_text.logprobs" in asked.include
    return ResponsesRequest(
        **asked.common(**{"text.format": asked.text.format}),
        # An answer is a new message in this API.
        **conversation(_messages(asked.instructions, items), "input", continues=False),
        **chosen_tool(word, named, [tool.for_chat() for tool in kept], "tool_choice"),
        logprobs=top if asks_logprobs else None,
        parallel_tool_calls=asked.parallel_tool_calls,
        template_kwargs=asked.template_kwargs(asked.text.verbosity),
        items=tuple(stored),
        known_tools=known,
        store=asked.store,
        repeated=_repeated(asked, body),
    )


_REPEATED = (
    *("frequency_penalty", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls"),
    *("presence_penalty", "previous_response_id", "store", "temperature", "top_logprobs", "top_p"),
)


def _repeated(asked: ResponsesBody, body: dict[str, Any]) -> dict[str, Any]:
    """The request's fields that the response repeats, with the values in force."""
    tools = zip(asked.tools, body.get("tools") or (), strict=True)
    return {
        **{name: getattr(asked, name) for name in _REPEATED},
        "reasoning": {"effort": asked.reasoning.effort, "summary": None},
        "service_tier": "default",
        "text": {
            "format": body["text"]["format"] if asked.text.format else {"type": "text"},
            "verbosity": asked.text.verbosity or asked.verbosity or "medium",
        },
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [sent for tool, sent in tools if not tool.hosted],
        "truncation": "disabled",
    }


# --- tools ---


def _known_tools(offered: Iterable[_ToolBody]) -> dict[str, _ToolBody]:
    """The tools that a request offers, by their names for the model.

    Agents such as Codex offer a web search besides their own tools to any server, and work
    without it. So it is left out.
    """
    known: dict[str, _ToolBody] = {}
    for outer in offered:
        if outer.hosted:
            continue
        tools = [outer]
        if outer.type == "namespace":
            tools = [tool.model_copy(update={"namespace": outer.name}) for tool in outer.tools]
        for tool in tools:
            if tool.type not in ("function", "custom"):
                raise ApiError(
                    f"tools has one of the type {shown(tool.type)}: offer tools of the type "
                    '"function" or "custom", or a "namespace" of them.',
                    param="tools",
                )
            known.setdefault(_flat_name(tool.name, tool.namespace), tool)
    return known


def _tool_choice(
    choice: str | _ToolBody, known: dict[str, _ToolBody]
) -> tuple[str, str | None, list[_ToolBody]]:
    """The tool choice of a chat, the function that must be called, and the allowed tools."""
    if isinstance(choice, str):
        return choice, None, [*known.values()]
    allows = choice.type == "allowed_tools"
    if not allows and choice.type not in ("function", "custom"):
        refuse("tool_choice.type", choice.type, 'send "function", "custom" or "allowed_tools"')
    names = {(tool.name, tool.namespace): flat_name for flat_name, tool in known.items()}
    # Without a namespace, the first tool of that name is meant.
    names |= {(tool.name, None): flat_name for flat_name, tool in reversed(known.items())}
    chosen = []
    for tool in choice.tools if allows else [choice]:
        if (tool.name, tool.namespace) in names:
            chosen.append(names[tool.name, tool.namespace])
        elif not tool.hosted:
            refuse("tool_choice", tool.name, "name one of the tools")
    if allows:
        return choice.mode, None, [known[name] for name in dict.fromkeys(chosen)]
    return "function", chosen[0], [*known.values()]


# --- the conversation ---


def new_id(prefix: str) -> str:
    """An id for a response or an item."""
    return f"{prefix}_{uuid.uuid4().hex}"


def _conversation(
    asked: ResponsesBody, sent: list[dict[str, Any]] | None, store: ResponseStore, partition: str
) -> list[dict[str, Any]]:
    """The items up to the previous response's end and the input's, each with an id.

    Raises:
        ApiError: a response or an item that the body refers to is not stored.
    """
    items: list[dict[str, Any]] = []
    if (previous := asked.previous_response_id) is not None:
        found = store.response(partition, previous)
        if not found:
            raise ApiError(
                f"previous_response_id is {shown(previous)}, which is not or no longer stored: "
                "send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        response, given = found
        items += [*given, *response["output"]]
    ids = {one.id for one in asked.input if one.type == "item_reference" and one.id}
    known = store.items(partition, ids)
    for index, (one, raw) in enumerate(zip(asked.input, sent or (), strict=True)):
        if one.type != "item_reference":
            items.append(_stored(one, raw))
        elif one.id in known:
            items.append(known.pop(one.id))  # once, or a short body could stand for gigabytes
        else:
            remedy = "send the item itself, since no stored one has this id, or it is there already"
            refuse(f"input[{index}].id", one.id, remedy)
    return items


def _stored(one: _InputItem, sent: dict[str, Any]) -> dict[str, Any]:
    """An item of the input as the server stores and returns it."""
    item = {**without_nulls(sent), "id": one.id or new_id("item"), "status": "completed"}
    if one.type == "message":
        part: dict[str, Any] = {"type": "input_text"}
        if one.role == "assistant":
            part = {"type": "output_text", "annotations": [], "logprobs": []}
        content = [{**part, "text": given.text} for given in one.content]
        item |= {"type": "message", "content": content}
    if "output" in item:  # without images
        item["output"] = text_of_output(one.output)
    return item


def _messages(instructions: str | None, items: Iterable[_InputItem]) -> list[dict[str, Any]]:
    """The conversation as chat messages; instructions and first system messages become one."""
    system = [{"role": "system", "content": [instructions]}] if instructions else []
    messages = [_message(item) for item in items]
    return merged([*system, *(message for message in messages if message)])


def _message(item: _InputItem) -> dict[str, Any] | None:
    """An item as a chat message whose content is a list; None if the model cannot use it."""
    if item.type == "message":
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": [joined(item.content)]}
    if item.type.endswith("_output"):
        text = text_of_output(item.output)
        return {"role": "tool", "content": [text], "tool_call_id": item.call_id}
    answer: dict[str, Any] = {"role": "assistant", "content": []}
    if item.type in ("function_call", "custom_tool_call"):
        custom = item.type == "custom_tool_call"
        arguments = {_INPUT: item.input} if custom else item.arguments or {}
        function = {"name": _flat_name(item.name, item.namespace), "arguments": arguments}
        call = {"type": "function", "function": function, "id": item.call_id}
        return answer | {"tool_calls": [call]}
    reasoning = joined(item.content) or "\n\n".join(part.text for part in item.summary)
    return answer | {"reasoning_content": [reasoning]} if reasoning else None


class ResponseStore:
    """Stores the most recently used responses in memory, with their conversations.

    A partition finds only its own responses. Any thread may call the store.

    Args:
        most: the most responses.
        most_bytes: the most bytes of all responses with their conversations, as JSON.

    Attributes:
        nbytes: the bytes of all stored responses with their conversations, as JSON.
    """

    def __init__(self, most: int = 1000, most_bytes: int = 64 * 2**20) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[bytes, frozenset[str]]] = OrderedDict()
        """By partition and response id: the JSON, and the ids of all items."""
        self.nbytes = 0
        self._changing = threading.Lock()

    def put(
        self, partition: str, response: dict[str, Any], given: Sequence[dict[str, Any]]
    ) -> None:
        """Store a response and all items before it; the least recently used ones make room."""
        # JSON takes a third of the memory of its objects.
        text = json.dumps([response, [*given]]).encode()
        ids = frozenset(item["id"] for item in (*given, *response["output"]))
        with self._changing:
            self._kept[partition, response["id"]] = text, ids
            self.nbytes += len(text)
            while len(self._kept) > self._most or self.nbytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def response(
        self, partition: str, response_id: str
    ) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The partition's response with this id and the items before it, if it is stored."""
        key = partition, response_id
        with self._changing:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            text, _ = self._kept[key]
        response, given = json.loads(text)
        return response, given

    def items(self, partition: str, ids: Set[str]) -> dict[str, dict[str, Any]]:
        """The items with these ids in the partition's responses, by id; the others are left out."""
        with self._changing:
            kept = [(key, own) for key, (_, own) in self._kept.items() if key[0] == partition]
        found: dict[str, dict[str, Any]] = {}
        for key, own in kept:
            if own & (ids - found.keys()) and (stored := self.response(*key)):
                response, given = stored
                found |= {item["id"]: item for item in (*given, *response["output"])}
        return {item_id: found[item_id] for item_id in ids & found.keys()}

    def delete(self, partition: str, response_id: str) -> None:
        """Delete a response, if it is stored."""
        with self._changing:
            self._drop((partition, response_id))

    def _drop(self, key: tuple[str, str]) -> None:
        dropped, _ = self._kept.pop(key, (b"", ()))
        self.nbytes -= len(dropped)


# --- answers ---


class ResponsesAnswer(ApiAnswer):
    """The answer of ``/v1/responses``.

    Events are numbered by ``sequence_number``. The keep-alive repeats ``response.in_progress``,
    since some clients do not accept comments as signs of life. The stream ends with
    ``response.completed``, with ``response.incomplete`` if the output was cut off, or with
    ``response.failed``.

    Log-probabilities are sent for the text only.

    Args:
        request: the client's request.
        model: the model's name in the answer.
        tokenizer: the model's tokenizer.
        format: the format of the model's output.
        keep: called with the finished response and the items before it, if it is to be stored.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        tokenizer: TokenizerWrapper,
        format: OutputFormat | None,
        keep: Callable[[dict[str, Any], Sequence[dict[str, Any]]], None],
    ) -> None:
        super().__init__([Choice(0, format)])
        self._request = request
        self._keep = keep
        self._tokenizer = tokenizer
        self._output: list[dict[str, Any]] = []
        self._part = Part("")  # the part of the last item
        self._logprobs: list[dict[str, Any]] = []  # of the last item
        self._sent = 0
        self._response = {**_new_response(), "model": model, **request.repeated}

    def begin(self) -> list[dict[str, Any]]:
        if self._sent:
            return []
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def feed_choice(self, choice: Choice, runs: Sequence[TextRun]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for run in runs:
            if run.begins:
                events += [*self._end_item("completed"), *self._begin_item(run.part)]
            if run.text and self._output[-1]["type"] != "custom_tool_call":
                events.append(self._delta(run.text, chat_logprobs(self._tokenizer, run.pieces)))
        if choice.end:
            if not self._output:
                events += self._begin_item(Part("text"))
            cut_off = choice.finish_reason == "length"
            status = "incomplete" if cut_off else "completed"
            events += self._end_item(status)
            self._response |= {
                "status": status,
                "completed_at": None if cut_off else int(time.time()),
                "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
                "output": self._output,
                "usage": _usage(choice, choice.end),
            }
        return events

    def close(self) -> list[dict[str, Any]]:
        if self._request.store:
            self._keep(self._response, self._request.items)
        return [self._lifecycle(self._response["status"])]

    def whole(self) -> dict[str, Any]:
        return self._response

    def keep_alive(self) -> str:
        return "".join(map(framed, self.begin() or [self._lifecycle("in_progress")]))

    def failed(self, error: ApiError) -> dict[str, Any]:
        if self._output:
            self._complete_item("incomplete")
        self._response |= {"output": self._output, **_failure(error)}
        return self._lifecycle("failed")

    # --- events ---

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": f"response.{kind}", "sequence_number": self._sent - 1, **fields}

    def _lifecycle(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=self._response.copy())

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the last item, which has at most one content part."""
        item = self._output[-1]
        index = {"content_index": 0} if "content" in item else {}
        place = {"item_id": item["id"], "output_index": len(self._output) - 1, **index}
        return self._event(kind, **place, **fields)

    def _whole_item(self, kind: str) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._output) - 1, item=self._output[-1].copy())

    def _begin_item(self, part: Part) -> list[dict[str, Any]]:
        """Add an item for a part of the answer."""
        self._part, self._logprobs, kind = part, [], part.kind
        called: dict[str, Any] = {}
        if kind == "call":
            tool = self._request.known_tools.get(part.name) or _ToolBody(
                type="function", name=part.name
            )
            called = {"call_id": part.id, "name": tool.name, "namespace": tool.namespace}
            kind = "custom" if tool.type == "custom" else kind
        prefix, fields = _ITEMS[kind]
        item = {"id": new_id(prefix), "status": "in_progress", **fields, **without_nulls(called)}
        self._output.append(item)
        events = [self._whole_item("output_item.added")]
        if "content" in item:
            events.append(self._of_item("content_part.added", part=self._content("")))
        return events

    def _content(self, text: str) -> dict[str, Any]:
        """The only content part of the last item, with the given text."""
        kind = self._output[-1]["type"]
        part: dict[str, Any] = {"type": _TEXTS[kind], "text": text}
        if kind == "message":
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """The event for more text of the last item."""
        kind = self._output[-1]["type"]
        fields: dict[str, Any] = {"delta": text}
        if kind == "message":
            fields["logprobs"] = logprobs
            self._logprobs += logprobs
        return self._of_item(f"{_TEXTS[kind]}.delta", **fields)

    def _complete_item(self, status: str) -> dict[str, Any]:
        """Complete the last item; returns the fields of the event that ends its text."""
        item, text = self._output[-1], self._part.text
        item["status"] = status
        if "content" in item:
            item["content"] = [self._content(text)]
            return without_nulls({"text": text, "logprobs": item["content"][0].get("logprobs")})
        if item["type"] == "custom_tool_call":
            item["input"] = _whole_input(text)
            return {"input": item["input"]}
        item["arguments"] = text
        return {"arguments": text, "name": item["name"]}

    def _end_item(self, status: str) -> list[dict[str, Any]]:
        """End the last item, if there is one."""
        if not self._output:
            return []
        item, events = self._output[-1], []
        done = self._complete_item(status)
        if item.get("input"):  # it could not be read before
            events.append(self._delta(item["input"], []))
        events.append(self._of_item(f"{_TEXTS[item['type']]}.done", **done))
        if "content" in item:
            events.append(self._of_item("content_part.done", part=item["content"][0]))
        return [*events, self._whole_item("output_item.done")]


_ITEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("msg", {"type": "message", "role": "assistant", "content": []}),
    "reasoning": (
        "rs",
        {"type": "reasoning", "content": [], "summary": [], "encrypted_content": None},
    ),
    "call": ("fc", {"type": "function_call", "arguments": ""}),
    "custom": ("ctc", {"type": "custom_tool_call", "input": ""}),
}
"""By the kind of a part: the prefix of its item's id, and the item's fields at the beginning."""

_TEXTS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""By the type of an item: the name of its text in events."""


def _new_response() -> dict[str, Any]:
    """A response that has just begun."""
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": "",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _failure(error: ApiError) -> dict[str, Any]:
    """The fields of a failed response."""
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    code = "rate_limit_exceeded" if error.status == 429 else code
    if error.code == "context_length_exceeded":
        code = error.code
    return {"status": "failed", "error": {"code": code, "message": error.message}}


def failed_event(error: ApiError, request_id: str) -> dict[str, Any]:
    """The only event of a stream that fails before it has an answer."""
    response = _new_response() | _failure(error)
    return {"type": "response.failed", "sequence_number": 0, "response": response}


def _usage(choice: Choice, end: Ended) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": end.cached_tokens,
            # All computed tokens are cached for later prompts.
            "cache_write_tokens": end.prompt_tokens - end.cached_tokens,
        },
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


def _whole_input(written: str) -> str:
    """The text for a custom tool, or all that the model wrote if its JSON is invalid.

    Backslashes that JSON does not allow are escaped: models do not escape regular expressions.
    """
    mended = _ESCAPE.sub(lambda found: found[0] if found[1] else r"\\", written)
    try:
        value = json.loads(mended, strict=False)["input"]
    except (ValueError, LookupError, TypeError, RecursionError):
        value = None
    return without_lone_surrogates(value) if isinstance(value, str) else written


_ESCAPE = re.compile(r'\\(["\\/bfnrtu])|\\(?=.)')


# --- input items ---


def input_items_answer(given: Sequence[dict[str, Any]], order: str | None) -> dict[str, Any]:
    """The answer of ``/v1/responses/ID/input_items``: all items, the latest first unless "asc"."""
    data = [*given] if order == "asc" else [*reversed(given)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"],
        "last_id": data[-1]["id"],
        "has_more": False,
    }
