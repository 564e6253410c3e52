"""Reads a command's prompt from its options or standard input, and turns it into tokens."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ...errors import OptionError, PromptError
from ...models.chat_template import NOT_A_PROMPT
from .notes import note
from .options import NAME, option, option_field

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ...generation.chat_prompt import ChatPrompt
    from ...models.chat_template import Messages

    Prompt = str | list[int] | Messages

_PATIENCE = 10.0  # seconds to wait for a pipe's first byte

prompt_argument = click.argument(
    "argument", help="What to ask the model.", required=False, metavar="[PROMPT]"
)
"""The prompt as an argument; it becomes :attr:`PromptOptions.argument`."""


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise click.BadParameter(f"{text!r} is not a JSON object: write, for example, {_EXAMPLE}")
    if wrong := sorted(NOT_A_PROMPT & value.keys()):
        raise click.BadParameter(f"{wrong[0]} is not a variable of the template: leave it out")
    return value


def token_ids(text: str) -> list[int]:
    """Parse token ids separated by commas or spaces."""
    words = text.replace(",", " ").split() or [text]  # so that an empty text is an error
    try:
        return [int(word) for word in words]
    except ValueError:
        raise click.BadParameter(f"{text!r}: write token ids as 1,415,2936") from None


_EXAMPLE = "'{\"enable_thinking\": false}'"
_TEMPLATE = "Chat template"
_in_template = partial(option_field, group=_TEMPLATE)
_ARGUMENTS = (
    "--chat-template-config JSON",
    f"Variables of the chat template, such as {_EXAMPLE}.",
)


def template_option(group: str) -> Any:
    """``--chat-template-config`` for a command without :class:`PromptOptions`."""
    return option(*_ARGUMENTS, "chat_template_config", type=_json_object, group=group)


@dataclass(frozen=True)
class PromptOptions:
    """The prompt and its options; None for an option that is not given.

    Attributes:
        argument: the prompt that was given as an argument.

    Raises:
        OptionError: an option for the chat template is given with a prompt that does not use it.
    """

    prompt: str | None = option_field(
        "-p --prompt TEXT", "The prompt; - reads all of standard input."
    )
    prompt_file: str | None = option_field(
        "--prompt-file FILE",
        "Read UTF-8 text from FILE; - reads standard input. The text comes before the prompt, or "
        "is the prompt if no other is given.",
        type=NAME,
    )
    prompt_ids: list[int] | None = option_field(  # noqa: RUF009
        "--prompt-ids IDS", "The prompt as token ids: 1,415,2936.", type=token_ids
    )
    chat: bool | None = _in_template(
        "--chat/--raw",
        "Put the prompt into the model's chat template, or use it unchanged.  [default: chat if "
        "the model has a template]",
    )
    system_prompt: str | None = _in_template("--system-prompt TEXT", "The system prompt.")
    chat_template_config: Mapping[str, Any] | None = _in_template(*_ARGUMENTS, type=_json_object)
    prefill_response: str | None = _in_template(
        "--prefill-response TEXT", "Begin the model's answer with TEXT; the output continues it."
    )
    argument: str | None = None

    def __post_init__(self) -> None:
        given = self.for_template()
        if given and (self.prompt_ids is not None or self.chat is False):
            raise OptionError(f"{given[0]} {_NEEDS_TEMPLATE}")

    def for_template(self) -> list[str]:
        """The options given that apply only to a prompt in a chat template."""
        names = [field.name for field in fields(self) if field.metadata.get("group") == _TEMPLATE]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        return [f"--{name.replace('_', '-')}" for name in given]

    def names(self) -> list[str]:
        """The names, as in the help, of the options and arguments that give a prompt."""
        sources = {
            "PROMPT": self.argument,
            "--prompt": self.prompt,
            "--prompt-file": self.prompt_file,
            "--prompt-ids": self.prompt_ids,
        }
        return [name for name, value in sources.items() if value is not None]

    def read(self, *, piped: bool = True) -> str | list[int]:
        """Read the prompt: a text, an instruction, both of them, or token ids.

        The instruction comes after the text and a blank line. There models follow it better if the
        text is long, and prompts about the same text share a prefix that can be cached.

        Args:
            piped: also read a text from standard input, if it is a pipe with data or a file that
                has not been read yet.

        Returns:
            a text that is not empty, or token ids. One newline at the end of a file or of standard
            input is dropped, since editors and ``echo`` add it.

        Raises:
            PromptError: no prompt is given, prompts are given that exclude each other, or the
                prompt is empty or cannot be read.
        """
        given = self.names()
        if given[:2] == ["PROMPT", "--prompt"] or ("--prompt-ids" in given and len(given) > 1):
            raise PromptError(f"{' and '.join(given)} are given together: choose one")
        if self.prompt_ids is not None:
            return self.prompt_ids
        instruction = self.prompt if self.argument is None else self.argument
        parts: list[str] = []
        if self.prompt_file is not None:
            parts.append(read_text("--prompt-file", self.prompt_file))
        elif piped and instruction != "-" and (text := _piped_text(waits=instruction is None)):
            parts.append(text)
        if instruction == "-":
            parts.append(read_text(given[0], instruction))
        elif instruction is not None:
            # Python has turned bytes that are not UTF-8 into lone surrogates.
            parts.append(_decode(instruction.encode(errors="surrogateescape"), given[0]))
        if not parts:
            raise PromptError(
                "no prompt: give one in quotes, --prompt-file FILE or --prompt-ids IDS, or pipe a "
                "text in"
            )
        return "\n\n".join(parts)

    def uses_template(self, prompt: Prompt, tokenizer: TokenizerWrapper) -> bool:
        """Whether the prompt goes into the chat template.

        Raises:
            OptionError: an option requires a template, but the model has none, or the prompt is
                token ids.
        """
        is_ids = not isinstance(prompt, str) and isinstance(prompt[0], int)
        uses = tokenizer.has_chat_template and self.chat is not False and not is_ids
        needing = self.for_template()
        if not (is_ids or isinstance(prompt, str)):
            needing.append('"messages"')
        if needing and not uses:
            raise OptionError(f"{needing[0]} {_NEEDS_TEMPLATE}")
        return uses

    def turns(self, messages: Messages, ended: bool = True) -> tuple[Messages, dict[str, Any]]:
        """Complete a conversation for the chat template.

        Args:
            ended: whether its last message is complete, so that the answer comes next.

        Returns:
            the conversation, with the system prompt from the options if it has none, and with the
            beginning of the answer; and the arguments for :func:`.conversation_prompt`.
        """
        if self.system_prompt is not None and all(
            message["role"] != "system" for message in messages
        ):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        how = {} if ended else {"add_generation_prompt": False, "continue_final_message": True}
        if ended and self.prefill_response:
            messages = [*messages, {"role": "assistant", "content": self.prefill_response}]
        return messages, {**how, **(self.chat_template_config or {})}

    def encoded(
        self, prompt: Prompt, tokenizer: TokenizerWrapper, ended: bool = True
    ) -> tuple[list[int], ChatPrompt | None]:
        """Turn a prompt into token ids.

        Args:
            prompt: a text, a conversation, or token ids, which are returned unchanged.
            ended: whether the user's message is complete, so that the answer comes next.

        Returns:
            the ids, and the prompt in the chat template, if it went into it.

        Raises:
            OptionError: an option requires a template, but the model has none.
            PromptError: the template fails.
        """
        from ...generation.chat_prompt import conversation_prompt
        from ...models.model import encode_prompt

        if not self.uses_template(prompt, tokenizer):
            ids: Any = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt
            return ids, None
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages, how = self.turns(messages, ended)
        chat = conversation_prompt(tokenizer, messages, how)
        return chat.tokens(tokenizer), chat


_NEEDS_TEMPLATE = "needs a chat template, which --raw, token ids and some models lack: leave it out"


def read_text(option: str, file: str) -> str:
    """Read the UTF-8 text in the file that an option names; - is standard input.

    Raises:
        PromptError: the file is empty, or not text.
        OSError: the file cannot be read.
    """
    with click.open_file(file, "rb") as opened:
        return _text(opened.read(), f"{option} {file}")


def _piped_text(waits: bool) -> str | None:
    """Read a text from standard input, though no option asks for it; None if there is none.

    Terminals, sockets and /dev/null count as having none. So does a file that is already being
    read: in ``while read line; do ...; done < FILE`` the remaining lines belong to the loop.

    Args:
        waits: whether to wait without limit for a pipe's first byte. If not, a pipe that stays
            empty is ignored.
    """
    try:
        descriptor = sys.stdin.fileno()
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISREG(kind):
            comes = os.lseek(descriptor, 0, os.SEEK_CUR) == 0
        else:
            comes = stat.S_ISFIFO(kind) and _begins(descriptor, waits)
        os.set_blocking(descriptor, True)  # another process may have made it non-blocking
        data = sys.stdin.buffer.read() if comes else b""
    except OSError:  # standard input was replaced by an object, or is open only for writing
        return None
    return _text(data, "standard input") if data.strip() else None


def _begins(pipe: int, waits: bool) -> bool:
    """Wait for a pipe's first byte or its end; return whether either came in time."""
    if select.select([pipe], [], [], None if waits else _PATIENCE)[0]:
        return True
    note("the pipe sent nothing: using the prompt alone; to wait for the pipe, add --prompt-file -")
    return False


def _text(data: bytes, source: str) -> str:
    return _decode(data.removesuffix(b"\n").removesuffix(b"\r"), source)


def _decode(data: bytes, source: str) -> str:
    """Decode the text of a prompt; ``source`` names it in errors."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{source} is not UTF-8 text (byte {error.start}): convert it to UTF-8"
        ) from error
    if not text.strip():
        raise PromptError(f"{source} is empty: write a text")
    return text
