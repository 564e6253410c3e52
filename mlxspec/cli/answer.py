"""What ``mlxspec generate`` does: read, load, generate, show."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from ..engine.caches import cached_length
from ..engine.positions import context_length
from ..errors import OptionError, PromptError
from ..generation.decoders import AutoDecoder
from ..generation.options import GenerationOptions
from ..generation.response import GenerationResponse, Transcript
from ..loading.detokenizer import detokenizer_of
from ..terminal import TokenPrinter
from .cached_prompt import CachedPrompt
from .consoles import error_console
from .context_room import room_behind, tell_of_full_context
from .decoding_choice import DecoderOptions, DecodingChoice
from .json_report import json_report
from .measuring_progress import MeasuringProgress
from .memory_options import take_memory
from .outcome import INTERRUPTED, note
from .panel import figures_panel, machine_line, step_times_table
from .prefill_progress import PrefillProgress
from .prompt_source import read_prompt
from .prompt_tokens import prompt_tokens, uses_template
from .sampling_options import sparing_line_ends, take_sampling

if TYPE_CHECKING:
    from ..distributed.leader import Leader


def answer(
    *,
    model: str | None,
    prompt: str | None,
    prompt_file: str | None,
    prompt_ids: str | None,
    prompt_cache_file: str | None,
    chat: bool | None,
    max_tokens: int,
    color: bool | None,
    stats: bool,
    as_json: bool,
    logprobs: int | None,
    leader: Leader | None = None,
    **options: Any,
) -> None:
    """Answer one prompt; the arguments are the options of the command line.

    ``options`` are those of :func:`.sampling_options.sampling_options` and of
    :func:`.memory_options.memory_options`, and the fields of :class:`DecoderOptions`. With a
    ``leader`` the model is split over its ranks.

    Exits with status 130 after showing what there is if Ctrl-C ends the generation.

    Raises:
        MlxspecError: an option, the prompt or the model is at fault.
    """
    # All that needs no model is checked before one is loaded, or even downloaded.
    source = read_prompt(prompt, prompt_file, prompt_ids)
    cached = CachedPrompt(prompt_cache_file) if prompt_cache_file is not None else None
    if cached:
        options["stop_tokens"] += cached.end_tokens
    sampling, ends = take_sampling(options)
    memory = take_memory(options)
    choice = DecodingChoice(DecoderOptions(**options))
    if max_tokens < 1:
        raise OptionError(f"--max-tokens is {max_tokens}: generate at least 1 token")
    choice.check_room(max_tokens)
    if logprobs is not None and not as_json:
        raise OptionError("--logprobs are written into the JSON object: add --json")
    if logprobs is not None and logprobs < 0:
        raise OptionError(f"--logprobs is {logprobs}: choose 0 or more")
    if cached:
        cached.check(memory)
        model = cached.model(model)
    transcript = Transcript(logprobs)

    name = model or default_model()
    console = error_console(color)
    with MeasuringProgress(console) as measuring:
        loaded, tokenizer = leader.load(name) if leader else (name, None)
        decoder = choice.load(loaded, measuring, tokenizer)
    templated = uses_template(source, decoder.tokenizer, chat)
    begun: GenerationOptions = {}
    if cached:
        tokens, begun = cached.continued(source, decoder, templated)
    else:
        tokens = prompt_tokens(source, decoder.tokenizer, templated)
    held = cached_length(begun.get("prompt_cache") or ()) + len(tokens)
    room = room_behind(held, context_length(decoder.model), max_tokens)
    sampling = sparing_line_ends(sampling, decoder.tokenizer)
    how: GenerationOptions = {"sampling": sampling, **ends, **memory, **begun}
    start = partial(choice.stream, decoder, tokens, room, **how)
    printer = None if as_json else TokenPrinter(color)
    # In a chat the answer is a text of its own, whose first space the tokenizer has put there.
    trims = templated and detokenizer_of(decoder.tokenizer).prefix_space
    tell = partial(tell_of_default, model)
    with choice.learner(decoder) as learner:
        _transcribe(start, transcript, printer, console, trims, tell)
        if learner:
            learner.add(transcript.tokens)
        result = replace(transcript.result(decoder.step_times), prompt_tokens=len(tokens))
        if printer:
            printer.finish()
            console.print()
            console.print(figures_panel(result, legend=printer.color))
        else:
            click.echo(json_report(result, name))
    # Learned after the answer is shown, which is not lost where the store cannot be written.
    if result.finish_reason == "length" and room < max_tokens:
        tell_of_full_context(decoder.model)
    if stats:
        console.print(step_times_table(result.step_times))
        if isinstance(decoder, AutoDecoder):
            console.print(machine_line(decoder.costs.slowdown))
    if result.finish_reason == "interrupted":
        sys.exit(INTERRUPTED)


def answer_together(**options: Any) -> None:
    """As :func:`answer`, with a model that is split over the ranks that were launched.

    Raises:
        MlxspecError: as :func:`answer`, or the ranks do not find each other.
    """
    from ..distributed.group import taking_part

    if options["prompt"] == "-":
        raise PromptError(
            "--prompt -: mlx.launch does not pass on where standard input ends; use --prompt-file"
        )
    with taking_part() as leader:
        answer(leader=leader, **options)


def default_model() -> str:
    """The model that answers where none is asked for."""
    return "mlx_model" if Path("mlx_model").is_dir() else "demo"


def tell_of_default(asked: str | None) -> None:
    """Say that the demo model answers, once there is no error left to come before the answer."""
    if asked is None and default_model() == "demo":
        note("no mlx_model directory here, so the bundled demo model answers (choose with --model)")


def _transcribe(
    start: Callable[..., Iterator[GenerationResponse]],
    transcript: Transcript,
    printer: TokenPrinter | None,
    console: Console,
    trims_first_space: bool,
    on_first: Callable[[], None],
) -> None:
    """Run a generation to its end or to Ctrl-C, writing its text as it comes."""
    with suppress(KeyboardInterrupt), PrefillProgress(console) as progress:
        for response in start(on_progress=progress):
            if response.generation_tokens == 1:
                on_first()
            if trims_first_space and response.text:
                response = replace(response, text=response.text.removeprefix(" "))
                trims_first_space = False
            transcript.add(response)
            if printer:
                printer.write(response.text, response.from_draft)
