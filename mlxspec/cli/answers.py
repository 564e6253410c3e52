"""``mlxspec generate --prompts``: answers a file of prompts, several at a time.

Each line of the file becomes an :class:`_Answer`. As many of them as ``--concurrency`` says run
in an :class:`Engine`; what has ended becomes a line of JSON. A line is written as soon as all
before it are, so the order of the results is that of the file. A prompt that cannot be answered
has a result, too, which says why.
"""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TextIO

import click
from rich.console import Console
from rich.panel import Panel
from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from rich.text import Text

from ..errors import MlxspecError, OptionError
from ..generation.decoder import Decoder
from ..generation.engine import Engine
from ..generation.request import Request
from ..generation.response import (
    GenerationResponse,
    GenerationResult,
    SpeculationStats,
    Transcript,
)
from ..models.detokenizer import detokenizer_of
from ..process import INTERRUPTED
from .figures import acceptance_row, against_plain, rate, result_report
from .generating import Generation
from .memory import Memories
from .model_choice import model_or_default, tell_of_model
from .options import check_least
from .outcome import told
from .output import ProgressBar, error_console, figures_grid, json_text
from .prompts import PromptOptions
from .prompts_file import PromptLines, id_of, open_prompts, read_line

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
        file: its lines are as :func:`.prompts_file.read_line` takes them; - is standard input.
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
