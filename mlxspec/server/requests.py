"""Requests in one form for all APIs, and the body fields that the APIs share.

Unknown fields are ignored, since clients add their own. A known but unsupported field is an error
that names it. Otherwise a client would assume, for instance, that the model has seen an image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, AliasChoices, AliasPath, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ..engine.params import Constraint, SamplingParams
from ..errors import OptionError
from .body import (
    MOST_VALUES,
    ApiError,
    Body,
    Dictionary,
    Integer,
    Items,
    Name,
    TokenId,
    as_integer,
    blaming,
    read_json,
    refuse,
    without_nulls,
)

MOST_CHOICES = 128  # of a prompt; also the most prompts
_Value = TypeVar("_Value")


# --- sampling ---


def _or_none(value: object) -> object:
    """Turn -1 into None: it means no limit or a random seed, as in other local servers."""
    value = as_integer(value)
    return None if value == -1 else value


_DEFAULT = SamplingParams(seed=None)
_MinusOne = BeforeValidator(_or_none)
_Fraction = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-100, le=100)] | None  # beyond, logits would overflow
_Token = Annotated[int, Field(strict=False, ge=0)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
MaxTokens = Annotated[
    Annotated[int, Field(ge=1), AfterValidator(lambda value: min(value, 2**31 - 1))] | None,
    _MinusOne,
]


class SamplingBody(Body):
    """Sampling options; :class:`SamplingParams` explains the fields and has their defaults.

    Without a seed, answers at temperatures above 0 vary.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] = _DEFAULT.temp
    top_p: _Fraction = _DEFAULT.top_p
    top_k: Annotated[Annotated[int, Field(ge=0, le=2**63)] | None, _MinusOne] = _DEFAULT.top_k
    min_p: _Fraction = _DEFAULT.min_p
    seed: Annotated[Annotated[int, Field(ge=0, le=2**64 - 1)] | None, _MinusOne] = _DEFAULT.seed
    logit_bias: Annotated[Dictionary[_Token, _Bias], Field(max_length=10_000)] = {}
    repetition_penalty: Annotated[float, Field(ge=0, le=100)] | None = _DEFAULT.repetition_penalty
    repetition_context_size: TokenId = _DEFAULT.repetition_context_size
    presence_penalty: _Penalty = _DEFAULT.presence_penalty
    presence_context_size: TokenId = _DEFAULT.presence_context_size
    frequency_penalty: _Penalty = _DEFAULT.frequency_penalty
    frequency_context_size: TokenId = _DEFAULT.frequency_context_size
    xtc_probability: _Fraction = _DEFAULT.xtc_probability
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] = _DEFAULT.xtc_threshold

    @property
    def sampling(self) -> SamplingParams:
        """The options as sampling parameters."""
        given = {name: getattr(self, name) for name in SamplingBody.model_fields}
        given |= {"top_k": self.top_k or 0, "logit_bias": self.logit_bias or None}
        with blaming("temperature"):  # one too close to 0
            return SamplingParams(given.pop("temperature"), **given)


def sampling_of_choice(
    sampling: SamplingParams, choice: int = 0, xtc_special_tokens: Sequence[int] = ()
) -> SamplingParams:
    """The sampling parameters of one choice.

    Args:
        sampling: the request's parameters.
        choice: the choice's index among a prompt's ``n``. The first choice has the seed as sent,
            so it equals that of ``n: 1``. The others have the seeds that follow.
        xtc_special_tokens: token ids that XTC never drops.
    """
    seed = None if sampling.seed is None else (sampling.seed + choice) % 2**64
    return replace(sampling, seed=seed, xtc_special_tokens=tuple(xtc_special_tokens))


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        ApiError: an id is not below ``vocab_size``.
    """
    for token in ids:
        if token >= vocab_size:
            raise ApiError(
                f"{param} has the id {token}: send ids from 0 to {vocab_size - 1}.", param=param
            )


# --- requests ---


@dataclass(frozen=True)
class ApiRequest:
    """A request for the answer to a conversation, or for completions of texts.

    Attributes:
        model: the requested model's name; None for the default.
        sampling: the sampling parameters.
        max_tokens: the most tokens per choice; None for the default.
        cuts_max_tokens: whether ``max_tokens`` is lowered to what fits, instead of refused.
        n: choices per prompt.
        stop: texts that end an output.
        stop_token_ids: tokens that end an output, besides the model's own.
        logprobs: how many of the likeliest tokens to return beside each token and its
            log-probability; None for no log-probabilities.
        stream: whether to send server-sent events.
        include_usage: whether a streamed answer ends with its usage.
        prediction: the text that the client expects, to draft from.
        drafts: whether to mark text from accepted drafts; ``"mlxspec": {"drafts": true}``.
        constraint: the constraint of the answer's text.
        constrained_by: the field that sets the constraint.
        param: the field with the messages or prompts.
        messages: the messages as chat templates expect them. Roles are system, user, assistant and
            tool, contents are strings, and arguments of tool calls are objects if they are JSON.
        continued: whether the answer continues the last message, which is the assistant's.
        tools: the tools in OpenAI's form; empty if ``tool_choice`` is "none".
        tool_choice: "auto", "required", or "function" for ``forced_tool``.
        forced_tool: the name of the function that must be called.
        parallel_tool_calls: whether an answer may have several tool calls.
        template_kwargs: arguments of the chat template besides messages and tools.
        prompts: texts to complete, or token ids that are used unchanged. Choice ``i`` of the answer
            belongs to prompt ``i // n``.
        suffix: the text after the output, for models that fill in the middle.
        echo: whether the text of each choice begins with its prompt.
    """

    model: str | None = None
    sampling: SamplingParams = _DEFAULT
    max_tokens: int | None = None
    cuts_max_tokens: bool = False
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    prediction: str | None = None
    drafts: bool = False
    constraint: Constraint | None = None
    constrained_by: str = ""
    param: str = "messages"
    messages: tuple[dict[str, Any], ...] = ()
    continued: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    forced_tool: str | None = None
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[str | tuple[int, ...], ...] = ()
    suffix: str | None = None
    echo: bool = False


def merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge consecutive messages of a role: many chat templates require that roles alternate.

    Contents and reasoning are lists of texts. They are joined at the end: ten thousand may form one
    message.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        last, role = result[-1] if result else {}, message["role"]
        complete = "tool_calls" in last and "tool_calls" not in message
        if role == "tool" or last.get("role") != role or complete:
            result.append(message)
            continue
        for name in message.keys() - {"role"}:
            last.setdefault(name, []).extend(message[name])
    for message in result:
        message["content"] = "\n\n".join(filter(None, message["content"]))
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return result


def conversation(
    messages: Sequence[dict[str, Any]], param: str, continues: bool = True
) -> dict[str, Any]:
    """The attributes of a :class:`ApiRequest` for a conversation.

    Args:
        messages: the messages in OpenAI's form.
        param: the messages' field in the body.
        continues: whether the answer continues a trailing message of the assistant.

    Raises:
        ApiError: all messages are empty.
    """
    left = MOST_VALUES
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        function = call["function"]
        if isinstance(function["arguments"], str):  # templates expect objects
            with suppress(ValueError):
                arguments, left = read_json(function["arguments"].encode(), left)
                if isinstance(arguments, dict):
                    function["arguments"] = arguments
    if messages and messages[-1] == {"role": "assistant", "content": ""}:
        messages = messages[:-1]  # nothing to continue
    if not messages:
        raise ApiError(f"{param} has no text: send a user message.", param=param)
    is_answer = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return {"param": param, "messages": tuple(messages), "continued": continues and is_answer}


def chosen_tool(
    choice: str, name: str | None, tools: Sequence[dict[str, Any]], param: str
) -> dict[str, Any]:
    """The attributes of a :class:`ApiRequest` for tools and the tool choice.

    Args:
        choice: "none", "auto", "required" or "function".
        name: the function that must be called.
        tools: the tools in OpenAI's form.
        param: the field that an error names.

    Raises:
        ApiError: the tool that must be called does not exist.
    """
    if choice == "required" and not tools:
        refuse(param, choice, "send tools too")
    if choice == "function" and all(tool["function"]["name"] != name for tool in tools):
        refuse(param, name, "name one of the tools")
    if choice == "none":
        return {}
    return {"tools": tuple(tools), "tool_choice": choice, "forced_tool": name}


# --- fields that the APIs share ---


def as_parts(value: object) -> list[Any]:
    """A content as a list of parts; a string is one part."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "send a string, or a list of parts")
    return value


class TextPart(Body):
    """A part of a message's content. Only text is supported."""

    type: Literal["text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


Texts = Annotated[Items[TextPart], BeforeValidator(as_parts)]
"""A string, or a list of parts with text."""

ToolOutput = Annotated[Items[dict[str, Any]], BeforeValidator(as_parts)]
"""A tool's result: a string, or a list of parts of any type."""


def joined(parts: Iterable[TextPart]) -> str:
    """The joined text of a content's parts."""
    return "".join(part.text for part in parts)


def text_of_output(parts: ToolOutput) -> str:
    """The text of a tool's result, with a note in place of each part that is not text.

    Such a part is not an error, since the client's tool sent it, not the user.
    """
    texts = []
    for part in parts:
        kind = str(part.get("type")).removeprefix("input_")
        if kind in ("text", "output_text"):
            texts.append(str(part.get("text") or ""))
        elif kind == "tool_reference":  # refers to a tool that is offered already
            texts.append(str(part.get("tool_name")))
        else:
            texts.append(f"[{kind[:20]}: left out, since this model reads text alone]")
    return "".join(texts)


class Function(Body):
    """A function that is offered or called; in ``/v1/messages`` also a tool."""

    type: Literal["function", "custom"] = "function"
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, validation_alias=AliasChoices("parameters", "input_schema")
    )
    strict: bool | None = None
    arguments: dict[str, Any] | str = {}


class ResponseFormat(Body):
    """The answer's format. The schema is beside ``type``, or below ``json_schema`` in some APIs."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Any = Field(
        None, validation_alias=AliasChoices("schema", AliasPath("json_schema", "schema"))
    )

    def schema_at(self, path: str) -> Any:
        """The schema of the answer; None for any text.

        Args:
            path: the path of this object in the body.

        Raises:
            ApiError: there is no schema.
        """
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.schema_ is None:
            raise ApiError(f"{path} has no schema: send a JSON Schema.", param=path)
        return self.schema_ or {"type": "object"}  # llama.cpp accepts one in a json_object


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class Options(Body):
    """The nested option objects of all APIs."""

    include_usage: bool = False
    drafts: bool = False
    effort: Effort | None = None
    verbosity: Verbosity | None = None
    format: ResponseFormat | None = None
    content: Texts = []


Stops = Annotated[Items[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=32)]


class CommonBody(SamplingBody):
    """The fields of chats, completions and responses."""

    model_config = ConfigDict(extra="allow")  # those of _KINDS

    model: str | None = None
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    max_output_tokens: MaxTokens = None
    n: Annotated[Integer, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: Annotated[
        Stops, BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
    ] = []
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=1024)] = []
    stream: bool = False
    stream_options: Options = Options()
    prediction: Options = Options()
    mlxspec: Options = Options()
    chat_template_kwargs: dict[str, Any] = {}
    enable_thinking: bool | None = None
    reasoning: Options = Options()
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] = {}

    unsupported: ClassVar[Sequence[str]] = ("all", "openai")

    def common(self, **formats: ResponseFormat | None) -> dict[str, Any]:
        """The attributes of an :class:`ApiRequest`.

        Args:
            formats: the answer's format besides ``response_format``, by its path in the body.

        Raises:
            ApiError: a constraint cannot be enforced, or fields contradict each other.
        """
        constraint, constrained_by = self._constraint(
            {"response_format": self.response_format, **formats}
        )
        return {
            "constraint": constraint,
            "constrained_by": constrained_by,
            "model": self.model,
            "sampling": self.sampling,
            "max_tokens": same(
                max_completion_tokens=self.max_completion_tokens,
                max_output_tokens=self.max_output_tokens,
                max_tokens=self.max_tokens,
            ),
            "n": self.n,
            "stop": tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
            "stream": self.stream,
            "include_usage": self.stream_options.include_usage,
            "prediction": joined(self.prediction.content) or None,
            "drafts": self.mlxspec.drafts,
        }

    def template_kwargs(self, verbosity: Verbosity | None = None) -> dict[str, Any]:
        """The chat template's arguments.

        Args:
            verbosity: that of the API's own field, if it has another one.
        """
        effort = self.reasoning.effort or self.reasoning_effort
        given = {"verbosity": verbosity or self.verbosity, **self.chat_template_kwargs}
        return template_kwargs(effort, self.enable_thinking, given)

    def _constraint(
        self, formats: Mapping[str, ResponseFormat | None]
    ) -> tuple[Constraint | None, str]:
        """The constraint and the field that sets it; empty fields are ignored.

        Clients of several servers send the same constraint under several names.
        """
        asked = [(path, "json", one.schema_at(path)) for path, one in formats.items() if one]
        fields = self.model_extra or {}
        asked += [(path, kind, fields.get(path)) for path, kind in _KINDS.items()]
        structured = self.structured_outputs.items()
        asked += [(f"structured_outputs.{kind}", kind, value) for kind, value in structured]
        found = {}
        for path, kind, value in asked:
            if value:
                with blaming(path):
                    found[path] = _constraint_of(kind, value)
        return same(**found), next(iter(found), "")


_KINDS = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},  # vLLM
    **{"grammar": "grammar", "json_schema": "json"},  # llama.cpp
    **{"format": "format"},  # Ollama
    **{"regex": "regex", "ebnf": "grammar"},  # SGLang
}
"""The fields that set a constraint, besides the formats, and the kind of the constraint."""


def _constraint_of(kind: str, value: Any) -> Constraint:
    """The constraint of a kind.

    Raises:
        OptionError: the kind is unknown, or the value is wrong.
    """
    if kind == "json_object" or (kind == "format" and value == "json"):
        return Constraint.json_object()
    if kind in ("json", "format"):
        return Constraint.json_schema(value)
    if kind == "choice" and isinstance(value, list):
        return Constraint.choice(value)
    if kind in ("regex", "grammar") and isinstance(value, str):
        return Constraint.regex(value) if kind == "regex" else Constraint.grammar(value)
    raise OptionError("send a regex or a grammar as text, choices as a list, or leave it out")


def same(**given: _Value | None) -> _Value | None:
    """The value of fields that mean the same, by their paths; None if none of them has one.

    Raises:
        ApiError: two of them have different values.
    """
    values = without_nulls(given)
    first = next(iter(values), "")
    for path, value in values.items():
        if value != values[first]:
            raise ApiError(f"{path} conflicts with {first}: send one of them.", param=path)
    return values.get(first)


def template_kwargs(
    effort: Effort | None, thinking: bool | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The chat template's arguments. Templates ignore unknown arguments."""
    if thinking is None and effort == "none":
        thinking = False
    return dict(without_nulls({"reasoning_effort": effort, "enable_thinking": thinking, **given}))
