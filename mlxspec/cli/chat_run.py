"""What ``mlxspec chat`` does: load, and then read, answer, show, turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from rich.console import Console

from ..distributed.launch import launched_rank
from ..engine.positions import context_length
from ..errors import MlxspecError, OptionError
from ..generation.response import GenerationResponse, Transcript
from ..store.learner import Learner
from ..terminal import TokenPrinter, one_line, visible
from .answer import default_model, tell_of_default
from .chat_figures import ChatFigures, figures_line
from .chat_input import ChatInput
from .consoles import error_console
from .conversation import Conversation
from .decoding_choice import DecoderOptions, DecodingChoice
from .measuring_progress import MeasuringProgress
from .memory_options import take_memory
from .outcome import note
from .prefill_progress import PrefillProgress
from .sampling_options import sparing_line_ends, take_sampling
from .wording import counted

_HELP = '''/help    this text
/stats   figures of the conversation
/reset   begin a new conversation
/exit    leave; Ctrl-D and Ctrl-C twice do, too
"""      begins and ends a message of several lines
\\        at a line's end, goes on with the message in the next line
Ctrl-C stops an answer and keeps the conversation.'''


def chat(
    *,
    model: str | None,
    system_prompt: str | None,
    max_tokens: int,
    color: bool | None,
    **options: Any,
) -> None:
    """Chat; the arguments are the options of the command line.

    ``options`` are those of :func:`.sampling_options.sampling_options` and of
    :func:`.memory_options.memory_options`, and the fields of :class:`DecoderOptions`.

    Raises:
        MlxspecError: an option or the model is at fault, or a turn that comes through a pipe.
    """
    # All that needs no model is checked before one is loaded, or even downloaded.
    sampling, ends = take_sampling(options)
    memory = take_memory(options)
    choice = DecodingChoice(DecoderOptions(**options))
    if max_tokens < 1:
        raise OptionError(f"--max-tokens is {max_tokens}: generate at least 1 token")
    choice.check_room(max_tokens)
    if launched_rank() is not None:
        raise OptionError("chat runs in one process: start it without mlx.launch")
    turns = ChatInput()
    name = model or default_model()
    console = error_console(color)
    with MeasuringProgress(console) as measuring:
        decoder = choice.load(name, measuring)
    sampling = sparing_line_ends(sampling, decoder.tokenizer)
    conversation = Conversation(
        decoder.tokenizer,
        partial(choice.stream, decoder, sampling=sampling, **ends, **memory),
        context_length(decoder.model),
        max_tokens,
        system_prompt,
    )
    tell_of_default(model)
    if turns.interactive:
        console.print(f"Chatting with {one_line(name)}. /help says what can be typed.", style="dim")
    with choice.learner(decoder) as learner:
        _Chat(conversation, console, color, learner, turns.interactive).take(turns)


class _Chat:
    """Takes turns until the user leaves.

    Args:
        interactive: show figures, and go on after a message that cannot be answered.
    """

    def __init__(
        self,
        conversation: Conversation,
        console: Console,
        color: bool | None,
        learner: Learner | None,
        interactive: bool,
    ) -> None:
        self._conversation = conversation
        self._console = console
        self._color = color
        self._learner = learner
        self._interactive = interactive
        self._figures = ChatFigures()
        self._commands: dict[str, Callable[[], None]] = {
            "/help": lambda: self._tell(_HELP),
            "/stats": lambda: console.print(self._figures.panel(conversation.context_length)),
            "/reset": self._reset,
        }

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
                if not self._interactive:
                    raise
                if leaves:
                    break
                leaves = True
                self._tell("\nCtrl-C again or Ctrl-D leaves.")
        if self._interactive:
            self._console.print()  # the line that a key was pressed in

    def _take(self, message: str) -> None:
        word = message.strip()
        if word in self._commands:
            self._commands[word]()
        elif word.startswith("/") and word[1:].isalpha():
            note(f"there is no command {word}; /help lists them")
        elif word:
            try:
                self._answer(message)
            except MlxspecError as error:
                if not self._interactive:
                    raise
                note(error)

    def _answer(self, message: str) -> None:
        """Answer a message, writing as the text comes; Ctrl-C ends the answer and no more."""
        printer, transcript = TokenPrinter(self._color), Transcript()
        last: GenerationResponse | None = None
        ending = ""
        try:
            with (
                PrefillProgress(self._console) as progress,
                closing(self._conversation.answer(message, progress)) as responses,
            ):
                for last in responses:
                    if last.generation_tokens == 1:
                        self._tell_dropped()
                    transcript.add(last)
                    printer.write(last.text, last.from_draft)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            ending = "stopped"
        finally:
            printer.finish()
            if self._learner:
                self._learner.add(transcript.tokens)
        if last is None:
            self._tell("Stopped before the first word; the message is forgotten.")
            return
        if last.finish_reason == "length":
            all_given = last.generation_tokens == self._conversation.max_tokens
            ending = "cut by --max-tokens" if all_given else "cut: the model's context is full"
        self._figures.add(last)
        if self._interactive:
            self._tell(figures_line(last, ending))

    def _tell_dropped(self) -> None:
        if self._conversation.dropped:
            turns = counted(self._conversation.dropped, "turn")
            note(
                f"the model's context of {self._conversation.context_length:,} tokens is full: "
                f"left out {turns} at the beginning; /reset begins anew"
            )

    def _reset(self) -> None:
        self._conversation.reset()
        self._figures = ChatFigures()
        self._tell("A new conversation begins.")

    def _tell(self, text: str) -> None:
        self._console.print(visible(text), style="dim")
