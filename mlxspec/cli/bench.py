"""``mlxspec bench``: compares decoders on a model, in speed and output."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import RenderableType
from rich.text import Text

from ..engine.params import SamplingParams
from ..errors import OptionError, PromptError
from ..files import SHARED, check_writable, replaced
from ..process import MLX_VARIABLES, variables_in
from ..terminal import one_line
from .calibrate import measured_curves
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
    at_terminal,
    counted,
    figures_table,
    folding_table,
    ratio,
)
from .settings import KEYS, MLX_SETTINGS

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
        "--prompts --spec-bench FILE",
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
        "--temp T", "Temperature; 0 is greedy. Above it, mlx-lm is left out.", default=0.0
    )
    seed: int = _measurement("--seed N", "The same seed gives the same outputs.", default=0)
    mlx_settings: str | None = _measurement(
        "--mlx-settings NAME=1,…",
        f"MLX's tuning variables for this run: {', '.join(MLX_VARIABLES)}.",
        type=KEYS[MLX_SETTINGS],
    )
    submit: bool = option_field(
        "--submit",
        "Also measure the cost of rows, and write a report. It is shown, and opened as an issue on "
        "GitHub if you agree.",
        default=False,
        group="Output",
    )


@command("bench", short_help="Compare decoders on MODEL: speed and outputs.")
@model_argument()
@options_of(BenchOptions, "asked")
@options_of(ReportOptions, "shows", "Output")
def bench_command(model: str | None, asked: BenchOptions, shows: ReportOptions) -> None:
    """Measure plain decoding, mlx-lm and the drafting decoders on MODEL.

    They take turns on the same prompts in one process. Outputs are compared token by token. A
    decoder whose outputs differ by more than near ties gets no overall speed-up, and the exit
    status is 1. With a trained head, auto is also measured without it.

    \b
    Examples:
      mlxspec bench mlx-community/Mistral-7B-Instruct-v0.3-4bit
      mlxspec bench demo --decoder prompt-lookup,mlx-lm --html bench.html
      mlxspec bench MODEL --spec-bench question.jsonl --limit 10
      mlxspec bench MODEL --submit

    In a JSONL file, each line has "prompt", "messages" or "turns", and optionally "category". The
    whole text of any other file is one prompt. Reports contain no prompts, outputs or paths.

    --submit writes a report for the page "Figures" and for "replay --chip". It has the chip,
    memory, versions, figures, and the model's name if that is a repository. Nothing is sent before
    you submit the issue in your browser.
    """
    from ..bench.measure import AUTO, BACKENDS, MLX_LM, PLAIN, backends_with
    from ..bench.prompts import bundled_prompts, chosen, limited, read_prompts
    from ..drafting.drafter import load_drafter

    # Before MLX first uses a GPU.
    os.environ.update(variables_in(asked.mlx_settings or ""))
    # Check everything that needs no model before one is loaded, or even downloaded.
    backends = {PLAIN: BACKENDS[PLAIN], **chosen(asked.decoders, BACKENDS)}
    if asked.temp > 0:
        backends.pop(MLX_LM, None)  # its random numbers differ
    if asked.drafter is not None:
        backends |= backends_with(load_drafter(asked.drafter))
    check_one(head=asked.head, no_head=asked.no_head)
    if asked.head is not None and AUTO not in backends:
        raise OptionError("--head is for --decoder auto: add it")
    sampling = SamplingParams(temp=asked.temp, seed=asked.seed)
    prompts = [prompt for file in asked.prompts for prompt in read_prompts(file)]
    questions = limited(prompts or bundled_prompts(), asked.limit)
    file = Path(time.strftime("mlxspec-report-%Y%m%d-%H%M%S.json"))
    if asked.submit:
        if asked.prompts or asked.drafter or shows.as_json or AUTO not in backends:
            raise OptionError(
                "--submit needs the bundled prompts, decoders with auto among them, and tables "
                "as output: leave out --prompts, --drafter and --json"
            )
        check_writable(file)
    note_if_demo(model)
    report = _report(model_or_default(model), asked, backends, questions, sampling)
    shows.show_tables(report, bench_tables(report))
    for line in report["wrong"]:
        click.echo(f"Error: {one_line(line)}", err=True)
    if report["wrong"]:
        sys.exit(1)
    if asked.submit:
        _submit(file, report)


def _report(
    model: str,
    asked: BenchOptions,
    backends: dict[str, MakeStream],
    questions: list[BenchPrompt],
    sampling: SamplingParams,
) -> Report:
    """Load the model, measure, and make the report."""
    from ..bench.measure import AUTO, bench_report, decoding, machine_facts, measure, model_facts
    from ..engine.heads import attach_head
    from ..generation.drafting import Auto
    from ..models.heads.loading import load_with_head

    wanted = False if asked.no_head or AUTO not in backends else asked.head
    loaded, tokenizer, head = load_with_head(model, wanted, asked.adapter_path)
    if head is not None and attach_head(head, loaded) is None:
        head = None
    about = model_facts(loaded, model, head)
    # First, so that the planner knows them, and so that the command fails early on a busy machine.
    curves = measured_curves(loaded, about["name"]) if asked.submit else []
    if head is not None:
        with_head = {AUTO: decoding(Auto(head=head)), "auto without head": backends[AUTO]}
        backends = backends | with_head
    measured: list[MeasuredPrompt] = []
    answers = sum(1 + len(prompt.follow_ups) for prompt in questions)
    with ProgressBar("Taking turns") as on_progress:
        on_progress(0.0)
        for prompt in measure(
            loaded,
            tokenizer,
            backends,
            questions,
            max_tokens=asked.max_tokens,
            repeats=asked.repeats,
            sampling=sampling,
        ):
            measured.append(prompt)
            on_progress(len(measured) / answers)
    if not measured:
        raise PromptError("every prompt is longer than the model's context: use shorter ones")
    settings = {
        "prompts": len(measured),
        "prompts_too_long": answers - len(measured),
        "max_tokens": asked.max_tokens,
        "repeats": asked.repeats,
        "temperature": asked.temp,
        "seed": asked.seed,
    }
    if asked.adapter_path is not None:
        about["name"] += f" with adapters {Path(asked.adapter_path).resolve().name}"
    facts = {"model": about, "machine": machine_facts(), "settings": settings, "curves": curves}
    return bench_report(measured, facts)


def _submit(file: Path, report: Report) -> None:
    """Write and show what will be public, and open the issue if the user agrees."""
    from ..bench.submission import BenchReport, issue_url

    sent = BenchReport.of(report)
    with replaced(file, SHARED) as writable:
        writable.write(sent.text().encode())
    url = issue_url(sent)
    click.echo(f"\nThe whole report, also in {file}:\n\n{sent.text()}")
    if at_terminal() and not click.confirm("Open it as a public issue on GitHub?", err=True):
        click.echo(f"Nothing was sent. The report stays in {file}.")
        return
    if not at_terminal() or not webbrowser.open(url):
        click.echo(f"To send the report, open this address:\n{url}")
    click.echo(
        f"If the form is empty, paste the content of {file}. "
        "Nothing is sent until you submit the form."
    )


# --- tables ---


_FIGURES = ("speedup", "vs_mlx_lm", "tokens_per_step", "rows_per_step", "acceptance_rate")


def bench_tables(report: Report) -> Iterator[RenderableType]:
    """Speeds by category and overall, how exact the outputs are, and which decoder is fastest."""
    from ..bench.measure import exactness, verdict

    yield from map(one_line, _heading(report["model"], report["machine"]))
    decoders = report["decoders"]
    caption = "tokens/s without prefill, and the ratio to plain decoding, turn by turn"
    table = folding_table("category", "prompts", *decoders, caption=caption)
    for category, entry in report["categories"].items():
        speeds = entry["decoders"].values()
        cells = (f"{of['tokens_per_second']:.1f}  {ratio(of['speedup'])}" for of in speeds)
        table.add_row(one_line(category), str(entry["prompts"]), *cells)
    yield table
    yield figures_table("all", decoders, _FIGURES, "speed-ups: geometric means of the categories")
    if skipped := report["settings"].get("prompts_too_long"):
        yield f"{counted(skipped, 'prompt')} left out: longer than the model's context"
    yield exactness(report)
    if report["rough"]:
        yield report["rough"]
    yield Text(one_line(verdict(report)), style="bold")


def _heading(model: Report, machine: Report) -> Iterator[str]:
    head = f", with a trained head, {model['head']}" if "head" in model else ""
    yield (
        f"{model['name']}: {model['parameters']:,} parameters, {model['bits_per_weight']} bits "
        f"each in memory, {model['dtype']}{head}"
    )
    facts = ("chip", "device", "blas", "system", "mlx_settings")
    yield ", ".join(machine[name] for name in facts if name in machine)
    yield (
        f"mlxspec {machine['mlxspec']}, mlx {machine['mlx']}, mlx-lm {machine['mlx_lm']}, "
        f"Python {machine['python']}"
    )
