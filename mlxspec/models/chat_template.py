"""Chat templates: applies a model's own, or makes one for a SentencePiece model's pieces.

A chat template is a program by the model's author, from which Jinja's sandbox protects the machine.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError, PromptError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Message = Mapping[str, Any]
"""A turn of a conversation."""

Messages = list[dict[str, Any]]
"""A conversation for a chat template: turns with "role", "content", and other keys that it uses."""


def reserved_arguments() -> set[str]:
    """The names of arguments of :func:`apply_template` and ``apply_chat_template``.

    A template cannot receive variables with these names. One of them replaces the template itself.
    """
    from transformers import PreTrainedTokenizerBase

    functions = (apply_template, PreTrainedTokenizerBase.apply_chat_template)
    return {name for one in functions for name in inspect.signature(one).parameters}


def apply_template(tokenizer: TokenizerWrapper, messages: Messages, **how: Any) -> Any:
    """Call ``tokenizer.apply_chat_template`` and return its result.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation.
        how: further arguments of ``apply_chat_template``.

    Raises:
        PromptError: the template fails.
    """
    try:
        return tokenizer.apply_chat_template(messages, **how)
    except Exception as error:  # a template can raise anything
        cause = str(error) or type(error).__name__
        raise PromptError(f"the chat template failed ({cause})") from error


NOT_A_PROMPT = {*("conversation", "messages", "return_dict", "return_tensors", "tokenize")}
"""Arguments of :func:`apply_template` that would make the result something other than a prompt."""


def conversation_ids(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], how: Mapping[str, Any]
) -> list[int]:
    """The prompt for the model's next turn, or for the rest of its unfinished turn.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation. Each has a "role", a "content", and other keys that the template
            uses. A trailing assistant message is continued.
        how: further arguments: "tools", or the template's own, such as "enable_thinking".

    Raises:
        PromptError: the model has no chat template, an item is not a message, or the template
            fails.
        OptionError: an entry of ``how`` is not allowed.
    """
    for number, message in enumerate(messages, start=1):
        if not _is_message(message):
            raise PromptError(
                f"message {number} must have a role and a content: write "
                '{"role": "user", "content": "..."}'
            )
    if not tokenizer.has_chat_template:
        raise PromptError(
            "the prompt is a list of messages, but this model has no chat template: pass a text"
        )
    if wrong := sorted(NOT_A_PROMPT & how.keys()):
        raise OptionError(f"chat_template_kwargs must not set {wrong[0]}: leave it out")
    continued = messages[-1]["role"] == "assistant"
    turn = {"add_generation_prompt": not continued, "continue_final_message": continued}
    try:
        ids: list[int] = apply_template(tokenizer, [*map(dict, messages)], **{**turn, **how})
    except PromptError as error:
        raise PromptError(
            f"{error}: pass messages whose roles and order this model accepts"
        ) from error
    return ids


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str | list) or bool(message.get("tool_calls"))


# --- the template of Mistral's instruct models ---

# A space after a piece's name belongs to the piece (SentencePiece puts one before every text). So
# spaces at the start of a turn's text are kept.
_TEMPLATE = Path(__file__).with_name("mistral.jinja")


def instruct_template(control: Collection[str], user_defined: Collection[str]) -> str | None:
    """The Jinja template for a model with these pieces; None if they show no instruct format.

    ``[INST]`` as a control piece is Mistral's format from version 2 on: ``[INST] text[/INST]``,
    with the system prompt before the last question or, from version 7 on, between its own pieces.
    As a user-defined piece, it is plain text of the form ``[INST] text [/INST]``.
    """
    if {"[INST]", "[/INST]"}.issubset(control):
        close = "[/INST]"
    elif {"[INST]", "[/INST]"}.issubset(user_defined):
        close = " [/INST]"
    else:
        return None
    system_pieces = "true" if {"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}.issubset(control) else "false"
    settings = f"{{%- set close, has_system_pieces = '{close}', {system_pieces} -%}}"
    return f"{settings}\n{_TEMPLATE.read_text(encoding='utf-8')}"
