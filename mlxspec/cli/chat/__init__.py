"""``mlxspec chat``: a conversation with a model, at a terminal or through a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ...distributed.launch import launched_rank
from ...engine.params import SamplingParams
from ...errors import MlxspecError, OptionError, PromptError
from ...models.model_files import local_path
from ...terminal import TokenPrinter, one_line, visible
from ..common.generation import Generation
from ..common.model_choice import model_argument, note_which_model, resolved
from ..common.notes import note
from ..common.options import FILE, color_option, command, option, options_of
from ..common.output import (
    Figures,
    ProgressBar,
    counted,
    error_console,
    output_console,
    prefill_bar,
)
from ..common.prompt import template_option
from ..memory import Memories

if TYPE_CHECKING:
    from ...generation.response import GenerationResponse
    from .conversation import ChatConversation, SavedChat
    from .terminal import LineInput, MarkdownPrinter, TerminalInput

    _Answering = Callable[[ProgressBar], Generator[GenerationResponse, None, None]]

_SEEDS = 1 << 64
_GLANCE = 60  # characters


@command("chat")
@model_argument()
@option("--system-prompt TEXT", "The system prompt.", group="Model and prompt")
@template_option("Model and prompt")
@option(
    "--load FILE",
    "Continue a conversation written by /save.",
    type=FILE,
    group="Model and prompt",
)
@option(
    "--server URL",
    "Talk with a model of 'mlxspec serve' at this address.",
    group="Model and prompt",
)
@option(
    "--max-tokens N",
    "Generate at most N tokens per answer.",
    default=2048,
    group="Model and prompt",
)
@options_of(Generation, "generation", leave_out=("json_schema", "regex", "grammar"))
@color_option("Output")
@option(
    "--markdown",
    "At a terminal: render answers as Markdown, without the colours of drafts.",
    group="Output",
)
@option("--no-history", "Do not keep what is typed for the next chat.", group="Output")
def chat_command(
    generation: Generation,
    system_prompt: str | None,
    chat_template_config: Mapping[str, Any] | None,
    load: Path | None,
    server: str | None,
    color: bool | None,
    markdown: bool,
    no_history: bool,
) -> None:
    """Talk with a model.

    Each turn continues where the last one ended: what the KV cache and the drafter's index hold
    of the conversation is not processed again.

    \b
    Examples:
      mlxspec chat --system-prompt "Answer in one sentence."
      printf 'Name a river.\\nAnd its source?\\n' | mlxspec chat
      mlxspec chat --server http://127.0.0.1:8080
      mlxspec chat --load rivers.json --markdown

    From a pipe every line is a turn. Three double quotes begin and end a message of several
    lines; a backslash at a line's end continues it on the next line.
    """
    if launched_rank() is not None:
        raise OptionError("chat runs in one process: start it without mlx.launch")
    from .conversation import ChatConversation, LocalModel, RemoteModel, read_chat
    from .terminal import open_input

    saved = read_chat(load) if load else None
    console = error_console(color)
    with ExitStack() as talking:
        turns = open_input(not no_history, lambda: conversation.model.others(), color)
        talking.callback(turns.close)
        keeps = not (generation.drafting.no_memory or server)
        memories = talking.enter_context(Memories(keeps))
        model: LocalModel | RemoteModel
        if server is not None:
            model = RemoteModel(server, generation, chat_template_config)
        else:
            model = LocalModel(generation, console, memories, chat_template_config)
        conversation = ChatConversation(model, generation.max_tokens, system_prompt)
        talking.callback(lambda: conversation.model.close())
        if server is None:
            note_which_model(generation.model)
            memories.tell_once()
        chat = _Chat(conversation, generation.sampling, console, color, turns.interactive, server)
        chat.markdown = markdown
        if turns.interactive:
            chat.say(f"Chatting with {chat.model_name}. /help says what can be typed.")
        if saved:
            chat.go_on(replace(saved, system_prompt=system_prompt or saved.system_prompt))
        chat.take(turns)


@dataclass
class _Chat:
    """Takes turns until the user leaves.

    Attributes:
        sampling: how answers are sampled, where /retry does not say otherwise.
        interactive: show figures, and go on after a message that cannot be answered.
        server: the address of the model's server, if it has one.
        markdown: whether answers are rendered.
        retries: how often the last message has been answered again.
        settled: whether a greedy answer to the last message would be the one that is there.
    """

    conversation: ChatConversation
    sampling: SamplingParams
    console: Console
    color: bool | None
    interactive: bool
    server: str | None
    markdown: bool = False
    retries: int = 0
    settled: bool = False
    answers: int = 0
    figures: Figures = field(default_factory=Figures)

    def take(self, turns: LineInput | TerminalInput) -> None:
        """Read messages and answer them."""
        leaves = False  # with the next Ctrl-C
        while True:
            try:
                message = turns.message()
                leaves = False
                if message is None or not self._take(message):
                    break
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                if leaves and not turns.forgot:
                    break
                leaves = True
                self.say("Ctrl-C again or Ctrl-D leaves.")

    def _take(self, message: str) -> bool:
        """Answer a message or run a command; False if the command ends the chat."""
        try:
            if found := command_in(message):
                command, argument = found
                if command.name == "/exit":
                    return False
                self._do(command.name, argument if command.takes == "text" else _unquoted(argument))
            elif message.strip():
                self.retries = 0
                # The space has kept it from being a command.
                text = message[1:] if message.startswith(" /") else message
                self._answer(partial(self.conversation.answer, text), self.sampling.temp)
        except MlxspecError as error:
            if not self.interactive:
                raise
            note(error)
        return True

    def _do(self, name: str, argument: str) -> None:
        match name:
            case "/help":
                table = Table.grid(padding=(0, 2))
                for row in help_rows():
                    table.add_row(*row)
                self.console.print(table)
            case "/retry":
                self._retry(argument)
            case "/undo":
                message = self.conversation.undo()
                self.retries, self.settled = 0, False
                self.say(f"Took back: {_beginning(message)}")
            case "/reset":
                self.conversation.reset()
                self.answers, self.figures = 0, Figures()
                self.say("A new conversation begins.")
            case "/system":
                self._system(argument)
            case "/model":
                self._model(argument)
            case "/save":
                self._save(local_path(argument))
            case "/load":
                from .conversation import read_chat

                self.go_on(read_chat(local_path(argument)))
            case "/markdown":
                self.markdown = not self.markdown
                now = "rendered as Markdown from now on" if self.markdown else "plain text again"
                self.say(f"Answers are {now}.")
            case "/stats":
                length = self.conversation.model.context_length
                self.console.print(
                    self.figures.panel(
                        ("answers", str(self.answers)),
                        (
                            "context",
                            f"{self.figures.context:,}",
                            f"of {length:,}" if length else "",
                        ),
                    )
                )

    def go_on(self, saved: SavedChat) -> None:
        """Continue a saved conversation instead of this one."""
        self.conversation.restore(saved)
        self.answers, self.figures = 0, Figures()
        self.retries, self.settled = 0, False
        parts = [f"Loaded {counted(self.conversation.n_turns, 'turn')}."]
        if saved.model not in ("", self.conversation.model.name):
            parts.append(f"Its model was {one_line(saved.model)}; /model switches.")
        if self.conversation.unanswered is not None:
            parts.append("The last message has no answer: /retry gives one.")
        self.say(" ".join(parts))

    def _save(self, path: Path) -> None:
        saved = self.conversation.saved
        if not saved.messages:
            raise PromptError("nothing has been said yet: write a message first")
        saved.write(path)
        self.say(f"Saved {counted(len(saved.messages), 'message')} in {one_line(path)}.")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system_prompt = None if text == "-" else text
            self.settled = False
        now = self.conversation.system_prompt
        self.say(f"System prompt: {now}" if now else "There is no system prompt.")

    def _model(self, name: str) -> None:
        model = self.conversation.model
        if not name:
            self.say(f"Chatting with {self.model_name}.")
            if self.server:
                self.say(f"The server has {one_line(', '.join(model.others()))}.")
        elif (name if self.server else resolved(name)) == model.name:
            self.say(f"{one_line(model.name)} answers already.")
        else:
            self.conversation.switch(name)
            self.settled = False
            self.say(f"Going on with {self.model_name}.")

    def _retry(self, argument: str) -> None:
        """Answer the last message again, as differently as the temperature allows."""
        temp, seed = self.sampling.temp, self.sampling.seed
        if argument:
            temp = _temperature(argument)
        if temp == 0 and self.settled:
            raise OptionError(
                "at temperature 0 the answer would be the same: '/retry 0.8' samples another one"
            )
        if self.conversation.unanswered is None:
            self.retries += 1
        sampling: dict[str, Any] = {"temp": temp}
        if seed is not None:
            sampling["seed"] = (seed + self.retries) % _SEEDS
        self._answer(partial(self.conversation.retry, **sampling), temp)

    def _answer(self, start: _Answering, temp: float) -> None:
        """Answer a message, writing as the text comes; Ctrl-C ends the answer and no more.

        Args:
            start: called with a bar for the prefill.
            temp: the temperature.
        """
        printer = self._printer()
        self.settled = False
        last: GenerationResponse | None = None
        ending = ""
        try:
            with prefill_bar(self.console) as progress, closing(start(progress)) as responses:
                for last in responses:
                    if last.generation_tokens == 1:
                        self._note_dropped()
                    printer.write(last.text, last.from_draft)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            ending = "stopped"
        finally:
            printer.finish()
        if last is None:
            self.say("Stopped before the first word; /retry asks again.")
            return
        self.settled = temp == 0 and not ending
        if last.finish_reason == "length":
            all_given = last.generation_tokens == self.conversation.max_tokens
            ending = "cut by --max-tokens" if all_given else "cut: the model's context is full"
        cost = self.conversation.model.predicted_cost
        self.answers += 1
        self.figures.add(last, last.generation_tokens, cost)
        if self.interactive:
            self.say(answer_line(last, cost, ending))

    def _printer(self) -> TokenPrinter | MarkdownPrinter:
        if not (self.markdown and sys.stdout.isatty()):
            return TokenPrinter(self.color)
        from .terminal import MarkdownPrinter

        return MarkdownPrinter(output_console(self.color))

    @property
    def model_name(self) -> str:
        at = f" at {self.server}" if self.server else ""
        return one_line(f"{self.conversation.model.name}{at}")

    def _note_dropped(self) -> None:
        if self.conversation.dropped:
            turns = counted(self.conversation.dropped, "turn")
            note(
                f"the model's context of {self.conversation.model.context_length:,} tokens is "
                f"full: left out {turns} at the beginning; /reset starts over"
            )

    def say(self, text: str) -> None:
        self.console.print(visible(text), style="dim", soft_wrap=not self.interactive)


def _temperature(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(
            f"/retry {text}: give a temperature, for example /retry 0.8, or nothing"
        ) from None


def _unquoted(name: str) -> str:
    """A name that may be in quotes, as shells take it."""
    in_quotes = len(name) > 1 and name[0] == name[-1] and name[0] in "\"'"
    return name[1:-1] if in_quotes else name


def _beginning(message: str) -> str:
    """So much of a message that one knows it again."""
    line = one_line(message)
    return line if len(line) <= _GLANCE else f"{line[:_GLANCE]}…"


# --- what can be typed ---

QUOTES = '"""'
"""They begin and end a message of several lines."""

_OR_TEXT = "a space before it makes it a message"
_COMMAND = re.compile(r"/[A-Za-z][\w-]*")


@dataclass(frozen=True)
class ChatCommand:
    """A command of a chat.

    Attributes:
        spelling: its name and what follows it, as the help shows them.
        help: what it does.
        takes: "text", "file" or "model", if that follows it.
        aliases: its other names.
    """

    spelling: str
    help: str
    takes: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """With the slash."""
        return self.spelling.split()[0]


COMMANDS = (
    ChatCommand("/help", "show what can be typed"),
    ChatCommand("/retry [TEMP]", "answer the last message again", "text"),
    ChatCommand("/undo", "take the last message and its answer back"),
    ChatCommand("/reset", "begin a new conversation", aliases=("/clear",)),
    ChatCommand("/system [TEXT]", "show or set the system prompt; - for none", "text"),
    ChatCommand("/model [NAME]", "show the model, or switch to another", "model"),
    ChatCommand("/save FILE", "write the conversation as JSON", "file"),
    ChatCommand("/load FILE", "continue a saved conversation", "file"),
    ChatCommand("/markdown", "render answers as Markdown, or no longer"),
    ChatCommand("/stats", "figures of the conversation"),
    ChatCommand("/exit", "leave; Ctrl-D does, too", aliases=("/quit", "/bye")),
)

NAMES = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}

KEYS = (
    ("Enter", "sends the message; pasted lines are one message"),
    ("Alt-Enter", "a new line; so do Ctrl-J, and \\ at a line's end"),
    ("Up, Ctrl-R", "earlier messages; Tab completes commands and files"),
    ("Ctrl-C", "stops an answer; twice at the prompt leaves"),
)


def help_rows() -> list[tuple[str, str]]:
    """Commands and keys, and what they do."""
    names = [", ".join([command.spelling, *command.aliases]) for command in COMMANDS]
    return [*zip(names, (command.help for command in COMMANDS), strict=True), *KEYS]


def help_text() -> str:
    """The same as lines of text."""
    rows = help_rows()
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{text}" for name, text in rows)


def command_in(message: str) -> tuple[ChatCommand, str] | None:
    """The command that a message is, and what follows its name; None for text to be answered.

    A command begins with the slash itself. So a space before it makes a message of it, and a
    path at the beginning (``/etc/hosts``) is text.

    Raises:
        OptionError: there is no such command, or it takes nothing, or needs something.
    """
    word, *rest = message.split(maxsplit=1) if message.startswith("/") else [""]
    if not _COMMAND.fullmatch(word):
        return None
    argument = rest[0].strip() if rest else ""
    command = NAMES.get(word)
    if command is None:
        close = get_close_matches(word, NAMES, 1)
        guess = f"did you mean {close[0]}?" if close else "/help lists them"
        raise OptionError(f"there is no command {word} ({guess}); {_OR_TEXT}")
    if argument and not command.takes:
        raise OptionError(f"{word} takes nothing after it; {_OR_TEXT}")
    if not argument and command.takes == "file":
        raise OptionError(f"{word} needs the name of a file: {command.spelling}")
    return command, argument


def is_open(text: str) -> bool:
    """Whether a message begins with three double quotes and the next three are still to come."""
    return text.startswith(QUOTES) and text.count(QUOTES) % 2 == 1


def without_quotes(text: str) -> str:
    """A message without the three double quotes around it; as it is where it has others."""
    within = text.rstrip()
    if text.count(QUOTES) != 2 or not (text.startswith(QUOTES) and within.endswith(QUOTES)):
        return text
    return within.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


# --- figures ---


def answer_line(last: GenerationResponse, predicted_cost: float, ending: str) -> str:
    """The figures of one answer.

    Args:
        last: its last response.
        predicted_cost: of its steps, in plain steps; 0 if not known.
        ending: why it ended, unless the model ended it.
    """
    figures = [counted(last.generation_tokens, "token"), f"{last.generation_tps:,.1f}/s"]
    if predicted_cost:
        figures.append(f"{last.stats.emitted / predicted_cost:.1f}× plain")
    figures += [
        f"{last.stats.tokens_per_step:.2f} per step",
        f"{last.reused_tokens:,} of {last.prompt_tokens:,} prompt tokens reused",
    ]
    return " · ".join([*figures, ending] if ending else figures)


# With the docstring's, what --help shows at the end.
chat_command.epilog = f"{chat_command.epilog}\n\n\b\nAt the prompt:\n{indent(help_text(), '  ')}"
