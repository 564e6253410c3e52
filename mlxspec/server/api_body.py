"""The base of every API's request body, with the fields that the APIs share.

Unknown fields are ignored, since clients add their own. A known but unsupported field is an error
that names the field. Otherwise a client would assume, for instance, that the model has seen an
image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BeforeValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    model_validator,
)

from ..engine.params import Constraint, SamplingParams
from ..errors import OptionError
from ..models.tokenizer import token_name
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
    read_json,
    refuse,
    without_nulls,
)

MOST_CHOICES = 128  # the most choices per prompt, and the most prompts


# --- sampling ---


def _or_none(value: object) -> object:
    """Turn -1 into None: as in other local servers, it means no limit or a random seed."""
    value = as_integer(value)
    return None if value == -1 else value


_DEFAULT = SamplingParams(seed=None)
_MinusOne = BeforeValidator(_or_none)
_Fraction = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-100, le=100)] | None  # larger ones would make logits overflow
_Token = Annotated[int, Field(strict=False, ge=0)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_MaxTokens = Annotated[
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
    seed: Annotated[Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None, _MinusOne] = (
        _DEFAULT.seed
    )
    logit_bias: Annotated[Dictionary[_Token, _Bias], Field(max_length=10_000)] = {}
    repetition_penalty: Annotated[float, Field(ge=0, le=100)] | None = _DEFAULT.repetition_penalty
    repetition_context_size: TokenId = _DEFAULT.repetition_context_size
    presence_penalty: _Penalty = _DEFAULT.presence_penalty
    presence_context_size: TokenId = _DEFAULT.presence_context_size
    frequency_penalty: _Penalty = _DEFAULT.frequency_penalty
    frequency_context_size: TokenId = _DEFAULT.frequency_context_size
    xtc_probability: _Fraction = _DEFAULT.xtc_probability
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] = _DEFAULT.xtc_threshold

    def sampling(self, choice: int = 0, xtc_special_tokens: Sequence[int] = ()) -> SamplingParams:
        """The sampling parameters of one choice.

        Args:
            choice: the choice's index among the ``n`` choices of a prompt. The first choice uses
                the seed as sent, so it equals the answer for ``n: 1``. The others use the seeds
                that follow.
            xtc_special_tokens: token ids that XTC never drops.
        """
        given = {name: getattr(self, name) for name in SamplingBody.model_fields}
        given |= {"top_k": self.top_k or 0, "logit_bias": self.logit_bias or None}
        given |= {"xtc_special_tokens": tuple(xtc_special_tokens)}
        if self.seed is not None:
            given["seed"] = (self.seed + choice) % 2**64
        return SamplingParams(given.pop("temperature"), **given)


def check_ids(
    ids: Iterable[int], vocab_size: int, param: str, tokenizer: TokenizerWrapper | None = None
) -> None:
    """Refuse token ids that the model does not have.

    Args:
        param: the field with the ids, or with the text that became them.
        tokenizer: the model's tokenizer, if a text may have become the ids.

    Raises:
        ApiError: an id is not below ``vocab_size``.
    """
    for token in ids:
        if token >= vocab_size:
            problem = f"the id {token}: send ids from 0 to {vocab_size - 1}"
            if tokenizer is not None and (name := token_name(tokenizer, token)):
                problem = f"{name}, which the model lacks: leave it out"
            raise ApiError(f"{param} has {problem}.", param=param)


# --- conversations ---


def merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge consecutive messages of the user, or of the assistant: many chat templates require that
    they alternate. System messages depend on the template; see :func:`.apply_template`.

    Contents and reasoning are lists of texts, joined only at the end, since ten thousand of them
    may form one message.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        last, role = result[-1] if result else {}, message["role"]
        complete = "tool_calls" in last and "tool_calls" not in message
        if role in ("tool", "system") or last.get("role") != role or complete:
            result.append(message)
            continue
        for name in message.keys() - {"role"}:
            last.setdefault(name, []).extend(message[name])
    for message in result:
        message["content"] = "\n\n".join(filter(None, message["content"]))
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return result


def _with_arguments(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Parse the arguments of calls, since templates expect objects; invalid ones stay text."""
    left = MOST_VALUES
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        function = call["function"]
        if isinstance(function["arguments"], str):
            with suppress(ValueError):
                arguments, left = read_json(function["arguments"].encode(), left)
                if isinstance(arguments, dict):
                    function["arguments"] = arguments
    return messages


class TextPart(Body):
    """A part of a message's content. Only text is supported."""

    type: Literal["text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


def _text(value: object) -> str:
    """The text of a message's content, which is a string or a list of parts with text."""
    return value if isinstance(value, str) else "".join(part.text for part in _text_parts(value))


def _text_of_output(value: object) -> str:
    """The text of a tool's result: a string, or a list of parts of any type.

    A note replaces a part that is not text. It is not an error, since it comes from the client's
    tool, not from the user.
    """
    if isinstance(value, str):
        return value
    texts = []
    for part in _any_parts(value):
        kind = str(part.get("type")).removeprefix("input_")
        if kind in ("text", "output_text"):
            texts.append(str(part.get("text") or ""))
        elif kind == "tool_reference":  # refers to a tool that is already offered
            texts.append(str(part.get("tool_name")))
        else:
            texts.append(f"[{kind[:20]}: left out, since this model reads only text]")
    return "".join(texts)


_text_parts = TypeAdapter(Items[TextPart]).validate_python
_any_parts = TypeAdapter(Items[dict[str, Any]]).validate_python
Text = Annotated[str, PlainValidator(_text)]
ToolOutput = Annotated[str, PlainValidator(_text_of_output)]


class Function(Body):
    """A function that is offered or called. A tool of ``/v1/messages`` has the same form."""

    type: Literal["function", "custom"] = "function"
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, validation_alias=AliasChoices("parameters", "input_schema")
    )
    strict: bool | None = None
    arguments: dict[str, Any] | str = {}


# --- constraints ---


class ResponseFormat(Body):
    """The answer's format. The schema is next to ``type``, or in some APIs inside
    ``json_schema``.
    """

    type: Literal["text", "json_object", "json_schema"]
    schema_: Any = Field(
        None, validation_alias=AliasChoices("schema", AliasPath("json_schema", "schema"))
    )


def _of_format(value: object) -> Constraint | None:
    response_format = ResponseFormat.model_validate(value)
    if response_format.type == "text":
        return None
    if response_format.type == "json_schema" and response_format.schema_ is None:
        raise OptionError("send a JSON Schema as its schema")
    # llama.cpp accepts a schema in a json_object.
    return Constraint.json_schema(response_format.schema_ or {"type": "object"})


Format = Annotated[Constraint | None, PlainValidator(_of_format)]


# --- request bodies ---


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class _StreamOptions(Body):
    include_usage: bool = False


class _Prediction(Body):
    content: Text = ""


class _OwnOptions(Body):
    drafts: bool = False


class _Reasoning(Body):
    effort: Effort | None = None


class OutputOptions(_Reasoning):
    """Options that two of the APIs nest in a field of the body: effort and format of the answer."""

    format: Format = None


Stops = Annotated[Items[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=32)]


class ApiBody(SamplingBody):
    """The body of a request for an answer to a conversation, or for completions of texts.

    It has the fields that the APIs share. ``/v1/messages`` has other names for some of them, and
    refuses others.

    Attributes:
        sent: the whole body as sent, with unknown fields.
        param: the field with the messages or prompts.
        format_param: the field that sets the constraint.
        continues: whether the answer may continue the last message, if that is the assistant's.
    """

    sent: dict[str, Any] = Field({}, exclude=True, repr=False)
    model: str | None = None
    max_tokens: _MaxTokens = Field(
        None,
        validation_alias=AliasChoices("max_completion_tokens", "max_output_tokens", "max_tokens"),
    )
    n: Annotated[Integer, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: Annotated[
        Stops, BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
    ] = []
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=1024)] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    prediction: _Prediction = _Prediction()
    mlxspec: _OwnOptions = _OwnOptions()
    chat_template_kwargs: dict[str, Any] = {}
    enable_thinking: bool | None = None
    reasoning: _Reasoning = _Reasoning()
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    parallel_tool_calls: bool = True
    continue_final_message: bool = True  # vLLM's
    response_format: Format = None

    unsupported: ClassVar[Sequence[str]] = ("all", "openai")
    param: ClassVar[str] = "messages"
    format_param: ClassVar[str] = "response_format"
    continues: ClassVar[bool] = True

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens to return with each token and its log-probability.

        None means that no log-probabilities are returned.
        """
        return None

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the answer's text."""
        return self.response_format

    def for_template(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them.

        Roles are system, user, assistant and tool, and contents are strings.
        """
        return []

    def offered(self) -> Sequence[dict[str, Any]]:
        """The tools in OpenAI's form."""
        return []

    @property
    def tool_mode(self) -> tuple[str, str | None]:
        """The tool choice: "none", "auto", "required", or "function" with the function's name."""
        return "auto", None

    @cached_property
    def conversation(self) -> Sequence[dict[str, Any]]:
        """The messages as chat templates expect them, with calls' arguments as objects."""
        messages = self.for_template()
        if messages and messages[-1] == {"role": "assistant", "content": ""}:
            messages = messages[:-1]  # nothing to continue
        return _with_arguments(messages)

    @cached_property
    def tools_shown(self) -> Sequence[dict[str, Any]]:
        """The tools in OpenAI's form that the model may call."""
        offered = self.offered()  # refuses tools that cannot be offered, even if none is chosen
        return [] if self.tool_mode[0] == "none" else offered

    @property
    def forced_tool(self) -> str | None:
        """The name of the function that must be called."""
        return self.tool_mode[1]

    @property
    def demands_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_mode[0] in ("required", "function")

    @property
    def continued(self) -> bool:
        """Whether the answer continues the last message, which is then the assistant's."""
        if not (self.continues and self.continue_final_message):
            return False
        last = self.conversation[-1]
        return last["role"] == "assistant" and "tool_calls" not in last

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template besides messages and tools; templates ignore others."""
        effort, thinking = self.reasoning.effort or self.reasoning_effort, self.enable_thinking
        if thinking is None and effort == "none":
            thinking = False
        given = {"reasoning_effort": effort, "enable_thinking": thinking}
        return dict(
            without_nulls({**given, "verbosity": self.verbosity, **self.chat_template_kwargs})
        )

    @model_validator(mode="after")
    def _agrees(self) -> ApiBody:
        """Refuse fields that contradict each other."""
        word, forced = self.tool_mode
        names = [tool["function"]["name"] for tool in self.tools_shown]
        if word == "required" and not names:
            refuse("tool_choice", word, "send tools too")
        if forced is not None and forced not in names:
            refuse("tool_choice", forced, "name one of the tools")
        if not self.conversation and self.param != "prompt":
            raise ApiError(f"{self.param} has no text: send a user message.", param=self.param)
        return self
