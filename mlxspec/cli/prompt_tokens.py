"""The tokens that a prompt becomes, by way of the chat template where one is wanted."""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import OptionError, PromptError
from ..loading.chat_template import Messages, apply_template
from ..loading.model import encode_prompt


def uses_template(prompt: str | list[int], tokenizer: TokenizerWrapper, chat: bool | None) -> bool:
    """Whether the prompt goes into the chat template.

    Args:
        prompt: a text, or token ids that are taken as they are.
        tokenizer: the model's.
        chat: what the user said; None applies the template where the tokenizer has one.

    Raises:
        OptionError: a template is wanted, and there is none or the prompt is no text.
    """
    if chat and not isinstance(prompt, str):
        raise OptionError("--chat needs a text: --prompt-ids are taken as they are")
    if chat and not tokenizer.has_chat_template:
        raise OptionError("--chat: this model's tokenizer has no chat template, use --raw")
    return isinstance(prompt, str) and tokenizer.has_chat_template if chat is None else chat


def prompt_tokens(
    prompt: str | list[int], tokenizer: TokenizerWrapper, templated: bool
) -> list[int]:
    """Turn a prompt into token ids, by way of the chat template if ``templated``.

    Raises:
        OptionError: the chat template does not apply.
    """
    if not isinstance(prompt, str):
        return prompt
    if not templated:
        return encode_prompt(tokenizer, prompt)
    return conversation_tokens([{"role": "user", "content": prompt}], tokenizer)


def opening_tokens(
    prompt: str | list[int], tokenizer: TokenizerWrapper, templated: bool
) -> list[int]:
    """As :func:`prompt_tokens`, but a templated prompt is a message that has not ended.

    Raises:
        OptionError: the chat template does not apply.
    """
    if not templated or not isinstance(prompt, str):
        return prompt_tokens(prompt, tokenizer, templated=False)
    messages = [{"role": "user", "content": prompt}]
    how = {"add_generation_prompt": False, "continue_final_message": True}
    return _applied(messages, tokenizer, **how)


def templated_text(prompt: str, tokenizer: TokenizerWrapper) -> str:
    """A prompt in the chat template, as text.

    Raises:
        OptionError: the chat template does not apply.
    """
    messages = [{"role": "user", "content": prompt}]
    return _applied(messages, tokenizer, add_generation_prompt=True, tokenize=False)


def conversation_tokens(messages: Messages, tokenizer: TokenizerWrapper) -> list[int]:
    """The tokens of a conversation whose next turn is the model's.

    Raises:
        OptionError: the chat template does not apply.
    """
    return _applied(messages, tokenizer, add_generation_prompt=True)


def _applied(messages: Messages, tokenizer: TokenizerWrapper, **how: bool) -> Any:
    try:
        return apply_template(tokenizer, messages, **how)
    except PromptError as error:
        raise OptionError(f"{error}: use --raw") from error
