"""``mlxspec generate --prompts``: answers a file of prompts, several at a time.

Each line of the file becomes an :class:`_Answer`. As many of them as ``--concurrency`` says run
in an :class:`Engine`; what has ended becomes a line of JSON. A line is written as soon as all
before it are, so the order of the results is that of the file. A prompt that cannot be answered
has a result, too, which says why.
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
from ..generation.response import (
    GenerationResponse,
    GenerationResult,
    SpeculationStats,
    Transcript,
)
from ..jsonl import conversation_of, json_lines
from ..models.detokenizer import detokenizer_of
from ..process import INTERRUPTED
from .common.figures import acceptance_row, against_plain, rate, result_report
from .common.generation import Generation
from .common.model_choice import model_or_default, tell_of_model
from .common.notes import told
from .common.options import check_least
from .common.output import ProgressBar, error_console, figures_grid, json_text
from .common.prompt import PromptOptions
from .memory import Memories

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..models.chat_template import Messages

_LONGEST_LINE = 100_000_000  # bytes; no context holds as much
_MARGIN = 50  # calls and levels by which writing may be nested deeper than checking
_FORM = 'write {"prompt": "..."} or {"messages": [...]}'


@dataclass(frozen=True)
class PromptLines:
    """The lines of a file that are not blank.

    Attributes:
        values: the number of each line, from 1, and its value; None where it is no JSON. It is
            read when the next one is asked for.
        count: how many there are; None where that cannot be known before, as in a pipe.
    """

    values: Iterator[tuple[int, Any]]
    count: int | None


@contextmanager
def open_prompts(name: str) -> Iterator[PromptLines]:
    """Open a file of prompts.

    Args:
        name: the file; - is standard input.

    Raises:
        PromptError: it cannot be read, or holds nothing but blank lines.
    """
    with ExitStack() as during:
        if name != "-":
            source = name
            try:
                file: BinaryIO = during.enter_context(open(name, "rb"))
            except OSError as error:
                raise PromptError(
                    f"--prompts {name} cannot be read ({error.strerror}): name a readable file"
                ) from error
        elif sys.stdin is None:
            raise PromptError("standard input is closed: give --prompts FILE")
        else:
            source, file = "standard input", sys.stdin.buffer
        count = _count(file) if file.seekable() else None
        values = json_lines(_lines(file))
        first = next(values, None)
        if first is None:
            raise PromptError(f"{source} holds no prompt: {_FORM}, one a line")
        yield PromptLines(chain([first], values), count)


def _count(file: BinaryIO) -> int:
    """How many lines that are not blank follow."""
    start = file.tell()
    count = sum(bool(line.strip()) for line in _lines(file))
    file.seek(start)
    return count


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines; of one that is too long its first byte alone, which is no JSON with a prompt."""
    while line := file.readline(_LONGEST_LINE):
        part = line
        while not part.endswith(b"\n") and (part := file.readline(_LONGEST_LINE)):
            line = line[:1]
        yield line


@dataclass(frozen=True)
class Asked:
    """A line of the file: a prompt, and what it says of its answer.

    Attributes:
        prompt: a text or token ids; None where there are messages.
        messages: a conversation; the model's turn comes next.
        max_tokens: how many tokens to generate at most; None where the line does not say it.
        ends: the given fields of :class:`.generating.Ends`.
        sampling: the given fields of :class:`mlxspec.SamplingParams`.
    """

    prompt: str | list[int] | None = None
    messages: Messages | None = None
    max_tokens: int | None = None
    ends: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    def generation(self, default: Generation) -> Generation:
        """How to generate: as ``default`` says where the line says nothing.

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

        Args:
            tokenizer: the model's.
            options: what goes into the chat template, and how, where the line says nothing.

        Raises:
            PromptError, OptionError: the template does not apply, or there is none.
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
    """Understand the value of a line.

    An option that is null is taken as not given.

    Raises:
        PromptError: it is no prompt, has a key that means nothing, or a value of the wrong kind.
            The message names the key, and not the line.
    """
    record = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(record, dict):
        raise PromptError(f"no JSON with a prompt: {_FORM}")
    for key in record:
        if key not in _KEYS:
            raise PromptError(_unknown(key))
    if not _is_json(record.get("id")):
        raise PromptError('"id" holds NaN or an infinity, or is nested too deeply: write a text')
    given = {key: record[key] for key in _READ if record.get(key) is not None}
    read = {key: _READ[key](key, value) for key, value in given.items()}
    return Asked(
        **_prompt(record),
        max_tokens=read.get("max_tokens"),
        ends={key: read[key] for key in _ENDS if key in read},
        sampling={key: read[key] for key in _SAMPLING if key in read},
    )


def _prompt(record: dict[str, Any]) -> dict[str, Any]:
    """The prompt or the messages, as fields of :class:`Asked`."""
    kinds = [key for key in ("prompt", "messages") if key in record]
    if len(kinds) != 1:
        found = "both" if kinds else "neither"
        raise PromptError(f'it has {found} of "prompt" and "messages": {_FORM}')
    given = record[kinds[0]]
    if given in ("", []):
        raise PromptError(f'"{kinds[0]}" is empty: {_FORM}')
    if kinds == ["messages"]:
        return {"messages": _messages(given)}
    if not isinstance(given, str) and not _is_list_of(given, int):
        raise PromptError(f'"prompt" is {_shown(given)}: give a text, or a list of token ids')
    return {"prompt": given}


def _messages(given: Any) -> Messages:
    try:
        conversation = conversation_of({"messages": given})
    except ValueError as error:
        form = '[{"role": "user", "content": "..."}]'
        raise PromptError(f'"messages" cannot be read ({error}): write {form}') from error
    return [{"role": turn.role, "content": turn.content} for turn in conversation.messages]


def _max_tokens(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise PromptError(f'"{key}" is {_shown(value)}: give a whole number, 1 or more')
    return value


def _texts(key: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not _is_list_of(texts, str):
        raise PromptError(f'"{key}" is {_shown(value)}: give a text, or a list of texts')
    return tuple(texts)


def _tokens(key: str, value: Any) -> tuple[int | str, ...]:
    tokens = value if isinstance(value, list) else [value]
    if not _is_list_of(tokens, int, str):
        raise PromptError(f'"{key}" is {_shown(value)}: give ids, or texts of one token, in a list')
    return tuple(tokens)


def _whole_number(key: str, value: Any) -> int:
    if type(value) is not int:
        raise PromptError(f'"{key}" is {_shown(value)}: give a whole number')
    return value


def _number(key: str, value: Any) -> float:
    try:
        if type(value) in (int, float):
            return float(value)
    except OverflowError:  # an integer with hundreds of digits
        pass
    raise PromptError(f'"{key}" is {_shown(value)}: give a number')


def _biases(key: str, value: Any) -> dict[int, float]:
    try:
        return {int(token): _number(key, bias) for token, bias in value.items()}
    except (AttributeError, ValueError):
        raise PromptError(
            f'"{key}" is {_shown(value)}: write token ids and numbers, {{"42": -5}}'
        ) from None


_Read = Callable[[str, Any], Any]

_ENDS: dict[str, _Read] = {"stop": _texts, "stop_tokens": _tokens}
_KINDS: dict[str, _Read] = {"float": _number, "int": _whole_number, "Mapping[int, float]": _biases}
# What the command has as options; processors and samplers are functions.
_SAMPLING: dict[str, _Read] = {
    own.name: _KINDS[str(own.type).partition(" | ")[0]]
    for own in fields(SamplingParams)
    if "help" in own.metadata
}
_READ: dict[str, _Read] = {"max_tokens": _max_tokens, **_ENDS, **_SAMPLING}
_KEYS = ["prompt", "messages", "id", *_READ]


def _unknown(key: str) -> str:
    similar = get_close_matches(key, _KEYS, 1, cutoff=0.5)
    remedy = f'did you mean "{similar[0]}"' if similar else 'leave it out, or keep it in "id"'
    return f'"{printable(key)}" is no key of a prompt: {remedy}'


def _is_list_of(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(type(item) in kinds for item in value)


def _is_json(value: Any) -> bool:
    """Whether it can be written as JSON: Python also reads NaN and infinities."""
    for _ in range(_MARGIN):
        value = [value]
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _shown(value: Any) -> str:
    return printable(json.dumps(value) if _is_json(value) else type(value).__name__)


_CONCURRENCY = 8
_MOST_HELD = 1000  # results that wait for one before them; a few kilobytes each


def answer_prompts(
    file: str,
    concurrency: int | None,
    *,
    generation: Generation,
    prompt: PromptOptions,
    prompt_cache_file: str | None,
    quiet: bool,
    color: bool | None,
    stats: bool,
    as_json: bool,
    logprobs: int | None,
) -> None:
    """Answer the prompts of a file with the options of ``mlxspec generate``.

    Exits with status 1 if any of them cannot be answered, once all others are, and with status
    130 after writing what there is if Ctrl-C ends it.

    Args:
        file: its lines are as :func:`.prompt_files.read_line` takes them; - is standard input.
        concurrency: how many are answered at once at most.
        as_json: changes nothing of the results, which are JSON.

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
    with open_prompts(file) as lines, Memories(not generation.drafting.no_memory) as memories:
        console = error_console(color)
        decoder = generation.load(Console(quiet=True) if quiet else console, memories)
        _check(generation, prompt, decoder)
        tell_of_model(generation.model)
        answers = Answers(
            generation,
            decoder,
            concurrency=concurrency or _CONCURRENCY,
            prompt=prompt,
            logprobs=logprobs,
            console=console,
            quiet=quiet,
        )
        interrupted = answers.run(lines)
        if not quiet:
            console.print()
            console.print(totals_panel(answers.totals, interrupted))
        if not as_json:
            memories.tell_once()
    if interrupted:
        sys.exit(INTERRUPTED)
    if answers.totals.failed:
        sys.exit(1)


def _check(generation: Generation, prompt: PromptOptions, decoder: Decoder) -> None:
    """Refuse options that no prompt could be answered with.

    Raises:
        OptionError: one of them does not fit the model.
    """
    prompt.uses_template("", decoder.tokenizer)
    decoder.checked(generation.max_tokens, generation.options(decoder))


@dataclass
class Totals:
    """What all answers together came to.

    Attributes:
        answered, failed, unfinished: prompts; the last ones were interrupted.
        prompt_tokens, generated_tokens: of the answered and the unfinished ones.
        prefill_seconds: the time that prompts took.
        seconds: the time of everything.
        stats: sums over the answers.
        decode_seconds: the time of the answers' steps, added up over the answers.
        plain_seconds: the same without drafts and as many at once, by the measured costs; 0 where
            these are not known.
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


class _Answer:
    """The answer to one line of the file.

    Args:
        number: the line's, from 1.
        place: the beginning of its result: "index", counted from 0 without blank lines, and "id".
        logprobs: as for :class:`Transcript`.

    Attributes:
        request: what answers it, until there is a result.
        prompt_tokens: how many tokens the prompt has.
        trims: whether the first space of the text is the tokenizer's own.
        line: the result as it is written, once there is one.
    """

    def __init__(self, number: int, place: dict[str, Any], logprobs: int | None) -> None:
        self.number = number
        self.place = place
        self.request: Request | None = None
        self.prompt_tokens = 0
        self.trims = False
        self.line: str | None = None
        self._transcript = Transcript(logprobs)

    def add(self, response: GenerationResponse) -> None:
        """Append the next response."""
        if self.trims and response.text:
            response = replace(response, text=response.text.removeprefix(" "))
            self.trims = False
        self._transcript.add(response)

    def result(self) -> GenerationResult:
        """What has been generated so far. A decoder's step times are those of all answers."""
        return replace(self._transcript.result(step_times=[]), prompt_tokens=self.prompt_tokens)

    def write(self, report: dict[str, Any]) -> None:
        """Keep the result alone: responses hold log-probabilities of the whole vocabulary."""
        self.line = json_text({**self.place, **report})
        del self._transcript, self.request


class Answers:
    """Answers the lines of a file and writes the results to standard output, in their order.

    Args:
        generation: how to generate where a line says nothing.
        decoder: its own.
        concurrency: how many prompts are answered at once at most.
        prompt: what goes into the chat template, and how, where a line says nothing.
        logprobs: as for :class:`Transcript`.
        console: gets a line for each prompt that cannot be answered, and the progress.
        quiet: show no progress.

    Attributes:
        totals: of what has been answered so far.
    """

    def __init__(
        self,
        generation: Generation,
        decoder: Decoder,
        *,
        concurrency: int,
        prompt: PromptOptions,
        logprobs: int | None,
        console: Console,
        quiet: bool = False,
    ) -> None:
        self.totals = Totals()
        self._generation = generation
        self._decoder = decoder
        self._prompt = prompt
        self._logprobs = logprobs
        self._console = console
        self._quiet = quiet
        self._model = model_or_default(generation.model)
        self._first_space = detokenizer_of(decoder.tokenizer).prefix_space
        # No answer is read as it comes, so none suffers while the prompts of others run.
        self._engine = Engine(decoder, max_active=concurrency, stall=math.inf)
        self._begun = 0
        self._running: list[_Answer] = []
        self._held: deque[_Answer] = deque()  # all that are not written, in the file's order

    def run(self, lines: PromptLines) -> bool:
        """Answer all lines, or as many as there is time for until Ctrl-C.

        Returns:
            whether it was interrupted. Then what there is has been written, too: the answers
            that had ended, and the text so far of those that had not.
        """
        started = time.perf_counter()
        interrupted = False
        try:
            with self._progress() as progress, self._engine.running():
                progress(0, lines.count)
                while self._begin_more(lines.values):
                    self._engine.turn()
                    self._finish_ended()
                    self._write_finished()
                    progress(self.totals.answered + self.totals.failed, lines.count)
        except KeyboardInterrupt:
            interrupted = True
            for answer in self._held:
                if answer.line is None:
                    self._finish(answer)
            self._write_finished()
        self.totals.seconds = time.perf_counter() - started
        self.totals.prefill_seconds = self._engine.prefill_seconds
        return interrupted

    def _progress(self) -> ProgressBar:
        """A bar; none where the results show the progress, at the terminal or behind a pipe."""
        hidden = self._quiet or (self._console.is_interactive and _is_watched(sys.stdout))
        console = Console(quiet=True) if hidden else self._console
        figures = MofNCompleteColumn(), TimeElapsedColumn()
        return ProgressBar("answers", *figures, console=console)

    def _begin_more(self, lines: Iterator[tuple[int, Any]]) -> bool:
        """Begin as many answers as may run; returns whether there is anything left to do."""
        while self._engine.room > 0 and len(self._held) < _MOST_HELD:
            line = next(lines, None)
            if line is None:
                break
            number, value = line
            place = {"index": self._begun, "id": id_of(value)}
            answer = _Answer(number, place, self._logprobs)
            self._held.append(answer)
            self._begun += 1
            self._begin(answer, value)
        return bool(self._held)

    def _begin(self, answer: _Answer, value: Any) -> None:
        """Begin an answer, or tell why it cannot be given."""
        decoder = self._decoder
        try:
            asked = read_line(value)
            generation = asked.generation(self._generation)
            tokens, templated = asked.tokens(decoder.tokenizer, self._prompt)
            room = generation.room(decoder.model, len(tokens))
            answer.prompt_tokens = len(tokens)
            # In a chat the answer is a text of its own, whose first space the tokenizer has put
            # there.
            begun = self._prompt.prefill_response
            answer.trims = templated and begun is None and self._first_space
            answer.request = generation.request(
                *(decoder, tokens, room, answer.add, templated), begun=begun
            )
            self._engine.add(answer.request)
        except MlxspecError as error:
            self._fail(answer, error)
        else:
            self._running.append(answer)

    def _finish_ended(self) -> None:
        """Make results of the answers that have ended."""
        ended = [answer for answer in self._running if answer.request and answer.request.done]
        for answer in ended:
            self._running.remove(answer)
            self._finish(answer)

    def _finish(self, answer: _Answer) -> None:
        """Make a result of what has been generated, or of what has ended that."""
        if request := answer.request:
            self.totals.plain_seconds += request.plain_seconds
            self.totals.decode_seconds += request.decode_seconds
            if request.error:
                self._fail(answer, request.error)
                return
        result = answer.result()
        report = result_report(result, self._model)
        del report["step_times"]
        answer.write(report)  # first: what an interrupt finds written is not counted again
        self.totals.add(result)

    def _fail(self, answer: _Answer, error: Exception) -> None:
        """Make a result of an error, and tell it."""
        # What a drafter of the user's own raises may be anything.
        cause = (
            str(error) if isinstance(error, MlxspecError) else f"{type(error).__name__}: {error}"
        )
        message = f"line {answer.number}: {cause}"
        self.totals.failed += 1
        self._console.print(Text(f"Error: {told(message)}"), soft_wrap=True)
        answer.write({"error": message})

    def _write_finished(self) -> None:
        """Write the results before which nothing is missing."""
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
    rows += [
        (
            "prompt tokens",
            str(totals.prompt_tokens),
            _rate(totals.prompt_tokens, totals.prefill_seconds),
        ),
        (
            "generated tokens",
            str(totals.generated_tokens),
            _rate(totals.generated_tokens, totals.seconds),
        ),
        ("tokens per step", f"{totals.stats.tokens_per_step:.2f}"),
        acceptance_row(totals.stats),
        *against_plain(totals.plain_seconds, totals.decode_seconds),
    ]
    subtitle = "interrupted" if interrupted else None
    return Panel(figures_grid(rows), expand=False, border_style="dim", subtitle=subtitle)


def _rate(tokens: int, seconds: float) -> str:
    return rate(tokens / seconds if seconds else 0.0)
