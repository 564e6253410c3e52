"""Grammars of tool calls: what a model writes after the marker that begins one.

The arguments of a function with ``strict`` are valid under the schema of its parameters, those of
others are any JSON object. Formats whose arguments are no JSON have no grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.constraint import ONE_LINE, Constraint
from ..engine.grammar import token_of
from .output import parser_name


def is_strict(tool: dict[str, Any]) -> bool:
    """Whether a tool asks for arguments that are valid under its schema."""
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
) -> Constraint | None:
    """What follows the marker of a call, to the end of the output.

    Args:
        tokenizer: the model's.
        tools: those that may be called.
        forced: the function whose call the prompt has begun, as
            :func:`mlxspec.server.output.call_opening` writes it.
        several: whether there may be more than one call.

    Returns:
        None where the arguments of a call are no JSON.
    """
    parser, has_args = parser_name(tokenizer), "[ARGS]" in tokenizer.get_vocab()
    start = _literal(tokenizer, tokenizer.tool_call_start)
    names = [tool["function"]["name"] for tool in tools]
    as_json = [
        f'{_quoted(head)} args_{number} "}}"'
        for number, name in enumerate(names)
        for head in [f'{{"name": {json.dumps(name)}, "arguments": ']
    ]
    if parser == "json_tools":
        calls, separator = as_json, f"WS? {start} WS?"
        before, after = "WS? ", f" WS? {_literal(tokenizer, tokenizer.tool_call_end)}"
        begun = 'SPACE? {args} "}}"' + after
    elif parser == "mistral" and has_args:
        args = _literal(tokenizer, "[ARGS]")
        calls = [f"{_quoted(name)} {args} args_{number}" for number, name in enumerate(names)]
        before, separator, after, begun = "", start, "", "{args}"
    elif parser == "mistral":
        calls, before, separator, after = as_json, '"[" ', '", "', ' "]"'
        begun = 'SPACE? {args} "}}" "]"'
    else:
        return None
    if forced is not None:
        rule = begun.format(args=f"args_{names.index(forced)}")
    elif parser == "mistral" and not has_args:  # one list of all calls
        rule = f"{before}call{f' ({separator} call)*' if several else ''}{after}"
    else:
        one = f"{before}call{after}"
        rule = f"{one}{f' ({separator} call{after})*' if several else ''}"
    schemas = [parameters_of(tool) if is_strict(tool) else {"type": "object"} for tool in tools]
    lark = [
        f"start: {rule}",
        *(["call: " + " | ".join(calls)] if forced is None else []),
        *(
            f"args_{number}: %json {json.dumps({'x-guidance': ONE_LINE, **schema})}"
            for number, schema in enumerate(schemas)
            if forced in (None, names[number])
        ),
        *(["WS: /[ \\n]{1,2}/"] if "WS" in rule else []),
        *(['SPACE: " "'] if "SPACE" in rule else []),
    ]
    return Constraint("lark", "\n".join(lark))


def _literal(tokenizer: TokenizerWrapper, marker: str) -> str:
    """A marker in a grammar: the token that it is, or its text."""
    token = token_of(tokenizer, marker)
    if not marker:
        return ""
    return _quoted(marker) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
