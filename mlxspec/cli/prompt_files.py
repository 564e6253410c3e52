"""``mlxspec generate --prompts``: answers a file of prompts, several at a time.

A line is ``{"prompt": …}`` or ``{"messages": …}``, and what goes with it. As many lines as
``--concurrency`` says run in an :class:`Engine`; what has ended becomes a line of JSON. The results
are written in the order of the file. A prompt that cannot be answered has a result, too, which
says why. Lines are read when they are needed, so a file may be longer than memory.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import click
from rich.console import Console
from rich.panel import Panel
from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from rich.text import Text

from ..engine.params import SamplingParams
from ..errors import MlxspecError, OptionError, PromptError, printable
from ..generation.decoder import Decoder
from ..generation.engine import Engine
from ..generation.request import Request
from ..generation.response import GenerationResult, SpeculationStats, Transcript
from ..jsonl import conversation_of, json_lines
from ..process import INTERRUPTED
from .common.generation import Generation
from .common.model_choice import model_or_default, note_which_model
from .common.notes import in_one_line
from .common.options import check_least
from .common.output import (
    ProgressBar,
    acceptance_row,
    against_plain,
    error_console,
    figures_grid,
    json_text,
    rate,
    result_report,
)
from .common.prompt import PromptOptions
from .memory import Memories

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..models.chat_template import Messages

_CONCURRENCY = 8
_MOST_HELD = 1000  # results that wait for one before them; a few kilobytes each
_LONGEST_LINE = 100_000_000  # bytes; no context holds as much
_MARGIN = 50  # calls and levels by which writing may be nested deeper than checking
_FORM = 'write {"prompt": "..."} or {"messages": [...]}'

Lines = Iterator[tuple[int, Any]]
"""The number of each line, from 1, and its value; None where it is not JSON."""


def answer_prompts(
    file: str,
    concurrency: int | None,
    *,
    generation: Generation,
    prompt: PromptOptions,
    prompt_cache_file: str | None,
    logprobs: int | None,
    stats: bool,
    **shows: Any,
) -> None:
    """Answer the prompts of a file with the options of ``mlxspec generate``.

    Exits with status 1 if any of them cannot be answered, once all others are, and with status
    130 after writing what there is if Ctrl-C ends it.

    Args:
        file: its lines are as :func:`read_line` takes them; - is standard input.
        concurrency: how many are answered at once at most.
        shows: ``quiet``, ``color`` and ``as_json``; the results are JSON in any case.

    Raises:
        MlxspecError: an option, the file as a whole or the model is at fault.
    """
    # All that needs no model is checked before one is loaded, or even downloaded.
    others = prompt.named()
    others += ["--prompt-cache-file"] * (prompt_cache_file is not None) + ["--stats"] * stats
    if others:
        raise OptionError(f"--prompts and {others[0]} are given together: choose one")
    check_least(1, concurrency=concurrency)
    check_least(0, logprobs=logprobs)
    with open_prompts(file) as (lines, count), Memories(not generation.drafting.no_memory) as kept:
        console = error_console(shows["color"])
        quiet = Console(quiet=True) if shows["quiet"] else console
        decoder = generation.load(quiet, kept)
        # What no prompt could be answered with is an error of the command.
        prompt.uses_template("", decoder.tokenizer)
        decoder.checked(generation.max_tokens, generation.options(decoder))
        note_which_model(generation.model)
        answers = PromptAnswers(generation, decoder, prompt, concurrency or _CONCURRENCY, logprobs)
        answers.console = console
        # Where the results go to the terminal, or behind a pipe, they show the progress.
        hidden = console.is_interactive and _is_watched(sys.stdout)
        figures = MofNCompleteColumn(), TimeElapsedColumn()
        bar_console = Console(quiet=True) if hidden else quiet
        bar = ProgressBar("answers", *figures, console=bar_console)
        interrupted = answers.run(lines, count, bar)
        quiet.print()
        quiet.print(totals_panel(answers.totals, interrupted))
        if not shows["as_json"]:
            kept.tell_once()
    if interrupted:
        sys.exit(INTERRUPTED)
    if answers.totals.failed:
        sys.exit(1)


# --- the file ---


@contextmanager
def open_prompts(name: str) -> Iterator[tuple[Lines, int | None]]:
    """Open a file of prompts: its lines that are not blank, and how many there are.

    Args:
        name: the file; - is standard input. The number of lines in a pipe is None.

    Raises:
        PromptError: it cannot be read, or holds nothing but blank lines.
    """
    with ExitStack() as during:
        file: BinaryIO
        if name != "-":
            try:
                file = during.enter_context(open(name, "rb"))
            except OSError as error:
                raise PromptError(
                    f"--prompts {name} cannot be read ({error.strerror}): name a readable file"
                ) from error
        elif sys.stdin is None:
            raise PromptError("standard input is closed: give --prompts FILE")
        else:
            file = sys.stdin.buffer
        count = None
        if file.seekable():
            start = file.tell()
            count = sum(bool(line.strip()) for line in _lines(file))
            file.seek(start)
        values = json_lines(_lines(file))
        first = next(values, None)
        if first is None:
            source = "standard input" if name == "-" else name
            raise PromptError(f"{source} holds no prompt: {_FORM}, one a line")
        yield chain([first], values), count


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines; of one that is too long the first byte alone, which is not JSON with a prompt."""
    while line := file.readline(_LONGEST_LINE):
        part = line
        while not part.endswith(b"\n") and (part := file.readline(_LONGEST_LINE)):
            line = line[:1]
        yield line


# --- a line ---


@dataclass(frozen=True)
class Asked:
    """A line of the file: a prompt, and how to answer it.

    Attributes:
        prompt: a text or token ids; None where there are messages.
        messages: a conversation; the model's turn comes next.
        max_tokens: how many tokens to generate at most; None for the command's.
        ends: the given fields of :class:`.common.generation.Ends`.
        sampling: the given fields of :class:`mlxspec.SamplingParams`.
    """

    prompt: str | list[int] | None = None
    messages: Messages | None = None
    max_tokens: int | None = None
    ends: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    def generation(self, default: Generation) -> Generation:
        """The command's generation with the line's options.

        Raises:
            OptionError: the line gives a value that is out of range.
        """
        return replace(
            default,
            max_tokens=self.max_tokens or default.max_tokens,
            ends=replace(default.ends, **self.ends),
            sampling=replace(default.sampling, **self.sampling),
        )

    def tokens(self, tokenizer: TokenizerWrapper, options: PromptOptions) -> tuple[list[int], bool]:
        """The prompt as token ids, and whether it went into the chat template.

        Raises:
            PromptError, OptionError: the template does not apply, or the model has none.
        """
        if self.messages is not None:
            return _conversation_tokens(self.messages, tokenizer, options), True
        assert self.prompt is not None
        if not isinstance(self.prompt, str) and (given := options.for_template()):
            raise PromptError(
                f"token ids are taken as they are: leave out {given[0]}, or give a text"
            )
        templated = options.uses_template(self.prompt, tokenizer)
        return options.tokens(self.prompt, tokenizer, templated), templated


def _conversation_tokens(
    messages: Messages, tokenizer: TokenizerWrapper, options: PromptOptions
) -> list[int]:
    from ..models.chat_template import apply_template

    if options.chat is False:
        raise PromptError('"messages" need the chat template: leave out --raw, or give a "prompt"')
    if not tokenizer.has_chat_template:
        raise PromptError(
            '"messages" need a chat template, and this model has none: give a "prompt"'
        )
    try:
        messages, how = options.turns(messages)
        tokens: list[int] = apply_template(tokenizer, messages, **how)
    except PromptError as error:
        raise PromptError(f'{error}: change the "messages"') from error
    return tokens


def id_of(value: Any) -> Any:
    """The "id" of a line's value, whatever else is wrong with the line; None without one."""
    given = value.get("id") if isinstance(value, dict) else None
    return given if _is_json(given) else None


def read_line(value: Any) -> Asked:
    """Read the value of a line; an option that is null counts as not given.

    Raises:
        PromptError: it is not a prompt, or has an unknown key or a value of the wrong kind. The
            message names the key, and not the line.
    """
    record = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(record, dict):
        raise PromptError(f"not JSON with a prompt: {_FORM}")
    for key in record:
        if key not in _KEYS:
            similar = get_close_matches(key, _KEYS, 1, cutoff=0.5)
            remedy = (
                f'did you mean "{similar[0]}"' if similar else 'leave it out, or keep it in "id"'
            )
            raise PromptError(f'"{printable(key)}" is not a key of a prompt: {remedy}')
    if not _is_json(record.get("id")):
        raise PromptError('"id" holds NaN or an infinity, or is nested too deeply: write a text')
    read = {
        key: _read(key, record[key])
        for key in (*_KINDS, "prompt", "messages")
        if record.get(key) is not None
    }
    kinds = [key for key in ("prompt", "messages") if key in record]
    if len(kinds) != 1:
        found = "both" if kinds else "neither"
        raise PromptError(f'it has {found} of "prompt" and "messages": {_FORM}')
    if not read.get(kinds[0]):
        what = "null" if record[kinds[0]] is None else "empty"
        raise PromptError(f'"{kinds[0]}" is {what}: {_FORM}')
    return Asked(
        **{key: read[key] for key in (kinds[0], "max_tokens") if key in read},
        ends={key: read[key] for key in ("stop", "stop_tokens") if key in read},
        sampling={key: read[key] for key in _SAMPLING if key in read},
    )


def _read(key: str, value: Any) -> Any:
    """The value of a key, in the type that the options have.

    Raises:
        PromptError: it is of another kind.
    """
    read, form = _KINDS.get(key) or _PROMPTS[key]
    try:
        return read(value)
    except (AttributeError, OverflowError, TypeError):
        shown = json.dumps(value) if _is_json(value) else type(value).__name__
        raise PromptError(f'"{key}" is {printable(shown)}: {form}') from None
    except ValueError as error:
        raise PromptError(f'"{key}" cannot be read ({error}): {form}') from error


def _of(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise TypeError(value)
    return value


def _several(value: Any, *types: type) -> tuple[Any, ...]:
    return tuple(_of(one, *types) for one in (value if isinstance(value, list) else [value]))


def _prompt(value: Any) -> str | list[int]:
    return value if isinstance(value, str) else [_of(one, int) for one in _of(value, list)]


def _messages(value: Any) -> Messages:
    return conversation_of({"messages": value})[0]


def _max_tokens(value: Any) -> int:
    if _of(value, int) < 1:
        raise TypeError(value)
    return int(value)


def _biases(value: Any) -> dict[int, float]:
    if not all(token.isdecimal() for token in value):
        raise TypeError(value)
    return {int(token): float(_of(bias, int, float)) for token, bias in value.items()}


# What a key's value becomes, and what to write instead of a wrong one.
_Kind = tuple[Callable[[Any], Any], str]
_PROMPTS: dict[str, _Kind] = {
    "prompt": (_prompt, "give a text, or a list of token ids"),
    "messages": (_messages, 'write [{"role": "user", "content": "..."}]'),
}
_OF_TYPES: dict[str, _Kind] = {
    "float": (lambda value: float(_of(value, int, float)), "give a number"),
    "int": (lambda value: _of(value, int), "give a whole number"),
    "Mapping[int, float]": (_biases, 'write token ids and numbers, {"42": -5}'),
}
# What the command has as options; processors and samplers are functions.
_SAMPLING: dict[str, _Kind] = {
    own.name: _OF_TYPES[str(own.type).partition(" | ")[0]]
    for own in fields(SamplingParams)
    if "help" in own.metadata
}
_KINDS: dict[str, _Kind] = {
    "max_tokens": (_max_tokens, "give a whole number, 1 or more"),
    "stop": (lambda value: _several(value, str), "give a text, or a list of texts"),
    "stop_tokens": (
        lambda value: _several(value, int, str),
        "give ids, or texts of one token, in a list",
    ),
    **_SAMPLING,
}
_KEYS = ["id", *_PROMPTS, *_KINDS]


def _is_json(value: Any) -> bool:
    """Whether it can be written as JSON: Python also reads NaN and infinities."""
    for _ in range(_MARGIN):
        value = [value]
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


# --- the answers ---


@dataclass
class Totals:
    """Sums over all answers.

    Attributes:
        answered, failed, unfinished: prompts; the last ones were interrupted.
        prompt_tokens, generated_tokens: of the answered and the unfinished ones.
        prefill_seconds: the time that prompts took.
        seconds: the time of everything.
        stats: sums over the answers.
        decode_seconds: the time of the answers' steps, added up over the answers.
        plain_seconds: the same without drafts at the same concurrency, by the measured costs; 0 if
            these are unknown.
    """

    answered: int = 0
    failed: int = 0
    unfinished: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    decode_seconds: float = 0.0
    plain_seconds: float = 0.0

    def add(self, result: GenerationResult) -> None:
        """Count an answer."""
        if result.finish_reason == "interrupted":
            self.unfinished += 1
        else:
            self.answered += 1
        self.prompt_tokens += result.prompt_tokens
        self.generated_tokens += len(result.tokens)
        sums = zip(astuple(self.stats), astuple(result.stats), strict=True)
        self.stats = SpeculationStats(*map(sum, sums))


@dataclass(eq=False)
class _PromptAnswer:
    """The answer to one line of the file.

    Attributes:
        number: the line's, from 1.
        place: the beginning of its result: "index", counted from 0 without blank lines, and "id".
        transcript: collects the responses.
        request: what answers it, until there is a result.
        prompt_tokens: how many tokens the prompt has.
        line: the result as it is written, once there is one.
    """

    number: int
    place: dict[str, Any]
    transcript: Transcript
    request: Request | None = None
    prompt_tokens: int = 0
    line: str | None = None

    def end(self, report: dict[str, Any]) -> None:
        """Keep the result alone: responses hold log-probabilities of the whole vocabulary."""
        self.line = json_text({**self.place, **report})
        self.request, self.transcript = None, Transcript()


class PromptAnswers:
    """Answers the lines of a file and writes the results to standard output, in their order.

    Args:
        generation: how to generate where a line says nothing.
        decoder: its own.
        prompt: what goes into the chat template, and how, where a line says nothing.
        concurrency: how many prompts are answered at once at most.
        logprobs: as for :class:`Transcript`.

    Attributes:
        totals: of what has been answered so far.
        console: gets a line for each prompt that cannot be answered.
    """

    def __init__(
        self,
        generation: Generation,
        decoder: Decoder,
        prompt: PromptOptions,
        concurrency: int,
        logprobs: int | None = None,
    ) -> None:
        self.totals = Totals()
        self.console = error_console()
        self._generation = generation
        self._decoder = decoder
        self._prompt = prompt
        self._logprobs = logprobs
        # No answer is read as it comes, so none suffers while the prompts of others run.
        self._engine = Engine(decoder, max_active=concurrency, stall=math.inf)
        self._begun = 0
        self._held: deque[_PromptAnswer] = deque()  # all that are not written, in the file's order

    def run(self, lines: Lines, count: int | None, bar: ProgressBar) -> bool:
        """Answer all lines, or as many as there is time for until Ctrl-C.

        Args:
            lines: of :func:`open_prompts`.
            count: how many there are, if that is known.
            bar: shows how many are done.

        Returns:
            whether it was interrupted. Then what there is has been written, too: finished
            answers, and the text so far of the others.
        """
        started = time.perf_counter()
        interrupted = False
        try:
            with bar, self._engine.running():
                bar(0, count)
                while self._begin_more(lines):
                    self._engine.turn()
                    for answer in self._held:
                        if answer.request and answer.request.done:
                            self._finish(answer)
                    self._write_finished()
                    bar(self.totals.answered + self.totals.failed, count)
        except KeyboardInterrupt:
            interrupted = True
            for answer in self._held:
                if answer.line is None:
                    self._finish(answer)
            self._write_finished()
        self.totals.seconds = time.perf_counter() - started
        self.totals.prefill_seconds = self._engine.prefill_seconds
        return interrupted

    def _begin_more(self, lines: Lines) -> bool:
        """Begin as many answers as may run; returns whether there is anything left to do."""
        while self._engine.room > 0 and len(self._held) < _MOST_HELD:
            line = next(lines, None)
            if line is None:
                break
            number, value = line
            place = {"index": self._begun, "id": id_of(value)}
            answer = _PromptAnswer(number, place, Transcript(self._logprobs))
            self._held.append(answer)
            self._begun += 1
            try:
                self._begin(answer, value)
            except MlxspecError as error:
                self._fail(answer, error)
        return bool(self._held)

    def _begin(self, answer: _PromptAnswer, value: Any) -> None:
        """Begin an answer.

        Raises:
            MlxspecError: it cannot be given.
        """
        decoder = self._decoder
        asked = read_line(value)
        generation = asked.generation(self._generation)
        tokens, templated = asked.tokens(decoder.tokenizer, self._prompt)
        room = generation.room(decoder.model, len(tokens))
        answer.prompt_tokens = len(tokens)
        request = generation.request(
            *(decoder, tokens, room, answer.transcript.add, templated),
            begun=self._prompt.prefill_response,
        )
        self._engine.add(request)
        answer.request = request

    def _finish(self, answer: _PromptAnswer) -> None:
        """Make a result of what has been generated, or of the error that ended it."""
        if request := answer.request:
            self.totals.plain_seconds += request.plain_seconds
            self.totals.decode_seconds += request.decode_seconds
            if request.error:
                self._fail(answer, request.error)
                return
        result = answer.transcript.result(step_times=[])
        result = replace(result, prompt_tokens=answer.prompt_tokens)
        report = result_report(result, model_or_default(self._generation.model))
        del report["step_times"]  # which are those of all answers
        answer.end(report)  # first: an interrupt does not count twice what it finds ended
        self.totals.add(result)

    def _fail(self, answer: _PromptAnswer, error: Exception) -> None:
        """Make a result of an error, and show it."""
        # A custom drafter may raise anything.
        kind = "" if isinstance(error, MlxspecError) else f"{type(error).__name__}: "
        message = f"line {answer.number}: {kind}{error}"
        self.totals.failed += 1
        self.console.print(Text(f"Error: {in_one_line(message)}"), soft_wrap=True)
        answer.end({"error": message})

    def _write_finished(self) -> None:
        """Write the results that are next in order."""
        while self._held and self._held[0].line is not None:
            # In this order an interrupt can write none twice.
            click.echo(self._held.popleft().line)


def _is_watched(stream: TextIO) -> bool:
    """Whether a stream goes to a terminal, or to a program that may write to one (``| jq``)."""
    return stream.isatty() or stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)


def totals_panel(totals: Totals, interrupted: bool) -> Panel:
    """The figures of all answers together."""
    rows: list[tuple[str, ...]] = [("prompts answered", str(totals.answered))]
    if totals.failed:
        rows.append(("failed", str(totals.failed)))
    if totals.unfinished:
        rows.append(("unfinished", str(totals.unfinished)))
    for name, tokens, seconds in (
        ("prompt tokens", totals.prompt_tokens, totals.prefill_seconds),
        ("generated tokens", totals.generated_tokens, totals.seconds),
    ):
        rows.append((name, str(tokens), rate(tokens / seconds if seconds else 0.0)))
    rows += [
        ("tokens per step", f"{totals.stats.tokens_per_step:.2f}"),
        acceptance_row(totals.stats),
        *against_plain(totals.plain_seconds, totals.decode_seconds),
    ]
    subtitle = "interrupted" if interrupted else None
    return Panel(figures_grid(rows), expand=False, border_style="dim", subtitle=subtitle)
