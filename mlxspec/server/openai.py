"""OpenAI's API for chats and completions: request bodies and answers.

With ``"mlxspec": {"drafts": true}`` in the request, each chunk of a stream marks the text that
comes from accepted drafts: ``"mlxspec": {"drafts": [["The quick brown", true], [" fox", false]]}``.
Joined, these texts are the chunk's text.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from .. import __version__
from ..models.tokenizer import token_bytes
from .answer import ApiAnswer
from .api_body import MOST_CHOICES, ApiBody, Function, Text
from .body import Body, Integer, Items, StringOr, TokenId, parse, refuse, without_nulls
from .choice import Choice, TextRun
from .output_parser import OutputFormat, Part
from .worker import Piece

Top = Annotated[Integer, Field(ge=0, le=20)]
"""How many of the likeliest tokens to return with each token."""


class _Tool(Body):
    """A tool that is offered, called or chosen."""

    type: Literal["function"] = "function"
    function: Function
    id: str | None = None

    needed = {"function": ("function",)}

    def for_template(self) -> dict[str, Any]:
        """A call in the form that chat templates expect."""
        called = {"name": self.function.name, "arguments": self.function.arguments or {}}
        return without_nulls({"type": "function", "function": called, "id": self.id})


class _Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = Field("", validation_alias=AliasChoices("content", "refusal"))
    name: str | None = None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: Items[_Tool] = []
    tool_call_id: str | None = None
    images: Annotated[list[Any], Field(max_length=0)] = []  # Ollama's

    needed = {"user": ("content",)}

    def for_template(self) -> dict[str, Any]:
        """The message in the form that chat templates expect."""
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning or None,
            "tool_calls": [call.for_template() for call in self.tool_calls] or None,
        }
        return without_nulls(message)


class ChatBody(ApiBody):
    """A body of ``/v1/chat/completions``."""

    messages: Annotated[Items[_Message], Field(min_length=1)]
    tools: Items[_Tool] = []
    tool_choice: StringOr[Literal["none", "auto", "required"], _Tool] = "auto"
    logprobs: bool = False
    top_logprobs: Top = 0
    add_generation_prompt: bool = True  # vLLM's, whose continue_final_message needs a false one

    unsupported = (*ApiBody.unsupported, "chats", "/v1/chat/completions")

    @model_validator(mode="after")
    def _answers(self) -> ChatBody:
        if not (self.add_generation_prompt or self.continued):
            refuse("add_generation_prompt", False, "leave it out, since the model always answers")
        return self

    @property
    def top(self) -> int | None:
        return self.top_logprobs or (0 if self.logprobs else None)

    def for_template(self) -> list[dict[str, Any]]:
        # Some clients send system messages without content.
        return [
            message.for_template()
            for message in self.messages
            if message.role not in ("system", "developer") or "content" in message.model_fields_set
        ]

    def offered(self) -> Sequence[dict[str, Any]]:
        return self.sent.get("tools") or []  # with all fields: templates may use unknown ones

    @property
    def tool_mode(self) -> tuple[str, str | None]:
        choice = self.tool_choice
        return (choice, None) if isinstance(choice, str) else ("function", choice.function.name)


def _as_prompts(value: Any) -> Any:
    several = isinstance(value, list) and not (value and isinstance(value[0], (int, float)))
    return value if several else [value]


_Prompt = StringOr[str, Annotated[Items[TokenId], Field(min_length=1)]]
_Prompts = Annotated[Items[_Prompt], Field(min_length=1, max_length=MOST_CHOICES)]


class CompletionBody(ApiBody):
    """A body of ``/v1/completions``.

    Choice ``i`` of the answer belongs to prompt ``i // n``. Prompts of token ids are used
    unchanged.
    """

    prompt: Annotated[_Prompts, BeforeValidator(_as_prompts)]
    suffix: str = ""
    echo: bool = False
    logprobs: Top | None = None

    unsupported = (*ApiBody.unsupported, "/v1/completions")
    param = "prompt"

    @property
    def top(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _has_no_logprobs_of_prompts(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            refuse("echo", True, "leave it out, since prompt tokens have no logprobs here")
        return self


class TokenizeBody(Body):
    """A body of ``/v1/tokenize`` with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """A body of ``/v1/detokenize``."""

    model: str | None = None
    tokens: Items[TokenId]


def parse_tokenize(body: object) -> TokenizeBody | ChatBody:
    """Parse a body of ``/v1/tokenize``, with ``prompt`` or ``messages``; raises as ``parse``."""
    if isinstance(body, dict) and body.get("messages") is not None:
        return parse(ChatBody, body)
    return parse(TokenizeBody, body)


# --- answers ---

_IMPOSSIBLE = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


class ChatAnswer(ApiAnswer):
    """The answer of ``/v1/chat/completions``.

    Reasoning is sent as ``reasoning_content``. Log-probabilities are sent for the text only.
    """

    end = "data: [DONE]\n\n"
    _prefix, _object, _chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        body: ApiBody,
        model: str,
        n_prompts: int = 1,
    ) -> None:
        super().__init__(n_prompts * body.n)
        self._body = body
        self._head = {
            "id": f"{self._prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"mlxspec-{__version__}",
        }

    def begin(self) -> list[dict[str, Any]]:
        """The chunks that begin the choices, in order.

        OpenAI's Python library fails if the first chunk belongs to a choice other than 0.
        """
        return [chunk for choice in self.choices for chunk in self._begin_choice(choice)]

    def close(self) -> list[dict[str, Any]]:
        if not self._body.stream_options.include_usage:
            return []
        return [self._envelope(self._chunk_object, [], self.usage())]

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(choice) for choice in self.choices]
        return self._envelope(self._object, choices, self.usage())

    def usage(self) -> dict[str, Any]:
        """The token counts of the ended choices; a prompt with ``n`` choices counts once."""
        ends = [choice.end for choice in self.choices if choice.end]
        n = self._body.n
        prompts = [list(group) for _, group in groupby(ends, key=lambda end: end.index // n)]
        prompt_tokens = sum(group[0].prompt_tokens for group in prompts)
        completion_tokens = sum(end.completion_tokens for end in ends)
        accepted = sum(end.accepted for end in ends)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                # One choice computes the prompt; the others find it cached.
                "cached_tokens": sum(min(e.cached_tokens for e in group) for group in prompts),
            },
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(end.drafted for end in ends) - accepted,
            },
        }

    def _chunk(
        self, choice: Choice, fields: dict[str, Any], drafts: Sequence[list[Any]] = ()
    ) -> dict[str, Any]:
        """A chunk for one choice, with the marks of its drafts if they were requested."""
        content = {"index": choice.index, "logprobs": None, "finish_reason": None, **fields}
        if self._body.mlxspec.drafts and drafts:
            content["mlxspec"] = {"drafts": drafts}
        return self._envelope(self._chunk_object, [content], None)

    def _envelope(
        self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        envelope = {**self._head, "object": kind, "choices": choices}
        if usage or self._body.stream_options.include_usage:
            envelope["usage"] = usage
        return envelope

    def _begin_choice(self, choice: Choice) -> list[dict[str, Any]]:
        return [self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})]

    def feed_choice(self, choice: Choice, runs: Sequence[TextRun]) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        for run in runs:
            part, text = run.part, run.text
            fields: dict[str, Any]
            if part.kind == "call":
                call = _call(part, text) if run.begins else {"function": {"arguments": text}}
                fields = {"delta": {"tool_calls": [{"index": part.index, **call}]}}
            elif part.kind == "reasoning":
                fields = {"delta": {"reasoning_content": text}}
            else:
                fields = {"delta": {"content": text}, "logprobs": self._logprobs(run.pieces)}
            if text or run.begins:
                drafts = () if part.kind == "call" else run.drafts
                chunks.append(self._chunk(choice, fields, drafts))
        if choice.end:
            end = {"delta": {}, "finish_reason": choice.finish_reason}
            chunks.append(self._chunk(choice, end))
        return chunks

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        content, reasoning = choice.joined("text"), choice.joined("reasoning")
        calls = [_call(part, part.text) for part in choice.parts if part.kind == "call"]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.pieces),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self._body.top is None:
            return None
        return {"content": chat_logprobs(self._tokenizer, pieces), "refusal": None}


def _call(part: Part, arguments: str) -> dict[str, Any]:
    function = {"name": part.name, "arguments": arguments}
    return {"id": part.id, "type": "function", "function": function}


class CompletionAnswer(ChatAnswer):
    """The answer of ``/v1/completions``, whose choices are texts."""

    _prefix, _object, _chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, model: str) -> None:
        super().__init__(body, model, len(body.prompt))
        self._echoes: list[str] = []
        self._prompts = body.prompt if body.echo else ()

    def read_with(self, tokenizer: TokenizerWrapper, format: OutputFormat | None) -> None:
        super().read_with(tokenizer, format)
        self._echoes = [
            prompt if isinstance(prompt, str) else detokenized(tokenizer, prompt)
            for prompt in self._prompts
        ]

    def _echo(self, choice: Choice) -> str:
        return self._echoes[choice.index // self._body.n] if self._echoes else ""

    def _begin_choice(self, choice: Choice) -> list[dict[str, Any]]:
        echo = self._echo(choice)
        return [self._chunk(choice, {"text": echo}, [[echo, False]])] if echo else []

    def feed_choice(self, choice: Choice, runs: Sequence[TextRun]) -> list[dict[str, Any]]:
        chunks = []
        for run in runs:  # there is at most one
            offset = len(self._echo(choice)) + len(run.part.text) - len(run.text)
            logprobs = completion_logprobs(self._tokenizer, run.pieces, offset, self._body.top)
            if run.text or logprobs:
                fields = {"text": run.text, "logprobs": logprobs}
                chunks.append(self._chunk(choice, fields, run.drafts))
        if choice.end:
            chunks.append(self._chunk(choice, {"text": "", "finish_reason": choice.finish_reason}))
        return chunks

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        echo, top = self._echo(choice), self._body.top
        logprobs = completion_logprobs(self._tokenizer, choice.pieces, len(echo), top)
        return {
            "index": choice.index,
            "text": echo + choice.joined("text"),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }


# --- log-probabilities ---


def chat_logprobs(tokenizer: TokenizerWrapper, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """The entries of ``logprobs.content``, one for each token."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        in_bytes = token_bytes(tokenizer, token)
        return {"token": _name(in_bytes), "logprob": _finite(logprob), "bytes": [*in_bytes]}

    return [
        {**entry(piece.token, piece.logprob), "top_logprobs": [entry(*pair) for pair in piece.top]}
        for piece in pieces
        if _is_shown(piece, tokenizer)
    ]


def completion_logprobs(
    tokenizer: TokenizerWrapper, pieces: Iterable[Piece], offset: int, top: int | None
) -> dict[str, Any] | None:
    """The lists of a completion's ``logprobs``; None if it would have no tokens.

    Args:
        offset: where the first token begins in the choice's text.
    """
    offsets, likeliest = [], []
    for piece in pieces:
        if _is_shown(piece, tokenizer):
            all_tokens = (*piece.top, (piece.token, piece.logprob))
            offsets.append(offset)
            likeliest.append(
                [
                    (_name(token_bytes(tokenizer, token)), _finite(logprob))
                    for token, logprob in all_tokens
                ]
            )
        offset += len(piece.text)
    if not offsets:
        return None
    return {
        "tokens": [best[-1][0] for best in likeliest],
        "token_logprobs": [best[-1][1] for best in likeliest],
        "text_offset": offsets,
        "top_logprobs": [*map(dict, likeliest)] if top else None,
    }


def _is_shown(piece: Piece, tokenizer: TokenizerWrapper) -> bool:
    """Whether to show a token's log-probability; an end token's is hidden, like its text."""
    return piece.logprob is not None and piece.token not in tokenizer.eos_token_ids


def _name(in_bytes: bytes) -> str:
    """A token's name: its text, in which incomplete characters appear as ``\\xe2``."""
    return in_bytes.decode(errors="backslashreplace")


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > _IMPOSSIBLE else _IMPOSSIBLE


# --- tokens ---


def detokenized(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> str:
    """The text of token ids, without special tokens such as BOS."""
    known = [token for token in tokens if token < len(tokenizer)]
    return str(tokenizer.decode(known, skip_special_tokens=True))
