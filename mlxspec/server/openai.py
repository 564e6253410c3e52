"""OpenAI's API for chats and completions: its bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag, WrapValidator

from .body import ApiError, Body, Integer, Items, Name, TokenId, parse, refuse
from .requests import (
    MOST_CHOICES,
    ChatRequest,
    CommonBody,
    CompletionRequest,
    ResponseFormat,
    Texts,
    chosen_tool,
    conversation,
    joined,
)

_Top = Annotated[Integer, Field(ge=0, le=20)]


class _Function(Body):
    name: Name
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False
    arguments: dict[str, Any] | str = {}


class _Tool(Body):
    """A tool that is offered, called or chosen."""

    type: Literal["function"] = "function"
    function: _Function
    id: str | None = None


class _OfferedTool(_Tool):
    type: Literal["function"]


class _ToolChoice(Body):
    type: Literal["none", "auto", "required", "function"]
    function: _Function | None = None

    needed = {"function": ("function",)}


class _Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Texts = []
    name: str | None = None
    refusal: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    audio: None = None
    tool_calls: Items[_Tool] = []
    function_call: _Function | None = None
    tool_call_id: str | None = None

    needed = dict.fromkeys(("system", "developer", "user"), ("content",))

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": joined(self.content)}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if role != "assistant":
            return message
        message["content"] = message["content"] or self.refusal
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        calls = [_template_call(call.function, call.id) for call in self.tool_calls]
        if self.function_call:
            calls.append(_template_call(self.function_call, None))
        if calls:
            message["tool_calls"] = calls
        return message


def _template_call(function: _Function, call_id: str | None) -> dict[str, Any]:
    called = {"name": function.name, "arguments": function.arguments or {}}
    call: dict[str, Any] = {"type": "function", "function": called}
    return call if call_id is None else call | {"id": call_id}


def _as_sent(value: Any, check: Any) -> Any:
    """A checked object with all of its fields, such as templates may know."""
    check(value)
    return value


class ChatBody(CommonBody):
    """A body of ``/v1/chat/completions``."""

    messages: Annotated[Items[_Message], Field(min_length=1)]
    tools: Items[Annotated[_OfferedTool, WrapValidator(_as_sent)]] = []
    tool_choice: Annotated[
        _ToolChoice,
        BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value),
    ] = _ToolChoice(type="auto")
    logprobs: bool = False
    top_logprobs: _Top = 0
    response_format: ResponseFormat | None = None

    unsupported: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        **CommonBody.unsupported,
        "add_generation_prompt": ((True,), "leave it out, since an answer always begins"),
        "audio": ((), "leave it out, since answers are text"),
        "best_of": ((1,), "use n for several answers"),
        "documents": (([],), "leave it out, and put the documents into a message"),
        "echo": ((False,), "leave it out, or use /v1/completions"),
        "function_call": (("auto", "none"), "use tool_choice"),
        "functions": (([],), "use tools"),
        "modalities": ((["text"], []), "leave it out, since answers are text"),
        "role_mapping": ((), "leave it out, since the model's chat template is used"),
        "verbosity": (("medium",), "leave it out, and tell the model how much to write"),
        "web_search_options": ((), "leave it out, since the server opens no pages; offer a tool"),
    }


def parse_chat(body: object) -> ChatRequest:
    """Read a body of ``/v1/chat/completions``.

    Raises:
        ApiError: a field is missing or wrong, or asks for what this server does not do.
    """
    chat = parse(ChatBody, body)
    if chat.top_logprobs and not chat.logprobs:
        refuse("top_logprobs", chat.top_logprobs, "send logprobs: true with it")
    format, choice = chat.response_format, chat.tool_choice
    tools = cast(list[dict[str, Any]], chat.tools)
    named = choice.function.name if choice.function and choice.type == "function" else None
    param = "tool_choice.function.name" if named else "tool_choice"
    return ChatRequest(
        **chat.common(format.schema_at("response_format", inner=True) if format else None),
        **conversation(
            [message.for_template() for message in chat.messages],
            *("messages", chat.continue_final_message),
        ),
        **chosen_tool(choice.type, named, tools, param),
        tool_places=tuple(f"tools[{index}].function.parameters" for index in range(len(tools))),
        logprobs=chat.top_logprobs if chat.logprobs else None,
        parallel_tool_calls=chat.parallel_tool_calls,
        template_kwargs=chat.template_kwargs(chat.reasoning_effort),
    )


def _kind(prompt: object) -> str | None:
    if isinstance(prompt, str):
        return "text"
    return "ids" if isinstance(prompt, list) else None


def _kind_of_all(prompt: Any) -> str | None:
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], (int, float))):
        return "several"
    return _kind(prompt)


_WRONG_PROMPT = ("prompt", "send a string, token ids, or a list of several of them")
_Ids = Annotated[Items[TokenId], Field(min_length=1), Tag("ids")]
_Prompt = Annotated[
    Annotated[str, Tag("text")] | _Ids,
    Discriminator(_kind, *_WRONG_PROMPT),
]
_Several = Annotated[Items[_Prompt], Field(min_length=1), Tag("several")]
_Prompts = Annotated[
    Annotated[str, Tag("text")] | _Ids | _Several,
    Discriminator(_kind_of_all, *_WRONG_PROMPT),
]


class CompletionBody(CommonBody):
    """A body of ``/v1/completions``."""

    prompt: _Prompts
    suffix: str = ""
    echo: bool = False
    best_of: Annotated[Integer, Field(ge=1, le=MOST_CHOICES)] | None = None
    logprobs: _Top | None = None
    response_format: ResponseFormat | None = None


def parse_completion(body: object) -> CompletionRequest:
    """Read a body of ``/v1/completions``.

    Raises:
        ApiError: as for :func:`parse_chat`.
    """
    completion = parse(CompletionBody, body)
    prompt, n, format = completion.prompt, completion.n, completion.response_format
    several: list[Any] = [prompt]
    if isinstance(prompt, list) and isinstance(prompt[0], (str, list)):
        several = prompt
    prompts = tuple(one if isinstance(one, str) else tuple(one) for one in several)
    if completion.best_of not in (None, n):
        refuse("best_of", completion.best_of, f"leave it out, or send n, which is {n}")
    if len(prompts) * n > MOST_CHOICES:
        raise ApiError(
            f"{len(prompts)} prompts with {n} choices each are too many: ask for "
            f"{MOST_CHOICES} choices in all, in several requests if need be.",
            param="prompt" if n == 1 else "n",
        )
    if completion.echo and completion.logprobs is not None:
        refuse("echo", True, "leave it out, since the tokens of a prompt have no logprobs here")
    return CompletionRequest(
        **completion.common(format.schema_at("response_format", inner=True) if format else None),
        logprobs=completion.logprobs,
        prompts=prompts,
        suffix=completion.suffix or None,
        echo=completion.echo,
    )


class TokenizeBody(Body):
    """A body of ``/v1/tokenize``, with a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool = True
    messages: Any = None

    @property
    def text(self) -> str | None:
        """The text, if it is not a conversation."""
        return self.content if self.prompt is None else self.prompt


def parse_tokenize(body: object) -> tuple[TokenizeBody, ChatRequest | None]:
    """Read a body of ``/v1/tokenize``: ``prompt`` (or ``content``) or ``messages``.

    Raises:
        ApiError: it has none of them, or a wrong one.
    """
    asked = parse(TokenizeBody, body)
    if asked.messages is not None:
        return asked, parse_chat(body)
    if asked.text is None:
        refuse("prompt", None, "send a string, or messages")
    return asked, None


class DetokenizeBody(Body):
    """A body of ``/v1/detokenize``."""

    model: str | None = None
    tokens: Items[TokenId]
