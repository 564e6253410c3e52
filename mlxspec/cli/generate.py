"""``mlxspec generate``: a model answers a prompt, with accepted draft tokens in colour."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.panel import Panel
from rich.progress import MofNCompleteColumn
from rich.text import Text

from ..distributed import leading
from ..distributed.launch import launched_rank
from ..errors import OptionError, PromptError
from ..process import INTERRUPTED
from ..terminal import TokenPrinter, colored
from .common.generation import GenerationSettings, generation_options
from .common.model_choice import model_option, model_or_default, note_if_demo
from .common.notes import silence_notes
from .common.options import COUNT, NAME, check_one, color_option, command, option, options_of
from .common.output import (
    Figures,
    PlainDecoding,
    ProgressBar,
    error_console,
    prefill_bar,
    result_report,
    write_json,
)
from .common.prompt import PromptOptions, prompt_argument
from .memory import Memories

if TYPE_CHECKING:
    from ..distributed.ranks import Leader
    from ..generation.decoder import Decoder
    from ..generation.response import GenerationResult


_model = partial(option, group="Model and prompt")
_output = partial(option, group="Output")


@command("generate")
@prompt_argument
@model_option
@options_of(PromptOptions, "prompt", "Model and prompt")
@_model(
    "--prompt-cache-file FILE",
    "Continue a prompt cached by 'mlxspec cache-prompt' or mlx_lm.cache_prompt.",
    type=NAME,
)
@_model(
    "--prompts FILE",
    "Answer each line of FILE, several at a time (see below); - reads standard input.",
    type=NAME,
)
@_model("--concurrency N", "With --prompts: answer N at once.", default=8, type=COUNT)
@_model("--max-tokens N", "Generate at most N tokens.", default=250, type=COUNT)
@generation_options()
@_output("-q --quiet", "Show only the text: no figures, progress or notes.")
@color_option("Output")
@_output("--compare", "Then decode again without drafts, and show both measured speeds.")
@_output("--json", "Write one JSON object instead of text.", "as_json")
@_output(
    "--logprobs K",
    "With --json or --prompts: add the log-probabilities of each token, and of the K likeliest "
    "tokens at its position.",
    type=click.IntRange(0),
)
def generate_command(*, prompts: str | None, concurrency: int, **options: Any) -> None:
    """Generate text with speculative decoding.

    PROMPT is the instruction or question. To add an input text, pipe it in, or name its file with
    --prompt-file. The model gets the text, a blank line and PROMPT. Without PROMPT, the text is the
    prompt.

    A draft is text that followed the latest words where they occurred before: in the prompt, the
    output or earlier outputs. The model verifies a draft in one forward, so the text is the model's
    own and only the speed changes.

    \b
    Examples:
      mlxspec generate "Say this three times: ..." --compare
      git diff | mlxspec generate -q "Write a commit message." > message.txt
      mlxspec generate --model mlx-community/Mistral-7B-Instruct-v0.3-4bit \\
          --prompt-file report.txt "Summarise this in three sentences."
      mlxspec generate --raw < draft.txt > continuation.txt
      mlxspec generate "Who is it?" --json-schema person.json
      mlxspec generate "..." --json | jq .stats
      mlx.launch --hostfile macs.json mlxspec generate --model ... --prompt "..."
      mlxspec generate --prompts questions.jsonl --concurrency 16 > answers.jsonl

    "python decoder.py" is the same command, except that ./mlx_model overrides 'mlxspec config'.

    A line of --prompts is JSON: {"prompt": "text"}, {"prompt": [token ids]}, {"messages":
    [{"role": "user", "content": "..."}]} or just "text". It may set "max_tokens", "stop",
    "stop_tokens" and sampling options by their names ("temp", "top_p", "seed", ...); the options of
    the command are the defaults. If it has an "id", this is copied into the result. The results are
    lines of JSON in the order of the prompts, with the keys of --json. A result is written when all
    results before it have been. If a line cannot be answered, its result has an "error", the other
    lines are answered, and the exit status is 1.

    Standard input is read if it is a pipe, or a file that has not been read from yet. If PROMPT is
    given, a pipe that stays open and empty is ignored after 10 seconds. If your script reads its
    own standard input from a pipe, run "mlxspec generate ... < /dev/null" in it.

    Only the text goes to standard output: unchanged in a file or a pipe, with control characters
    made visible at a terminal. Figures, notes and errors go to standard error.
    """
    for other in ("quiet", "as_json", "prompt_cache_file"):
        name = other.removeprefix("as_")
        check_one(compare=options["compare"], **{name: options[other]})
    check_one(compare=options["compare"], prompts=prompts)
    if options["quiet"]:
        silence_notes()
    sources = *vars(options["prompt"]).values(), prompts
    if launched_rank() is not None and "-" in sources:
        raise PromptError("-: mlx.launch does not pass on the end of standard input; name a file")
    with leading() as leader:
        if prompts is None:
            answer(leader=leader, **options)
        else:
            from .prompt_files import answer_prompts

            answer_prompts(prompts, concurrency, leader=leader, **options)


def answer(
    *,
    generation: GenerationSettings,
    prompt: PromptOptions,
    prompt_cache_file: str | None,
    logprobs: int | None,
    leader: Leader | None = None,
    **shows: Any,
) -> None:
    """Answer one prompt; with a ``leader``, the model is split over its ranks.

    If Ctrl-C ends the generation, it shows the partial result and exits with status 130.

    Args:
        shows: the options ``quiet``, ``color``, ``compare`` and ``as_json``.

    Raises:
        MlxspecError: an option, the prompt or the model is invalid.
    """
    from ..generation.response import GenerationResult
    from .cache_prompt import CachedPrompt

    # Check what can be checked without a model before a model is loaded or downloaded.
    source, model = prompt.read(piped=leader is None), model_or_default(generation.model)
    check_one(system_prompt=prompt.system_prompt, prompt_cache_file=prompt_cache_file)
    check_one(max_kv_size=generation.caches.max_kv_size, prompt_cache_file=prompt_cache_file)
    if leader and shows["compare"]:
        raise OptionError("--compare does not work under mlx.launch: leave it out")
    cached = None
    if prompt_cache_file is not None:
        cached = CachedPrompt(prompt_cache_file, model, generation.adapter_path)

    printer = None if shows["as_json"] else TokenPrinter(shows["color"])
    console = Console(quiet=True) if shows["quiet"] else error_console(shows["color"])
    with Memories(not generation.drafting.no_saved_answers) as memories:
        decoder = generation.load(console, memories, leader)
        how: dict[str, Any]
        if cached:
            tokens, how = cached.continued(source, prompt, decoder)
        else:
            tokens, chat = prompt.encoded(source, decoder.tokenizer)
            how = {"chat": chat}
        result = GenerationResult(logprobs=None if logprobs is None else [])
        with suppress(KeyboardInterrupt), prefill_bar(console) as progress:
            for response in generation.stream(decoder, tokens, on_progress=progress, **how):
                if response.generation_tokens == 1:
                    note_if_demo(generation.model)
                result.add(response, logprobs or 0)
                if printer:
                    printer.write(response.text, response.from_draft)
        result.prompt_tokens = len(tokens)
        if printer:
            printer.finish()
            plain = None
            if shows["compare"] and result.finish_reason != "interrupted":
                plain = decode_plainly(generation, decoder, tokens, result, console, **how)
            console.print("", figures_panel(result, printer.color, plain), sep="\n")
        else:
            write_json(result_report(result, model))
        generation.note_if_full(decoder.model, result.finish_reason, len(result.tokens))
        if printer and not shows["quiet"]:
            memories.suggest_once()
    if result.finish_reason == "interrupted":
        sys.exit(INTERRUPTED)


def decode_plainly(
    generation: GenerationSettings,
    decoder: Decoder,
    tokens: list[int],
    result: GenerationResult,
    console: Console,
    **how: Any,
) -> PlainDecoding | None:
    """Generate a result again without drafts; if Ctrl-C ends that, mark it as interrupted."""
    from ..bench.measure import first_difference
    from ..generation.decoder import Decoder
    from ..generation.response import GenerationResult

    plain, without_drafts = GenerationResult(), Decoder(decoder.loaded, decoder.tokenizer)
    bar = ProgressBar("without drafts", MofNCompleteColumn(), console=console)
    with suppress(KeyboardInterrupt), bar:
        for response in generation.stream(without_drafts, tokens, **how):
            plain.add(response)
            bar(response.generation_tokens, len(result.tokens))
    if plain.finish_reason == "interrupted":
        result.finish_reason = "interrupted"
        return None
    difference = first_difference(
        decoder.model, tokens, plain.tokens, result.tokens, generation.sampling
    )
    caches = generation.caches
    other_logits = caches.kv_bits or caches.max_kv_size or generation.sampling.xtc_probability
    if difference is None:
        text = "same text"
    elif generation.constraint or other_logits:
        text = "differs"  # the logits that were compared are not those of the choice
    else:
        text = "near tie" if difference.near_tie else "other text"
    return PlainDecoding(plain.generation_tps, text)


def figures_panel(
    result: GenerationResult, legend: bool, plain: PlainDecoding | None = None
) -> Panel:
    """The figures of a generation, and a legend for the two colours.

    Args:
        plain: the same generation without drafts, if that was measured.
    """
    figures = Figures(plain=plain)
    figures.add(result, len(result.tokens))
    meaning = f"{colored('■ accepted draft', True)}  {colored('■ target’s own', False)}"
    return figures.panel(
        subtitle="interrupted" if result.finish_reason == "interrupted" else None,
        below=["", Text.from_ansi(meaning)] if legend else [],
    )
