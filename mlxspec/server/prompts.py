"""Turns request bodies into token ids: chat templates, texts, and fill-in-the-middle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.json_schema import enforceable
from ..engine.params import ONE_LINE, Constraint, Phases
from ..errors import OptionError, PromptError
from ..generation.chat_prompt import ChatPrompt, in_answer
from ..models.chat_template import reserved_arguments
from ..models.model import encode_prompt
from ..models.reasoning import reasoning_markers, token_of
from .api_body import ApiBody
from .body import ApiError
from .openai import CompletionBody
from .output_parser import (
    FINAL_MESSAGE,
    OutputFormat,
    initial_state,
    is_harmony,
    parser_name,
)
from .tool_calls import CALL_FORMATS


@dataclass(frozen=True)
class Prompt:
    """A prompt, and how to constrain, parse and end its output.

    Attributes:
        tokens: the token ids.
        stop_tokens: tokens that end the output, besides the model's end tokens.
        constraint: the constraint of the output.
        format: the format of a chat's answer; None for text without markers.
    """

    tokens: list[int]
    stop_tokens: tuple[int, ...] = ()
    constraint: Constraint | Phases | None = None
    format: OutputFormat | None = None


# --- chat ---


def chat_prompt(
    body: ApiBody,
    tokenizer: TokenizerWrapper,
    longest: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Prompt:
    """Apply the model's chat template to a conversation.

    Args:
        longest: the model's context length in tokens; None if unknown.
        arguments: default arguments of the template, overridden by the body's.

    Raises:
        ApiError: the template rejects the messages, the rendered text is too long, the model does
            not support chats or tools, or its answer cannot be constrained as requested.
    """
    if not tokenizer.has_chat_template:
        raise ApiError("This model has no chat template: use /v1/completions.", param="model")
    if body.tools_shown and (reason := why_no_tools(tokenizer)):
        raise ApiError(
            f"This model does not support tools, since {reason}: leave tools out.", param="tools"
        )
    contents = sum(len(message.get("content") or "") for message in body.conversation)
    check_length(contents, body.param, longest)  # before the template, which may take seconds
    chat = _templated(body, tokenizer, arguments or {})
    text, trims_space = chat.text, chat.trims_space
    initial = initial_state(tokenizer)
    if initial == "header" and is_harmony(tokenizer):
        if body.constraint and not body.tools_shown:  # the answer is the final message alone
            text += FINAL_MESSAGE
        if body.continued or text.endswith(FINAL_MESSAGE):
            initial = "normal"
    if chat.reasons:
        initial = "reasoning"
    if body.demands_call:
        known = body.forced_tool is None or parser_name(tokenizer) in _FORMATS
        if initial_state(tokenizer) != "normal" or not known:
            raise ApiError(
                'tool_choice: this model cannot be forced to make that call; send "auto".',
                param="tool_choice",
            )
        markers = reasoning_markers(tokenizer)
        if initial == "reasoning" and markers:  # a call inside reasoning would not count
            text += f"\n{markers[1]}\n\n"
        text += tokenizer.tool_call_start
        initial, trims_space = "tool", False
    format = OutputFormat(
        tokenizer,
        body.tools_shown,
        initial=initial,
        several_calls=body.parallel_tool_calls,
        trims_space=trims_space,
    )
    try:
        constraint = _answer_phases(body, format, tokenizer)
    except OptionError as error:
        param = body.format_param if body.constraint else "tools"
        raise ApiError(f"{param}: {error}.", param=param) from error
    tokens = text_ids(text, body.param, tokenizer, longest)
    return Prompt(tokens, constraint=constraint, format=format)


def why_no_tools(tokenizer: TokenizerWrapper) -> str | None:
    """Why tools cannot be offered to a model; None if they can."""
    if not tokenizer.has_chat_template:
        return "it has no chat template"
    if parser_name(tokenizer) in CALL_FORMATS:
        return None
    if "tools" not in str(tokenizer.chat_template):
        return "its chat template has no place for them"
    return "its chat template writes calls in a format that mlxspec does not know"


def text_ids(
    text: str, param: str, tokenizer: TokenizerWrapper, longest: int | None, special: bool = False
) -> list[int]:
    """The token ids of a text, with BOS if ``special``; raises as :func:`check_length` does."""
    check_length(len(text), param, longest)
    return cast(list[int], tokenizer.encode(text, add_special_tokens=special))


_LONGEST_TOKEN = 128  # characters per token, averaged over a text; most texts have four


def check_length(length: int, param: str, longest: int | None) -> None:
    """Refuse a text that is far too long for the context, before it is tokenized.

    Args:
        length: the characters of the text that the model would read.
        longest: the model's context length in tokens; None if unknown.

    Raises:
        ApiError: the text is too long.
    """
    if longest is not None and length > _LONGEST_TOKEN * longest:
        raise ApiError(
            f"the prompt is too long: the {length:,} characters of {param} do not fit into "
            f"the model's context of {longest:,} tokens; shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _templated(
    body: ApiBody, tokenizer: TokenizerWrapper, arguments: Mapping[str, Any]
) -> ChatPrompt:
    reserved = _RESERVED.union(tokenizer.SPECIAL_TOKENS_ATTRIBUTES, tokenizer.special_tokens_map)
    for name in body.template_kwargs:
        if name in reserved:
            raise ApiError(
                f"chat_template_kwargs sets {name}, which only the server may set: leave it out.",
                param=f"chat_template_kwargs.{name}",
            )
    how = {
        **arguments,
        **body.template_kwargs,
        "tools": list(body.tools_shown) or None,
        "add_generation_prompt": not body.continued,
        "continue_final_message": body.continued,
    }
    try:
        return ChatPrompt.of(tokenizer, list(body.conversation), how)
    except PromptError as error:
        raise ApiError(
            f"{error}: send messages with roles, and in an order, that this model accepts.",
            param=body.param,
        ) from error


_RESERVED = reserved_arguments()


# --- constraints ---


def _is_strict(tool: dict[str, Any]) -> bool:
    """Whether a tool's arguments must match its schema."""
    return bool(tool["function"].get("strict"))


def _answer_phases(
    body: ApiBody, format: OutputFormat, tokenizer: TokenizerWrapper
) -> Constraint | Phases | None:
    """The constraint of a chat's answer."""
    constrains = body.demands_call or any(map(_is_strict, body.tools_shown))
    calls = _calls_constraint(body, tokenizer) if constrains else None
    if body.demands_call:  # the prompt ends with a call's marker
        return calls
    marker = tokenizer.tool_call_start if body.tools_shown else None
    call_start = token_of(tokenizer, marker) if marker else None
    if body.tools_shown and call_start is None:
        if body.constraint:
            raise OptionError(
                "cannot be combined with tools, since this model's tool calls do not begin with a "
                "single token: leave one out"
            )
        return None
    if not body.constraint and not calls:
        return None
    return in_answer(
        body.constraint,
        tokenizer,
        reasons=format.initial == "reasoning",
        trims_space=format.trims_space,
        calls=calls,
        call_start=call_start,
    )


_FORMATS = ("json_tools", "mistral", "qwen3_coder")
"""mlx-lm's names of the call formats that :func:`_calls_constraint` can describe by a grammar."""


def _calls_constraint(body: ApiBody, tokenizer: TokenizerWrapper) -> Constraint | None:
    """The constraint of the output after a call's marker; None if the format is unknown.

    If the request demands a call, or the called tool is strict, the arguments must match the tool's
    schema. Otherwise they may be any object.
    """
    parser, has_args = parser_name(tokenizer), "[ARGS]" in tokenizer.get_vocab()
    if parser not in _FORMATS:
        return None
    start = _literal(tokenizer, tokenizer.tool_call_start)
    end = _literal(tokenizer, tokenizer.tool_call_end)
    forced = body.forced_tool
    tools = [tool for tool in body.tools_shown if forced in (None, tool["function"]["name"])]
    names = [tool["function"]["name"] for tool in tools]
    heads = [_quoted(f'{{"name": {json.dumps(name)}, "arguments": ') for name in names]
    tail, arguments, shared = ' "}"', _json_arguments, list[str]()
    if parser == "json_tools":
        before, after = f"{_SPACE} ", f" {_SPACE} {end}"
        separator = f"{after} {_SPACE} {start} {_SPACE}"
    elif parser == "mistral" and has_args:
        heads = [f"{_quoted(name)} {_literal(tokenizer, '[ARGS]')}" for name in names]
        before, separator, after, tail = "", start, "", ""
    elif parser == "mistral":
        before, separator, after = '"[" ', '", "', ' "]"'
    else:
        heads = [_quoted(f"<function={name}>\n") for name in names]
        before, after, tail = '"\\n" ', f' "</function>\\n" {end}', ""
        arguments, shared = _elements, _ELEMENT
        separator = f'{after} {_SPACE} {start} "\\n"'
    more = f" ({separator} call)*" if body.parallel_tool_calls and not forced else ""
    calls = [f"{head} args_{number}{tail}" for number, head in enumerate(heads)]
    rules = [f"start: {before}call{more}{after}", f"call: {' | '.join(calls)}"]
    demanded = body.demands_call
    for number, tool in enumerate(tools):
        rules += arguments(f"args_{number}", _arguments_schema(tool, demanded))
    return Constraint("lark", "\n".join([*rules, *shared]))


def _json_arguments(rule: str, schema: dict[str, Any]) -> list[str]:
    """The grammar rule for arguments that are a JSON object."""
    return [f"{rule}: %json {json.dumps(schema)}"]


def _elements(rule: str, schema: dict[str, Any]) -> list[str]:
    """The grammar rules for arguments as Qwen 3 Coder writes them, each in its own element.

    mlx-lm's parser reads a value according to the ``type`` in its schema. A string is any text,
    without quotes.
    """
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return [f"{rule}: element*"]
    shared = {
        name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema
    }
    elements, rules = [], []
    for number, (name, value) in enumerate(properties.items()):
        value = value if isinstance(value, dict) else {}
        kind, options, content = value.get("type"), value.get("enum"), "text"
        if kind == "string" and isinstance(options, list) and options:
            content = f"({' | '.join(_quoted(str(option)) for option in options)}) end"
        elif kind in ("array", "boolean", "integer", "number", "object"):
            content = f"%json {json.dumps({**value, **shared})} end"
        rules.append(f"{rule}_{number}: {_quoted(f'<parameter={name}>' + chr(10))} {content}")
        optional = "" if isinstance(required, list) and name in required else "?"
        elements.append(f"{rule}_{number}{optional}")
    return [f"{rule}: {' '.join(elements) or _quoted('')}", *rules]


_ELEMENT = [
    'element: "<parameter=" /[^<>\\s]+/ ">\\n" text',
    'text[suffix="\\n</parameter>\\n"]: /(?s:.*)/',
    'end: "\\n</parameter>\\n"',
]


_SPACE = "(/[ \\n]{1,2}/)?"


def _arguments_schema(tool: dict[str, Any], demanded: bool) -> dict[str, Any]:
    """The schema of a tool's arguments in a grammar.

    Unless the tool is strict or the request demands a call, any object matches.
    """
    strict = _is_strict(tool)
    schema = (tool["function"].get("parameters") or {}) if strict or demanded else {}
    schema = enforceable(schema, lenient=not strict)
    return {"type": "object", **schema, "x-guidance": {**ONE_LINE, "lenient": not strict}}


def _literal(tokenizer: TokenizerWrapper, marker: str) -> str:
    """A marker in a grammar: its token, or its text if it is several tokens."""
    token = token_of(tokenizer, marker)
    return _quoted(marker) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- completions ---


def completion_prompts(
    body: CompletionBody, tokenizer: TokenizerWrapper, longest: int | None = None
) -> list[Prompt]:
    """The prompts of a completion request, in order.

    Args:
        longest: the model's context length in tokens; None if unknown.

    Raises:
        ApiError: a prompt is too long, or there is a suffix and the model cannot fill in the
            middle.
    """
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            check_length(len(prompt) + len(body.suffix), body.param, longest)
        ends: tuple[int, ...] = ()
        if body.suffix:
            text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
            tokens, ends = _fill_in(text, body.suffix, tokenizer)
        else:
            tokens = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt
        prompts.append(Prompt(tokens, ends, body.constraint))
    return prompts


_FILL_IN: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("[PREFIX]", "[SUFFIX]"),
)
"""For each family of models: its tokens before the prefix, before the suffix, and after both.
Without the last token, the suffix comes first, and the output continues the prefix.
"""

_FILL_IN_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>"),
    *("<|repo_name|>", "<|cursor|>", "<file_sep>", "▁<EOT>", "<EOT>"),
)
"""Tokens that end a filled-in text, and are not always among a model's end tokens."""


def _fill_in(
    prompt: str, suffix: str, tokenizer: TokenizerWrapper
) -> tuple[list[int], tuple[int, ...]]:
    """A prompt for filling in the middle of a text, and the tokens that end the output."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    markers = next((names for names in _FILL_IN if vocabulary.keys() >= {*names}), None)
    if markers is None:
        raise ApiError(
            "suffix: this model cannot fill in the middle of a text; leave it out.",
            param="suffix",
        )
    first, second, *last = (vocabulary[name] for name in markers)
    before = [first, *tokenizer.encode(prompt, add_special_tokens=False)]
    after = [second, *_continuing_ids(suffix, tokenizer)]
    tokens = encode_prompt(tokenizer, "")  # BOS, if the model has one
    tokens += [*before, *after, *last] if last else [*after, *before]
    ends = [vocabulary[name] for name in (*markers, *_FILL_IN_ENDS) if name in vocabulary]
    return tokens, tuple(ends)


def _continuing_ids(text: str, tokenizer: TokenizerWrapper) -> list[int]:
    """The token ids of a text that continues another, without an added space in front."""
    anchor = "☺"  # shares no token with other characters
    start, ids = (
        tokenizer.encode(part, add_special_tokens=False) for part in (anchor, anchor + text)
    )
    return cast(list[int], ids[len(start) :])
