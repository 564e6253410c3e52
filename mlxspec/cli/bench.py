"""``mlxspec bench``: compares decoders on a model, in speed and output."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import RenderableType
from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..engine.params import SamplingParams
from ..errors import OptionError, PromptError
from ..process import INTERRUPTED
from ..terminal import one_line
from .common.model_choice import MODEL, model_argument, model_or_default, note_if_demo
from .common.options import (
    ADAPTERS,
    COUNT,
    DRAFTER,
    FILE,
    HEAD,
    NAME,
    NO_HEAD,
    check_one,
    command,
    names_completed,
    option_field,
    options_of,
)
from .common.output import (
    ProgressBar,
    ReportOptions,
    counted,
    figures_table,
    folding_table,
    ratio,
    waiting_bar,
)

if TYPE_CHECKING:
    from ..bench.measure import MakeStream, MeasuredPrompt, Report
    from ..bench.prompts import BenchPrompt

_DECODERS = ("plain", "mlx-lm", "prompt-lookup", "auto", "lookahead")
_prompts = partial(option_field, group="Prompts")
_measurement = partial(option_field, group="Measurement")


@dataclass(frozen=True)
class BenchOptions:
    """What to measure."""

    adapter_path: str | None = option_field(*ADAPTERS, type=NAME, group="Model")
    head: str | None = option_field(*HEAD, type=MODEL, group="Model")
    no_head: bool = option_field(*NO_HEAD, default=False, group="Model")
    prompts: tuple[Path, ...] = _prompts(
        "--prompts FILE",
        "Prompts to answer, such as Spec-Bench's question.jsonl; repeatable.  [default: a small "
        "bundled set]",
        type=FILE,
        multiple=True,
    )
    limit: int | None = _prompts("--limit N", "At most N prompts of each category.", type=COUNT)
    decoders: str = _measurement(
        "--decoder A,B",
        f"Decoders to compare with plain decoding: any of {', '.join(_DECODERS)}.",
        default="all",
        shell_complete=names_completed(lambda: _DECODERS),
    )
    drafter: str | None = _measurement(
        DRAFTER, "Also measure your own drafter class, alone and with auto."
    )
    max_tokens: int = _measurement(
        "--max-tokens N", "Generate at most N tokens.", default=250, type=COUNT
    )
    repeats: int = _measurement(
        "--repeats N", "Runs of each decoder on each prompt.", default=3, type=COUNT
    )
    temp: float = _measurement(
        "--temp T", "Temperature; 0 is greedy. Above 0, mlx-lm is skipped.", default=0.0
    )
    seed: int = _measurement("--seed N", "The same seed gives the same outputs.", default=0)


@command("bench", short_help="Compare decoders on MODEL: speed and outputs.")
@model_argument()
@options_of(BenchOptions, "options")
@options_of(ReportOptions, "shows", "Output")
def bench_command(model: str | None, options: BenchOptions, shows: ReportOptions) -> None:
    """Measure plain decoding, mlx-lm and the drafting decoders on MODEL.

    They take turns on the same prompts in one process. Outputs are compared token by token. If a
    decoder's outputs differ by more than near ties, it gets no overall speed-up, and the exit
    status is 1. With a trained head, auto is also measured without the head. Ctrl-C ends the
    measurement and shows what is known by then.

    \b
    Examples:
      mlxspec bench mlx-community/Mistral-7B-Instruct-v0.3-4bit
      mlxspec bench demo --decoder prompt-lookup,mlx-lm --html bench.html
      mlxspec bench MODEL --prompts question.jsonl --limit 10

    In a JSONL file, each line has "prompt", "messages" or "turns", and optionally "category". The
    whole text of any other file is one prompt. Reports contain no prompts, outputs or paths.
    """
    from ..bench.measure import AUTO, BACKENDS, MLX_LM, PLAIN, backends_with
    from ..bench.prompts import bundled_prompts, chosen, limited, read_prompts
    from ..drafting.drafter import load_drafter

    # Check what can be checked without a model before a model is loaded or downloaded.
    backends = {PLAIN: BACKENDS[PLAIN], **chosen(options.decoders, BACKENDS)}
    if options.temp > 0:
        backends.pop(MLX_LM, None)  # mlx-lm's random numbers differ from mlxspec's
    if options.drafter is not None:
        backends |= backends_with(load_drafter(options.drafter))
    check_one(head=options.head, no_head=options.no_head)
    if options.head is not None and AUTO not in backends:
        raise OptionError("--head is for --decoder auto: add auto to --decoder")
    sampling = SamplingParams(temp=options.temp, seed=options.seed)
    prompts = [prompt for file in options.prompts for prompt in read_prompts(file)]
    questions = limited(prompts or bundled_prompts(), options.limit)
    note_if_demo(model)
    report = _report(model_or_default(model), options, backends, questions, sampling)
    shows.show_tables(report, bench_tables(report))
    for line in report["wrong"]:
        click.echo(f"Error: {one_line(line)}", err=True)
    if report["wrong"]:
        sys.exit(1)
    if report["settings"]["interrupted"]:
        sys.exit(INTERRUPTED)


def _report(
    model: str,
    options: BenchOptions,
    backends: dict[str, MakeStream],
    questions: list[BenchPrompt],
    sampling: SamplingParams,
) -> Report:
    """Load the model, measure, and make the report."""
    from ..bench.measure import AUTO, bench_report, decoding, machine_facts, measure, model_facts
    from ..engine.heads import attach_head
    from ..generation.drafter_factories import Auto
    from ..models.heads.loading import load_with_head

    wanted = False if options.no_head or AUTO not in backends else options.head
    with waiting_bar("Loading"):
        loaded, tokenizer, head = load_with_head(model, wanted, options.adapter_path)
    if head is not None and attach_head(head, loaded) is None:
        head = None
    about = model_facts(loaded, model, head)
    if head is not None:
        with_head = {AUTO: decoding(Auto(head=head)), "auto without head": backends[AUTO]}
        backends = backends | with_head
    measured: list[MeasuredPrompt] = []
    turns = sum(1 + len(prompt.follow_ups) for prompt in questions)
    answers = (1 + turns * options.repeats) * len(backends)  # one of each backend warms up
    done, interrupted = itertools.count(1), False
    figures = MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn()
    with ProgressBar("Answers", *figures, noted=f"measuring {answers:,} answers") as on_progress:
        on_progress(0, answers)
        try:
            for prompt in measure(
                loaded,
                tokenizer,
                backends,
                questions,
                max_tokens=options.max_tokens,
                repeats=options.repeats,
                sampling=sampling,
                on_answer=lambda: on_progress(next(done), answers),
            ):
                measured.append(prompt)
        except KeyboardInterrupt:
            if not measured:
                raise
            interrupted = True
    if not measured:
        raise PromptError("every prompt is longer than the model's context: use shorter ones")
    settings = {
        "prompts": len(measured),
        "prompts_too_long": 0 if interrupted else turns - len(measured),
        "interrupted": interrupted,
        "max_tokens": options.max_tokens,
        "repeats": min(len(runs) for runs in measured[0].runs.values()),
        "temperature": options.temp,
        "seed": options.seed,
    }
    if options.adapter_path is not None:
        about["name"] += f" with adapters {Path(options.adapter_path).resolve().name}"
    facts = {"model": about, "machine": machine_facts(), "settings": settings}
    return bench_report(measured, facts)


# --- tables ---


_FIGURES = (
    *("speedup", "lowest", "highest", "vs_mlx_lm"),
    *("tokens_per_step", "rows_per_step", "acceptance_rate"),
)


def bench_tables(report: Report) -> Iterator[RenderableType]:
    """The report's tables and lines: speeds, how exact the outputs are, the fastest decoder."""
    from ..bench.measure import exactness, shown, verdict

    yield from map(one_line, _heading(report["model"], report["machine"]))
    decoders = {shown(name): of for name, of in report["decoders"].items()}
    caption = "tokens/s without prefill, and the speed relative to plain decoding"
    table = folding_table("category", "prompts", *decoders, caption=caption)
    for category, entry in report["categories"].items():
        speeds = entry["decoders"].values()
        cells = (f"{of['tokens_per_second']:.1f}  {ratio(of['speedup'])}" for of in speeds)
        table.add_row(one_line(category), str(entry["prompts"]), *cells)
    yield table
    caption = "speed-ups: geometric means over categories; lowest, highest: of single repeats"
    yield figures_table("all", decoders, _FIGURES, caption)
    if report["settings"].get("interrupted"):
        yield f"interrupted after {counted(report['settings']['prompts'], 'prompt')}"
    if skipped := report["settings"].get("prompts_too_long"):
        yield f"{counted(skipped, 'prompt')} left out: longer than the model's context"
    yield exactness(report)
    yield Text(one_line(verdict(report)), style="bold")


def _heading(model: Report, machine: Report) -> Iterator[str]:
    head = f", with a trained head, {model['head']}" if "head" in model else ""
    yield (
        f"{model['name']}: {model['parameters']:,} parameters, {model['bits_per_weight']} bits "
        f"each in memory, {model['dtype']}{head}"
    )
    facts = ("chip", "device", "blas", "system")
    yield ", ".join(machine[name] for name in facts if name in machine)
    yield (
        f"mlxspec {machine['mlxspec']}, mlx {machine['mlx']}, mlx-lm {machine['mlx_lm']}, "
        f"Python {machine['python']}"
    )
