"""Requests in one form for all APIs, and the body fields that the APIs share.

Unknown fields are ignored, since clients add their own. A known but unsupported field is an error
that names it. Otherwise a client would assume, for instance, that the model has seen an image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..engine.params import Constraint, SamplingParams
from .body import (
    MOST_VALUES,
    ApiError,
    Body,
    Dictionary,
    Integer,
    Items,
    StringOr,
    TokenId,
    as_integer,
    blaming,
    read_json,
    refuse,
    without_nulls,
)

MOST_CHOICES = 128  # of all prompts together
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_Value = TypeVar("_Value")
_COLDEST = 1e-6  # a lower temperature counts as 0, which samples the same tokens

# Large enough for every use, small enough not to overflow float32.
_HOTTEST = 100.0
_STRONGEST = 100.0


# --- sampling ---


def _or_none(value: object) -> object:
    """Turn -1 into None: it means no limit or a random seed, as in other local servers."""
    value = as_integer(value)
    return None if value == -1 else value


def _temperature(value: float) -> float:
    return 0.0 if value < _COLDEST else value


def _repetition_penalty(value: float) -> float:
    """Refuse tiny penalties, which would make logits infinite. 0 means no penalty."""
    if 0 < value < 1 / _STRONGEST:
        raise PydanticCustomError("penalty", f"choose 0, or {1 / _STRONGEST:g} to {_STRONGEST:g}")
    return value


def _by_token(biases: dict[str, float]) -> dict[int, float] | None:
    if not all(map(_TOKEN_ID.fullmatch, biases)):
        raise PydanticCustomError("token", "use token ids as names")
    return {int(token): bias for token, bias in biases.items()} or None


_DEFAULT = SamplingParams(seed=None)
_Fraction = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-_STRONGEST, le=_STRONGEST)] | None
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Biases = Annotated[Dictionary[str, _Bias], Field(max_length=10_000), AfterValidator(_by_token)]
_MinusOne = BeforeValidator(_or_none)
MaxTokens = Annotated[Annotated[int, Field(ge=1)] | None, _MinusOne]


class SamplingBody(Body):
    """Sampling options; :class:`SamplingParams` explains the fields and has their defaults.

    Without a seed, answers at temperatures above 0 vary.
    """

    temperature: Annotated[float, Field(ge=0, le=_HOTTEST), AfterValidator(_temperature)] = (
        _DEFAULT.temp
    )
    top_p: _Fraction = _DEFAULT.top_p
    top_k: Annotated[Annotated[int, Field(ge=0, le=2**63)] | None, _MinusOne] = _DEFAULT.top_k
    min_p: _Fraction = _DEFAULT.min_p
    seed: Annotated[Annotated[int, Field(ge=0, le=2**64 - 1)] | None, _MinusOne] = _DEFAULT.seed
    logit_bias: _Biases | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=0, le=_STRONGEST), AfterValidator(_repetition_penalty)] | None
    ) = _DEFAULT.repetition_penalty
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
        return SamplingParams(given.pop("temperature"), **given | {"top_k": self.top_k or 0})


def sampling_of_choice(
    sampling: SamplingParams,
    vocab_size: int,
    choice: int = 0,
    xtc_special_tokens: Sequence[int] = (),
) -> SamplingParams:
    """The sampling parameters of one choice.

    Args:
        sampling: the request's parameters.
        vocab_size: the number of the model's token ids.
        choice: the choice's index among a prompt's ``n``. The first choice has the seed as sent,
            so it equals that of ``n: 1``. The others have the seeds that follow.
        xtc_special_tokens: token ids that XTC never drops.

    Raises:
        ApiError: a logit bias is for an unknown token id.
    """
    check_ids(sampling.logit_bias or (), vocab_size, "logit_bias")
    return replace(
        sampling,
        top_k=sampling.top_k if sampling.top_k < vocab_size else 0,
        seed=None if sampling.seed is None else (sampling.seed + choice) % 2**64,
        xtc_special_tokens=tuple(xtc_special_tokens),
    )


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
    """The fields that chat and completion requests share.

    Attributes:
        param: the prompt's field in the body.
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
    """

    param: ClassVar[str] = "prompt"

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


@dataclass(frozen=True)
class ChatRequest(ApiRequest):
    """A request for the answer to a conversation.

    Attributes:
        messages: the messages as chat templates expect them. Roles are system, user, assistant and
            tool, contents are strings, and arguments of tool calls are objects if they are JSON.
        continued: whether the answer continues the last message, which is the assistant's.
        tools: the tools in OpenAI's form; empty if ``tool_choice`` is "none".
        tool_places: the path of each tool's schema in the body.
        tool_choice: "auto", "required", or "function" for ``forced_tool``.
        forced_tool: the name of the function that must be called.
        parallel_tool_calls: whether an answer may have several tool calls.
        template_kwargs: arguments of the chat template besides messages and tools.
    """

    param: ClassVar[str] = "messages"

    messages: tuple[dict[str, Any], ...] = ()
    continued: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_places: tuple[str, ...] = ()
    tool_choice: str = "auto"
    forced_tool: str | None = None
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompletionRequest(ApiRequest):
    """A request for completions of texts.

    Attributes:
        prompts: texts, or token ids that are used unchanged. Choice ``i`` of the answer belongs to
            prompt ``i // n``.
        suffix: the text after the output, for models that fill in the middle.
        echo: whether the text of each choice begins with its prompt.
    """

    prompts: tuple[str | tuple[int, ...], ...] = ()
    suffix: str | None = None
    echo: bool = False


def conversation(
    messages: Sequence[dict[str, Any]], param: str, continues: bool | None = None
) -> dict[str, Any]:
    """The attributes of a :class:`ChatRequest` for a conversation.

    Args:
        messages: the messages in OpenAI's form; the last one may be an answer to continue.
        param: the messages' field in the body.
        continues: whether to continue the last answer; None to continue it if there is one.

    Raises:
        ApiError: all messages are empty, or there is no answer to continue.
    """
    left = MOST_VALUES
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        function = call["function"]
        if isinstance(function["arguments"], str):  # templates expect objects
            with suppress(ValueError):
                arguments, left = read_json(function["arguments"].encode(), left)
                if isinstance(arguments, dict):
                    function["arguments"] = arguments
    last = messages[-1] if messages else {"role": ""}
    is_answer = last["role"] == "assistant" and "tool_calls" not in last
    if continues and not is_answer:
        refuse("continue_final_message", True, "end with an assistant message, or leave it out")
    if is_answer and not last["content"] and "reasoning_content" not in last:
        messages, is_answer = messages[:-1], False  # nothing to continue
    if not messages:
        raise ApiError(f"{param} has no text: send a user message.", param=param)
    return {"messages": tuple(messages), "continued": is_answer and continues is not False}


def chosen_tool(
    choice: str, name: str | None, tools: Sequence[dict[str, Any]], param: str
) -> dict[str, Any]:
    """The attributes of a :class:`ChatRequest` for tools and the tool choice.

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

    type: Literal["text", "input_text", "output_text", "summary_text", "reasoning_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "refusal":
            return {"type": "text", "text": value.get("refusal")}
        return value


Texts = Annotated[Items[TextPart], BeforeValidator(as_parts)]
"""A string, or a list of parts with text."""


def joined(parts: Iterable[TextPart] | None) -> str:
    """The joined text of a content's parts."""
    return "".join(part.text for part in parts or ())


class ResponseFormat(Body):
    """The answer's format. The schema is beside ``type``, or below ``json_schema`` in some APIs."""

    type: Literal["text", "json_object", "json_schema"] | None = None
    name: str = ""
    description: str = ""
    strict: bool = False
    schema_: Any = Field(None, alias="schema")
    json_schema: ResponseFormat | None = None

    def schema_at(self, path: str, inner: bool) -> tuple[str, Any] | None:
        """The field that constrains the answer, and its schema.

        Args:
            path: the path of this object in the body.
            inner: whether the schema is below ``json_schema``.

        Raises:
            ApiError: the type or the schema is missing.
        """
        if self.type is None:
            refuse(f"{path}.type", None, f'send "json_schema", or leave {path} out')
        if self.type == "text":
            return None
        if self.type == "json_object":  # llama.cpp accepts a schema here
            return path, self.schema_ or {"type": "object"}
        place = self.json_schema if inner else self
        path += ".json_schema" if inner else ""
        if place is None:
            refuse(path, None, "send an object with a name and a schema")
        if place.schema_ is None:
            refuse(f"{path}.schema", None, "send a JSON Schema")
        return f"{path}.schema", place.schema_


class _StructuredOutputs(Body):
    """vLLM's constraints, and its other options, which are refused unless they are off."""

    model_config = ConfigDict(extra="allow")

    json_: Any = Field(default=None, validation_alias="json")
    regex: str = ""
    choice: Items[Any] = []
    grammar: str = ""
    json_object: bool = False


class _Prediction(Body):
    type: Literal["content"]
    content: Texts


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class Options(Body):
    """The nested option objects of all APIs."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    effort: Effort | None = None
    verbosity: Verbosity | None = None
    format: ResponseFormat | None = None


_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[Items[_Stop], Field(max_length=32)]
_OneOrMoreStops = Annotated[
    Stops,
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class CommonBody(SamplingBody):
    """The fields of chats, completions and responses."""

    model: str | None = None
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    max_output_tokens: MaxTokens = None
    n: Annotated[Integer, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: _OneOrMoreStops = []
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=1024)] = []
    stream: bool = False
    stream_options: Options = Options()
    prediction: _Prediction | None = None
    mlxspec: Dictionary[Literal["drafts"], bool] = {}
    chat_template_kwargs: dict[str, Any] = {}
    enable_thinking: bool | None = None
    reasoning: Options = Options()
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    parallel_tool_calls: bool = True
    continue_final_message: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] = {}
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    response_format: ResponseFormat | None = None
    format: StringOr[Literal["json", ""], dict[str, Any]] = ""
    regex: str = ""
    ebnf: str = ""
    grammar: str = ""
    json_schema: Any = None
    guided_json: Any = None
    guided_regex: str = ""
    guided_choice: Items[Any] = []
    guided_grammar: str = ""
    structured_outputs: _StructuredOutputs = _StructuredOutputs()

    unsupported: ClassVar[Sequence[str]] = ("all", "openai")

    def common(self, format: tuple[str, Any] | None = None) -> dict[str, Any]:
        """The attributes of an :class:`ApiRequest`.

        Args:
            format: the path and the JSON Schema of the answer's format, if the API does not have
                ``response_format``.

        Raises:
            ApiError: a constraint cannot be enforced, or there are several.
        """
        if self.stream_options.continuous_usage_stats:
            refuse("stream_options.continuous_usage_stats", True, "use include_usage")
        if self.response_format:
            format = self.response_format.schema_at("response_format", inner=True)
        max_tokens = same(
            max_completion_tokens=self.max_completion_tokens,
            max_output_tokens=self.max_output_tokens,
            max_tokens=self.max_tokens,
        )
        constraint, constrained_by = self._constraint(format)
        return {
            "constraint": constraint,
            "constrained_by": constrained_by,
            "model": self.model,
            "sampling": self.sampling,
            "max_tokens": max_tokens and min(max_tokens, 2**31 - 1),
            "n": self.n,
            "stop": tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
            "stream": self.stream,
            "include_usage": self.stream_options.include_usage,
            "prediction": (self.prediction and joined(self.prediction.content)) or None,
            "drafts": self.mlxspec.get("drafts", False),
        }

    def template_kwargs(self, verbosity: Verbosity | None = None) -> dict[str, Any]:
        """The chat template's arguments.

        Args:
            verbosity: that of the API's own field, if it has another one.

        Raises:
            ApiError: fields contradict each other.
        """
        effort: Effort | None = same(
            **{"reasoning.effort": self.reasoning.effort, "reasoning_effort": self.reasoning_effort}
        )
        verbosity = same(**{"text.verbosity": verbosity, "verbosity": self.verbosity})
        given = self.chat_template_kwargs
        for name in ("reasoning_effort", "enable_thinking", "verbosity"):
            same(**{name: getattr(self, name), f"chat_template_kwargs.{name}": given.get(name)})
        return template_kwargs(effort, self.enable_thinking, given, verbosity)

    def _constraint(self, format: tuple[str, Any] | None) -> tuple[Constraint | None, str]:
        """The constraint and the field that sets it; empty fields are ignored.

        Clients of several servers send the same constraint under several names.
        """
        structured = [(name.rstrip("_"), value) for name, value in self.structured_outputs]
        asked = [
            (*(format or ("", None)), "json"),
            *((f"guided_{kind}", getattr(self, f"guided_{kind}"), kind) for kind in _GUIDED),
            *((f"structured_outputs.{kind}", value, kind) for kind, value in structured),
            ("grammar", self.grammar, "grammar"),
            ("json_schema", self.json_schema, "json"),
            ("format", self.format, "json_object" if self.format == "json" else "json"),
            ("regex", self.regex, "regex"),
            ("ebnf", self.ebnf, "grammar"),
        ]
        found = {}
        for path, value, kind in asked:
            if value:
                if kind not in _MAKE_CONSTRAINT:
                    refuse(path, value, "leave it out")
                with blaming(path):
                    found[path] = _MAKE_CONSTRAINT[kind](value)
        return same(**found), next(iter(found), "")


_MAKE_CONSTRAINT: dict[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json_schema,
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.grammar,
    "json_object": lambda value: Constraint.json_object(),
}
_GUIDED = ("json", "regex", "choice", "grammar")


def same(**given: _Value | None) -> _Value | None:
    """The value of fields that mean the same, by their paths; None if none of them has one.

    Raises:
        ApiError: two of them have different values.
    """
    first: tuple[str, _Value] | None = None
    for path, value in given.items():
        if value is None:
            continue
        if first is None:
            first = path, value
        elif value != first[1]:
            raise ApiError(f"{path} conflicts with {first[0]}: send one of them.", param=path)
    return first and first[1]


def template_kwargs(
    effort: Effort | None,
    thinking: bool | None,
    given: dict[str, Any],
    verbosity: Verbosity | None = None,
) -> dict[str, Any]:
    """The chat template's arguments. Templates ignore unknown arguments."""
    if thinking is None and effort == "none":
        thinking = False
    kwargs = {"reasoning_effort": effort, "enable_thinking": thinking, "verbosity": verbosity}
    return without_nulls(kwargs) | without_nulls(given)


def left_out(kind: str) -> str:
    """The text that replaces a part of a tool's result that is not text.

    Such a part is not an error, since the client's tool sent it, not the user.
    """
    return f"[{kind[:20]}: left out, since this model reads text alone]"
