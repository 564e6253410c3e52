"""Byte tokenizers with the markers and templates of well-known chat models."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache
from importlib import import_module
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizer_kinds import wrap

CHATML = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for tool_call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}
{%- elif force_thinking %}{{ '<think>\n' }}
{%- endif %}
{%- endif %}"""
"""Like Qwen 3's template, with a switch for models that always think."""

_MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


@cache
def chat_tokenizer(
    parser: str | None = "json_tools",
    template: str | None = CHATML,
    markers: Sequence[str] = _MARKERS,
    module: str | None = None,
) -> TokenizerWrapper:
    """Return a tokenizer whose tokens are the 256 bytes and some markers.

    Args:
        parser: mlx-lm's name for the model's tool-call format; None for no tools.
        template: the chat template.
        markers: additional tokens.
        module: mlx-lm's module for the message format, if messages have headers.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: index for index, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(markers))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=markers[1],
        chat_template=template,
        name_or_path="bytes",
    )
    settings = {} if parser is None else _calls(parser)
    if module is not None:
        form = import_module(f"mlx_lm.chat_templates.{module}").RESPONSE_FORMAT
        settings["response_format"] = form
    return wrap(fast, **settings)


def harmony_tokenizer(template: str | None = CHATML) -> TokenizerWrapper:
    """Return a tokenizer with the markers of gpt-oss."""
    names = ("start", "end", "message", "channel", "constrain", "return", "call")
    return chat_tokenizer(None, template, tuple(f"<|{name}|>" for name in names))


def with_tools(tokenizer: TokenizerWrapper, parser: str, template: str) -> TokenizerWrapper:
    """Add a tool-calling format to a tokenizer.

    Args:
        tokenizer: supplies the tokens.
        parser: as for :func:`chat_tokenizer`.
        template: the chat template, with tools.
    """
    fast = copy(tokenizer._tokenizer)
    fast.chat_template = template
    return wrap(fast, **_calls(parser))


def _calls(parser: str) -> dict[str, Any]:
    """Return the tool-call arguments of mlx-lm's wrapper."""
    module = import_module(f"mlx_lm.tool_parsers.{parser}")
    return {
        "tool_parser": module.parse_tool_call,
        "tool_call_start": module.tool_call_start,
        "tool_call_end": module.tool_call_end,
    }
