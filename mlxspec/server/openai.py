"""OpenAI's API for chats and completions: its bodies as models, and its answers.

With ``"mlxspec": {"drafts": true}`` in the request, each streamed choice that has text says which
of it came from accepted drafts: ``"mlxspec": {"drafts": [["The quick brown", true], [" fox",
false]]}``, whose texts join to the choice's.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic import BeforeValidator, Discriminator, Field, Tag, WrapValidator

from .. import __version__
from ..models.detokenizer import token_bytes
from .answer import ApiAnswer, ChatChoice
from .body import ApiError, Body, Integer, Items, Name, TokenId, parse, refuse
from .output import Delta, OutputFormat, OutputParser
from .requests import (
    MOST_CHOICES,
    UNSUPPORTED_IN_CHATS,
    ApiRequest,
    ChatRequest,
    CommonBody,
    CompletionRequest,
    ResponseFormat,
    Texts,
    chosen_tool,
    conversation,
    joined,
)
from .worker import Ended, Piece

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


class _ToolChoice(Body):
    type: Literal["none", "auto", "required", "function"]
    function: _Function = _Function(name="-")

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
    tools: Items[Annotated[_Tool, WrapValidator(_as_sent)]] = []
    tool_choice: Annotated[
        _ToolChoice,
        BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value),
    ] = _ToolChoice(type="auto")
    logprobs: bool = False
    top_logprobs: _Top = 0
    response_format: ResponseFormat | None = None

    unsupported: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        **CommonBody.unsupported,
        **UNSUPPORTED_IN_CHATS,
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
    named = choice.function.name if choice.type == "function" else None
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


# --- answers ---

_IMPOSSIBLE = -9999.0  # what OpenAI has for minus infinity, which JSON lacks


class _OpenAIAnswer(ApiAnswer):
    """What the answers to chats and completions have in common.

    Args:
        request: what was asked.
        model: the name that the answer gives the model.
        tokenizer: the model's.
        n_choices: of all prompts together.

    Attributes:
        id: of the answer.
    """

    end = "data: [DONE]\n\n"
    _prefix = _object = _chunk_object = ""

    def __init__(
        self, request: ApiRequest, model: str, tokenizer: TokenizerWrapper, n_choices: int
    ) -> None:
        super().__init__(n_choices)
        self.id = f"{self._prefix}-{uuid.uuid4().hex}"
        self._request = request
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer)
        self._begun = False
        self._head = {
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"mlxspec-{__version__}",
        }

    def begin(self) -> list[dict[str, Any]]:
        """The chunks that begin the choices, in order.

        OpenAI's Python library fails where the first chunk is of another choice than 0.
        """
        if self._begun:
            return []
        self._begun = True
        choices = [c for index in range(len(self.ends)) for c in self._begin_choice(index)]
        return [self._chunk(choice) for choice in choices]

    def feed_choice(
        self, index: int, pieces: Sequence[Piece], end: Ended | None
    ) -> list[dict[str, Any]]:
        return [self._chunk(choice) for choice in self._feed_choice(index, pieces, end)]

    def close(self) -> list[dict[str, Any]]:
        if not self._request.include_usage:
            return []
        return [self._envelope(self._chunk_object, [], self.usage())]

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(index) for index in range(len(self.ends))]
        return self._envelope(self._object, choices, self.usage())

    def usage(self) -> dict[str, Any]:
        """The tokens of the choices that have ended; a prompt of ``n`` choices counts once."""
        ends = [end for end in self.ends if end]
        n = self._request.n
        prompts = [list(group) for _, group in groupby(ends, key=lambda end: end.index // n)]
        prompt_tokens = sum(group[0].prompt_tokens for group in prompts)
        completion_tokens = sum(end.completion_tokens for end in ends)
        accepted = sum(end.accepted for end in ends)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                # Of several choices one computes the prompt, and the others find it cached.
                "cached_tokens": sum(min(e.cached_tokens for e in group) for group in prompts),
            },
            "completion_tokens_details": {
                "reasoning_tokens": self._reasoning_tokens(),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(end.drafted for end in ends) - accepted,
            },
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._envelope(self._chunk_object, [choice], None)

    def _envelope(
        self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        envelope = {"id": self.id, "object": kind, **self._head, "choices": choices}
        if usage or self._request.include_usage:
            envelope["usage"] = usage
        return envelope

    @abstractmethod
    def _begin_choice(self, index: int) -> list[dict[str, Any]]:
        """The choices of the chunks before any token of a choice."""

    @abstractmethod
    def _feed_choice(
        self, index: int, pieces: Sequence[Piece], end: Ended | None
    ) -> list[dict[str, Any]]:
        """The choices of the chunks for some tokens of a choice, and its end."""

    @abstractmethod
    def _whole_choice(self, index: int) -> dict[str, Any]:
        """A choice of the answer in one piece."""

    def _reasoning_tokens(self) -> int:
        return 0

    def _marked(self, choice: dict[str, Any], texts: Iterable[tuple[str, bool]]) -> dict[str, Any]:
        """The choice, with its drafts where they were asked for and it has text."""
        if self._request.drafts and (runs := _runs(texts)):
            choice["mlxspec"] = {"drafts": runs}
        return choice


def _runs(texts: Iterable[tuple[str, bool]]) -> list[list[Any]]:
    """Texts and whether they were accepted drafts, with neighbours of one kind made one."""
    return [
        [text, accepted]
        for accepted, group in groupby(texts, key=lambda one: one[1])
        if (text := "".join(text for text, _ in group))
    ]


# --- chat ---


class ChatAnswer(_OpenAIAnswer):
    """The answer of ``/v1/chat/completions``.

    Reasoning is sent as ``reasoning_content``. Log-probabilities are of all generated tokens,
    those of reasoning, markers and calls too, but the one that ends the output.

    Args:
        format: of the model's output.
    """

    _prefix, _object, _chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, request: ChatRequest, model: str, tokenizer: TokenizerWrapper, format: OutputFormat
    ) -> None:
        super().__init__(request, model, tokenizer, request.n)
        self._choices = [ChatChoice(OutputParser(format)) for _ in range(request.n)]

    def finished(self, index: int) -> bool:
        return self._choices[index].parser.finished

    def _begin_choice(self, index: int) -> list[dict[str, Any]]:
        return [_chat_chunk(index, {"role": "assistant", "content": ""})]

    def _feed_choice(
        self, index: int, pieces: Sequence[Piece], end: Ended | None
    ) -> list[dict[str, Any]]:
        choice = self._choices[index]
        chunks: list[dict[str, Any]] = []
        before = choice.tokens
        said = choice.read(pieces, end)
        pieces = pieces[: choice.tokens - before]
        for _, group in groupby(said, key=lambda one: (one[0].kind, one[0].index)):
            deltas = list(group)
            for delta, _ in deltas:
                choice.add(delta)
            texts = ((d.text, a) for d, a in deltas if d.kind in ("text", "reasoning"))
            chunk = _chat_chunk(index, _chunk_delta([delta for delta, _ in deltas]))
            chunks.append(self._marked(chunk, texts))
        if self._request.logprobs is not None and (logprobs := self._names.of_chat(pieces)):
            choice.logprobs += logprobs
            if not chunks:
                chunks.append(_chat_chunk(index, {}))
            chunks[-1]["logprobs"] = {"content": logprobs, "refusal": None}
        if end := choice.counted(end):
            self.ends[index] = end
            chunks.append(_chat_chunk(index, {}, choice.finish_reason(end)))
        return chunks

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        content = "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not choice.calls else None,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = choice.calls
        asked = self._request.logprobs is not None
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": choice.logprobs, "refusal": None} if asked else None,
            "finish_reason": choice.finish_reason(self.ends[index]),
        }

    def _reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self._choices)


def _chunk_delta(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Deltas of one kind in OpenAI's form."""
    first, text = deltas[0], "".join(delta.text for delta in deltas)
    if first.kind == "call":
        function = {"name": first.name, "arguments": ""}
        call = {"index": first.index, "id": first.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if first.kind == "arguments":
        return {"tool_calls": [{"index": first.index, "function": {"arguments": text}}]}
    return {"content" if first.kind == "text" else "reasoning_content": text}


def _chat_chunk(
    index: int, delta: dict[str, Any], finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


# --- completions ---


@dataclass
class _TextChoice:
    """What a choice of a completion has so far: its texts, an echoed prompt first."""

    texts: list[str] = field(default_factory=list)
    length: int = 0
    logprobs: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, text: str) -> None:
        self.texts.append(text)
        self.length += len(text)


class CompletionAnswer(_OpenAIAnswer):
    """The answer of ``/v1/completions``."""

    _prefix, _object, _chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, model: str, tokenizer: TokenizerWrapper) -> None:
        super().__init__(request, model, tokenizer, len(request.prompts) * request.n)
        self._echoes = [self._text_of(prompt) if request.echo else "" for prompt in request.prompts]
        self._choices = [_TextChoice() for _ in self.ends]

    def _text_of(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else detokenized(self._tokenizer, prompt)

    def _begin_choice(self, index: int) -> list[dict[str, Any]]:
        echo = self._echoes[index // self._request.n]
        self._choices[index].add(echo)
        choice = _text_choice(index, echo, None, None)
        return [self._marked(choice, [(echo, False)])] if echo else []

    def _feed_choice(
        self, index: int, pieces: Sequence[Piece], end: Ended | None
    ) -> list[dict[str, Any]]:
        choice, top = self._choices[index], self._request.logprobs
        logprobs = None
        if top is not None and (found := self._names.of_completion(pieces, choice.length, top)):
            logprobs = _legacy(found)
            for name, values in found.items():
                choice.logprobs.setdefault(name, []).extend(values)
        for piece in pieces:
            choice.add(piece.text)
        chunks = []
        text = "".join(piece.text for piece in pieces)
        if text or logprobs:
            chunk = _text_choice(index, text, logprobs, None)
            chunks.append(self._marked(chunk, ((p.text, p.accepted) for p in pieces)))
        if end:
            chunks.append(_text_choice(index, "", None, end.finish_reason))
        return chunks

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice, end = self._choices[index], self.ends[index]
        logprobs = None if self._request.logprobs is None else _legacy(choice.logprobs)
        reason = end.finish_reason if end else "stop"
        return _text_choice(index, "".join(choice.texts), logprobs, reason)


def _text_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _legacy(found: dict[str, list[Any]]) -> dict[str, Any]:
    """The lists of a completion's log-probabilities; null where no likeliest were asked for."""
    names = ("tokens", "token_logprobs", "text_offset")
    lists: dict[str, Any] = {name: found.get(name, []) for name in names}
    return lists | {"top_logprobs": found.get("top_logprobs")}


# --- log-probabilities ---


class TokenNames:
    """Log-probabilities with tokens under the names that OpenAI's API gives them.

    That is a token's text, or ``bytes:\\xe2\\x80`` for one that is part of a character. The
    token that ended the output is left out, as it is from the text.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of_chat(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """An entry of ``logprobs.content`` for each token."""
        return [
            {
                **self._entry(piece.token, piece.logprob),
                "top_logprobs": [self._entry(*one) for one in piece.top],
            }
            for piece in pieces
            if self._is_shown(piece)
        ]

    def of_completion(self, pieces: Iterable[Piece], offset: int, top: int) -> dict[str, list[Any]]:
        """The lists of a completion's ``logprobs``; empty where all tokens are left out.

        Args:
            pieces: the tokens.
            offset: where the first of them begins in the choice's text.
            top: how many of the likeliest tokens were asked for.
        """
        found: dict[str, list[Any]] = defaultdict(list)
        for piece in pieces:
            if self._is_shown(piece):
                found["tokens"].append(self._name(piece.token)[0])
                found["token_logprobs"].append(_finite(piece.logprob))
                found["text_offset"].append(offset)
                if top:
                    likeliest = (*piece.top, (piece.token, piece.logprob))
                    found["top_logprobs"].append(
                        {self._name(token)[0]: _finite(logprob) for token, logprob in likeliest}
                    )
            offset += len(piece.text)
        return found

    def _is_shown(self, piece: Piece) -> bool:
        return piece.logprob is not None and piece.token not in self._tokenizer.eos_token_ids

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        name, in_bytes = self._name(token)
        return {"token": name, "logprob": _finite(logprob), "bytes": in_bytes}

    def _name(self, token: int) -> tuple[str, list[int]]:
        if token not in self._known:
            in_bytes = token_bytes(self._tokenizer, token)
            try:
                name = in_bytes.decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in in_bytes)
            self._known[token] = name, list(in_bytes)
        return self._known[token]


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > _IMPOSSIBLE else _IMPOSSIBLE


# --- tokens ---


def detokenized(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> str:
    """The text of token ids, without the tokenizer's own tokens such as BOS."""
    known = [token for token in tokens if token < len(tokenizer)]
    return str(tokenizer.decode(known, skip_special_tokens=True))
