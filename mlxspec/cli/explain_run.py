"""What ``mlxspec explain`` does: generate, recording every step, and show some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from ..draft.recording import RecordedStep, RecordingDrafter
from ..engine.positions import context_length
from ..errors import OptionError
from ..eval.page import check_report, write_report
from ..generation.decoder import Decoder
from ..generation.response import GenerationResponse, SpeculationStats
from .answer import default_model, tell_of_default
from .consoles import error_console, output_console
from .context_room import room_behind, tell_of_full_context
from .decoding_choice import DecoderOptions, DecodingChoice
from .explain_page import explain_page
from .explain_pieces import Pieces
from .explain_terminal import print_explained
from .explain_walk import telling_run
from .explained import Explained
from .measuring_progress import MeasuringProgress
from .memory_options import take_memory
from .prefill_progress import PrefillProgress
from .prompt_source import read_prompt
from .prompt_tokens import prompt_tokens, uses_template
from .sampling_options import sparing_line_ends, take_sampling


def explain(
    *,
    model: str | None,
    prompt: str | None,
    prompt_file: str | None,
    prompt_ids: str | None,
    chat: bool | None,
    max_tokens: int,
    steps: int,
    skip: int | None,
    html: Path | None,
    force: bool,
    color: bool | None,
    **options: Any,
) -> None:
    """Explain some steps; the arguments are the options of the command line.

    ``options`` are those of :func:`.sampling_options.sampling_options` and of
    :func:`.memory_options.memory_options`, and the fields of :class:`DecoderOptions` but
    ``learn``.

    Raises:
        MlxspecError: an option, the prompt or the model is at fault.
    """
    # All that needs no model is checked before one is loaded, or even downloaded.
    source = read_prompt(prompt, prompt_file, prompt_ids)
    sampling, ends = take_sampling(options)
    memory = take_memory(options)
    choice = DecodingChoice(DecoderOptions(**options, learn=False))
    _check(max_tokens, steps, skip)
    choice.check_room(max_tokens)
    if html:
        check_report(html, "--html", force=force)
    name = model or default_model()
    with MeasuringProgress(error_console(color)) as measuring:
        decoder = choice.load(name, measuring)
    templated = uses_template(source, decoder.tokenizer, chat)
    tokens = prompt_tokens(source, decoder.tokenizer, templated)
    sampling = sparing_line_ends(sampling, decoder.tokenizer)
    room = room_behind(len(tokens), context_length(decoder.model), max_tokens)
    start = partial(choice.stream, decoder, tokens, room, sampling=sampling, **ends, **memory)
    recorded, stats, cut = _record(decoder, start, room)
    if skip is not None and skip >= len(recorded):
        raise OptionError(f"--skip is {skip}: the output has {len(recorded)} steps, skip fewer")
    explained = Explained(
        model=Path(name).resolve().name if Path(name).is_dir() else name,
        decoder=choice.kind,
        prompt=tokens,
        steps=recorded,
        first=telling_run(recorded, steps) if skip is None else skip,
        count=steps,
        stats=stats,
        pieces=Pieces(decoder.tokenizer),
    )
    tell_of_default(model)
    try:
        if html:
            write_report(html, explain_page(explained), "--html", force=force)
    finally:  # what was found is not lost with the page
        print_explained(explained, output_console(color))
    if cut and room < max_tokens:
        tell_of_full_context(decoder.model)


def _check(max_tokens: int, steps: int, skip: int | None) -> None:
    if max_tokens < 1:
        raise OptionError(f"--max-tokens is {max_tokens}: generate at least 1 token")
    if steps < 1:
        raise OptionError(f"--steps is {steps}: show at least 1 step")
    if skip is not None and skip < 0:
        raise OptionError(f"--skip is {skip}: 0 begins with the first step")


def _record(
    decoder: Decoder, start: Callable[..., Iterable[GenerationResponse]], max_tokens: int
) -> tuple[list[RecordedStep], SpeculationStats, bool]:
    """Generate to the end; what the steps were, and whether all of ``max_tokens`` was given."""
    steps: list[RecordedStep] = []
    stats, cut = SpeculationStats(), False
    decoder.wrap_drafter = partial(RecordingDrafter, steps=steps)
    console = error_console(None)
    with PrefillProgress(console) as prefilling, MeasuringProgress(console, "Generating") as bar:
        for response in start(on_progress=prefilling):
            stats, cut = response.stats, response.finish_reason == "length"
            bar(response.generation_tokens / max_tokens)
    return steps, stats, cut
