"""What ``mlxspec generate`` does: read, load, generate, show."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ..decoders import AutoDecoder
from ..decoding import SamplingParams
from ..errors import OptionError
from ..response import GenerationResponse, Transcript
from ..terminal import TokenPrinter
from .decoding_choice import DecoderOptions, DecodingChoice
from .json_report import json_report
from .measuring_progress import MeasuringProgress
from .outcome import INTERRUPTED, note
from .panel import error_console, figures_panel, machine_line, step_times_table
from .prefill_progress import PrefillProgress
from .prompt_source import read_prompt
from .prompt_tokens import prompt_tokens, uses_template


def answer(
    *,
    model: str | None,
    prompt: str | None,
    prompt_file: str | None,
    prompt_ids: str | None,
    chat: bool | None,
    max_tokens: int,
    stop: tuple[str, ...],
    temp: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int,
    color: bool | None,
    stats: bool,
    as_json: bool,
    **decoder_options: Any,
) -> None:
    """Answer one prompt; the arguments are the options of the command line.

    ``decoder_options`` are the fields of :class:`DecoderOptions`.

    Exits with status 130 after showing what there is if Ctrl-C ends the generation.

    Raises:
        MlxspecError: an option, the prompt or the model is at fault.
    """
    # All that needs no model is checked before one is loaded, or even downloaded.
    source = read_prompt(prompt, prompt_file, prompt_ids)
    choice = DecodingChoice(DecoderOptions(**decoder_options))
    sampling = SamplingParams(temp, top_p, top_k, min_p, seed)
    if max_tokens < 1:
        raise OptionError(f"--max-tokens is {max_tokens}: generate at least 1 token")

    model = model or _default_model()
    console = error_console(color)
    with MeasuringProgress(console) as measuring:
        decoder = choice.load(model, measuring)
    templated = uses_template(source, decoder.tokenizer, chat)
    tokens = prompt_tokens(source, decoder.tokenizer, templated)
    start = partial(
        choice.stream, decoder, tokens, max_tokens=max_tokens, sampling=sampling, stop=stop
    )
    printer = None if as_json else TokenPrinter(color)
    # In a chat the answer is a text of its own, whose first space the tokenizer has put there.
    trims = templated and decoder.tokenizer.detokenizer.prefix_space
    with choice.learner(decoder) as learner:
        transcript = _transcribe(start, printer, console, trims)
        if learner:
            learner.add(transcript.tokens)
    result = replace(transcript.result(decoder.step_times), prompt_tokens=len(tokens))

    if printer:
        printer.finish()
        console.print()
        console.print(figures_panel(result, legend=printer.color))
    else:
        click.echo(json_report(result, model))
    if stats:
        console.print(step_times_table(result.step_times))
        if isinstance(decoder, AutoDecoder):
            console.print(machine_line(decoder.costs.slowdown))
    if result.finish_reason == "interrupted":
        sys.exit(INTERRUPTED)


def _default_model() -> str:
    if Path("mlx_model").is_dir():
        return "mlx_model"
    note("no mlx_model directory here, so the bundled demo model answers (choose with --model)")
    return "demo"


def _transcribe(
    start: Callable[..., Iterator[GenerationResponse]],
    printer: TokenPrinter | None,
    console: Console,
    trims_first_space: bool,
) -> Transcript:
    """Run a generation to its end or to Ctrl-C, writing its text as it comes."""
    transcript = Transcript()
    with suppress(KeyboardInterrupt), PrefillProgress(console) as progress:
        for response in start(on_progress=progress):
            if trims_first_space and response.text:
                response = replace(response, text=response.text.removeprefix(" "))
                trims_first_space = False
            transcript.add(response)
            if printer:
                printer.write(response.text, response.from_draft)
    return transcript
