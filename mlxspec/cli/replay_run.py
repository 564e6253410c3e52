"""What ``mlxspec replay`` does: read, replay, show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType

from ..errors import OptionError
from ..eval.comparison import (
    Comparison,
    chosen_policies,
    compare,
    read_curve,
    replay_page,
    verdict,
)
from ..eval.page import check_report, write_report
from ..eval.policies import AUTO, HINDSIGHT
from ..eval.replay import ReplayReport
from ..eval.traces import load_trace_tokenizer, read_completions
from ..plan.chips import chip_curve, chip_names, chip_source
from ..plan.cost_curve import CostCurve
from .consoles import error_console
from .folding_table import FoldingTable
from .measuring_progress import MeasuringProgress
from .report_output import print_tables, ratio, shown

_ALL = "all"
_DEFAULT_CHIP = "M4 Pro"
_OWN = "own curve"


def run_replay(
    *,
    traces: tuple[Path, ...],
    tokenizer: str,
    chips: tuple[str, ...],
    curve: Path | None,
    decoders: str | None,
    limit: int,
    as_json: bool,
    html: Path | None,
    force: bool,
) -> None:
    """Replay; the arguments are the options of the command line.

    Raises:
        MlxspecError: an option, a trace or the tokenizer is at fault.
    """
    policies = chosen_policies(decoders if decoders is not None else _ALL if html else AUTO)
    curves, sources = _curves(chips, curve, default=_ALL if html else _DEFAULT_CHIP)
    if html:
        check_report(html, "--html", force=force)
    loaded = load_trace_tokenizer(tokenizer)
    completions = read_completions(traces, loaded, limit)
    with MeasuringProgress(error_console(None), "Replaying") as on_progress:
        comparison = compare(completions, loaded.classes, policies, curves, on_progress)
    try:
        if html:
            write_report(html, replay_page(comparison, policies, sources), "--html", force=force)
    finally:  # what was found is not lost with the page
        if as_json:
            click.echo(json.dumps(json_report(comparison)))
        else:
            print_tables(_tables(comparison))


def json_report(comparison: Comparison) -> dict[str, Any]:
    """The figures of the first decoder on the first chip, and below ``comparison`` of all."""
    entries = [
        {"chip": chip, "decoder": name, **asdict(report)}
        for chip, reports in comparison.items()
        for name, report in reports.items()
    ]
    return {**entries[0], "comparison": entries}


def _curves(
    chips: tuple[str, ...], file: Path | None, default: str
) -> tuple[dict[str, CostCurve], dict[str, str]]:
    """Curves and their sources by name."""
    if chips and file:
        raise OptionError("--chip and --curve are given together: choose one")
    if file:
        return {_OWN: read_curve(file)}, {_OWN: "measured on the user's machine"}
    wanted = chips or (default,)
    names = chip_names() if _ALL in wanted else wanted
    return (
        {name: chip_curve(name) for name in names},
        {name: chip_source(name) for name in names},
    )


def _tables(comparison: Comparison) -> Iterator[RenderableType]:
    for chip, reports in comparison.items():
        yield shown(f"Modelled on: {chip}")
        yield _sets(reports)
        yield _decoders(reports)
    yield from map(shown, verdict(comparison))


def _sets(reports: Mapping[str, ReplayReport]) -> RenderableType:
    """Speed by set and decoder."""
    result = FoldingTable(
        *("set", "outputs", "tokens", *map(_label, reports)),
        caption="speed against plain decoding",
    )
    for name, first in next(iter(reports.values())).sets.items():
        speeds = [ratio(report.sets[name].speedup) for report in reports.values()]
        result.add_row(shown(name), str(first.completions), f"{first.tokens:,}", *speeds)
    return result


def _decoders(reports: Mapping[str, ReplayReport]) -> RenderableType:
    result = FoldingTable(
        *("decoder", "speed", "worst set", "outputs below 0.98"),
        *("tokens per step", "rows per step"),
        caption="speed: geometric mean over the sets; share: mean over the sets",
    )
    for name, report in reports.items():
        worst = min(report.sets, key=lambda one: report.sets[one].speedup)
        result.add_row(
            _label(name),
            ratio(report.speedup),
            f"{shown(worst)} {ratio(report.worst)}",
            f"{report.share_below_098:.1%}",
            f"{report.tokens_per_step:.2f}",
            f"{report.rows_per_step:.2f}",
        )
    return result


def _label(decoder: str) -> str:
    return f"{decoder} (unreachable)" if decoder == HINDSIGHT else decoder
