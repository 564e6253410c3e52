"""``mlxspec generate --prompts``: answers a file of prompts, several at a time.

A line is ``{"prompt": …}`` or ``{"messages": …}``, and may also have options. A :class:`Scheduler`
runs up to ``--concurrency`` lines at once, and each result becomes a line of JSON. Results are
written in the order of the file. If a prompt cannot be answered, its result gives the reason. Lines
are read as they are needed, so a file may be larger than memory.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.panel import Panel
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from ..engine.params import SamplingParams
from ..errors import MlxspecError, OptionError, PromptError, printable
from ..generation.decoder import Decoder
from ..generation.options import checked_max_tokens
from ..generation.request import Request
from ..generation.response import GenerationResult
from ..generation.scheduler import Scheduler
from ..jsonl import conversation_of, json_lines
from ..process import INTERRUPTED
from .common.generation import GenerationSettings
from .common.model_choice import model_or_default, note_if_demo
from .common.output import Figures, ProgressBar, counted, error_console, json_text, result_report
from .common.prompt import PromptOptions
from .memory import Memories

if TYPE_CHECKING:
    from ..distributed.ranks import Leader

_FORM = 'write {"prompt": "..."} or {"messages": [...]}'


def answer_prompts(
    file: str,
    concurrency: int,
    *,
    generation: GenerationSettings,
    prompt: PromptOptions,
    prompt_cache_file: str | None,
    logprobs: int | None,
    leader: Leader | None = None,
    **shows: Any,
) -> None:
    """Answer the prompts of a file with the options of ``mlxspec generate``.

    If some prompts cannot be answered, it answers the others and exits with status 1. After Ctrl-C
    it writes the results so far and exits with status 130.

    Args:
        file: a file of lines in the form that :func:`read_line` accepts; - is standard input.
        leader: splits the model over its ranks; None for one process.
        shows: ``quiet``, ``color`` and ``as_json``; the results are always JSON.

    Raises:
        MlxspecError, OSError: an option, the file, one of its prompts or the model is invalid.
    """
    # Check what can be checked without a model before a model is loaded or downloaded.
    others = prompt.names()
    if prompt_cache_file is not None:
        others.append("--prompt-cache-file")
    if others:
        raise OptionError(f"--prompts and {others[0]} are given together: choose one")
    keeps = not generation.drafting.no_saved_answers
    with click.open_file(file, "rb") as opened, Memories(keeps) as kept:
        console = Console(quiet=True) if shows["quiet"] else error_console(shows["color"])
        decoder = generation.load(console, kept, leader)
        # If the options would make every prompt fail, the command fails.
        prompt.uses_template("", decoder.tokenizer)
        decoder.new_request([0], generation.max_tokens, generation.options(decoder))
        note_if_demo(generation.model)
        answers = PromptAnswers(generation, decoder, prompt, concurrency, logprobs)
        # If results appear on the terminal, no progress bar is needed.
        shown = Console(quiet=True) if sys.stdout.isatty() else console
        bar = ProgressBar("answers", MofNCompleteColumn(), TimeElapsedColumn(), console=shown)
        interrupted = answers.run(json_lines(opened), bar)
        console.print("", answers.panel(interrupted), sep="\n")
        if not (shows["as_json"] or shows["quiet"]):
            kept.suggest_once()
    if interrupted:
        sys.exit(INTERRUPTED)
    if answers.failed:
        failed = counted(answers.failed, "prompt")
        raise PromptError(f'{failed} could not be answered: see "error" in the results')


# --- a line ---

_NOT_JSON = {"logits_processors", "sampler", "xtc_special_tokens"}
_SAMPLING = {field.name for field in fields(SamplingParams)} - _NOT_JSON
_OPTIONS = _SAMPLING | {"max_tokens", "stop", "stop_tokens"}


def read_line(value: Any) -> dict[str, Any]:
    """Check a line except for its options, and return its entries that are not null.

    Raises:
        PromptError: it is not a prompt, or has an unknown key. The message does not name the line.
    """
    record = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(record, dict):
        raise PromptError(f"not JSON with a prompt: {_FORM}")
    given = {key: field for key, field in record.items() if field is not None}
    if unknown := sorted(given.keys() - _OPTIONS - {"id", "prompt", "messages"}):
        raise PromptError(f'"{printable(unknown[0])}": leave it out, or keep it in "id"')
    prompt = given.get("prompt", "")
    is_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    if not (is_ids or isinstance(prompt, str)) or bool(prompt) == bool(given.get("messages")):
        raise PromptError(f'it needs "prompt" or "messages", not both, and not empty: {_FORM}')
    try:
        if "messages" in given:
            given["messages"] = conversation_of(given)[0]
        if "logit_bias" in given:  # JSON's keys are strings
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    except (AttributeError, ValueError) as error:
        raise PromptError(
            f'"messages" or "logit_bias" cannot be read ({error}): {_FORM}'
        ) from error
    return given


# --- the answers ---


@dataclass
class PromptAnswers:
    """Answers the lines of a file and writes the results to standard output, in order.

    Attributes:
        generation: the options, which a line may override.
        decoder: the decoder of ``generation``.
        prompt: options of the chat template.
        concurrency: the most prompts to answer at once.
        logprobs: how many of the likeliest tokens get log-probabilities in the results, in addition
            to the chosen token; None for no log-probabilities.
        failed: how many prompts could not be answered.
        figures: the figures of the prompts that were answered.
    """

    generation: GenerationSettings
    decoder: Decoder
    prompt: PromptOptions
    concurrency: int
    logprobs: int | None

    def __post_init__(self) -> None:
        self.failed = self._begun = self._written = 0
        self.figures = Figures()
        # Nobody reads the answers as they grow, so they may wait while other prompts run.
        self._engine = Scheduler(self.decoder, max_active=self.concurrency, stall=math.inf)
        self._ready: dict[int, str] = {}  # results that wait for earlier ones, by their index

    def panel(self, interrupted: bool) -> Panel:
        """The figures of all answers."""
        rows = [("prompts answered", f"{self.figures.answers:,}")]
        if self.failed:
            rows.append(("prompts failed", f"{self.failed:,}"))
        return self.figures.panel(*rows, subtitle="interrupted" if interrupted else None)

    def run(self, lines: Iterator[tuple[int, Any]], bar: ProgressBar) -> bool:
        """Answer lines until all are done or Ctrl-C is pressed.

        Args:
            lines: the number of each line, from 1, and its value, which is None if it is not JSON.

        Returns:
            whether it was interrupted. Even then, all finished answers have been written, and the
            others as far as they were generated.
        """
        started, interrupted = time.perf_counter(), False
        try:
            with bar, self._engine.running():
                while self._begin_more(lines):
                    bar(self.figures.answers + self.failed, None)
                    self._engine.turn()
                    self._write()
        except KeyboardInterrupt:
            interrupted = True
        self._write()
        self.figures.seconds = time.perf_counter() - started
        self.figures.prefill_seconds = self._engine.prefill_seconds
        return interrupted

    def _begin_more(self, lines: Iterator[tuple[int, Any]]) -> bool:
        """Start as many answers as may run at once; return whether any work is left."""
        while self._engine.room > 0 and (line := next(lines, None)):
            number, value = line
            given_id = value.get("id") if isinstance(value, dict) else None
            names = {"index": self._begun, "id": given_id}
            self._begun += 1
            try:
                self._engine.add(self._request(value, names, number))
            except (MlxspecError, TypeError) as error:
                self._fail(names, number, error)
                self._write()  # many wrong lines must not pile up
        return self._written < self._begun

    def _request(self, value: Any, names: dict[str, Any], number: int) -> Request:
        """The request for a line."""
        line = read_line(value)
        source = line.get("prompt") or line["messages"]
        tokens, chat = self.prompt.encoded(source, self.decoder.tokenizer)
        options = {name: line[name] for name in _OPTIONS & line.keys()}
        max_tokens = checked_max_tokens(options.pop("max_tokens", self.generation.max_tokens))
        request, as_shown = self.generation.request(
            self.decoder, tokens, max_tokens=max_tokens, chat=chat, **options
        )
        result = GenerationResult(logprobs=None if self.logprobs is None else [])
        request.receive = lambda response: result.add(as_shown(response), self.logprobs or 0)
        request.at_end = lambda: self._finish(names, number, request, result)
        return request

    def _write(self) -> None:
        """Write the results that are next in order."""
        while line := self._ready.pop(self._written, None):
            self._written += 1
            click.echo(line)

    def _finish(
        self, names: dict[str, Any], number: int, request: Request, result: GenerationResult
    ) -> None:
        """Make the result from the generated text, or from the error that ended it."""
        if request.error:
            self._fail(names, number, request.error)
            return
        result.prompt_tokens = len(request.prompt)
        report = result_report(result, model_or_default(self.generation.model))
        self._ready[names["index"]] = json_text({**names, **report})
        self.figures.add(result, len(result.tokens))

    def _fail(self, names: dict[str, Any], number: int, error: Exception) -> None:
        """Make the result from an error; a custom drafter may raise anything."""
        kind = "" if isinstance(error, MlxspecError) else f"{type(error).__name__}: "
        self.failed += 1
        self._ready[names["index"]] = json_text({**names, "error": f"line {number}: {kind}{error}"})
