"""What ``mlxspec bench`` does: read, load, measure, show."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import click

from ..engine.params import SamplingParams
from ..errors import OptionError, PromptError
from ..eval.backends import chosen_backends
from ..eval.bench import MeasuredPrompt, Measurement
from ..eval.bench_report import (
    bench_page,
    bench_report,
    machine_facts,
    model_facts,
    require_rouge,
    what_differs,
)
from ..eval.page import check_report, write_report
from ..eval.prompts import BenchPrompt, bundled_prompts, limited, read_prompts, read_spec_bench
from ..loading.model import load
from .bench_table import bench_tables
from .consoles import error_console
from .measuring_progress import MeasuringProgress
from .outcome import INTERRUPTED, note
from .report_output import print_tables, shown


def run_bench(
    *,
    model: str,
    prompts: tuple[Path, ...],
    spec_bench: Path | None,
    limit: int | None,
    references: bool,
    decoders: str | None,
    max_tokens: int,
    repeats: int,
    temp: float,
    seed: int,
    as_json: bool,
    html: Path | None,
    force: bool,
    include_text: bool,
) -> None:
    """Measure; the arguments are the options of the command line.

    Exits with status 1 if outputs differ, and with 130 after showing what there is if Ctrl-C
    ends the measurement.

    Raises:
        MlxspecError: an option, a prompt or the model is at fault.
    """
    # All that needs no model is checked before one is loaded, or even downloaded.
    backends = chosen_backends(decoders)
    sampling = SamplingParams(temp=temp, seed=seed)
    for option, value in (("--max-tokens", max_tokens), ("--repeats", repeats)):
        if value < 1:
            raise OptionError(f"{option} is {value}: it is at least 1")
    questions = _read(prompts, spec_bench, limit)
    if references:
        _check_references(questions)
    if html:
        check_report(html, "--html", force=force)

    loaded, tokenizer = load(model)
    measurement = Measurement(
        loaded, tokenizer, backends, max_tokens=max_tokens, repeats=repeats, sampling=sampling
    )
    measured, interrupted = _measure(measurement, questions)
    settings = {
        "prompts": len(measured),
        "prompts_too_long": measurement.skipped,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": temp,
        "seed": seed,
        "interrupted": interrupted,
    }
    report = bench_report(
        measured,
        facts={
            "model": model_facts(loaded, model),
            "machine": machine_facts(),
            "settings": settings,
        },
        with_references=references,
        include_text=include_text,
    )
    wrong = list(what_differs(report))
    try:
        if html:
            write_report(html, bench_page(report), "--html", force=force)
    finally:  # what was measured is not lost with the page
        if as_json:
            click.echo(json.dumps(report))
        else:
            print_tables(bench_tables(report))
        for line in wrong:
            click.echo(f"Error: {shown(line)}", err=True)
    if wrong:
        sys.exit(1)
    if interrupted:
        sys.exit(INTERRUPTED)


def _read(files: tuple[Path, ...], spec_bench: Path | None, limit: int | None) -> list[BenchPrompt]:
    if files and spec_bench:
        raise OptionError("--prompts and --spec-bench are given together: choose one")
    if limit is not None and limit < 1:
        raise OptionError(f"--limit is {limit}: it is at least 1")
    if spec_bench:
        prompts = read_spec_bench(spec_bench)
    elif files:
        prompts = [prompt for file in files for prompt in read_prompts(file)]
    else:
        prompts = bundled_prompts()
    return prompts if limit is None else limited(prompts, limit)


def _check_references(prompts: list[BenchPrompt]) -> None:
    require_rouge()
    if not any(prompt.references for prompt in prompts):
        raise PromptError('--references: no prompt has a "reference" to compare outputs with')


def _measure(
    measurement: Measurement, prompts: list[BenchPrompt]
) -> tuple[list[MeasuredPrompt], bool]:
    """What was measured to the end, or to Ctrl-C; whether it was the latter."""
    measured: list[MeasuredPrompt] = []
    interrupted = True
    console = error_console(None)
    with suppress(KeyboardInterrupt), MeasuringProgress(console, "Taking turns") as on_progress:
        for prompt in measurement.measure(prompts, on_progress):
            measured.append(prompt)
        interrupted = False
    if measurement.skipped:
        note(f"left out since longer than the model's context: {measurement.skipped} prompts")
    if not measured and interrupted:
        raise KeyboardInterrupt
    if not measured:
        raise PromptError("every prompt is longer than the model's context: use shorter ones")
    return measured, interrupted
