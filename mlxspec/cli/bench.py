"""``mlxspec bench``: decoders side by side on a model, with their outputs compared."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..engine.params import SamplingParams
from ..errors import OptionError, PromptError
from ..files import SHARED, check_writable, replaced
from ..process import INTERRUPTED
from ..terminal import visible
from .calibrate import measured_curves
from .common.model_choice import ABOUT, DEFAULT, MODEL, model_argument, needed_model
from .common.notes import note
from .common.options import (
    ADAPTERS,
    DRAFTER,
    FILE,
    HEAD,
    NAME,
    NO_HEAD,
    check_least,
    check_one,
    command,
    names_completed,
    option,
    option_field,
    options_of,
)
from .common.output import (
    ProgressBar,
    ReportOptions,
    at_terminal,
    folding_table,
    ratio,
    shown,
    speed_bars,
)

if TYPE_CHECKING:
    from ..bench.measure import MakeBackend, MeasuredPrompt, Report
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
    limit: int | None = _prompts("--limit N", "At most N prompts of each category.")
    decoders: str | None = _measurement(
        "--decoder A,B",
        f"Decoders to compare with plain decoding: any of {', '.join(_DECODERS)}.  [default: all; "
        "with --tune auto]",
        shell_complete=names_completed(lambda: _DECODERS),
    )
    drafter: str | None = _measurement(
        DRAFTER, "Also measure your own drafter class, alone and with auto."
    )
    max_tokens: int = _measurement("--max-tokens N", "Generate at most N tokens.", default=250)
    repeats: int = _measurement("--repeats N", "Runs of each decoder on each prompt.", default=3)
    temp: float = _measurement("--temp T", "Temperature; 0 is greedy.", default=0.0)
    seed: int = _measurement("--seed N", "Same seed, same outputs.", default=0)
    tune: bool = _measurement(
        "--tune", "Measure MLX's tuning variables, each setting in its own process.", default=False
    )


@command("bench", short_help="Compare decoders on MODEL: speed and outputs.")
@model_argument(ABOUT + DEFAULT)
@options_of(BenchOptions, "asked")
@options_of(ReportOptions, "shows", "Output")
@option("--include-text", "Include prompts and outputs in the JSON and the page.", group="Output")
@option(
    "--submit",
    "Also measure what rows cost, and write a report. It is shown, and opened as an issue on "
    "GitHub if you agree.",
    group="Output",
)
def bench_command(
    model: str | None, asked: BenchOptions, shows: ReportOptions, include_text: bool, submit: bool
) -> None:
    """Measure plain decoding, mlx-lm and the drafting decoders on MODEL.

    They take turns on the same prompts in one process. Outputs are compared token by token. If
    outputs differ by more than near ties, no speed-up is shown and the exit status is 1. With a
    trained head, auto is also measured without it.

    \b
    Examples:
      mlxspec bench mlx-community/Mistral-7B-Instruct-v0.3-4bit
      mlxspec bench demo --decoder prompt-lookup,mlx-lm --html bench.html
      mlxspec bench MODEL --spec-bench question.jsonl --limit 10
      mlxspec bench MODEL --submit

    A file of prompts is JSONL with "prompt", "messages" or "turns" and optionally "category" in
    each line. The whole text of any other file is one prompt. Reports contain no prompts, outputs
    or paths unless you ask for them.

    --tune measures plain decoding and --decoder with MLX's variables MLX_METAL_FAST_SYNCH,
    MLX_MAX_MB_PER_BUFFER and MLX_MAX_OPS_PER_BUFFER: with each of them, with all and with none, in
    --repeats rounds. It shows which of them help beyond noise, and how to keep them.

    --submit writes a report for the page "Figures" and for "replay --chip": chip, memory, versions,
    the model's name if it is a repository's, and figures, with --tune those of its settings, too.
    Nothing is sent before you submit the issue in your browser.
    """
    from ..bench.measure import backends_with, chosen_backends, takes_head, what_differs
    from ..bench.prompts import bundled_prompts, limited, read_prompts
    from ..drafting.drafter import load_drafter

    # Check all that needs no model before a model is loaded, or even downloaded.
    model = needed_model(model)
    backends = chosen_backends(asked.decoders)
    if asked.drafter is not None:
        backends |= backends_with(load_drafter(asked.drafter))
    check_one(head=asked.head, no_head=asked.no_head)
    uses_head = any(map(takes_head, backends))
    if asked.head is not None and not uses_head:
        raise OptionError("--head is for --decoder auto: add it")
    check_least(1, max_tokens=asked.max_tokens, repeats=asked.repeats, limit=asked.limit)
    sampling = SamplingParams(temp=asked.temp, seed=asked.seed)
    prompts = [prompt for file in asked.prompts for prompt in read_prompts(file)]
    questions = limited(prompts or bundled_prompts(), asked.limit)
    shows.check()
    if asked.tune and include_text:
        raise OptionError("--tune reports no texts: leave out --include-text")
    file = _submission_file(asked, shows, backends) if submit else None
    tuned: Report = {"tuning": []}
    if asked.tune:
        tuned = _tuned(model, asked)
        _show_tuning(tuned, shows)
        if file is None:
            return

    head = asked.head if uses_head and not asked.no_head else False
    report = _report(model, asked, head, backends, sampling, questions, include_text, submit)
    wrong = list(what_differs(report))
    shows.show_tables(report, lambda: bench_tables(report), lambda: page_parts(report))
    _exit(report, wrong)
    if file is not None:
        _submit(file, report, tuned["tuning"])


def _exit(report: Report, wrong: list[str]) -> None:
    """Print errors and exit with status 1, or as after Ctrl-C if interrupted; else return."""
    for line in wrong:
        click.echo(f"Error: {shown(line)}", err=True)
    if wrong:
        sys.exit(1)
    if report["settings"]["interrupted"]:
        sys.exit(INTERRUPTED)


def _report(
    model: str,
    asked: BenchOptions,
    head: str | bool | None,
    backends: dict[str, MakeBackend],
    sampling: SamplingParams,
    questions: list[BenchPrompt],
    include_text: bool,
    with_curves: bool,
) -> Report:
    """Load the model, measure until the end or Ctrl-C, and make the report."""
    from ..bench.measure import Measurement, bench_report, machine_facts, model_facts, with_head
    from ..drafting.kept import CostCache
    from ..engine.heads import attach_head
    from ..models.heads.loading import load_with_head

    loaded, tokenizer, its_head = load_with_head(model, head, asked.adapter_path)
    if its_head is not None and attach_head(its_head, loaded) is None:
        its_head = None
    about = model_facts(loaded, model, its_head)
    # First, so that the planner knows them, and that a busy machine ends the command early.
    curves = measured_curves(CostCache(), loaded, about["name"]) if with_curves else []
    if its_head is not None:
        backends = with_head(backends, its_head)
    max_tokens, repeats = asked.max_tokens, asked.repeats
    measurement = Measurement(
        *(loaded, tokenizer, backends), max_tokens=max_tokens, repeats=repeats, sampling=sampling
    )
    measured: list[MeasuredPrompt] = []
    interrupted = True
    with suppress(KeyboardInterrupt), ProgressBar("Taking turns") as on_progress:
        for prompt in measurement.measure(questions, on_progress):
            measured.append(prompt)
        interrupted = False
    if measurement.skipped:
        note(f"left out {measurement.skipped} prompts that are longer than the model's context")
    if not measured and interrupted:
        raise KeyboardInterrupt
    if not measured:
        raise PromptError("every prompt is longer than the model's context: use shorter ones")
    settings = {
        "prompts": len(measured),
        "prompts_too_long": measurement.skipped,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": asked.temp,
        "seed": asked.seed,
        "interrupted": interrupted,
    }
    if asked.adapter_path is not None:
        about["name"] += f" with adapters {Path(asked.adapter_path).resolve().name}"
    facts = {"model": about, "machine": machine_facts(), "settings": settings}
    report = bench_report(measured, facts=facts, include_text=include_text)
    return report | ({"curves": curves} if with_curves else {})


def _submission_file(asked: BenchOptions, shows: ReportOptions, names: Iterable[str]) -> Path:
    """Check before the work that a report can be made and written; return the file for it."""
    given = {"--prompts": asked.prompts, "--drafter": asked.drafter, "--json": shows.as_json}
    for option_name in (option_name for option_name, value in given.items() if value):
        raise OptionError(
            f"{option_name} with --submit: reports have the bundled prompts and decoders, and are "
            "shown as they are sent; leave out one of the two"
        )
    if "auto" not in names:
        raise OptionError(
            f"--decoder {asked.decoders} with --submit: a report needs the default one; add auto"
        )
    file = Path(time.strftime("mlxspec-report-%Y%m%d-%H%M%S.json"))
    check_writable(file)
    return file


def _submit(file: Path, report: Report, tuning: list[Report]) -> None:
    """Write and show what will be public, and open the issue if the user agrees."""
    from ..bench.submission import BenchReport, issue_url

    sent = BenchReport.of(report, tuning)
    with replaced(file, SHARED) as writable:
        writable.write(sent.text().encode())
    url, is_filled_in = issue_url(sent)
    click.echo(f"\nAll that the report says; it is in {file}, too:\n\n{sent.text()}")
    if sent.machine.device == "cpu":
        click.echo("It is shown as a report of MLX's CPU back end.")
    if at_terminal() and not click.confirm("Open it as a public issue on GitHub?", err=True):
        click.echo(f"Nothing was sent. The report stays in {file}.")
        return
    if not at_terminal() or not webbrowser.open(url):
        click.echo(f"To send the report, open this address:\n{url}")
    unless = "If the form is empty, paste" if is_filled_in else "The form is empty: paste"
    click.echo(f"{unless} the content of {file}. Nothing is sent until you submit the form.")


def _tuned(model: str, asked: BenchOptions) -> Report:
    """Measure MLX's settings in turns, each in its own process."""
    from ..bench.tune import measured, tune
    from ..models.model_files import find_directory

    find_directory(model, None)  # a download shows its progress here
    options = {
        "--adapter-path": asked.adapter_path,
        "--head": asked.head,
        "--limit": asked.limit,
        "--decoder": asked.decoders or "auto",
        "--drafter": asked.drafter,
        "--max-tokens": asked.max_tokens,
        "--temp": asked.temp,
        "--seed": asked.seed,
    }
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    given += [f"--prompts={file}" for file in asked.prompts]
    given += [NO_HEAD[0]] if asked.no_head else []
    with ProgressBar("Taking turns") as on_progress:
        return tune(partial(measured, [f"--model={model}", *given]), asked.repeats, on_progress)


# --- tables and the page ---


def _show_tuning(report: Report, shows: ReportOptions) -> None:
    """Show what settings bring; return if all was measured, or else exit as :func:`_exit`."""
    shows.show_tables(report, lambda: _tuning_tables(report))
    if report["best"] and not shows.as_json:  # on one line, even if the terminal is narrow
        click.echo(f"To keep the best: mlxspec config set mlx-settings {report['best']}")
        click.echo("Then measure the costs of steps again: mlxspec calibrate MODEL")
    _exit(report, report["failed"])


def page_parts(report: Report) -> Iterator[RenderableType]:
    """The tables of a report, bars of the speeds, the settings, and texts if it has any."""
    from ..bench.measure import SLOW, ratio_name, what_differs

    yield from bench_tables(report)
    yield from (Text(shown(line), "red") for line in what_differs(report))
    for title, entry in {"all": report, **report["categories"]}.items():
        speeds = {name: of[ratio_name(report)] for name, of in entry["decoders"].items()}
        yield Text(f"\n{shown(title)}: tokens/s against {report['baseline']}\n", "bold")
        yield speed_bars(speeds, SLOW)
    settings = (f"{name.replace('_', ' ')} {value}" for name, value in report["settings"].items())
    yield f"\n{', '.join(settings)}"
    for number, prompt in enumerate(report["prompts"], start=1):
        for one in prompt.get("messages", ()):
            yield Text(f"\n{number}. {shown(prompt['category'])}, {one['role']}", "bold")
            yield Text(visible(one["content"]))
        writers: dict[str, list[str]] = {}
        for name, output in prompt.get("outputs", {}).items():
            writers.setdefault(output, []).append(name)
        for output, names in writers.items():
            yield Text(f"\n{number}. {', '.join(names)}", "bold")
            yield Text(visible(output))


def _heading(report: Report) -> Iterator[RenderableType]:
    model, machine = report["model"], report["machine"]
    yield shown(
        f"{model['name']}: {model['parameters']:,} parameters, {model['bits_per_weight']} bits "
        f"each in memory, {model['dtype']}"
        + (f", with a trained head, {model['head']}" if "head" in model else "")
    )
    blas = f", BLAS: {machine['blas']}" if "blas" in machine else ""
    yield shown(f"{machine['chip']} ({machine['device']}{blas}), {machine['system']}")
    yield (
        f"mlxspec {machine['mlxspec']}, mlx {machine['mlx']}, mlx-lm {machine['mlx_lm']}, "
        f"Python {machine['python']}"
    )
    if "mlx_settings" in machine:
        yield shown(machine["mlx_settings"])


def bench_tables(report: Report) -> Iterator[RenderableType]:
    from ..bench.measure import exactness, ratio_name, verdict

    yield from _heading(report)
    decoders = report["decoders"]
    table = folding_table(
        *("category", "prompts", *decoders),
        caption=f"tokens/s without prefill, and the ratio to {report['baseline']}, turn by turn",
    )
    for category, entry in report["categories"].items():
        cells = []
        for name, figures in entry["decoders"].items():
            rate = f"{figures['tokens_per_second']:.1f}"
            if name != report["baseline"]:
                differs = figures["outputs"]["different"]
                rate += f"  {'differs' if differs else ratio(figures[ratio_name(report)])}"
            cells.append(rate)
        table.add_row(shown(category), str(entry["prompts"]), *cells)
    yield table
    yield _over_all(decoders)
    if compared := exactness(report):
        yield compared
    if report["rough"]:
        yield report["rough"]
    yield Text(shown(verdict(report)), style="bold")


def _over_all(decoders: Report) -> RenderableType:
    result = folding_table(
        "all",
        *("vs plain", "vs mlx-lm", "worst vs plain", "predicted", "error"),
        *("tokens/step", "rows/step", "accepted", "outputs"),
        caption="geometric means of the categories; outputs are compared with plain's",
    )
    for name, figures in decoders.items():
        worst = "–"
        if figures["worst"] is not None:
            worst = f"{shown(figures['worst_category'])} {ratio(figures['worst'])}"
        result.add_row(
            name,
            ratio(figures["speedup"]),
            ratio(figures["vs_mlx_lm"]),
            worst,
            ratio(figures["predicted_speed"]),
            _formatted(figures["prediction_error"], "+.0%"),
            _formatted(figures["tokens_per_step"], ".2f"),
            _formatted(figures["rows_per_step"], ".2f"),
            _formatted(figures["acceptance_rate"], ".0%"),
            _outputs(figures["outputs"]),
        )
    return result


def _outputs(outputs: dict[str, Any]) -> str:
    parts = [f"{outputs['equal']} equal"] if outputs["equal"] else []
    if outputs["near_ties"]:
        parts.append(f"{outputs['near_ties']} near ties (margin {outputs['largest_margin']:.0e})")
    if outputs["different"]:
        parts.append(f"{outputs['different']} DIFFERENT")
    if outputs["not_compared"]:
        parts.append(f"{outputs['not_compared']} other samples")
    return ", ".join(parts)


def _formatted(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _tuning_tables(report: Report) -> Iterator[RenderableType]:
    yield from _heading(report)
    none, *others = report["tuning"]
    table = folding_table(
        *("MLX's settings", *none["decoders"]),
        caption="tokens/s, and the ratio to none: the geometric mean over prompts and rounds "
        f"({report['settings']['repeats']}); ± is half the width of a 95 % confidence interval",
    )
    table.add_row("none", *(f"{of['tokens_per_second']:.1f}" for of in none["decoders"].values()))
    for entry in others:
        cells = [
            f"{of['tokens_per_second']:.1f}  {ratio(of['ratio'])} ±{_formatted(of['error'], '.1%')}"
            for of in entry["decoders"].values()
        ]
        table.add_row(entry["mlx_settings"].replace(",", ", "), *cells)
    yield table
    if report["machine"]["device"] == "cpu":
        yield "On a CPU MLX reads none of these variables: all differences are noise."
    if report["settings"]["repeats"] == 1:
        yield "One round has no confidence interval: give --repeats 3 or more."
    helpful = [entry["mlx_settings"] for entry in others if entry["helps"]]
    verdict = (
        f"Faster with every decoder, beyond the interval: {'; '.join(helpful) or 'none of them'}."
    )
    yield Text(verdict, style="bold")
