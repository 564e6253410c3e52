"""``mlxspec chat``: a conversation with a model, at a terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel

from ..distributed.launch import launched_rank
from ..errors import MlxspecError, OptionError, PromptError
from ..terminal import TokenPrinter, one_line, visible
from .figures import acceptance_row
from .generate import prefill_bar
from .generating import Generation, model_or_default, tell_of_default
from .memories import Memories
from .options import color_option, command, option, options_of
from .outcome import note
from .output import counted, error_console, figures_grid
from .prompts import model_option

if TYPE_CHECKING:
    from ..generation.decoder import Decoder
    from ..generation.response import GenerationResponse, SpeculationStats
    from ..store.learner import Learner
    from .conversation import Conversation


@command("chat")
@model_option
@option(
    "--system-prompt TEXT", "What the model is told before all turns.", group="Model and prompt"
)
@option(
    "--server URL",
    "Talk with a model of 'mlxspec serve' at this address.",
    group="Model and prompt",
)
@option("--max-tokens N", "Generate at most N per answer.", default=2048, group="Model and prompt")
@options_of(Generation, "generation", leave_out=("json_schema", "regex", "grammar"))
@color_option("Output")
def chat_command(
    generation: Generation, system_prompt: str | None, server: str | None, color: bool | None
) -> None:
    """Talk with a model.

    Each turn goes on where the last one ended: what the KV cache and the drafter's index hold
    of the conversation is not processed again.

    \b
    Examples:
      mlxspec chat --system-prompt "Answer in one sentence."
      printf 'Name a river.\\nAnd its source?\\n' | mlxspec chat
      mlxspec chat --server http://127.0.0.1:8080

    From a pipe every line is a turn.

    \b
    At the prompt:
      /help    what can be typed here
      /stats   figures of the conversation
      /reset   begin a new conversation
      /exit    leave; Ctrl-D and Ctrl-C twice do, too
      \"\"\"      begins and ends a message of several lines
      \\        at a line's end, goes on with the message in the next line

    Ctrl-C stops an answer and keeps the conversation.
    """
    if launched_rank() is not None:
        raise OptionError("chat runs in one process: start it without mlx.launch")
    turns, console = ChatInput(), error_console(color)
    with ExitStack() as talking:
        learner = None
        if server is not None:
            conversation, name = _remote(server, generation, system_prompt)
        else:
            memories = talking.enter_context(Memories(not generation.drafting.no_memory))
            decoder = generation.load(console, memories)
            conversation = _local(decoder, generation, system_prompt)
            name = model_or_default(generation.model)
            tell_of_default(generation.model)
            memories.tell_once()
            learner = talking.enter_context(generation.learner(decoder))
        if turns.interactive:
            hint = f"Chatting with {one_line(name)}. /help says what can be typed."
            console.print(hint, style="dim")
        _Chat(conversation, console, color, learner, turns.interactive, _Figures()).take(turns)


def _local(decoder: Decoder, generation: Generation, system_prompt: str | None) -> Conversation:
    from ..engine.positions import context_length
    from ..loading.detokenizer import detokenizer_of
    from .conversation import Conversation, template_of

    return Conversation(
        template_of(decoder.tokenizer),
        partial(generation.stream, decoder),
        context_length(decoder.model),
        generation.max_tokens,
        system_prompt,
        detokenizer_of(decoder.tokenizer).prefix_space,
    )


def _remote(
    server: str, generation: Generation, system_prompt: str | None
) -> tuple[Conversation, str]:
    """A conversation with a server's model, and the model's name."""
    from .conversation import Conversation
    from .remote import RemoteModel

    model = RemoteModel(server, generation)
    conversation = Conversation(
        model.tokenize,
        model.stream,
        model.context_length,
        generation.max_tokens,
        system_prompt,
        trims_first_space=True,
    )
    return conversation, f"{model.name} at {server}"


_QUOTES = '"""'


class ChatInput:
    """Reads messages from standard input, at a terminal with line editing and history.

    A message is a line. One that begins with three double quotes goes on to the next three; a
    backslash at the end of a line has it go on with the next line.

    Raises:
        PromptError: standard input is closed.
    """

    def __init__(self) -> None:
        if sys.stdin is None:
            raise PromptError("standard input is closed: chat at a terminal, or pipe the turns in")
        self.interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, TextIOWrapper):
            if self.interactive:
                sys.stdin.reconfigure(errors="replace")
            else:  # bytes that are not UTF-8 become lone surrogates, by which they are found
                sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
        self._read_line: Callable[[str], str] = _line_of_stream
        if self.interactive and sys.stdout.isatty():
            with suppress(ImportError):  # there is none on Windows
                import readline  # noqa: F401  (gives input() arrow keys and history)
            self._read_line = input

    def message(self) -> str | None:
        """The next message, which may be empty; None at the end of the input.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the message so far is forgotten.
            PromptError: what comes through a pipe is not UTF-8.
        """
        try:
            line = self._line("> ")
            if line.startswith(_QUOTES):
                return self._quoted(line.removeprefix(_QUOTES))
            lines = [line]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(self._line(". "))
        except EOFError:
            return None
        return "\n".join(lines)

    def _quoted(self, first: str) -> str:
        lines = [first]
        with suppress(EOFError):  # the end of a file closes the quotes
            while not lines[-1].rstrip().endswith(_QUOTES):
                lines.append(self._line(". "))
        return "\n".join(lines).rstrip().removesuffix(_QUOTES).strip("\n")

    def _line(self, prompt: str) -> str:
        return self._read_line(prompt if self.interactive else "")


def _line_of_stream(prompt: str) -> str:
    """A line where ``input()`` would write its prompt among the answers."""
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise PromptError("standard input is not UTF-8 text: convert it to UTF-8") from error
    return line.removesuffix("\n").removesuffix("\r")


@dataclass
class _Chat:
    """Takes turns until the user leaves.

    Attributes:
        interactive: show figures, and go on after a message that cannot be answered.
    """

    conversation: Conversation
    console: Console
    color: bool | None
    learner: Learner | None
    interactive: bool
    figures: _Figures

    def take(self, turns: ChatInput) -> None:
        """Read messages and answer them."""
        leaves = False  # with the next Ctrl-C
        while True:
            try:
                message = turns.message()
                leaves = False
                if message is None or message.strip() in ("/exit", "/quit"):
                    break
                self._take(message)
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                if leaves:
                    break
                leaves = True
                self._tell("\nCtrl-C again or Ctrl-D leaves.")
        if self.interactive:
            self.console.print()  # the line that a key was pressed in

    def _take(self, message: str) -> None:
        word = message.strip()
        if word == "/help":
            self._tell(_what_can_be_typed())
        elif word == "/stats":
            self.console.print(self.figures.panel(self.conversation.context_length))
        elif word == "/reset":
            self.conversation.reset()
            self.figures = _Figures()
            self._tell("A new conversation begins.")
        elif word.startswith("/") and word[1:].isalpha():
            note(f"there is no command {word}; /help lists them")
        elif word:
            try:
                self._answer(message)
            except MlxspecError as error:
                if not self.interactive:
                    raise
                note(error)

    def _answer(self, message: str) -> None:
        """Answer a message, writing as the text comes; Ctrl-C ends the answer and no more."""
        printer = TokenPrinter(self.color)
        tokens: list[int] = []
        last: GenerationResponse | None = None
        ending = ""
        try:
            with (
                prefill_bar(self.console) as progress,
                closing(self.conversation.answer(message, progress)) as responses,
            ):
                for last in responses:
                    if last.generation_tokens == 1:
                        self._tell_dropped()
                    tokens.append(last.token)
                    printer.write(last.text, last.from_draft)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            ending = "stopped"
        finally:
            printer.finish()
            if self.learner:
                self.learner.add(tokens)
        if last is None:
            self._tell("Stopped before the first word; the message is forgotten.")
            return
        if last.finish_reason == "length":
            all_given = last.generation_tokens == self.conversation.max_tokens
            ending = "cut by --max-tokens" if all_given else "cut: the model's context is full"
        self.figures.add(last)
        if self.interactive:
            self._tell(_figures_line(last, ending))

    def _tell_dropped(self) -> None:
        if self.conversation.dropped:
            turns = counted(self.conversation.dropped, "turn")
            note(
                f"the model's context of {self.conversation.context_length:,} tokens is full: "
                f"left out {turns} at the beginning; /reset begins anew"
            )

    def _tell(self, text: str) -> None:
        self.console.print(visible(text), style="dim")


def _what_can_be_typed() -> str:
    """The end of the command's help."""
    lines = (chat_command.epilog or "").partition("At the prompt:\n")[2].splitlines()
    return "\n".join(line.strip() for line in lines if line)


def _figures_line(last: GenerationResponse, ending: str) -> str:
    """The figures of one answer.

    Args:
        last: its last response.
        ending: why it ended, where that is not for the model's own reasons.
    """
    figures = [
        f"{last.generation_tokens:,} tokens",
        f"{last.generation_tps:,.1f}/s",
        f"{last.stats.tokens_per_step:.2f} per step",
        f"{last.reused_tokens:,} of {last.prompt_tokens:,} prompt tokens reused",
    ]
    return " · ".join([*figures, ending] if ending else figures)


class _Figures:
    """Adds up what the answers of a conversation took."""

    def __init__(self) -> None:
        self._answers = self._prompt_tokens = self._reused_tokens = self._context = 0
        self._stats: SpeculationStats | None = None
        self._seconds = 0.0

    def add(self, last: GenerationResponse) -> None:
        """Count an answer by its last response."""
        self._answers += 1
        self._prompt_tokens += last.prompt_tokens
        self._reused_tokens += last.reused_tokens
        self._context = last.prompt_tokens + last.generation_tokens
        self._seconds += last.generation_tokens / last.generation_tps
        earlier = vars(self._stats) if self._stats else {}
        sums = {name: value + earlier.get(name, 0) for name, value in vars(last.stats).items()}
        self._stats = replace(last.stats, **sums)

    def panel(self, context_length: int | None) -> Panel:
        """All figures.

        Args:
            context_length: the model's, in tokens, where it is known.
        """
        rows: list[tuple[str, ...]] = [
            ("answers", str(self._answers)),
            ("context", f"{self._context:,}", f"of {context_length:,}" if context_length else ""),
            ("prompt tokens", f"{self._prompt_tokens:,}"),
            ("of them reused", f"{self._reused_tokens:,}"),
        ]
        if self._stats:
            rate = f"{self._stats.emitted / self._seconds:,.1f}/s"
            rows += [
                ("generated tokens", f"{self._stats.emitted:,}", rate),
                ("tokens per step", f"{self._stats.tokens_per_step:.2f}"),
                acceptance_row(self._stats),
            ]
        return Panel(figures_grid(rows), expand=False, border_style="dim")
