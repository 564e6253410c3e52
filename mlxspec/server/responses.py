"""OpenAI's Responses API: request bodies, stored conversations and answers."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import from_json

from .answer import ApiAnswer, Choice, OutputFormat, Part, TextRun
from .body import (
    ApiError,
    Body,
    Dictionary,
    Integer,
    Items,
    Name,
    StringOr,
    TokenId,
    parse,
    refuse,
    shown,
    without_lone_surrogates,
    without_nulls,
)
from .openai import TokenNames
from .requests import (
    ChatRequest,
    CommonBody,
    Options,
    Texts,
    chosen_tool,
    conversation,
    left_out,
)

_MOST_REPEATED = 4_000_000  # characters of JSON; a stream sends them three times
_INPUT = "input"  # the argument with the text for a custom tool
_HOSTED = ("web_search", "image_generation", "tool_search")
"""Type prefixes of optional tools that the server would run. Agents offer them beside their own."""


class Tool(NamedTuple):
    """A tool as the client knows it.

    Attributes:
        name: the tool's name in its namespace.
        namespace: the namespace's name; None without one.
        custom: whether the tool takes a text instead of JSON.
        place: the path of its schema in the body.
        function: the tool in OpenAI's form for chats.
    """

    name: str
    namespace: str | None = None
    custom: bool = False
    place: str = ""
    function: Mapping[str, Any] = {}


def _flat_name(name: str, namespace: str | None) -> str:
    """A tool's name for the model. Models have no namespaces."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


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
    known_tools: Mapping[str, Tool] = field(default_factory=dict)
    store: bool = True
    repeated: Mapping[str, Any] = field(default_factory=dict)


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
    phase: str | None = None
    content: Texts = []
    summary: Texts = []
    encrypted_content: str | None = None
    call_id: Name = "-"
    name: Name = "-"
    namespace: str | None = None
    arguments: dict[str, Any] | str = ""
    input: str = ""
    output: StringOr[str, Items[dict[str, Any]]] = ""
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
    max_tool_calls: TokenId | None = None
    metadata: Annotated[Dictionary[str, str], Field(max_length=16)] = {}  # OpenAI's limit
    store: bool = True
    text: Options = Options()
    truncation: Literal["auto", "disabled"] = "disabled"

    unsupported = (*CommonBody.unsupported, "chats", "/v1/responses")


def parse_responses(
    body: object, store: ResponseStore | None = None, partition: str = ""
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
    items = [*_before(asked, store, partition), *_items(asked, store, partition)]
    if not items:
        refuse("input", asked.input, "send a string, or a list with at least one item")
    known = _known_tools(asked, items)
    word, named, kept = _tool_choice(asked.tool_choice, known)
    text, top = asked.text, asked.top_logprobs
    asks_logprobs = top or "message.output_text.logprobs" in asked.include
    common = asked.common(text.format.schema_at("text.format", False) if text.format else None)
    # By default an answer is a new message in this API.
    continues = asked.continue_final_message or False
    request = ResponsesRequest(
        **common,
        **conversation(_messages(asked.instructions, items), "input", continues),
        **chosen_tool(word, named, [dict(tool.function) for tool in kept], "tool_choice"),
        tool_places=tuple(tool.place for tool in kept),
        logprobs=top if asks_logprobs else None,
        parallel_tool_calls=asked.parallel_tool_calls,
        template_kwargs=asked.template_kwargs(text.verbosity),
        items=tuple(items),
        known_tools=known,
        store=asked.store,
        repeated=_repeated(asked, body),
    )
    if (length := len(json.dumps(request.repeated))) > _MOST_REPEATED:
        raise ApiError(
            "instructions, tools and the other fields that a response repeats have "
            f"{length:,} characters of JSON: send {_MOST_REPEATED:,} at most"
        )
    return request


_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("previous_response_id", "prompt_cache_key", "safety_identifier", "store", "temperature"),
    *("top_logprobs", "top_p", "user"),
)


def _repeated(asked: ResponsesBody, body: Any) -> dict[str, Any]:
    """The request's fields that the response repeats, with the values in force."""
    format = asked.text.format and body["text"]["format"]
    return {
        **{name: getattr(asked, name) for name in _REPEATED},
        "background": False,
        "frequency_penalty": asked.frequency_penalty or 0.0,
        "presence_penalty": asked.presence_penalty or 0.0,
        "reasoning": {"effort": asked.reasoning.effort, "summary": None},
        "service_tier": "default",
        "text": {
            "format": format or {"type": "text"},
            "verbosity": asked.text.verbosity or asked.verbosity or "medium",
        },
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_repeated_tool(tool) for tool in asked.tools if not tool.hosted],
        "truncation": "disabled",
    }


def _repeated_tool(tool: _ToolBody) -> dict[str, Any]:
    """A tool as the response repeats it, with the fields that clients expect."""
    absent: dict[str, Any] = {"description": "" if tool.type == "namespace" else None}
    if tool.type == "function":
        absent |= {"parameters": None, "strict": None}
    given = tool.model_dump(exclude_unset=True)
    return absent | given | ({"tools": [*map(_repeated_tool, tool.tools)]} if tool.tools else {})


# --- tools ---


def _known_tools(asked: ResponsesBody, items: Sequence[dict[str, Any]]) -> dict[str, Tool]:
    """The tools that a request offers, by their names for the model.

    Agents such as Codex offer a web search besides their own tools to any server, and work
    without it. So it is left out, but refused if it is the only tool.
    """
    known: dict[str, Tool] = {}
    for index, tool in enumerate(asked.tools):
        _add_tools(tool, f"tools[{index}]", known)
    for item in items:
        if item["type"] == "additional_tools":
            for index, tool in enumerate(map(_ToolBody.model_validate, item["tools"])):
                _add_tools(tool, f"additional_tools[{index}]", known, again=True)
    if not known:
        for index, tool in enumerate(asked.tools):
            remedy = "offer functions, since the server does not run tools itself"
            refuse(f"tools[{index}].type", tool.type, remedy)
    return known


def _add_tools(tool: _ToolBody, path: str, known: dict[str, Tool], again: bool = False) -> None:
    """Add a tool, or a namespace's tools; known tools are skipped if ``again``."""
    space = tool if tool.type == "namespace" else None
    if tool.hosted:
        return
    for index, one in enumerate(space.tools if space else [tool]):
        place = f"{path}.tools[{index}]" if space else path
        if one.type not in ("function", "custom"):
            inside = "" if space else ', or a "namespace" of them'
            refuse(
                f"{place}.type", one.type, f'offer tools of the type "function" or "custom"{inside}'
            )
        about = one.description
        if space and space.description and not index:
            about = f"{space.description}\n\n{about or ''}".rstrip()
        custom, namespace = one.type == "custom", space.name if space else None
        name = _flat_name(one.name, namespace)
        if name not in known:
            function: dict[str, Any] = {"name": name, "description": about, "strict": one.strict}
            function["parameters"] = _text_schema(one.format) if custom else one.parameters
            function = {"type": "function", "function": without_nulls(function)}
            known[name] = Tool(one.name, namespace, custom, f"{place}.parameters", function)
        elif not again:
            refuse(f"{place}.name", one.name, "give each tool a different name")


def _tool_choice(
    choice: str | _ToolBody, known: Mapping[str, Tool]
) -> tuple[str, str | None, list[Tool]]:
    """The tool choice of a chat, the function that must be called, and the allowed tools."""
    if isinstance(choice, str):
        return choice, None, [*known.values()]
    names: dict[tuple[str, str | None], str] = {}
    for flat_name, tool in known.items():
        for namespace in (None, tool.namespace):  # without a namespace, the first tool of that name
            names.setdefault((tool.name, namespace), flat_name)

    def found(named: _ToolBody, path: str) -> str:
        flat_name = names.get((named.name, named.namespace))
        if flat_name is None:
            refuse(f"{path}.name", named.name, "name one of the tools")
        return flat_name

    if choice.type in ("function", "custom"):
        return "function", found(choice, "tool_choice"), [*known.values()]
    if choice.type != "allowed_tools":
        remedy = 'send "function", "custom" or "allowed_tools", or a string'
        refuse("tool_choice.type", choice.type, remedy)
    allowed = {
        found(tool, f"tool_choice.tools[{index}]")
        for index, tool in enumerate(choice.tools)
        if not tool.hosted
    }
    return choice.mode, None, [tool for name, tool in known.items() if name in allowed]


def _text_schema(format: _ToolBody | None) -> dict[str, Any]:
    """The parameters of the function that stands for a custom tool: one text.

    A grammar is shown to the model but not enforced.
    """
    about = "The text that the tool takes, as it is."
    if format and format.type == "grammar":
        about += f" It follows this {format.syntax} grammar:\n{format.definition}"
    text = {"type": "string", "description": about}
    return {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}


# --- the conversation ---

_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_CALLS = ("function_call", "custom_tool_call")


def new_id(prefix: str) -> str:
    """An id for a response or an item."""
    return f"{prefix}_{uuid.uuid4().hex}"


def _before(
    asked: ResponsesBody, store: ResponseStore | None, partition: str
) -> Sequence[dict[str, Any]]:
    """The conversation up to the end of the previous response."""
    previous = asked.previous_response_id
    if previous is None:
        return ()
    found = store and store.response(partition, previous)
    if not found:
        raise ApiError(
            f"previous_response_id is {shown(previous)}, which is not or no longer stored: send "
            "the whole conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.items


def _items(
    asked: ResponsesBody, store: ResponseStore | None, partition: str
) -> Iterable[dict[str, Any]]:
    """The input's items as the server returns them, without items that models cannot use."""
    for index, one in enumerate(asked.input):
        if one.type == "item_reference":
            found = store and one.id and store.item(partition, one.id)
            if not found:
                remedy = "send the item itself, since the server has no item with this id"
                refuse(f"input[{index}].id", one.id, remedy)
            yield found
        elif one.type in _ITEM_FIELDS:
            yield _item(one, f"input[{index}]")


_ITEM_FIELDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "message": ("msg", ("role", "content", "phase")),
    "function_call": ("fc", ("call_id", "name", "namespace", "arguments")),
    "custom_tool_call": ("ctc", ("call_id", "name", "namespace", "input")),
    "function_call_output": ("fco", ("call_id", "output")),
    "custom_tool_call_output": ("ctco", ("call_id", "output")),
    "reasoning": ("rs", ("summary", "content", "encrypted_content")),
    "additional_tools": ("at", ("tools",)),
}
"""By the type of an item: the prefix of its id, and its fields."""


def _item(one: _InputItem, path: str) -> dict[str, Any]:
    """An item as the server stores and returns it."""
    prefix, names = _ITEM_FIELDS[one.type]
    item: dict[str, Any] = {"id": one.id or new_id(prefix), "type": one.type, "status": "completed"}
    item |= without_nulls({name: getattr(one, name) for name in names})
    if one.type == "additional_tools":
        tools = [tool.model_dump(exclude_unset=True) for tool in one.tools]
        item |= {"role": "developer", "tools": tools}
    elif one.type == "reasoning":
        item["summary"] = [{"type": "summary_text", "text": part.text} for part in one.summary]
        item["content"] = [{"type": "reasoning_text", "text": part.text} for part in one.content]
    elif one.type == "message":
        part: dict[str, Any] = {"type": "input_text"}
        if one.role == "assistant":
            part = {"type": "output_text", "annotations": [], "logprobs": []}
        item["content"] = [{**part, "text": given.text} for given in one.content]
    elif isinstance(item.get("arguments"), dict):
        item["arguments"] = json.dumps(one.arguments)
    elif "output" in item and not isinstance(one.output, str):
        item["output"] = [
            {"type": "input_text", "text": _output_text(part, f"{path}.output[{index}]")}
            for index, part in enumerate(one.output)
        ]
    return item


def _output_text(part: Mapping[str, Any], path: str) -> str:
    """The text of a part of a tool's output, or a note in place of another type."""
    kind, text = part.get("type"), part.get("text")
    if not isinstance(kind, str) or not kind:
        refuse(f"{path}.type", kind, "send a string")
    if kind not in ("input_text", "output_text", "text"):
        return left_out(kind.removeprefix("input_"))
    if text is not None and not isinstance(text, str):
        refuse(f"{path}.text", text, "send a string")
    return text or ""


def _messages(instructions: str | None, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as chat messages.

    System messages at the beginning become one, since many templates accept only one. Consecutive
    items of the model become one message.
    """
    messages: list[dict[str, Any]] = []
    system = [] if instructions is None else [instructions]
    for item in items:
        kind = item["type"]
        if kind == "additional_tools":
            continue
        if kind == "message" and item["role"] in ("system", "developer") and not messages:
            system.append(_text_of(item["content"]))
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text_of(item["content"])})
        elif kind in _OUTPUTS:
            output = item["output"]
            text = output if isinstance(output, str) else _text_of(output)
            messages.append({"role": "tool", "content": text, "tool_call_id": item["call_id"]})
        else:
            _add_to_answer(messages, item)
    for message in messages:
        for name in ("content", "reasoning_content"):
            if isinstance(message.get(name), list):
                message[name] = "".join(message[name])
    if system:
        messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return messages


def _add_to_answer(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item of the model to its last message, or to a new one if that is complete.

    Texts are collected in lists and joined at the end: ten thousand items may form one message.
    """
    is_call = item["type"] in _CALLS
    last = messages[-1] if messages else None
    if (
        last is None
        or last["role"] != "assistant"
        or (not is_call and last["content"] and "tool_calls" not in last)
    ):
        last = {"role": "assistant", "content": []}
        messages.append(last)
    if is_call:
        name = _flat_name(item["name"], item.get("namespace"))
        custom = item["type"] == "custom_tool_call"
        arguments = {_INPUT: item["input"]} if custom else item["arguments"] or {}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        last.setdefault("tool_calls", []).append(call | {"id": item["call_id"]})
    elif item["type"] == "message":
        last["content"] += filter(None, [_text_of(item["content"])])
    elif reasoning := _text_of(item["content"]) or "\n\n".join(p["text"] for p in item["summary"]):
        last.setdefault("reasoning_content", []).append(reasoning)


def _text_of(parts: Iterable[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


@dataclass(frozen=True)
class StoredResponse:
    """A response and its conversation.

    Attributes:
        response: the response as the client received it.
        given: all items before the response, including earlier responses.
    """

    response: dict[str, Any]
    given: Sequence[dict[str, Any]]

    @property
    def items(self) -> tuple[dict[str, Any], ...]:
        """The conversation up to the end of the answer."""
        return (*self.given, *self.response["output"])


class ResponseStore:
    """Stores the most recently used responses in memory.

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
        self._kept: OrderedDict[tuple[str, str], tuple[bytes, list[str]]] = OrderedDict()
        """By partition and response id: the JSON of the response, and the ids of its items."""
        self._items: dict[tuple[str, str], tuple[bytes, int]] = {}
        """By partition and item id: the item's JSON, and the number of responses with it."""
        self.nbytes = 0
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, partition: str, stored: StoredResponse) -> None:
        """Store a response; the least recently used ones make room."""
        # JSON takes a third of the memory of its objects.
        text, items = json.dumps([stored.response, [*stored.given]]).encode(), stored.items
        with self._changing:
            for item in items:
                place = partition, item["id"]
                _, count = self._items.get(place, (b"", 0))
                self._items[place] = json.dumps(item).encode(), count + 1
            ids = [item["id"] for item in items]
            self._kept[partition, stored.response["id"]] = text, ids
            self.nbytes += len(text)
            while len(self._kept) > self._most or self.nbytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def response(self, partition: str, response_id: str) -> StoredResponse | None:
        """The partition's stored response with this id, if there is one."""
        key = partition, response_id
        with self._changing:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            text, _ = self._kept[key]
        return StoredResponse(*json.loads(text))

    def item(self, partition: str, item_id: str) -> dict[str, Any] | None:
        """The item with this id in one of the partition's responses, if there is one."""
        text, _ = self._items.get((partition, item_id), (b"null", 0))
        item: dict[str, Any] | None = json.loads(text)
        return item

    def delete(self, partition: str, response_id: str) -> bool:
        """Delete a response; returns whether it was stored."""
        with self._changing:
            if (partition, response_id) not in self._kept:
                return False
            self._drop((partition, response_id))
            return True

    def _drop(self, key: tuple[str, str]) -> None:
        dropped, ids = self._kept.pop(key)
        self.nbytes -= len(dropped)
        for item_id in ids:
            place = key[0], item_id
            text, count = self._items.pop(place)
            if count > 1:
                self._items[place] = text, count - 1


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
        keep: called with the finished response, if it is to be stored.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        tokenizer: TokenizerWrapper,
        format: OutputFormat,
        keep: Callable[[StoredResponse], None],
    ) -> None:
        super().__init__([Choice(0, format)])
        self.id = new_id("resp")
        self._request = request
        self._keep = keep
        self._names = TokenNames(tokenizer)
        self._items: list[_Item] = []
        self._sent = 0
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._model = model
        self._created = int(time.time())
        self._completed: int | None = None

    def begin(self) -> list[dict[str, Any]]:
        if self._sent:
            return []
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def feed_choice(self, choice: Choice, runs: Sequence[TextRun]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for run in runs:
            if run.begins:
                events += [*self._end_item("completed"), *self._begin_item(run.part)]
            item, text = self._items[-1], run.text
            if item.custom:
                text = _input_so_far(run.part.text).removeprefix(item.text)
            events += self._add(text, self._names.of_chat(run.pieces))
        if choice.end:
            if not self._items:
                events += self._begin_item(Part("text"))
            cut_off = choice.finish_reason == "length"
            self._status = "incomplete" if cut_off else "completed"
            self._completed = None if cut_off else int(time.time())
            events += self._end_item(self._status)
        return events

    def close(self) -> list[dict[str, Any]]:
        if self._request.store:
            self._keep(StoredResponse(self.whole(), self._request.items))
        return [self._lifecycle(self._status)]

    def whole(self) -> dict[str, Any]:
        cut_off, running = self._status == "incomplete", self._status == "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "model": self._model,
            "output": [] if running else [item.as_json() for item in self._items],
            "usage": self._usage(),
            **self._request.repeated,
        }

    def framed(self, chunk: dict[str, Any]) -> str:
        return f"event: {chunk['type']}\n{super().framed(chunk)}"

    def keep_alive(self) -> str:
        return "".join(map(self.framed, self.begin() or [self._lifecycle("in_progress")]))

    def failed(self, error: ApiError) -> dict[str, Any]:
        self._status = "failed"
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if error.status == 429 else code
        if error.code == "context_length_exceeded":
            code = error.code
        self._error = {"code": code, "message": error.message}
        if self._items and self._items[-1].status == "in_progress":
            self._items[-1].status = "incomplete"
        return self._lifecycle("failed") if self._request.stream else self.whole()

    # --- events ---

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": f"response.{kind}", "sequence_number": self._sent - 1, **fields}

    def _lifecycle(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=self.whole())

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the last item, which has at most one content part."""
        item = self._items[-1]
        index = {} if item.tool else {"content_index": 0}
        place = {"item_id": item.id, "output_index": len(self._items) - 1, **index}
        return self._event(kind, **place, **fields)

    def _whole_item(self, kind: str) -> dict[str, Any]:
        item = self._items[-1].as_json()
        return self._event(kind, output_index=len(self._items) - 1, item=item)

    def _begin_item(self, part: Part) -> list[dict[str, Any]]:
        tool = None
        if part.kind == "call":
            tool = self._request.known_tools.get(part.name, Tool(part.name))
        item = _Item(part, tool)
        self._items.append(item)
        events = [self._whole_item("output_item.added")]
        if not tool:
            events.append(self._of_item("content_part.added", part=item.content()))
        return events

    def _add(self, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add text to the last item; returns the events for it."""
        item = self._items[-1]
        item.text += text
        if not text:
            return []
        if item.type != "message":
            return [self._of_item(f"{item.event}.delta", delta=text)]
        item.logprobs += logprobs
        return [self._of_item(f"{item.event}.delta", delta=text, logprobs=logprobs)]

    def _end_item(self, status: str) -> list[dict[str, Any]]:
        """End the last item, if there is one."""
        if not self._items:
            return []
        item, events = self._items[-1], []
        if item.custom:
            events = self._add(_whole_input(item.part.text).removeprefix(item.text), [])
        done: dict[str, Any] = {item.field: item.text}
        if item.type == "message":
            done["logprobs"] = item.logprobs
        if item.tool and not item.custom:
            done["name"] = item.tool.name
        events.append(self._of_item(f"{item.event}.done", **done))
        if not item.tool:
            events.append(self._of_item("content_part.done", part=item.content()))
        item.status = status
        return [*events, self._whole_item("output_item.done")]

    def _usage(self) -> dict[str, Any] | None:
        """The token counts; None until the answer has ended."""
        (choice,) = self.choices
        end = choice.end
        if end is None:
            return None
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


_KINDS = {
    "text": ("message", "msg", "output_text", "text"),
    "reasoning": ("reasoning", "rs", "reasoning_text", "text"),
    "call": ("function_call", "fc", "function_call_arguments", "arguments"),
    "custom": ("custom_tool_call", "ctc", "custom_tool_call_input", "input"),
}
"""By the kind of a part: the item's type, id prefix, event name and text field."""


class _Item:
    """An item of the output: a message, reasoning, or a call.

    Args:
        part: the answer's part.
        tool: the called tool.

    Attributes:
        status: "in_progress", "completed" or "incomplete".
        text: the text that was sent. Of a custom call it is one of the part's arguments.
        logprobs: the log-probabilities that were sent.
    """

    def __init__(self, part: Part, tool: Tool | None = None) -> None:
        self.custom = tool is not None and tool.custom
        self.type, prefix, self.event, self.field = _KINDS["custom" if self.custom else part.kind]
        self.id = new_id(prefix)
        self.part, self.tool = part, tool
        self.status = "in_progress"
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []

    def content(self) -> dict[str, Any]:
        """The only part of the content."""
        part: dict[str, Any] = {"type": self.event, "text": self.text}
        if self.type == "message":
            part |= {"annotations": [], "logprobs": [*self.logprobs]}
        return part

    def as_json(self) -> dict[str, Any]:
        """The item's present state as JSON."""
        item: dict[str, Any] = {"id": self.id, "type": self.type, "status": self.status}
        if self.tool:
            item |= {"call_id": self.part.id, "name": self.tool.name, self.field: self.text}
            space = self.tool.namespace
            return item if space is None else item | {"namespace": space}
        item["content"] = [] if self.status == "in_progress" else [self.content()]
        if self.type == "message":
            return item | {"role": "assistant"}
        return item | {"summary": [], "encrypted_content": None}


def _input_so_far(written: str) -> str:
    """The text for a custom tool in incomplete arguments; "" if it has not begun."""
    try:
        value = from_json(_mended(written), allow_partial="trailing-strings")["input"]
    except (ValueError, LookupError, TypeError):
        return ""
    return value if isinstance(value, str) else ""


def _mended(written: str) -> str:
    """Escape backslashes that JSON does not allow: models do not escape regular expressions."""
    return _ESCAPE.sub(lambda found: found[0] if found[1] else r"\\", written)


_ESCAPE = re.compile(r'\\(["\\/bfnrtu])|\\(?=.)')


def _whole_input(written: str) -> str:
    """The text for a custom tool, or all that the model wrote if its JSON is invalid."""
    try:
        value = json.loads(_mended(written), strict=False)["input"]
    except (ValueError, LookupError, TypeError, RecursionError):
        value = None
    return without_lone_surrogates(value) if isinstance(value, str) else written


# --- input items ---

_MOST_LISTED = 100


def input_items_answer(given: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The answer of ``/v1/responses/ID/input_items``, the latest items first.

    Args:
        given: the items, in order.
        query: the parameters ``limit``, ``order`` ("asc" or "desc") and ``after`` (an item's id).

    Raises:
        ApiError: a parameter is wrong.
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
