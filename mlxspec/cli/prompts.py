"""The prompt of a command: where it comes from, and the tokens that it becomes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import OptionError, PromptError
from .options import NAME, option, option_field

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..loading.chat_template import Messages

_MOST_BYTES = 100_000_000  # no context holds as much, and some devices never end

model_option = option(
    "--model DIR_OR_REPO",
    "Model directory, Hub repository, or 'demo'.  [default: mlx_model if it is there, otherwise "
    "demo]",
    type=NAME,
    group="Model and prompt",
)


@dataclass(frozen=True)
class PromptOptions:
    """A prompt as the user gave it; None where an option is not given."""

    prompt: str | None = option_field("--prompt TEXT", "The prompt; - reads standard input.")
    prompt_file: str | None = option_field(
        "--prompt-file FILE", "Read the prompt from a UTF-8 file.", type=NAME
    )
    prompt_ids: str | None = option_field(
        "--prompt-ids IDS", "The prompt as token ids: 1,415,2936."
    )
    chat: bool | None = option_field(
        "--chat/--raw",
        "Put the prompt into the model's chat template, or take it as it is.  [default: chat if "
        "the model has a template]",
    )

    def read(self) -> str | list[int]:
        """The prompt that exactly one of the options gives.

        Returns:
            a text that is not empty, or token ids. One newline at the end of a file or of
            standard input is dropped: editors and ``echo`` put it there.

        Raises:
            PromptError: none or several are given, or the given one is empty or cannot be read.
        """
        options = {
            "--prompt": self.prompt,
            "--prompt-file": self.prompt_file,
            "--prompt-ids": self.prompt_ids,
        }
        given = [name for name, value in options.items() if value is not None]
        if not given:
            raise PromptError(
                "no prompt: give --prompt TEXT, --prompt-file FILE or --prompt-ids IDS"
            )
        if len(given) > 1:
            raise PromptError(f"{' and '.join(given)} are given together: choose one")
        if self.prompt_ids is not None:
            return _parse_ids(self.prompt_ids)
        if self.prompt_file is not None:
            source = f"--prompt-file {self.prompt_file}"
            try:
                with open(self.prompt_file, "rb") as file:
                    return _read(file, source)
            except OSError as error:
                raise PromptError(
                    f"{source} cannot be read ({error.strerror}): name a readable text file"
                ) from error
        if self.prompt == "-":
            if sys.stdin is None:
                raise PromptError(
                    "standard input is closed: give --prompt TEXT or --prompt-file FILE"
                )
            return _read(sys.stdin.buffer, "standard input")
        # Bytes of an argument that are not UTF-8 have become lone surrogates.
        return _decode(str(self.prompt).encode(errors="surrogateescape"), "--prompt")

    def uses_template(self, prompt: str | list[int], tokenizer: TokenizerWrapper) -> bool:
        """Whether the prompt goes into the chat template.

        Raises:
            OptionError: a template is wanted, and there is none or the prompt is no text.
        """
        if self.chat and not isinstance(prompt, str):
            raise OptionError("--chat needs a text: --prompt-ids are taken as they are")
        if self.chat and not tokenizer.has_chat_template:
            raise OptionError("--chat: this model's tokenizer has no chat template, use --raw")
        templated = tokenizer.has_chat_template if self.chat is None else self.chat
        return isinstance(prompt, str) and templated


def _parse_ids(ids: str) -> list[int]:
    words = ids.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise PromptError(f"--prompt-ids is {ids!r}: write token ids, for example 1,415,2936")
    return [int(word) for word in words]


def _read(file: BinaryIO, source: str) -> str:
    data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise PromptError(f"{source} is more than {_MOST_BYTES:,} bytes: give a shorter text")
    return _decode(data.removesuffix(b"\n").removesuffix(b"\r"), source)


def _decode(data: bytes, source: str) -> str:
    """The text of a prompt; ``source`` names it in errors."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{source} is not UTF-8 text (byte {error.start}): convert it to UTF-8"
        ) from error
    if "\0" in text:
        raise PromptError(f"{source} is binary: give a text in UTF-8")
    if not text:
        raise PromptError(f"{source} is empty: write a text, or give --prompt-ids with the BOS id")
    return text


def prompt_tokens(
    prompt: str | list[int], tokenizer: TokenizerWrapper, templated: bool, ended: bool = True
) -> list[int]:
    """Turn a prompt into token ids.

    Args:
        prompt: a text, or token ids that are taken as they are.
        tokenizer: the model's.
        templated: put the text into the chat template, as the user's message.
        ended: the message is complete, and the answer comes next.

    Raises:
        OptionError: the chat template does not apply.
    """
    from ..loading.model import encode_prompt

    if not isinstance(prompt, str):
        return prompt
    if not templated:
        return encode_prompt(tokenizer, prompt)
    messages = [{"role": "user", "content": prompt}]
    if ended:
        return in_template(messages, tokenizer)
    return in_template(
        messages, tokenizer, add_generation_prompt=False, continue_final_message=True
    )


def in_template(messages: Messages, tokenizer: TokenizerWrapper, **how: bool) -> Any:
    """A conversation in the chat template: its tokens, or its text with ``tokenize=False``.

    Args:
        messages: the conversation; the model's turn comes next.
        tokenizer: the model's.
        how: as for ``apply_chat_template`` of transformers.

    Raises:
        OptionError: the chat template does not apply.
    """
    from ..loading.chat_template import apply_template

    try:
        return apply_template(tokenizer, messages, **{"add_generation_prompt": True, **how})
    except PromptError as error:
        raise OptionError(f"{error}: use --raw") from error
