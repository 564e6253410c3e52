"""What clients of OpenAI's Responses API ask for, as requests for a chat.

A body is translated into one of ``/v1/chat/completions`` and read as such, so that both APIs take
the same options and the same conversation has the same prompt. What is particular to this API is
checked here, and errors name its own fields.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from ..errors import ApiError
from ..fields import Fields, checked_body, shown
from ..requests import ChatRequest, left_out, parse_as_chat, refuse_unsupported
from .store import StoredResponse

_MOST_TOKENS = 2**31 - 1
_MOST_TOLD = 4_000_000  # characters, which a stream repeats three times
_MOST_METADATA = 16  # entries, as at OpenAI


class Tool(NamedTuple):
    """A tool as the client knows it.

    Attributes:
        name: within its namespace.
        namespace: None where it has none.
        custom: it takes a text, not JSON.
    """

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def flat_name(self) -> str:
        """The name by which the model knows it; models know no namespaces."""
        if self.namespace is None:
            return self.name
        return f"{self.namespace.removesuffix('__')}__{self.name}"


@dataclass(frozen=True)
class ResponsesRequest(ChatRequest):
    """A request for a response.

    Attributes:
        items: the conversation in this API's form, that before an earlier response included. Each
            has an id.
        known_tools: the tools by the names that the model knows.
        store: keep the response for requests that follow.
        told: the fields of the request that its response repeats.
    """

    param: ClassVar[str] = "input"

    items: tuple[dict[str, Any], ...] = ()
    known_tools: Mapping[str, Tool] = field(default_factory=dict)
    store: bool = True
    told: Mapping[str, Any] = field(default_factory=dict)


class Earlier(NamedTuple):
    """What earlier responses may be gone back to.

    Attributes:
        response: finds one by its id.
        item: finds an item of any of them by its id.
    """

    response: Callable[[str], StoredResponse | None]
    item: Callable[[str], dict[str, Any] | None]


def parse_responses(body: object, earlier: Earlier) -> ResponsesRequest:
    """Read a body of ``/v1/responses``.

    Args:
        body: as it was sent.
        earlier: what ``previous_response_id`` and ``item_reference`` may name.

    Raises:
        ApiError: a field is missing or wrong, or asks for what this server does not do.
    """
    fields = Fields(checked_body(body))
    refuse_unsupported(fields, _UNSUPPORTED)
    items = (*_before(fields, earlier), *_input(fields, earlier))
    if not items:
        fields.refuse("input", "send a string, or a list with one item or more")
    tools = _Tools(fields, items)
    chat = {name: fields[name] for name in fields if name not in _TRANSLATED}
    chat.setdefault("continue_final_message", False)  # an answer is a message of its own here
    chat |= {
        "messages": _messages(fields.text("instructions"), items),
        "tools": tools.for_chat,
        "tool_choice": tools.choice,
        "response_format": _response_format(fields),
        **_sizes(fields),
        **_logprobs(fields),
        **_reasoning(fields),
    }
    given = {name: value for name, value in chat.items() if value is not None}
    request = ResponsesRequest(
        **parse_as_chat(given, _NAMES | tools.places),
        items=items,
        known_tools=tools.known,
        store=fields.flag("store") is not False,
    )
    told = _told(fields, request, tools)
    if (length := len(json.dumps(told))) > _MOST_TOLD:
        raise ApiError(
            "instructions, tools and other fields that a response repeats have "
            f"{length:,} characters of JSON: send {_MOST_TOLD:,} at most"
        )
    return replace(request, told=told)


_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "leave it out, since a response is made while its client waits"),
    "context_management": (([],), "leave it out, and shorten the input yourself"),
    "conversation": ((), "leave it out, and use previous_response_id or send the whole history"),
    "mlxspec": (({},), "leave it out, or use /v1/chat/completions"),
    "moderation": ((), "leave it out, since the server moderates nothing"),
    "n": ((1,), "leave it out, or use /v1/chat/completions"),
    "prompt": ((), "leave it out, since the server keeps no prompts; send instructions and input"),
    "response_format": ((), "call it text.format"),
}

_TRANSLATED = {
    *("include", "input", "instructions", "max_output_tokens", "max_tool_calls", "messages"),
    *("logprobs", "previous_response_id", "reasoning", "text", "tool_choice", "tools"),
    *("top_logprobs", "truncation", *_UNSUPPORTED),
}
"""Fields that are no chat's, or other ones; a chat gets all others as they are."""

_NAMES = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
}
"""What fields of a chat are called here."""


# --- options ---


def _sizes(fields: Fields) -> dict[str, Any]:
    fields.word("truncation", ("auto", "disabled"))
    fields.integer("max_tool_calls", 0, _MOST_TOKENS)
    most = fields.integer("max_output_tokens", 1, _MOST_TOKENS)
    return {} if most is None else {"max_completion_tokens": most}


def _logprobs(fields: Fields) -> dict[str, Any]:
    included = fields.items("include") or []
    for index, one in enumerate(included):
        if not isinstance(one, str):
            raise ApiError(
                f"include[{index}] is no string: send names of fields.", param=f"include[{index}]"
            )
    top = fields.integer("top_logprobs", 0, 20)
    if not top and "message.output_text.logprobs" not in included:
        return {}
    return {"logprobs": True, "top_logprobs": top}


def _reasoning(fields: Fields) -> dict[str, Any]:
    reasoning = fields.object("reasoning") or Fields({})
    for name in ("summary", "generate_summary"):
        reasoning.text(name)
    effort = reasoning.text("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _response_format(fields: Fields) -> dict[str, Any] | None:
    """``text.format`` as a chat has it."""
    text = fields.object("text") or Fields({})
    text.word("verbosity", ("low", "medium", "high"))
    format = text.object("format")
    if format is None:
        return None
    kind = format.needed_text("type")
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, kind: {name: format[name] for name in format if name != "type"}}


def _metadata(fields: Fields) -> dict[str, str]:
    metadata = fields.object("metadata") or Fields({})
    found = {name: metadata.text(name) or "" for name in metadata}
    if len(found) > _MOST_METADATA:
        raise ApiError(
            f"metadata has {len(found)} entries: send {_MOST_METADATA} at most.", param="metadata"
        )
    return found


def _told(fields: Fields, request: ResponsesRequest, tools: _Tools) -> dict[str, Any]:
    """What a response says of its request: what holds, where that is not what was asked for."""
    reasoning, text = fields.object("reasoning"), fields.object("text")
    sampling = request.sampling
    return {
        "background": False,
        "frequency_penalty": sampling.frequency_penalty,
        "instructions": fields.text("instructions"),
        "max_output_tokens": fields.integer("max_output_tokens", 1, _MOST_TOKENS),
        "max_tool_calls": fields.integer("max_tool_calls", 0, _MOST_TOKENS),
        "metadata": _metadata(fields),
        "parallel_tool_calls": request.parallel_tool_calls,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": fields.text("previous_response_id"),
        "prompt_cache_key": fields.text("prompt_cache_key"),
        "reasoning": {"effort": reasoning.text("effort") if reasoning else None, "summary": None},
        "safety_identifier": fields.text("safety_identifier"),
        "service_tier": "default",
        "store": request.store,
        "temperature": sampling.temperature,
        "text": {"format": (text and text["format"]) or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": fields["tool_choice"] or "auto",
        "tools": tools.told,
        "top_logprobs": request.logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": fields.text("user"),
    }


# --- tools ---

_INPUT = "input"  # the argument that holds the text for a custom tool
_HOSTED = ("web_search", "image_generation", "tool_search")
"""Beginnings of the kinds of tools that agents offer besides their own, and can do without."""


class _Tools:
    """The tools that a request offers, and what it says of their use.

    Agents such as Codex offer a search of the web beside their own tools, whatever the server can
    do. They get along without it, so it is left out; where nothing else is offered it is refused.

    Attributes:
        for_chat: the tools in the form of a chat.
        known: by the names that the model knows.
        choice: in the form of a chat.
        told: what the response says is offered.
    """

    def __init__(self, fields: Fields, items: Sequence[dict[str, Any]]) -> None:
        self.for_chat: list[dict[str, Any]] = []
        self.known: dict[str, Tool] = {}
        self.told: list[dict[str, Any]] = []
        self._paths: dict[str, str] = {}
        """Where they stand in the body, by the names that the model knows."""
        given = [
            Fields(tool, f"tools[{index}]")
            for index, tool in enumerate(fields.items("tools") or [])
        ]
        hosted = [tool for tool in given if _is_hosted(tool)]
        for tool in given:
            if not _is_hosted(tool):
                self.told.append(self._add(tool))
        for item in items:
            if item["type"] == "additional_tools":
                for index, tool in enumerate(item["tools"]):
                    one = Fields(tool, f"additional_tools[{index}]")
                    if not _is_hosted(one):
                        self._add(one, again=True)
        if hosted and not self.known:
            hosted[0].refuse("type", "offer functions, since the server itself runs no tools")
        self.choice = self._choice(fields)

    @property
    def places(self) -> dict[str, str]:
        """Where the functions of the chat stand in the body."""
        return {
            f"tools[{index}].function": self._paths[tool["function"]["name"]]
            for index, tool in enumerate(self.for_chat)
        }

    def _add(self, tool: Fields, again: bool = False) -> dict[str, Any]:
        """Take a tool, which may come again; returns it as the response tells it."""
        if tool.text("type") != "namespace":
            return self._add_one(tool, None, "", again)
        namespace = tool.needed_text("name")
        about = tool.text("description") or ""
        told = []
        for index, inner in enumerate(tool.items("tools") or []):
            one = Fields(inner, f"{tool.at('tools')}[{index}]")
            told.append(self._add_one(one, namespace, "" if index else about, again))
        return {"type": "namespace", "name": namespace, "description": about, "tools": told}

    def _add_one(
        self, one: Fields, namespace: str | None, about: str, again: bool
    ) -> dict[str, Any]:
        """Take a function or custom tool.

        Args:
            one: the tool.
            namespace: in which it is.
            about: what to say before its own description.
            again: it may be one that is known; then nothing changes.
        """
        kind = one.text("type")
        if kind not in ("function", "custom"):
            inside = "" if namespace else ', or a "namespace" of them'
            one.refuse("type", f'offer tools of the type "function" or "custom"{inside}')
        tool = Tool(one.needed_text("name"), namespace, kind == "custom")
        name = tool.flat_name
        if name in self.known:
            if again:
                return {}
            one.refuse("name", "give each tool a name of its own")
        description = one.text("description")
        self.known[name], self._paths[name] = tool, one.path
        if tool.custom:
            function, told = _custom(one)
        else:
            one.object("parameters")
            strict = one.flag("strict")
            sent = ("name", "description", "parameters", "strict")
            function = {key: one[key] for key in one if key in sent}
            told = {"type": "function", "name": tool.name, "description": description}
            told |= {"parameters": one["parameters"], "strict": strict}
        function["name"] = name
        if about:
            function["description"] = f"{about}\n\n{function.get('description', '')}".rstrip()
        self.for_chat.append({"type": "function", "function": function})
        return told

    def _choice(self, fields: Fields) -> Any:
        """``tool_choice`` as a chat has it; tools that are not allowed are not offered."""
        choice = fields["tool_choice"]
        if choice is None or isinstance(choice, str):
            return choice
        named = Fields(choice, "tool_choice")
        kind = named.text("type")
        if kind in ("function", "custom"):
            return {"type": "function", "function": {"name": self._find(named, self._by_place())}}
        if kind != "allowed_tools":
            named.refuse("type", 'send "function", "custom" or "allowed_tools", or a string')
        mode = named.word("mode", ("auto", "required")) or "auto"
        allowed = [
            Fields(tool, f"tool_choice.tools[{index}]")
            for index, tool in enumerate(named.items("tools") or [])
        ]
        places = self._by_place()
        names = {self._find(tool, places) for tool in allowed if not _is_hosted(tool)}
        self.for_chat = [tool for tool in self.for_chat if tool["function"]["name"] in names]
        return mode

    def _by_place(self) -> dict[tuple[str, str | None], str]:
        """The names that the model knows, by those in a namespace, and in whichever is first."""
        places: dict[tuple[str, str | None], str] = {}
        for flat_name, tool in self.known.items():
            for namespace in (None, tool.namespace):
                places.setdefault((tool.name, namespace), flat_name)
        return places

    @staticmethod
    def _find(named: Fields, places: Mapping[tuple[str, str | None], str]) -> str:
        """The name by which the model knows the tool that a choice names."""
        found = places.get((named.needed_text("name"), named.text("namespace")))
        if found is None:
            named.refuse("name", "name one of the tools")
        return found


def _is_hosted(tool: Fields) -> bool:
    return (tool.text("type") or "").startswith(_HOSTED)


def _custom(one: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """A custom tool as a function of one text, and as the response tells it.

    The output is not held to a grammar; the model reads it.
    """
    description = one.text("description")
    format = one.object("format") or Fields({"type": "text"})
    about = "The text that the tool takes, as it is."
    if format.word("type", ("text", "grammar")) == "grammar":
        format.needed_text("syntax")
        syntax = format.word("syntax", ("lark", "regex"))
        about += f" It follows this {syntax} grammar:\n{format.needed_text('definition')}"
    told = {"type": "custom", "name": one["name"], "description": description}
    told["format"] = {name: format[name] for name in format}
    schema = {
        "type": "object",
        "properties": {_INPUT: {"type": "string", "description": about}},
        "required": [_INPUT],
    }
    return {"name": "", "description": description or "", "parameters": schema}, told


# --- the conversation ---

_PASSED_OVER = ("web_search_call", "file_search_call", "image_generation_call")
"""Items of other servers' own tools, whose results are in the messages that follow them."""

_TEXT_PARTS = ("input_text", "output_text", "text")


def new_id(prefix: str) -> str:
    """An id for a response or an item."""
    return f"{prefix}_{uuid.uuid4().hex}"


def _before(fields: Fields, earlier: Earlier) -> Sequence[dict[str, Any]]:
    """The conversation that led to an earlier response, and its answer."""
    previous_id = fields.text("previous_response_id")
    if previous_id is None:
        return ()
    found = earlier.response(previous_id)
    if found is None:
        raise ApiError(
            f"previous_response_id is {shown(previous_id)}, which the server does not have, or no "
            "longer: send the whole conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.items


def _input(fields: Fields, earlier: Earlier) -> list[dict[str, Any]]:
    given = fields["input"]
    if isinstance(given, str):
        return [_message_item("user", [given], {})]
    items = []
    for index, value in enumerate(fields.items("input") or []):
        one = Fields(value, f"input[{index}]")
        if (item := _item(one, earlier)) is not None:
            items.append(item)
    return items


def _item(one: Fields, earlier: Earlier) -> dict[str, Any] | None:
    """An item of the input as the server tells it; None for one that says nothing to a model."""
    kind = one.text("type")
    if kind is None:
        kind = "message" if one["role"] is not None else "item_reference"
    if kind in _PASSED_OVER:
        return None
    if kind == "item_reference":
        return _referred(one, earlier)
    if kind not in _READ:
        known = ", ".join(_READ)
        one.refuse("type", f"leave it out, or send one of {known}, item_reference")
    return _READ[kind](one)


def _referred(one: Fields, earlier: Earlier) -> dict[str, Any]:
    found = earlier.item(one.needed_text("id"))
    if found is None:
        one.refuse("id", "send the item itself, since the server has none of this id")
    return found


def _common(one: Fields, kind: str, prefix: str) -> dict[str, Any]:
    return {"id": one.text("id") or new_id(prefix), "type": kind, "status": "completed"}


def _message(one: Fields) -> dict[str, Any]:
    role = one.word("role", ("user", "assistant", "system", "developer"))
    if role is None:
        one.refuse("role", "choose one of user, assistant, system, developer")
    content = one["content"]
    if content is None:
        one.refuse("content", "send a string, or a list of text parts")
    kinds = (*_TEXT_PARTS, "refusal")
    texts = [content] if isinstance(content, str) else list(_texts(one, "content", kinds))
    sent = {"id": one.text("id"), "phase": one.text("phase")}
    return _message_item(role, texts, sent)


def _message_item(
    role: str, texts: Sequence[str], sent: Mapping[str, str | None]
) -> dict[str, Any]:
    item: dict[str, Any] = {"id": sent.get("id") or new_id("msg"), "type": "message"}
    item |= {"role": role, "status": "completed"}
    if role == "assistant":
        item["content"] = [
            {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            for text in texts
        ]
        if sent.get("phase"):
            item["phase"] = sent["phase"]
    else:
        item["content"] = [{"type": "input_text", "text": text} for text in texts]
    return item


def _texts(one: Fields, name: str, kinds: Sequence[str]) -> Iterable[str]:
    """The texts of a list of parts of some kinds."""
    for index, value in enumerate(one.items(name) or []):
        part = Fields(value, f"{one.at(name)}[{index}]")
        kind = part.text("type")
        if kind not in kinds:
            part.refuse("type", f'send parts of the type "{kinds[0]}", since the model reads text')
        text = part.text("refusal" if kind == "refusal" else "text")
        if text is None:
            part.refuse("refusal" if kind == "refusal" else "text", "send a string")
        yield text


def _call(one: Fields) -> dict[str, Any]:
    custom = one["type"] == "custom_tool_call"
    item = _common(one, one["type"], "ctc" if custom else "fc")
    item |= {"call_id": one.needed_text("call_id"), "name": one.needed_text("name")}
    if (namespace := one.text("namespace")) is not None:
        item["namespace"] = namespace
    if custom:
        item["input"] = one.text("input") or ""
    elif isinstance(arguments := one["arguments"], dict):
        item["arguments"] = json.dumps(arguments)
    else:
        item["arguments"] = one.text("arguments") or ""
    return item


def _call_output(one: Fields) -> dict[str, Any]:
    custom = one["type"] == "custom_tool_call_output"
    item = _common(one, one["type"], "ctco" if custom else "fco")
    item["call_id"] = one.needed_text("call_id")
    output = one["output"]
    if output is None or isinstance(output, str):
        item["output"] = output or ""
        return item
    item["output"] = []
    for index, value in enumerate(one.items("output") or []):
        part = Fields(value, f"{one.at('output')}[{index}]")
        kind = part.needed_text("type")
        if kind in _TEXT_PARTS:
            text = part.text("text") or ""
        else:
            text = left_out(kind.removeprefix("input_"))
        item["output"].append({"type": "input_text", "text": text})
    return item


def _reasoning_item(one: Fields) -> dict[str, Any]:
    """Reasoning: of this server with its text, of others perhaps with a summary alone."""
    item = _common(one, "reasoning", "rs")
    for name, kinds in (("summary", ("summary_text",)), ("content", ("reasoning_text", "text"))):
        item[name] = [{"type": kinds[0], "text": text} for text in _texts(one, name, kinds)]
    item["encrypted_content"] = one.text("encrypted_content")
    return item


def _additional_tools(one: Fields) -> dict[str, Any]:
    """Tools within a conversation, as newer agents send them."""
    item = {"id": one.text("id") or new_id("at"), "type": "additional_tools", "role": "developer"}
    return item | {"tools": one.items("tools") or []}


_READ: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "custom_tool_call": _call,
    "custom_tool_call_output": _call_output,
    "reasoning": _reasoning_item,
    "additional_tools": _additional_tools,
}


def _messages(instructions: str | None, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as a chat has it.

    What stands before the first other message becomes one message of the system, since many
    templates take only one. What the model has written in one go becomes one message.
    """
    messages: list[dict[str, Any]] = []
    system = [] if instructions is None else [instructions]
    for item in items:
        kind = item["type"]
        if kind == "additional_tools":
            continue
        if kind == "message" and item["role"] in ("system", "developer") and not messages:
            system.append(_joined(item["content"]))
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _joined(item["content"])})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item["output"]
            text = output if isinstance(output, str) else _joined(output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
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
    """Add what the model has written to its message, or to a new one if that was at its end.

    Its texts are lists, which are joined in the end: ten thousand items may be one message.
    """
    is_call = item["type"] in ("function_call", "custom_tool_call")
    last = messages[-1] if messages else None
    if (
        last is None
        or last["role"] != "assistant"
        or (not is_call and last["content"] and "tool_calls" not in last)
    ):
        last = {"role": "assistant", "content": []}
        messages.append(last)
    if is_call:
        last.setdefault("tool_calls", []).append(_chat_call(item))
    elif item["type"] == "message":
        last["content"] += filter(None, [_joined(item["content"])])
    elif reasoning := _joined(item["content"]) or "\n\n".join(p["text"] for p in item["summary"]):
        last.setdefault("reasoning_content", []).append(reasoning)


def _chat_call(item: dict[str, Any]) -> dict[str, Any]:
    """A call as a chat has it."""
    custom = item["type"] == "custom_tool_call"
    name = Tool(item["name"], item.get("namespace")).flat_name
    arguments = {_INPUT: item["input"]} if custom else item["arguments"]
    function = {"name": name, "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


def _joined(parts: Iterable[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)
