"""What clients ask for: the bodies of OpenAI's API, checked, as frozen dataclasses.

A field that no OpenAI-compatible server knows is ignored, since clients add their own. A field
that is known and cannot be honoured is an error that names it, so that nobody believes that an
answer has looked at an image when it has not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..engine.constraint import Constraint
from ..engine.params import SamplingParams
from ..errors import OptionError
from .body import MOST_VALUES, JsonReader
from .errors import ApiError
from .fields import Fields, as_integer, as_number, checked_body, refuse, shown

MOST_CHOICES = 128  # of all prompts together
_MOST_TOP = 20  # likeliest tokens beside each chosen one, as at OpenAI
_MOST_STOPS = 32
_LONGEST_STOP = 1000  # characters
_MOST_STOP_IDS = 1024
_MOST_BIASES = 10_000
_MOST_TOKENS = 2**31 - 1
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_COLDEST = 1e-6  # below it a temperature is 0, whose samples are the same

# Large enough for every use, small enough for float32 whatever they multiply.
_HOTTEST = 100.0
_STRONGEST = 100.0


@dataclass(frozen=True)
class Sampling:
    """How to pick tokens, under the names that clients send; :class:`SamplingParams` has the rest.

    Where a client says nothing, the output is greedy, as that of ``mlxspec generate``. At a
    temperature above 0 without a seed, each answer is another one.

    Attributes:
        temperature: 0 by default, unlike OpenAI's 1.
        seed: None, which -1 means too, draws one for each answer.
        logit_bias: by token id, -100 to 100.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1

    def params(
        self, vocab_size: int, choice: int = 0, xtc_special_tokens: Sequence[int] = ()
    ) -> SamplingParams:
        """The settings for the decoder.

        Args:
            vocab_size: the number of token ids that the model knows.
            choice: which of a prompt's ``n`` answers. The first has the seed as it was sent,
                and so is what ``n: 1`` gives; the others have those that follow.
            xtc_special_tokens: ids that XTC never drops.

        Raises:
            ApiError: a logit bias is for an id that is no token.
        """
        check_ids(self.logit_bias, vocab_size, "logit_bias")
        return SamplingParams(
            temp=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if self.top_k < vocab_size else 0,
            min_p=self.min_p,
            seed=None if self.seed is None else (self.seed + choice) % 2**64,
            logit_bias=self.logit_bias or None,
            repetition_penalty=self.repetition_penalty or None,
            repetition_context_size=self.repetition_context_size,
            presence_penalty=self.presence_penalty or None,
            presence_context_size=self.presence_context_size,
            frequency_penalty=self.frequency_penalty or None,
            frequency_context_size=self.frequency_context_size,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            xtc_special_tokens=tuple(xtc_special_tokens),
        )


@dataclass(frozen=True)
class Request:
    """What requests for chats and for completions have.

    Attributes:
        model: as the client calls it; None for the default.
        sampling: how to pick tokens.
        max_tokens: per choice; None for as many as the context has room for.
        n: choices per prompt.
        stop: texts that end an output.
        stop_token_ids: tokens that end it, besides the model's own.
        logprobs: how many of the likeliest tokens are told beside each chosen one, whose
            log-probability is told in any case; None for no log-probabilities.
        stream: answer with server-sent events.
        include_usage: let a streamed answer end with its usage.
        prediction: the text that the client expects, to draft from.
        drafts: tell which text came from accepted drafts; our own
            ``"mlxspec": {"drafts": true}``.
        constraint: what the answer's text has to be.
        constrained_by: the field that says so.
        names: what the body calls fields that its API names otherwise than OpenAI's for chats; a
            name stands for all that is below it, too.
        cuts_max_tokens: where there is no room for so many tokens, an answer has fewer, and the
            request is no error.
        param: what the body calls the prompt.
    """

    param: ClassVar[str] = "prompt"
    cuts_max_tokens: ClassVar[bool] = False

    model: str | None = None
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
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
    names: Mapping[str, str] = field(default_factory=dict)

    def place_of(self, path: str) -> str:
        """What the body calls a field of a chat."""
        return _renamed(path, self.names)


@dataclass(frozen=True)
class ChatRequest(Request):
    """A request for chat completions.

    Attributes:
        messages: as chat templates take them: roles system, user, assistant and tool, contents
            as strings, and the arguments of tool calls as objects where they are JSON.
        continued: the last message is the assistant's, and the answer goes on with it.
        tools: as sent; none where ``tool_choice`` is "none", since then the model sees none.
        tool_choice: "auto", "required", or "function" for the one of ``forced_tool``.
        forced_tool: the name of the function that must be called.
        parallel_tool_calls: an answer may have several tool calls.
        template_kwargs: what the chat template gets besides messages and tools.
    """

    param: ClassVar[str] = "messages"

    messages: tuple[dict[str, Any], ...] = ()
    continued: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    forced_tool: str | None = None
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompletionRequest(Request):
    """A request for completions of texts.

    Attributes:
        prompts: texts, or token ids that are taken as they are. Choice ``i`` of the answer
            belongs to prompt ``i // n``.
        suffix: the text after the output, for models that fill in the middle.
        echo: let the text of each choice start with its prompt.
    """

    prompts: tuple[str | tuple[int, ...], ...] = ()
    suffix: str | None = None
    echo: bool = False


def parse_chat(body: object) -> ChatRequest:
    """Read a body of ``/v1/chat/completions``.

    Raises:
        ApiError: a field is missing or wrong, or asks for what this server does not do.
    """
    fields = Fields(checked_body(body))
    refuse_unsupported(fields, _UNSUPPORTED | _UNSUPPORTED_IN_CHAT)
    messages, continued = _messages(fields)
    tools = _tools(fields)
    tool_choice, forced_tool = _tool_choice(fields, tools)
    parallel = fields.flag("parallel_tool_calls")
    return ChatRequest(
        **_common(fields),
        logprobs=_chat_logprobs(fields),
        messages=messages,
        continued=continued,
        tools=() if tool_choice == "none" else tools,
        tool_choice="auto" if tool_choice == "none" else tool_choice,
        forced_tool=forced_tool,
        parallel_tool_calls=parallel is not False,
        template_kwargs=_template_kwargs(fields),
    )


def parse_as_chat(chat: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Read a body of another API, translated into one of ``/v1/chat/completions``.

    Args:
        chat: the translated body.
        names: as of :class:`Request`.

    Returns:
        the attributes of a :class:`ChatRequest`.

    Raises:
        ApiError: as for :func:`parse_chat`; it names the other API's field.
    """
    try:
        request = parse_chat(chat)
    except ApiError as error:
        if error.param is None:
            raise
        param = _renamed(error.param, names)
        message = error.message.replace(error.param, param)
        raise ApiError(message, status=error.status, param=param, code=error.code) from error
    constrained_by = _renamed(request.constrained_by, names)
    return vars(request) | {"constrained_by": constrained_by, "names": names}


def _renamed(path: str, names: Mapping[str, str]) -> str:
    """A field of a chat as another API calls it; the longest name that fits counts."""
    for name in sorted(names, key=len, reverse=True):
        if path == name or path.startswith((f"{name}.", f"{name}[")):
            return names[name] + path.removeprefix(name)
    return path


def parse_completion(body: object) -> CompletionRequest:
    """Read a body of ``/v1/completions``.

    Raises:
        ApiError: as for :func:`parse_chat`.
    """
    fields = Fields(checked_body(body))
    refuse_unsupported(fields, _UNSUPPORTED)
    prompts = _prompts(fields)
    common = _common(fields)
    n = common["n"]
    if fields["best_of"] is not None and fields.integer("best_of", 1, MOST_CHOICES) != n:
        fields.refuse("best_of", f"leave it out, or ask for as many answers as n, which is {n}")
    if len(prompts) * n > MOST_CHOICES:
        raise ApiError(
            f"{len(prompts)} prompts with {n} choices each are too many: ask for "
            f"{MOST_CHOICES} choices in all, in several requests if need be.",
            param="prompt" if n == 1 else "n",
        )
    logprobs = fields.integer("logprobs", 0, _MOST_TOP)
    echo = fields.flag("echo") or False
    if echo and logprobs is not None:
        fields.refuse("echo", "leave it out, since the tokens of a prompt have no logprobs here")
    return CompletionRequest(
        **common,
        logprobs=logprobs,
        prompts=prompts,
        suffix=fields.text("suffix") or None,
        echo=echo,
    )


@dataclass(frozen=True)
class TokenizeRequest:
    """A request for token ids.

    Attributes:
        text: the text.
        chat: a conversation instead, to go into the chat template.
        add_special_tokens: begin a text with the tokens that begin a prompt.
    """

    text: str | None
    chat: ChatRequest | None
    add_special_tokens: bool = True


def parse_tokenize(body: object) -> TokenizeRequest:
    """Read a body of ``/v1/tokenize``: ``prompt`` (or ``content``) or ``messages``.

    Raises:
        ApiError: it has none of them, or one that is wrong.
    """
    fields = Fields(checked_body(body))
    special = fields.flag("add_special_tokens") is not False
    if fields["messages"] is not None:
        return TokenizeRequest(None, parse_chat(body), special)
    text = fields.text("prompt" if fields["prompt"] is not None else "content")
    if text is None:
        fields.refuse("prompt", "send a string, or messages")
    return TokenizeRequest(text, None, special)


def parse_detokenize(body: object) -> tuple[int, ...]:
    """Read a body of ``/v1/detokenize``: the ids in ``tokens``.

    Raises:
        ApiError: there are none, or they are no ids.
    """
    fields = Fields(checked_body(body))
    tokens = fields.items("tokens")
    if tokens is None:
        fields.refuse("tokens", "send a list of token ids")
    return _ids(tokens, "tokens")


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse ids that are no tokens of the model.

    Args:
        ids: as they were sent.
        vocab_size: the number of token ids that the model knows.
        param: the field that has them.

    Raises:
        ApiError: one of them is too large.
    """
    for token in ids:
        if token >= vocab_size:
            raise ApiError(
                f"{param} has the id {token}: the model's are 0 to {vocab_size - 1}.", param=param
            )


# --- fields of both kinds ---

_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "adapters": ((), "start a server with the adapter's model"),
    "allowed_token_ids": (([],), "leave it out, or use logit_bias"),
    "bad_words": (([],), "leave it out, or use logit_bias"),
    "chat_template": ((), "leave it out, since the model's own is used"),
    "draft_model": ((), "leave it out, since the drafts are chosen when the server starts"),
    "dynatemp_range": ((0,), "leave it out"),
    "guided_decoding_backend": ((), "leave it out, since there is only one"),
    "guided_whitespace_pattern": ((), "leave it out, or put x-guidance into the schema"),
    "ignore_eos": ((False,), "leave it out, or forbid the end token with logit_bias"),
    "length_penalty": ((1,), "leave it out, since there is no beam search"),
    "min_tokens": ((0,), "leave it out, or forbid the end token with logit_bias"),
    "mirostat": ((0,), "leave it out"),
    "mm_processor_kwargs": (({},), "leave it out, since the model reads text alone"),
    "num_draft_tokens": ((), "leave it out, since the number of drafts follows their gain"),
    "prompt_logprobs": ((False,), "leave it out, since a prompt's tokens have no logprobs here"),
    "repeat_penalty": ((1,), "call it repetition_penalty"),
    "tfs_z": ((1,), "leave it out"),
    "top_a": ((0,), "leave it out"),
    "typical_p": ((1,), "leave it out"),
    "use_beam_search": ((False,), "leave it out"),
}
"""Fields that some server knows and this one does not: the values that ask for nothing, and what
to do instead of any other."""

_UNSUPPORTED_IN_CHAT: dict[str, tuple[tuple[Any, ...], str]] = {
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


def refuse_unsupported(fields: Fields, unsupported: dict[str, tuple[tuple[Any, ...], str]]) -> None:
    """Refuse the fields that a table names, unless they ask for nothing."""
    for name in fields:
        if name in unsupported:
            harmless, remedy = unsupported[name]
            # True equals 1 in Python, and is no number in JSON.
            value = fields[name]
            if not any(
                value == one and isinstance(value, bool) == isinstance(one, bool)
                for one in harmless
            ):
                fields.refuse(name, remedy)


def left_out(kind: str) -> str:
    """What stands for a part of a tool's result that is no text.

    The client's tool has put it there, not the user, so it is no error, and the model had better
    know.
    """
    return f"[{kind[:20]}: left out, since this model reads text alone]"


# --- what the output has to be ---


def _constraint(fields: Fields) -> tuple[Constraint, str] | None:
    """The constraint, and the field that asks for it."""
    found = [
        (path, value, make)
        for path, value, make in (*_of_response_format(fields), *_of_others(fields))
        if value is not None
    ]
    if not found:
        return None
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise ApiError(f"{second} comes beside {first}: send one of them.", param=second)
    ((path, value, make),) = found
    try:
        return make(value), path
    except OptionError as error:
        raise ApiError(f"{path}: {error}.", param=path) from error


_Made = tuple[str, Any, Callable[[Any], Constraint]]


def _of_response_format(fields: Fields) -> Iterator[_Made]:
    response_format = fields.object("response_format")
    if response_format is None:
        return
    kind = response_format.word("type", ("text", "json_object", "json_schema"))
    if kind is None:
        response_format.refuse("type", "choose one of text, json_object, json_schema")
    if kind == "json_object":
        # llama.cpp has a schema here.
        schema = response_format["schema"]
        yield "response_format", {"type": "object"} if schema is None else schema, _json
    elif kind == "json_schema":
        about = response_format.object("json_schema")
        if about is None:
            response_format.refuse("json_schema", "send an object with a name and a schema")
        about.text("name")
        about.text("description")
        about.flag("strict")
        if about["schema"] is None:
            about.refuse("schema", "send a JSON Schema")
        yield about.at("schema"), about["schema"], _json


def _of_others(fields: Fields) -> Iterator[_Made]:
    """Fields of vLLM and llama.cpp; empty ones ask for nothing."""
    for prefix, own in (("guided_", fields), ("", fields.object("structured_outputs"))):
        for name, make in _CONSTRAINTS.items():
            if own is not None:
                yield own.at(prefix + name), own[prefix + name] or None, make
    structured = fields.object("structured_outputs") or Fields({})
    if structured["json_object"] not in (None, False):
        structured.flag("json_object")
        yield structured.at("json_object"), {"type": "object"}, _json
    for name in structured:
        if name not in _CONSTRAINTS and name != "json_object" and structured[name] is not False:
            structured.refuse(name, f"leave it out, or send {', '.join(_CONSTRAINTS)}")
    yield "grammar", fields["grammar"] or None, _CONSTRAINTS["grammar"]
    yield "json_schema", fields["json_schema"] or None, _json


def _json(schema: Any) -> Constraint:
    return Constraint.json_schema(schema)


def _text(make: Callable[[str], Constraint]) -> Callable[[Any], Constraint]:
    def made(value: Any) -> Constraint:
        if not isinstance(value, str):
            raise OptionError(f"is {shown(value)}: send a string")
        return make(value)

    return made


def _choices(value: Any) -> Constraint:
    if not isinstance(value, list):
        raise OptionError(f"is {shown(value)}: send a list of strings")
    return Constraint.choice(value)


_CONSTRAINTS: dict[str, Callable[[Any], Constraint]] = {
    "json": _json,
    "regex": _text(Constraint.regex),
    "choice": _choices,
    "grammar": _text(Constraint.grammar),
}
"""vLLM's names for constraints, in ``structured_outputs``, or with ``guided_`` before them."""


def _common(fields: Fields) -> dict[str, Any]:
    """The fields of :class:`Request`, but for ``logprobs``, which differs."""
    for name in ("user", "prompt_cache_key", "safety_identifier", "service_tier"):
        fields.text(name)
    fields.flag("store")
    fields.object("metadata")
    stream_options = fields.object("stream_options") or Fields({})
    stream_options.flag("include_obfuscation")
    if stream_options["continuous_usage_stats"] not in (None, False):
        stream_options.refuse("continuous_usage_stats", "leave it out, and use include_usage")
    own = fields.object("mlxspec") or Fields({})
    for name in own:
        if name != "drafts":
            own.refuse(name, 'leave it out, since there is only "drafts"')
    constraint, constrained_by = _constraint(fields) or (None, "")
    return {
        "constraint": constraint,
        "constrained_by": constrained_by,
        "model": fields.text("model"),
        "sampling": _sampling(fields),
        "max_tokens": _max_tokens(fields),
        "n": fields.integer("n", 1, MOST_CHOICES) or 1,
        "stop": _stop(fields),
        "stop_token_ids": _stop_token_ids(fields),
        "stream": fields.flag("stream") or False,
        "include_usage": stream_options.flag("include_usage") or False,
        "prediction": _prediction(fields),
        "drafts": own.flag("drafts") or False,
    }


def _sampling(fields: Fields) -> Sampling:
    temperature = fields.number("temperature", 0, _HOTTEST)
    given: dict[str, Any] = {
        "temperature": 0.0 if temperature is not None and temperature < _COLDEST else temperature,
        "top_p": fields.number("top_p", 0, 1),
        "top_k": _top_k(fields),
        "min_p": fields.number("min_p", 0, 1),
        "seed": _seed(fields),
        "logit_bias": _logit_bias(fields),
        "repetition_penalty": _repetition_penalty(fields),
        "presence_penalty": fields.number("presence_penalty", -_STRONGEST, _STRONGEST),
        "frequency_penalty": fields.number("frequency_penalty", -_STRONGEST, _STRONGEST),
        "xtc_probability": fields.number("xtc_probability", 0, 1),
        "xtc_threshold": fields.number("xtc_threshold", 0, 0.5),
    }
    for kind in ("repetition", "presence", "frequency"):
        name = f"{kind}_context_size"
        given[name] = fields.integer(name, 0, _MOST_TOKENS)
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def _repetition_penalty(fields: Fields) -> float | None:
    """0 is none. Logits are divided by it, so that a tiny one would make infinities of them."""
    penalty = fields.number("repetition_penalty", 0, _STRONGEST)
    if penalty is not None and 0 < penalty < 1 / _STRONGEST:
        fields.refuse(
            "repetition_penalty", f"choose a number from {1 / _STRONGEST:g} to {_STRONGEST:g}, or 0"
        )
    return penalty


def _top_k(fields: Fields) -> int | None:
    """-1 and 0 keep all, as does a number above the vocabulary's."""
    if as_integer(fields["top_k"]) == -1:
        return None
    return fields.integer("top_k", 0, 2**63)


def _seed(fields: Fields) -> int | None:
    if as_integer(fields["seed"]) == -1:
        return None
    return fields.integer("seed", 0, 2**64 - 1)


def _max_tokens(fields: Fields) -> int | None:
    """The newer of the two fields goes first; -1 is no bound, as in other local servers."""
    found = None
    for name in ("max_tokens", "max_completion_tokens"):
        value = as_integer(fields[name])
        if fields[name] is None or value == -1:
            continue
        if value is None or value < 1:
            fields.refuse(name, "choose an integer of 1 or more")
        found = min(value, _MOST_TOKENS)
    return found


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields["stop"]
    stops = [value] if isinstance(value, str) else fields.items("stop") or []
    if len(stops) > _MOST_STOPS:
        raise ApiError(f"stop has {len(stops)} texts: send {_MOST_STOPS} at most.", param="stop")
    for index, text in enumerate(stops):
        param = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(text, str) or not text:
            refuse(param, text, "send a string that is not empty")
        if len(text) > _LONGEST_STOP:
            raise ApiError(
                f"{param} has {len(text)} characters: send {_LONGEST_STOP} at most.", param=param
            )
    return tuple(stops)


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.items("stop_token_ids") or []
    _check_number("stop_token_ids", len(ids), _MOST_STOP_IDS)
    return _ids(ids, "stop_token_ids")


def _check_number(name: str, number: int, most: int) -> None:
    """Refuse too many tokens of a field."""
    if number > most:
        raise ApiError(f"{name} has {number:,} tokens: send {most:,} at most.", param=name)


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    biases = fields.object("logit_bias")
    if biases is None:
        return None
    _check_number("logit_bias", len(fields["logit_bias"]), _MOST_BIASES)
    found = {}
    for key in biases:
        if not _TOKEN_ID.fullmatch(key):
            raise ApiError(
                f"logit_bias has the key {shown(key)}: name a token by its id.", param="logit_bias"
            )
        bias = biases.number(key, -100, 100)
        assert bias is not None
        found[int(key)] = bias
    return found


def _prediction(fields: Fields) -> str | None:
    prediction = fields.object("prediction")
    if prediction is None:
        return None
    if prediction.text("type") != "content":
        prediction.refuse("type", 'send "content"')
    if prediction["content"] is None:
        prediction.refuse("content", "send a string, or a list of text parts")
    return _content(prediction) or None


def _ids(values: Sequence[object], path: str) -> tuple[int, ...]:
    """Token ids; whether the model has them is not known here."""
    ids = []
    for index, value in enumerate(values):
        token = as_integer(value)
        if token is None or not 0 <= token <= _MOST_TOKENS:
            refuse(f"{path}[{index}]", value, "send a token id")
        ids.append(token)
    return tuple(ids)


# --- completions ---


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        fields.refuse("prompt", "send a string, token ids, or a list of several of them")
    if as_number(prompt[0]) is not None:
        return (_ids(prompt, "prompt"),)
    return tuple(_prompt(one, f"prompt[{index}]") for index, one in enumerate(prompt))


def _prompt(prompt: object, path: str) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        refuse(path, prompt, "send a string or token ids, and nothing else beside them")
    return _ids(prompt, path)


# --- chat ---

_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _chat_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, _MOST_TOP)
    if fields.flag("logprobs"):
        return top or 0
    if top:
        fields.refuse("top_logprobs", "send logprobs: true with it")
    return None


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    """``chat_template_kwargs``, and the fields that mean the same."""
    kwargs: dict[str, Any] = {}
    effort = fields.word("reasoning_effort", _EFFORTS)
    if effort is not None:
        # Templates know the one or the other, and ignore what they do not know.
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    if (enabled := fields.flag("enable_thinking")) is not None:
        kwargs["enable_thinking"] = enabled
    given = fields.object("chat_template_kwargs")
    return kwargs | ({name: given[name] for name in given} if given else {})


def _messages(fields: Fields) -> tuple[tuple[dict[str, Any], ...], bool]:
    """The messages for the template, and whether the answer goes on with the last of them."""
    given = fields.items("messages")
    if not given:
        fields.refuse("messages", "send a list with one message or more")
    messages = [
        _message(Fields(message, f"messages[{index}]")) for index, message in enumerate(given)
    ]
    _read_arguments(messages)
    last = messages[-1]
    is_prefill = last["role"] == "assistant" and "tool_calls" not in last
    wanted = fields.flag("continue_final_message")
    if wanted and not is_prefill:
        fields.refuse("continue_final_message", "end with a message of the assistant, or omit it")
    if is_prefill and not last["content"] and "reasoning_content" not in last:
        messages.pop()  # nothing to go on with
        is_prefill = False
    if not messages:
        raise ApiError("messages has no text: send a message of the user.", param="messages")
    return tuple(messages), is_prefill and wanted is not False


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.word("role", _ROLES)
    if role is None:
        fields.refuse("role", f"choose one of {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": _TEMPLATE_ROLES.get(role, role), "content": ""}
    if (name := fields.text("name")) is not None:
        message["name"] = name
    if role == "assistant":
        _add_answer(fields, message)
    elif fields["content"] is None and message["role"] != "tool":  # which may give nothing
        fields.refuse("content", "send a string, or a list of text parts")
    else:
        message["content"] = _content(fields)
    if (call_id := fields.text("tool_call_id")) is not None:
        message["tool_call_id"] = call_id
    return message


def _add_answer(fields: Fields, message: dict[str, Any]) -> None:
    """What only messages of the assistant have."""
    if fields["audio"] is not None:
        fields.refuse("audio", "leave it out, since the model reads text alone")
    message["content"] = _content(fields) or fields.text("refusal") or ""
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [
        _tool_call(Fields(call, f"{fields.at('tool_calls')}[{index}]"))
        for index, call in enumerate(fields.items("tool_calls") or [])
    ]
    if (old_call := fields.object("function_call")) is not None:
        calls.append({"type": "function", "function": _called_function(old_call)})
    if calls:
        message["tool_calls"] = calls


def _tool_call(fields: Fields) -> dict[str, Any]:
    if fields.text("type") not in (None, "function"):
        fields.refuse("type", 'send "function", the only kind of tool here')
    function = fields.object("function")
    if function is None:
        fields.refuse("function", "send an object with name and arguments")
    call: dict[str, Any] = {"type": "function", "function": _called_function(function)}
    if (call_id := fields.text("id")) is not None:
        call["id"] = call_id
    return call


def _called_function(fields: Fields) -> dict[str, Any]:
    arguments = fields["arguments"]
    if not isinstance(arguments, (dict, str, type(None))):
        fields.refuse("arguments", "send an object, or a string of JSON")
    return {"name": fields.needed_text("name"), "arguments": arguments or {}}


def _read_arguments(messages: Iterable[dict[str, Any]]) -> None:
    """Make objects of the arguments of calls, as templates take them, where they are JSON."""
    left = MOST_VALUES
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if isinstance(function["arguments"], str):
                reader = JsonReader(function["arguments"].encode(), left)
                with suppress(ValueError):
                    arguments = reader.read()
                    if isinstance(arguments, dict):
                        function["arguments"] = arguments
                left = reader.left


def _content(fields: Fields) -> str:
    """A content: null, a string, or a list of text parts, which are joined."""
    content = fields["content"]
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        fields.refuse("content", "send a string, or a list of text parts")
    return "".join(
        _part(Fields(part, f"{fields.at('content')}[{index}]"))
        for index, part in enumerate(content)
    )


def _part(fields: Fields) -> str:
    kind = fields.text("type")
    if kind not in ("text", "refusal"):
        fields.refuse("type", 'send parts of the type "text", since the model reads text alone')
    text = fields.text(kind)
    if text is None:
        fields.refuse(kind, "send a string")
    return text


def _tools(fields: Fields) -> tuple[dict[str, Any], ...]:
    """The tools as they were sent, checked."""
    tools = fields.items("tools") or []
    for index, tool in enumerate(tools):
        one = Fields(tool, f"tools[{index}]")
        if one.text("type") != "function":
            one.refuse("type", 'send "function", the only kind of tool here')
        function = one.object("function")
        if function is None:
            one.refuse("function", "send an object with name, description and parameters")
        function.needed_text("name")
        function.text("description")
        function.object("parameters")
        function.flag("strict")
    return tuple(tools)


def _tool_choice(fields: Fields, tools: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
    """The choice, and the name of the function that must be called."""
    value = fields["tool_choice"]
    if value is None:
        return "auto", None
    if isinstance(value, str):
        choice = fields.word("tool_choice", ("none", "auto", "required")) or "auto"
        if choice == "required" and not tools:
            fields.refuse("tool_choice", "send tools with it")
        return choice, None
    named = Fields(value, "tool_choice")
    if named.text("type") != "function":
        named.refuse("type", 'send "function" with a name, or the string none, auto or required')
    function = named.object("function")
    if function is None:
        named.refuse("function", "send an object with the function's name")
    name = function.needed_text("name")
    if all(tool["function"]["name"] != name for tool in tools):
        function.refuse("name", "name one of the tools")
    return "function", name
