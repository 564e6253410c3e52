"""``mlxspec explain``: a few steps of a generation, each with its draft tree."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..errors import OptionError
from .common.generation import Generation
from .common.model_choice import model_or_default, note_which_model
from .common.options import check_least, color_option, command, option, options_of
from .common.output import ProgressBar, ReportOptions, error_console, output_console, prefill_bar
from .common.prompt import PromptOptions, model_option, prompt_argument
from .memory import Memories

_view = partial(option, group="Steps and output")


@command("explain")
@prompt_argument
@model_option
@options_of(PromptOptions, "prompt", "Model and prompt")
@option("--max-tokens N", "Generate at most N tokens.", default=250, group="Model and prompt")
@options_of(Generation, "generation")
@_view("--steps K", "Show K successive steps.", default=3)
@_view(
    "--skip N",
    "Begin after N steps.  [default: where most drafts are accepted in part, or else where most "
    "tokens are]",
    type=int,
)
@options_of(ReportOptions, "shows", "Steps and output", leave_out=("as_json",))
@color_option("Steps and output", "Show in colour.")
def explain_command(
    *,
    generation: Generation,
    prompt: PromptOptions,
    steps: int,
    skip: int | None,
    shows: ReportOptions,
    color: bool | None,
) -> None:
    """Show what steps of speculative decoding do.

    Each step is drawn as its draft tree: what was drafted and where it came from, what the
    model chose, how far the draft was accepted; for lookahead decoding with its window.

    The prompt and the options are those of 'mlxspec generate', and so is the output.

    \b
    Examples:
      mlxspec explain --decoder lookahead -W 7 -N 4 --raw "def add(a, b):"
      mlxspec explain "Say this three times: ..." --steps 5 --skip 0
      mlxspec explain --decoder combined --prompt-file ask.txt --html steps.html
    """
    source = prompt.read()  # and all checks that need no model, before one is loaded
    check_least(1, steps=steps)
    check_least(0, skip=skip)
    shows.check()

    from ..drafting.sources import RecordedStep, RecordingDrafter
    from ..models.model_files import given_name
    from .explained import Explained, Pieces, most_instructive

    console = error_console(color)
    with Memories(not generation.drafting.no_memory) as memories:
        decoder = generation.load(console, memories)
        templated = prompt.uses_template(source, decoder.tokenizer)
        tokens = prompt.tokens(source, decoder.tokenizer, templated)
        recorded: list[RecordedStep] = []
        decoder.wrap_drafter = partial(RecordingDrafter, steps=recorded)
        with prefill_bar(console) as on_progress, ProgressBar("Generating", console=console) as bar:
            how: Any = {"begun": prompt.prefill_response, "on_progress": on_progress}
            for last in generation.stream(decoder, tokens, templated=templated, **how):
                bar(last.generation_tokens, generation.max_tokens)
        if skip is not None and skip >= len(recorded):
            raise OptionError(f"--skip is {skip}: the output has {len(recorded)} steps, skip fewer")
        explained = Explained(
            model=given_name(model_or_default(generation.model)),
            decoder=generation.drafting.kind,
            prompt=tokens,
            steps=recorded,
            first=most_instructive(recorded, steps) if skip is None else skip,
            count=steps,
            stats=last.stats,
            pieces=Pieces(decoder.tokenizer),
            chosen=skip is None,
        )
        note_which_model(generation.model)
        shows.show(lambda: explained.print(output_console(color)), explained.page)
        generation.note_if_full(decoder.model, last.finish_reason, last.generation_tokens)
        memories.tell_once()
