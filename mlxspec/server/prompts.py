"""Turns requests into token ids: chat templates, plain text, and filling in the middle."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.grammar import Grammar, Vocabulary, token_of
from ..engine.params import ONE_LINE, Constraint, Phases
from ..errors import OptionError, PromptError
from ..generation.options import in_answer, leaves_reasoning_open
from ..models.chat_template import apply_template, reserved_arguments
from ..models.model import encode_prompt
from ..models.tokenizer import detokenizer_of
from .answer import OutputFormat, output_format, parser_name
from .body import ApiError, blaming
from .requests import ApiRequest, ChatRequest, CompletionRequest, check_ids


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what ends its output.

    Attributes:
        tokens: the token ids.
        stop: texts that end the output, besides the request's.
        stop_tokens: tokens that end the output, besides the model's own.
    """

    tokens: list[int]
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChatPrompt(Prompt):
    """The prompt of a conversation, and the format of its answer."""

    format: OutputFormat = field(kw_only=True)


# --- chat ---


def chat_prompt(
    request: ChatRequest,
    tokenizer: TokenizerWrapper,
    longest: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Apply the model's chat template to a conversation.

    Args:
        request: the request with the conversation.
        tokenizer: the model's tokenizer.
        longest: the model's context length in tokens; None if unknown.
        arguments: default arguments of the template, overridden by the request's.

    Raises:
        ApiError: the template rejects the messages, the rendered text is too long, the model does
            not support tools, or it cannot be made to call one.
    """
    if longest is not None and len(request.messages) > longest:  # each has at least one token
        raise ApiError(
            f"the prompt is too long: {request.param} has {len(request.messages):,} messages, more "
            f"than the model's context of {longest:,} tokens can hold: shorten it",
            param=request.param,
            code="context_length_exceeded",
        )
    if not tokenizer.has_chat_template:
        return _plain_chat(request, tokenizer, longest)
    _check_tools(request, tokenizer)
    text = _templated(request, tokenizer, arguments or {})
    check_length(text, request.param, tokenizer, longest)
    format = replace(
        output_format(tokenizer, request.tools), several_calls=request.parallel_tool_calls
    )
    state = tokenizer.response_initial_state or "normal"
    if _is_reasoning(request, tokenizer, text):
        state = "reasoning"
    if request.tool_choice == "auto":
        # In a continued text the model itself has written the spaces.
        puts_space = bool(getattr(detokenizer_of(tokenizer), "prefix_space", False))
        trims = not request.continued and puts_space
        format = replace(format, initial=state, trims_space=trims)
    else:
        opening = _call_opening(request, tokenizer)
        if state == "reasoning":  # a call inside reasoning would not count
            text += f"\n{tokenizer.think_end}\n\n"
        text += tokenizer.tool_call_start + opening
        format = replace(format, initial="tool", call_begun=opening)
    return ChatPrompt(_ids(text, tokenizer), format=format)


def why_no_tools(tokenizer: TokenizerWrapper) -> str | None:
    """What keeps a model from being offered tools; None if nothing does."""
    if not tokenizer.has_chat_template:
        return "it has no chat template"
    if tokenizer.has_tool_calling:
        return None
    if "tools" not in str(tokenizer.chat_template):
        return "its chat template has no place for them"
    return "its chat template has no marker of calls that mlx-lm knows, such as <tool_call>"


def _check_tools(request: ChatRequest, tokenizer: TokenizerWrapper) -> None:
    if request.tools and (reason := why_no_tools(tokenizer)):
        raise ApiError(
            f"This model does not support tools, since {reason}: leave tools out.", param="tools"
        )


def text_ids(
    text: str, param: str, tokenizer: TokenizerWrapper, longest: int | None, special: bool
) -> list[int]:
    """The token ids of a text, with BOS if ``special``; refuses a text that is far too long."""
    check_length(text, param, tokenizer, longest)
    return cast(list[int], tokenizer.encode(text, add_special_tokens=special))


_SPARSEST = 8  # the most characters per token, on average, in texts that people write


def check_length(text: str, param: str, tokenizer: TokenizerWrapper, longest: int | None) -> None:
    """Refuse a text that is far too long for the context, before all of it is tokenized.

    A long text is tokenized in pieces until the pieces have twice as many tokens as the context.
    The few extra tokens at the cuts make no difference then.

    Args:
        text: the text as the model is to read it.
        param: the text's field in the body.
        tokenizer: the model's tokenizer.
        longest: the model's context length in tokens; None if unknown.

    Raises:
        ApiError: the text is too long.
    """
    if longest is None or len(text) <= _SPARSEST * longest:
        return
    count = 0
    for start in range(0, len(text), longest):
        count += len(_ids(text[start : start + longest], tokenizer))
        if count > 2 * longest:
            raise ApiError(
                f"the prompt is too long: the {len(text):,} characters of {param} do not fit into "
                f"the model's context of {longest:,} tokens; shorten it",
                param=param,
                code="context_length_exceeded",
            )


def _templated(
    request: ChatRequest, tokenizer: TokenizerWrapper, arguments: Mapping[str, Any]
) -> str:
    own = _RESERVED.union(tokenizer.SPECIAL_TOKENS_ATTRIBUTES, tokenizer.special_tokens_map)
    for name in request.template_kwargs:
        if name in own:
            raise ApiError(
                f"chat_template_kwargs sets {name}, which only the server may set: leave it out.",
                param=f"chat_template_kwargs.{name}",
            )
    messages = list(request.messages)
    how = {**arguments, **request.template_kwargs, "tokenize": False}
    if request.continued:
        how["continue_final_message"] = True
    else:
        how["add_generation_prompt"] = True
    if request.tools:
        how["tools"] = list(request.tools)
    try:
        return cast(str, apply_template(tokenizer, messages, **how))
    except PromptError as error:
        raise ApiError(
            f"{error}: send messages with roles, and in an order, that this model accepts.",
            param=request.param,
        ) from error


_RESERVED = reserved_arguments()


def _is_reasoning(request: ChatRequest, tokenizer: TokenizerWrapper, text: str) -> bool:
    """Whether the answer begins inside reasoning."""
    if not tokenizer.has_thinking:
        return False
    if request.continued:
        return leaves_reasoning_open(request.messages[-1]["content"], tokenizer)
    return text.rstrip().endswith(tokenizer.think_start)


def _call_opening(request: ChatRequest, tokenizer: TokenizerWrapper) -> str:
    opening = call_opening(tokenizer, request.forced_tool)
    if opening is None:
        what = "a function" if request.forced_tool is None else "a given function"
        raise ApiError(
            f'tool_choice: this model cannot be made to call {what}; send "auto".',
            param="tool_choice",
        )
    return opening


def call_opening(tokenizer: TokenizerWrapper, name: str | None) -> str | None:
    """The beginning of a call, after its marker, which makes the model continue the call.

    Args:
        tokenizer: the model's tokenizer.
        name: the function's name; None if the model may choose.

    Returns:
        the text; None if the model's call format is unknown.
    """
    if not tokenizer.has_tool_calling or tokenizer.response_initial_state:
        return None
    if name is None:
        return ""
    # Without the space before the arguments, which belongs to their first token.
    as_json = f'{{"name": {json.dumps(name)}, "arguments":'
    parser = parser_name(tokenizer)
    if parser == "json_tools":
        return f"\n{as_json}"
    if parser == "qwen3_coder":
        return f"\n<function={name}>\n"
    if parser == "mistral":
        return f"{name}[ARGS]" if "[ARGS]" in tokenizer.get_vocab() else f"[{as_json}"
    return None


_SPEAKERS = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


def _plain_chat(
    request: ChatRequest, tokenizer: TokenizerWrapper, longest: int | None
) -> ChatPrompt:
    """The prompt of a conversation as plain text, for a model without a chat template.

    System messages have no name in front. Every other message is a line that begins with its role.
    The output ends when the model begins a line of the user.
    """
    _check_tools(request, tokenizer)
    lines = []
    for message in request.messages:
        if message["role"] == "system":
            lines.append(f"{message['content']}\n")
        else:
            lines.append(f"{_SPEAKERS[message['role']]}: {message['content']}".rstrip())
    if not request.continued:
        lines.append("Assistant:")
    text = "\n".join(lines)
    check_length(text, request.param, tokenizer, longest)
    tokens = encode_prompt(tokenizer, text)
    format = replace(output_format(tokenizer), trims_space=not request.continued)
    return ChatPrompt(tokens, stop=("\nUser:",), format=format)


# --- constraints ---

_LONGEST_COMPILING = 20  # seconds for all tools of a request; each tool has its own limit


def compiled_constraint(
    request: ApiRequest, prompt: Prompt, tokenizer: TokenizerWrapper, vocabulary: Vocabulary
) -> Grammar | None:
    """Compile a request's constraint on the answers to a prompt.

    Args:
        request: the request for a chat or a completion.
        prompt: the prompt made from the request.
        tokenizer: the model's tokenizer.
        vocabulary: the model's vocabulary.

    Raises:
        ApiError: a schema, regex or grammar cannot be enforced, or compiling takes too long.
    """
    started = time.monotonic()
    # First by itself, even in a chat, so that an error names its field.
    grammar = _compiled(request.constraint, vocabulary, request.constrained_by)
    if not isinstance(request, ChatRequest):
        return grammar
    demanded = request.tool_choice != "auto"
    calls = None
    if demanded or any(map(is_strict, request.tools)):
        forced, several = request.forced_tool, request.parallel_tool_calls
        make = partial(calls_constraint, tokenizer, request.tools, forced=forced, several=several)
        calls = make(demanded=demanded)
    for number, tool in enumerate(request.tools):
        if calls and is_strict(tool):
            schema = Constraint.json_schema(parameters_of(tool))
            place = request.tool_places[number]
            if time.monotonic() - started > _LONGEST_COMPILING:
                raise ApiError(
                    f"{place}: the schemas before it took {_LONGEST_COMPILING} seconds to compile: "
                    "send fewer strict tools, or simpler ones.",
                    param=place,
                )
            _compiled(schema, vocabulary, place)
    if calls and demanded:
        try:
            return Grammar(calls, vocabulary)
        except OptionError:  # a schema that is not strict cannot be kept
            calls = make()
    assert isinstance(prompt, ChatPrompt)
    phases = _answer_phases(request, prompt, tokenizer, calls)
    return _compiled(phases, vocabulary, request.constrained_by or "tools")


def is_constrained(request: ApiRequest) -> bool:
    """Whether a request constrains its answer."""
    if request.constraint is not None:
        return True
    if not isinstance(request, ChatRequest):
        return False
    return request.tool_choice != "auto" or any(map(is_strict, request.tools))


def _answer_phases(
    request: ChatRequest, prompt: ChatPrompt, tokenizer: TokenizerWrapper, calls: Constraint | None
) -> Constraint | Phases | None:
    """The constraint of a chat's answer; ``calls`` constrains the text after a call's marker."""
    if request.tool_choice != "auto":  # the prompt ends with the beginning of a call
        return calls
    call_start = token_of(tokenizer, tokenizer.tool_call_start) if request.tools else None
    if request.tools and call_start is None:
        if request.constraint is not None:
            raise ApiError(
                "This model's tool calls do not begin with a single token, so tools cannot be "
                f"combined with {request.constrained_by}: leave one out.",
                param=request.constrained_by,
            )
        return None
    if request.constraint is None and calls is None:
        return None
    try:
        return in_answer(
            request.constraint,
            tokenizer,
            reasons=prompt.format.initial == "reasoning",
            trims_space=prompt.format.trims_space,
            calls=calls,
            call_start=call_start,
        )
    except OptionError as error:
        raise ApiError(f"{error}.", param=request.constrained_by or "tools") from error


def _compiled(
    constraint: Constraint | Phases | None, vocabulary: Vocabulary, param: str
) -> Grammar | None:
    with blaming(param):
        return None if constraint is None else Grammar(constraint, vocabulary)


def is_strict(tool: dict[str, Any]) -> bool:
    """Whether a tool's arguments must match its schema."""
    return bool(tool["function"].get("strict"))


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    schema: dict[str, Any] = tool["function"].get("parameters") or {}
    return {"type": "object", **schema}


def calls_constraint(
    tokenizer: TokenizerWrapper,
    tools: Sequence[dict[str, Any]],
    *,
    forced: str | None = None,
    several: bool = True,
    demanded: bool = False,
) -> Constraint | None:
    """The constraint of the output after a call's marker.

    The arguments of strict tools match their schemas; those of others are any object.

    Args:
        tokenizer: the model's tokenizer.
        tools: the tools that may be called.
        forced: the function whose call the prompt has begun, with :func:`call_opening`.
        several: whether more than one call is allowed.
        demanded: whether the other tools' arguments match their schemas, too, except for keywords
            that are not supported.

    Returns:
        the constraint; None if the arguments of a call are not JSON.
    """
    parser, has_args = parser_name(tokenizer), "[ARGS]" in tokenizer.get_vocab()
    start = _literal(tokenizer, tokenizer.tool_call_start)
    end = _literal(tokenizer, tokenizer.tool_call_end)
    names = [tool["function"]["name"] for tool in tools]
    heads = [_quoted(f'{{"name": {json.dumps(name)}, "arguments": ') for name in names]
    # A forced call's arguments may begin with the space that its opening leaves out.
    space, tail = "SPACE? ", ' "}"'
    if parser == "json_tools":
        before, separator, after = "WS? ", f"WS? {start} WS?", f" WS? {end}"
    elif parser == "mistral" and has_args:
        heads = [f"{_quoted(name)} {_literal(tokenizer, '[ARGS]')}" for name in names]
        before, separator, after, space, tail = "", start, "", "", ""
    elif parser == "mistral":
        before, separator, after = '"[" ', '", "', ' "]"'
    elif parser == "qwen3_coder":
        heads = [_quoted(f"<function={name}>\n") for name in names]
        before, separator, after = '"\\n" ', f'WS? {start} "\\n"', f' "</function>\\n" {end}'
        space, tail = "", ""
    else:
        return None
    calls = [f"{head} args_{number}{tail}" for number, head in enumerate(heads)]
    if forced is not None:
        rule = f"{space}args_{names.index(forced)}{tail}{after}"
    elif parser == "mistral" and not has_args:  # one list of all calls
        rule = f"{before}call{f' ({separator} call)*' if several else ''}{after}"
    else:
        one = f"{before}call{after}"
        rule = f"{one}{f' ({separator} call{after})*' if several else ''}"
    schemas = [_arguments_schema(tool, demanded) for tool in tools]
    arguments = _parameters if parser == "qwen3_coder" else _json_arguments
    lark = [
        f"start: {rule}",
        *(["call: " + " | ".join(calls)] if forced is None else []),
        *(
            arguments(f"args_{number}", schema)
            for number, schema in enumerate(schemas)
            if forced in (None, names[number])
        ),
        *(_PARAMETER if parser == "qwen3_coder" else ()),
        *(["WS: /[ \\n]{1,2}/"] if "WS" in rule else []),
        *(['SPACE: " "'] if "SPACE" in rule else []),
    ]
    return Constraint("lark", "\n".join(lark))


def _arguments_schema(tool: dict[str, Any], demanded: bool) -> dict[str, Any]:
    """The schema of a tool's arguments in a grammar."""
    strict = is_strict(tool)
    schema = parameters_of(tool) if strict or demanded else {"type": "object"}
    form = schema.get("x-guidance", ONE_LINE)
    if not strict and isinstance(form, dict):
        form = {**form, "lenient": True}
    return {**schema, "x-guidance": form}


def _json_arguments(rule: str, schema: dict[str, Any]) -> str:
    """The rule of arguments as JSON."""
    return f"{rule}: %json {json.dumps(schema)}"


def _parameters(rule: str, schema: dict[str, Any]) -> str:
    """The rules of arguments as Qwen 3 Coder writes them, each in an element of its own.

    mlx-lm's parser reads a value by its ``type``: a string is any text, without quotes.
    """
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return f"{rule}: parameter*"
    shared = {name: schema[name] for name in _SHARED if name in schema}
    parts, rules = [], []
    for number, (name, value) in enumerate(properties.items()):
        part, value = f"{rule}_{number}", value if isinstance(value, dict) else {}
        kind, options, content = value.get("type"), value.get("enum"), "text"
        if kind == "string" and isinstance(options, list) and options:
            content = f"({' | '.join(_quoted(str(option)) for option in options)}) end"
        elif kind in ("array", "boolean", "integer", "number", "object"):
            rules.append(_json_arguments(f"{part}_value", {**value, **shared}))
            content = f"{part}_value end"
        rules.append(f"{part}: {_quoted(f'<parameter={name}>' + chr(10))} {content}")
        needed = isinstance(required, list) and name in required
        parts.append(part if needed else f"{part}?")
    return "\n".join([f"{rule}: " + (" ".join(parts) or _quoted("")), *rules])


_SHARED = ("$defs", "definitions", "x-guidance")
_PARAMETER = (
    'parameter: "<parameter=" /[^<>\\s]+/ ">\\n" text',
    'text[suffix="\\n</parameter>\\n"]: /(?s:.*)/',
    'end: "\\n</parameter>\\n"',
)
"""The rules of an element with any name and text."""


def _literal(tokenizer: TokenizerWrapper, marker: str) -> str:
    """A marker in a grammar: its token, or its text if it has several."""
    token = token_of(tokenizer, marker)
    if not marker:
        return ""
    return _quoted(marker) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- completions ---


def completion_prompts(
    request: CompletionRequest,
    tokenizer: TokenizerWrapper,
    vocab_size: int,
    longest: int | None = None,
) -> list[Prompt]:
    """The prompts of a completion request, in order.

    Args:
        request: the request, with texts or token ids, and perhaps a suffix.
        tokenizer: the model's tokenizer.
        vocab_size: the number of the model's token ids.
        longest: the model's context length in tokens; None if unknown.

    Raises:
        ApiError: a prompt is empty, too long or has an unknown token id, or there is a suffix and
            the model cannot fill in the middle.
    """
    if request.suffix:
        check_length(request.suffix, "suffix", tokenizer, longest)
    middle = _fill_in_tokens(tokenizer) if request.suffix else None
    prompts = []
    for index, prompt in enumerate(request.prompts):
        param = "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            check_length(prompt, param, tokenizer, longest)
        else:
            check_ids(prompt, vocab_size, param)
        if middle and request.suffix:
            prompts.append(_fill_in(prompt, request.suffix, middle, tokenizer))
            continue
        tokens = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise ApiError(f"{param} is empty: send a text with at least one token.", param=param)
        prompts.append(Prompt(tokens))
    return prompts


_FILL_IN: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("[PREFIX]", "[SUFFIX]"),
)
"""Names of the tokens before the prefix, before the suffix, and after both. Without the last one
the suffix comes first, and the output continues the prefix."""

_FILL_IN_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>"),
    *("<|repo_name|>", "<|cursor|>", "<file_sep>", "▁<EOT>", "<EOT>"),
)
"""Tokens that end a filled-in text and are not always among a model's end tokens."""


def _fill_in_tokens(tokenizer: TokenizerWrapper) -> list[int]:
    """The ids of the tokens that make the model fill in the middle of a text."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    for names in _FILL_IN:
        if all(name in vocabulary for name in names):
            return [vocabulary[name] for name in names]
    raise ApiError(
        "suffix: this model cannot fill in the middle of a text; leave it out.",
        param="suffix",
    )


def _fill_in(
    prompt: str | Sequence[int], suffix: str, markers: list[int], tokenizer: TokenizerWrapper
) -> Prompt:
    before = [markers[0], *(_ids(prompt, tokenizer) if isinstance(prompt, str) else prompt)]
    after = [markers[1], *_continuing_ids(suffix, tokenizer)]
    tokens = encode_prompt(tokenizer, "")  # BOS, if the model has one
    tokens += [*before, *after, markers[2]] if len(markers) == 3 else [*after, *before]
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    ends = [vocabulary[name] for name in _FILL_IN_ENDS if name in vocabulary]
    return Prompt(tokens, stop_tokens=(*markers, *ends))


def _ids(text: str, tokenizer: TokenizerWrapper) -> list[int]:
    return cast(list[int], tokenizer.encode(text, add_special_tokens=False))


_ANCHOR = "☺"  # a character that shares no token with others


def _continuing_ids(text: str, tokenizer: TokenizerWrapper) -> list[int]:
    """The token ids of a text that continues another, without an added space in front."""
    anchor, anchored = _ids(_ANCHOR, tokenizer), _ids(_ANCHOR + text, tokenizer)
    if anchored[: len(anchor)] == anchor:
        return anchored[len(anchor) :]
    return _ids(text, tokenizer)
