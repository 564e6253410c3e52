"""``mlxspec chat``: a conversation with a model, at a terminal or through a pipe."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from textwrap import indent, shorten
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console

from ...distributed import leading
from ...errors import FileError, MlxspecError, OptionError, PromptError
from ...files import replaced
from ...jsonl import conversation_of, load_json
from ...models.model_files import find_directory, local_path
from ...terminal import TokenPrinter, one_line, visible
from ..common.api_client import RemoteModel
from ..common.generation import FORMS, PARAMETERS, GenerationSettings, generation_options
from ..common.model_choice import (
    known_names,
    model_argument,
    model_or_default,
    note_if_demo,
    resolved,
)
from ..common.notes import note
from ..common.options import COUNT, FILE, color_option, command, option
from ..common.output import Figures, counted, error_console, output_console, prefill_bar
from ..common.prompt import template_option
from ..memory import Memories

if TYPE_CHECKING:
    from ...engine.target import Progress
    from ...generation.decoder import Decoder
    from ...generation.response import GenerationResponse
    from ...models.chat_template import Messages
    from .terminal import MarkdownPrinter

_GLANCE = 60  # characters by which a message can be recognised
_ANSWERS_SHARE = 4  # a quarter of the context is kept for an answer, at most --max-tokens

_model = partial(option, group="Model and prompt")
_output = partial(option, group="Output")


@command("chat")
@model_argument()
@_model("--system-prompt TEXT", "The system prompt.")
@template_option("Model and prompt")
@_model("--load FILE", "Continue a conversation written by /save.", type=FILE)
@_model("--server URL", "Chat with a model that 'mlxspec serve' serves at this address.")
@_model("--max-tokens N", "Generate at most N tokens per answer.", default=2048, type=COUNT)
@generation_options(leave_out=(*FORMS, *PARAMETERS))
@color_option("Output")
@_output("--markdown", "At a terminal: render answers as Markdown, without the colours of drafts.")
@_output("--no-history", "Do not keep typed messages for the next chat.")
def chat_command(
    generation: GenerationSettings,
    system_prompt: str | None,
    chat_template_config: Mapping[str, Any] | None,
    load: Path | None,
    server: str | None,
    color: bool | None,
    markdown: bool,
    no_history: bool,
) -> None:
    """Chat with a model.

    The conversation stays in the KV cache, so a new message does not process it again.

    \b
    Examples:
      mlxspec chat --system-prompt "Answer in one sentence."
      printf 'Name a river.\\nAnd its source?\\n' | mlxspec chat
      mlxspec chat --server http://127.0.0.1:8080
      mlxspec chat --load rivers.json --markdown

    Each line of a pipe is a message. Three double quotes begin a message of several lines, and
    three more end it.
    """
    from .terminal import MarkdownPrinter, message_reader

    saved = read_chat(load) if load else None
    console, template = error_console(color), chat_template_config or {}
    with leading() as leader, ExitStack() as during:
        keeps = not (generation.drafting.no_saved_answers or server)
        memories = during.enter_context(Memories(keeps))
        model: LocalModel | RemoteModel
        if server is None:
            model = LocalModel(
                generation, lambda settings: settings.load(console, memories, leader), template
            )
            note_if_demo(generation.model)
            memories.suggest_once()
        else:
            model = RemoteModel(server, generation, template)
        printer: Callable[[], TokenPrinter | MarkdownPrinter] = partial(
            TokenPrinter, color, wraps=True
        )
        if markdown and sys.stdout.isatty():
            printer = partial(MarkdownPrinter, output_console(color))
        chat = Chat(model, generation, console, printer, sys.stdin.isatty())
        if chat.interactive:
            chat.say(f"Chatting with {one_line(model.name)}. /help lists commands and keys.")
        if saved:
            chat.restore(*saved)
        given = click.get_current_context().get_parameter_source("system_prompt")
        if system_prompt and not (saved and given is ParameterSource.DEFAULT_MAP):
            chat.system_prompt = system_prompt
        chat.run(message_reader(not no_history, model.others, color))


@dataclass(eq=False)
class Chat:
    """A chat: the conversation, its commands and its output.

    Attributes:
        model: the model that answers.
        generation: the options of answers; /retry overrides the temperature and the seed.
        console: standard error.
        printer: makes the object that writes an answer.
        interactive: whether to show figures, and to continue after an error.
        system_prompt: the system prompt, which comes before all messages.
    """

    model: LocalModel | RemoteModel
    generation: GenerationSettings
    console: Console
    printer: Callable[[], TokenPrinter | MarkdownPrinter] = TokenPrinter
    interactive: bool = True
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        self.messages: Messages = []  # the user's and the assistant's, alternating
        # Each time the context was full: the number of messages, and how many of them, the oldest,
        # the model has not seen since.
        self._cuts: list[tuple[int, int]] = []
        self._figures = Figures()
        self._retries = 0  # added to the seed, so that each retry has its own

    def run(self, read: Callable[[], str]) -> None:
        """Answer messages and run commands until the user leaves.

        Args:
            read: returns the next message, or raises :class:`EOFError` if there is none.
        """
        leaves = False  # whether the next Ctrl-C leaves
        while True:
            try:
                message = read()
                leaves = False
                if parsed := command_in(message):
                    run, argument = parsed
                    run(self, argument)
                elif message.strip():
                    # A space before a slash marks a message that is not a command.
                    self.answer(message[1:] if message.startswith(" /") else message)
            except EOFError:
                return
            except MlxspecError as error:
                if not self.interactive:
                    raise
                note(error)
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                if leaves:
                    return
                leaves = True
                self.say("Press Ctrl-C again or Ctrl-D to leave.")

    # The conversation.

    @property
    def unanswered(self) -> bool:
        """Whether the last message has no answer."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    @property
    def conversation(self) -> Messages:
        """The system prompt and all messages."""
        return self._from(0)

    def _from(self, first: int) -> Messages:
        """The system prompt, and the messages from number ``first`` on."""
        begins = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return begins + self.messages[first:]

    def answer(self, message: str, **sampling: Any) -> None:
        """Answer a message, and write the text as it is generated; Ctrl-C ends only the answer.

        If the last message is unanswered, this one replaces it. If the answer is interrupted, what
        was generated so far is kept.

        Args:
            sampling: sampling options for this answer only.

        Raises:
            PromptError: the message alone is longer than the model's context.
        """
        if self.unanswered:
            self.undo()
        self.messages.append({"role": "user", "content": message})
        sampled = replace(self.generation.sampling, **sampling)
        generation = replace(self.generation, sampling=sampled)
        printer, said = self.printer(), ""
        last: GenerationResponse | None = None
        try:
            tokens = self._fitting_prompt()
            with (
                prefill_bar(self.console) as progress,
                closing(self.model.stream(generation, tokens, progress)) as responses,
            ):
                for last in responses:
                    said += last.text
                    printer.write(last.text, last.from_draft)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
        finally:
            printer.finish()
            if said:
                self.messages.append({"role": "assistant", "content": said})
        if last is None or last.finish_reason is None:
            self.say("The answer was stopped; /retry generates another one.")
            return
        self._figures.add(last, last.generation_tokens)
        if self.interactive:
            self.say(answer_line(last, self.generation.max_tokens))

    def _fitting_prompt(self) -> list[int]:
        """The tokens of what the model sees of the conversation.

        If they leave no room for an answer, the oldest turns are left out until half of the model's
        context is free. So the next turns can continue from the cache. If fewer were left out, each
        turn would leave out some, and process the rest of the conversation again.
        """
        before = unseen = self._cuts[-1][1] if self._cuts else 0
        length = self.model.context_length
        tokens = self.model.tokenize(self._from(unseen))
        kept_free = min(self.generation.max_tokens, (length or 0) // _ANSWERS_SHARE)
        if length is None or len(tokens) + kept_free <= length:
            return tokens
        while len(tokens) > length // 2 and len(self.messages) - unseen > 2:
            unseen += 2
            tokens = self.model.tokenize(self._from(unseen))
        if before < unseen and len(tokens) <= length:
            self._cuts.append((len(self.messages), unseen))
            note(
                f"the model's context of {length:,} tokens is full: the model no longer sees the "
                f"first {counted(unseen // 2, 'turn')}; /reset starts over"
            )
        return tokens

    def undo(self) -> str:
        """Remove the last message and its answer, and return the message.

        Raises:
            PromptError: there is no message.
        """
        self._check_begun()
        if not self.unanswered:
            self.messages.pop()
        message = self.messages.pop()["content"]
        while self._cuts and len(self.messages) < self._cuts[-1][0]:
            self._cuts.pop()
        return message

    def restore(self, system_prompt: str | None, messages: Messages) -> None:
        """Continue another conversation, which :func:`read_chat` returned."""
        self._begin(system_prompt, messages)
        self.say(f"Loaded {self._turns()}.")
        if self.unanswered:
            self.say("The last message has no answer: /retry answers it.")

    def _begin(self, system_prompt: str | None, messages: Messages) -> None:
        self.system_prompt, self.messages = system_prompt, messages
        self._cuts, self._figures = [], Figures()

    def _check_begun(self) -> None:
        if not self.messages:
            raise PromptError("nothing has been said yet: write a message first")

    def _turns(self) -> str:
        return counted((len(self.messages) + 1) // 2, "turn")

    # Output.

    def say(self, text: str) -> None:
        """Print a text that is not an answer."""
        self.console.print(visible(text), style="dim", soft_wrap=not self.interactive)

    # The commands.

    def _help(self, _: str) -> None:
        self.console.print(help_text())

    def _retry(self, argument: str) -> None:
        """Answer the last message again; above temperature 0 the answer differs.

        If that fails, the earlier answer stays.
        """
        self._check_begun()
        temp, seed = self.generation.sampling.temp, self.generation.sampling.seed
        if argument:
            try:
                temp = float(argument)
            except ValueError:
                raise OptionError(
                    f"/retry {argument}: give a temperature, for example /retry 0.8, or nothing"
                ) from None
        if not self.unanswered:
            self._retries += 1
            if temp == 0:
                note(
                    "at temperature 0 the same conversation gets the same answer: '/retry 0.8' "
                    "samples another answer"
                )
        seed = None if seed is None else seed + self._retries
        before = self.messages[-1 if self.unanswered else -2 :]
        message = self.undo()
        try:
            self.answer(message, temp=temp, seed=seed)
        finally:
            if self.unanswered:
                self.messages[-1:] = before

    def _undo(self, _: str) -> None:
        self.say(f"Removed: {shorten(self.undo(), _GLANCE, placeholder=' …')}")

    def _reset(self, _: str) -> None:
        self._begin(self.system_prompt, [])
        self.say("A new conversation begins.")

    def _system(self, text: str) -> None:
        if text:
            self.system_prompt = None if text == "-" else text
        now = self.system_prompt
        self.say(f"System prompt: {now}" if now else "There is no system prompt.")

    def _model(self, name: str) -> None:
        if name:
            try:
                self.model.switch(name)
            except (MlxspecError, KeyboardInterrupt):
                if self.interactive:
                    self.say(f"Still chatting with {one_line(self.model.name)}.")
                raise
            self._cuts = []  # its context may be longer
        self.say(f"Chatting with {one_line(self.model.name)}.")
        if not name:
            self.say(f"/model NAME switches to {one_line(', '.join(self.model.others()))}.")

    def _save(self, file: str) -> None:
        self._check_begun()
        write_chat(local_path(file), self.model.name, self.conversation)
        self.say(f"Saved {self._turns()} in {one_line(local_path(file))}.")

    def _load(self, file: str) -> None:
        self.restore(*read_chat(local_path(file)))

    def _stats(self, _: str) -> None:
        self.console.print(self._figures.panel(("answers", str(self._figures.answers))))

    def _exit(self, _: str) -> None:
        raise EOFError


def answer_line(last: GenerationResponse, max_tokens: int) -> str:
    """An answer's statistics, and why it was cut off if it was incomplete."""
    figures = [counted(last.generation_tokens, "token"), f"{last.generation_tps:,.1f}/s"]
    if last.stats.gain:
        figures.append(f"{last.stats.gain:.1f}× plain")
    figures += [
        f"{last.stats.tokens_per_step:.2f} per step",
        f"{last.reused_tokens:,} of {last.prompt_tokens:,} prompt tokens reused",
    ]
    if last.finish_reason == "length":
        whole = last.generation_tokens == max_tokens
        figures.append("cut by --max-tokens" if whole else "cut: the model's context is full")
    return " · ".join(figures)


# --- commands ---

_OR_TEXT = "to send it as a message, put a space before it"
_COMMAND = re.compile(r"/[A-Za-z][\w-]*")


Command = Callable[[Chat, str], None]
"""A command's function; it gets the chat and the argument, which may be empty."""

COMMANDS: dict[str, tuple[str, Command]] = {
    "/help": ("show commands and keys", Chat._help),
    "/retry [TEMP]": ("answer the last message again", Chat._retry),
    "/undo": ("remove the last message and its answer", Chat._undo),
    "/reset /clear": ("begin a new conversation", Chat._reset),
    "/system [TEXT]": ("show or set the system prompt; - removes it", Chat._system),
    "/model [NAME]": ("show the model, or switch to another", Chat._model),
    "/save FILE": ("write the conversation as JSON", Chat._save),
    "/load FILE": ("continue a saved conversation", Chat._load),
    "/stats": ("show figures of the conversation", Chat._stats),
    "/exit /quit /bye": ("leave, as does Ctrl-D", Chat._exit),
}
"""The commands' descriptions and functions. The keys, names and argument, are as in the help."""

NAMES = {name: spelling for spelling in COMMANDS for name in re.findall(r"/\w+", spelling)}

KEYS = (
    ("Enter", "sends the message; pasted lines are one message"),
    ("Alt-Enter", "a new line; so does Ctrl-J"),
    ("Up, Ctrl-R", "earlier messages; Tab completes commands and files"),
    ("Ctrl-C", "stops an answer, or clears the line; twice leaves"),
)


def help_text() -> str:
    """The list of commands and keys."""
    rows = [(spelling, about) for spelling, (about, _) in COMMANDS.items()] + list(KEYS)
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{text}" for name, text in rows)


def command_in(message: str) -> tuple[Command, str] | None:
    """The command in a message and its argument, or None if the message is text to answer.

    A command begins with a slash. A message with a space before the slash is text, and so is one
    that begins with a path (``/etc/hosts``).

    Raises:
        OptionError: the command is unknown, or its argument is missing or not allowed.
    """
    word, *rest = message.split(maxsplit=1) if message.startswith("/") else [""]
    if not _COMMAND.fullmatch(word):
        return None
    if word not in NAMES:
        close = get_close_matches(word, NAMES, 1)
        guess = f"did you mean {close[0]}?" if close else "/help lists them"
        raise OptionError(f"unknown command {word} ({guess}); {_OR_TEXT}")
    spelling, argument = NAMES[word], "".join(rest).strip()
    _, run = COMMANDS[spelling]
    if (" FILE" in spelling and not argument) or (argument and spelling.split()[-1] in NAMES):
        raise OptionError(f"write it as {spelling}; {_OR_TEXT}")
    return run, argument


# --- a model in this process ---


@dataclass(eq=False)
class LocalModel:
    """A model in this process, used for a chat.

    Attributes:
        first: the model to use first, and how to draft.
        load: loads the model of a generation.
        template_arguments: variables for the model's chat template.
        name: the model's name, as the user gave it.
        decoder: the loaded model.
        session: the session with the conversation's KV cache.
        context_length: the model's context length in tokens; None if unknown.

    Raises:
        MlxspecError: the model cannot be loaded, or has no chat template.
    """

    first: GenerationSettings
    load: Callable[[GenerationSettings], Decoder]
    template_arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._use(model_or_default(self.first.model))

    def tokenize(self, messages: Messages) -> list[int]:
        """The tokens of a conversation in the model's chat template.

        Raises:
            PromptError: the template fails, for example because it does not support a system
                prompt.
        """
        from ...generation.chat_prompt import conversation_prompt

        tokenizer = self.decoder.tokenizer
        self._chat = conversation_prompt(tokenizer, messages, self.template_arguments)
        return self._chat.tokens(tokenizer)

    def stream(
        self, generation: GenerationSettings, tokens: Sequence[int], on_progress: Progress
    ) -> Generator[GenerationResponse, None, None]:
        """Generate the answer to the conversation that was tokenized last."""
        how = {"session": self.session, "on_progress": on_progress}
        return generation.stream(self.decoder, tokens, chat=self._chat, **how)

    def others(self) -> list[str]:
        """The names, other than directories, that :meth:`switch` accepts."""
        return [*known_names()]

    def switch(self, name: str) -> None:
        """Load another model, and download it if necessary.

        The current model is unloaded first, since memory may not hold both. If the other model
        cannot be used, the current one is loaded again.

        Raises:
            MlxspecError: the other model cannot be loaded, or has no chat template.
            EOFError: the current model cannot be loaded again, or a second Ctrl-C has stopped that,
                so that no model is left to chat with.
        """
        import mlx.core as mx

        before, name = self.name, resolved(name)
        if name == before:
            return
        _check_template(name)
        find_directory(name, None)  # downloads it
        try:
            del self.session, self.decoder
            gc.collect()  # decoders may be part of cycles
            mx.clear_cache()
            self._use(name)
        except BaseException:
            try:
                self._use(before)
            except KeyboardInterrupt:  # the second, which leaves
                raise EOFError from None
            except MlxspecError as error:
                note(error)
                raise EOFError from error
            raise

    def _use(self, name: str) -> None:
        """Load a model."""
        from ...engine.model_sizes import context_length
        from ...generation.session import Session

        _check_template(name)
        is_first = name == model_or_default(self.first.model)
        decoder = self.load(self.first.for_model(name, is_first))
        self.name, self.decoder, self.session = name, decoder, Session()
        self.context_length = context_length(decoder.model)


def _check_template(name: str) -> None:
    """Refuse a model without a chat template, before its weights are read."""
    from ...models.tokenizer import has_chat_template

    if not has_chat_template(name):
        raise OptionError(
            "this model's tokenizer has no chat template: choose a chat model, or use "
            "'mlxspec generate --raw'"
        )


# --- saved chats ---


def write_chat(path: Path, model: str, conversation: Messages) -> None:
    """Write a conversation, completely or not at all; an existing file must be a saved chat.

    Args:
        conversation: the system prompt, if there is one, and the messages.

    Raises:
        FileError: the file exists and is not a saved chat, or cannot be written.
    """
    if os.path.isfile(path):  # unlike Path.is_file, False if the name is too long
        read_chat(path)
    record = {"model": model, "created": int(time.time()), "messages": conversation}
    text = json.dumps(record, ensure_ascii=False, indent=1)
    with replaced(path) as file:
        file.write(text.encode(errors="replace") + b"\n")


def read_chat(path: Path) -> tuple[str | None, Messages]:
    """Read a saved chat, or a request of OpenAI's API.

    Returns:
        the system prompt, if there is one, and the messages of user and assistant.

    Raises:
        FileError: the file cannot be read, or the conversation cannot be continued.
    """
    try:
        messages, _ = conversation_of(load_json(path.read_bytes()))
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}); name a saved chat") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: is not a saved chat ({error}); name another file") from error
    system_prompt = None
    if messages and messages[0]["role"] in ("system", "developer"):  # OpenAI's newer name for it
        system_prompt = messages.pop(0)["content"]
    roles = [message["role"] for message in messages]
    if roles != [("user", "assistant")[number % 2] for number in range(len(roles))]:
        raise FileError(
            f"{path}: is not a saved chat (its messages must alternate between user and "
            "assistant); name another file"
        )
    return system_prompt, messages


# --help shows this after the end of the docstring.
chat_command.epilog = f"{chat_command.epilog}\n\n\b\nAt the prompt:\n{indent(help_text(), '  ')}"
