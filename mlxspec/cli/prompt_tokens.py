"""The tokens that a prompt becomes, by way of the chat template where one is wanted."""

from __future__ import annotations

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import OptionError
from ..models.loading import encode_prompt


def prompt_tokens(
    prompt: str | list[int], tokenizer: TokenizerWrapper, chat: bool | None
) -> list[int]:
    """Turn a prompt into token ids.

    Args:
        prompt: a text, or token ids that are taken as they are.
        tokenizer: the model's.
        chat: whether to apply the chat template; None applies it where the tokenizer has one.

    Raises:
        OptionError: a chat template is wanted and there is none, or it does not apply.
    """
    if not isinstance(prompt, str):
        if chat:
            raise OptionError("--chat needs a text: --prompt-ids are taken as they are")
        return prompt
    if chat is None:
        chat = tokenizer.has_chat_template
    if not chat:
        return encode_prompt(tokenizer, prompt)
    if not tokenizer.has_chat_template:
        raise OptionError("--chat: this model's tokenizer has no chat template, use --raw")
    messages = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except TemplateError as error:
        raise OptionError(f"the chat template does not apply ({error}): use --raw") from error
