"""``mlxspec calibrate``: what a step over M rows costs, for this model on this machine."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.bar import Bar
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..errors import MlxspecError, OptionError
from ..terminal import visible
from .common.model_choice import ABOUT, DEFAULT, model_argument, needed_model
from .common.notes import note
from .common.options import ADAPTERS, ADAPTERS_HELP, FILE, NAME, check_least, command, option
from .common.output import FORCE_HELP, ProgressBar, at_terminal, output_console, write_json

if TYPE_CHECKING:
    from ..drafting.kept import CostCache, CostKey, KnownRange
    from ..engine.capability import Capability

_MOST_SEQUENCES = 64  # whose steps are shown
_DIGEST = 8  # characters, enough to distinguish models of one kind and size

_WIDEST_BAR = 60  # columns
_measurement = partial(option, group="Measurement")
_output = partial(option, group="Output")


@command("calibrate", short_help="Measure what steps of MODEL cost by their rows.")
@model_argument(ABOUT + DEFAULT)
@_measurement(ADAPTERS, ADAPTERS_HELP, type=NAME)
@_measurement("--context N", "Measure behind N tokens of context.  [default: 256]", type=int)
@_measurement("--sequences N", "Measure steps that N sequences share.", default=1, type=int)
@_measurement("--show", "Show what is known of MODEL, or else of all, and measure nothing.")
@_output("--svg FILE", "Draw the curve as a picture, too.", type=FILE)
@_output("--force", FORCE_HELP)
@_output("--json", "Write one JSON object and no table.", "as_json")
def calibrate_command(
    *,
    model: str | None,
    adapter_path: str | None,
    context: int | None,
    sequences: int,
    show: bool,
    svg: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Measure what steps of MODEL cost by their number of rows, and keep it.

    \b
    Examples:
      mlxspec calibrate mlx-community/Mistral-7B-Instruct-v0.3-4bit
      mlxspec calibrate demo --context 500 --svg curve.svg
      mlxspec calibrate demo --sequences 4
      mlxspec calibrate --show

    A draft of M - 1 tokens pays when its step emits more tokens than T(M)/T(1). The default
    decoder measures this by itself at first use, quickly, and corrects it all the time; this
    command measures it carefully, best on an otherwise idle machine. If the times scatter too
    much, nothing is kept, and the exit status is 1. The times are kept in the
    user's cache directory, or in the one that MLXSPEC_CACHE_DIR names.
    """
    from ..bench.report import check_report, write_report
    from ..drafting.kept import CostCache

    if svg:
        check_report(svg, "--svg", force=force)
    check_least(1, context=context, sequences=sequences)
    if adapter_path is not None and model is None:
        raise OptionError("--adapter-path is given without its MODEL: name that, too")
    cache = CostCache()
    if show:
        curves = _kept(cache, model, adapter_path, context)
    else:
        curves = [_measured(cache, needed_model(model), adapter_path, context, sequences)]
    if svg and len(curves) != 1:
        raise OptionError(
            f"a picture shows one curve, and there are {len(curves)}: name the model, and a "
            "--context where several ranges are known"
        )
    if as_json:
        reports = [curve.report() for curve in curves]
        write_json({"curves": reports} if show else reports[0])
    else:
        _print(curves, model)
    if svg:
        write_report(svg, _picture(curves[0]), "--svg", force=force)


@dataclass(frozen=True)
class _Curve:
    """One curve to show.

    Attributes:
        key: the machine and the model.
        range_end: it holds for contexts shorter than this.
        known: when and how it was measured.
        capability: what the model verifies; None where it is not at hand.
    """

    key: CostKey
    range_end: int
    known: KnownRange
    capability: Capability | None

    def points(self) -> list[dict[str, float]]:
        """T(rows) by rows: seconds, cost T(rows)/T(1), and half of its relative 95 % interval."""
        from ..drafting.measurement import cost_errors

        times = self.known.times
        return [
            {
                "rows": time.rows,
                "seconds": time.seconds,
                "cost": time.seconds / times[0].seconds,
                "error": error,
                "seconds_per_row": time.seconds / time.rows,
            }
            for time, error in zip(times, cost_errors(times), strict=True)
        ]

    @property
    def title(self) -> str:
        """What the user called the model, or else what kind it is."""
        return visible(self.known.name or str(self.key.model.get("type")))

    @property
    def about(self) -> list[str]:
        """What identifies it: the model's size and digest; machine, context and date."""
        model, machine = self.key.model, self.key.machine
        millions = float(model.get("parameters") or 0) / 1e6
        size = f"{millions / 1000:.2f} B" if millions >= 1000 else f"{millions:.1f} M"
        kind = [
            f"{model.get('type')}, {size} parameters, {model.get('bits_per_weight')} bits each in "
            f"memory, digest {str(model.get('digest'))[:_DIGEST]}"
        ]
        if self.sequences > 1:
            kind.append(f"{self.sequences} sequences")
        measured = [machine.get("chip"), machine.get("device")]
        if machine.get("blas") not in (None, "own"):
            measured.append(machine["blas"])
        measured += [f"MLX {machine.get('mlx')}", f"context below {self.range_end:,}"]
        measured += [self.known.source, self.known.updated[:10]]
        return [visible(", ".join(map(str, facts))) for facts in (kind, measured)]

    @property
    def sequences(self) -> int:
        """How many sequences share each step."""
        return int(self.key.model.get("sequences") or 1)

    def report(self) -> dict[str, Any]:
        return {
            "name": self.known.name or None,
            "machine": self.key.machine,
            "model": self.key.model,
            "context_below": self.range_end,
            "source": self.known.source,
            "updated": self.known.updated,
            "times": self.points(),
        }


def _measured(
    cache: CostCache, name: str, adapter_path: str | None, context: int | None, sequences: int
) -> _Curve:
    """Measure carefully, and keep it. An interrupt before the end leaves the cache as it was.

    Raises:
        MlxspecError: the times are noise; nothing is kept.
    """
    from ..drafting.costs import context_range
    from ..drafting.measurement import CAREFUL, noise
    from ..engine.capability import chain_capability
    from ..engine.costs import calibrate, cost_key, known_range
    from ..models.model import load
    from ..models.model_files import given_name

    model, _ = load(name, adapter_path=adapter_path)
    while True:
        with ProgressBar("Prefill") as prefill, ProgressBar("Measuring step times") as measuring:
            times = calibrate(
                model,
                CAREFUL,
                context=context,
                sequences=sequences,
                on_prefill=prefill,
                on_progress=measuring,
            )
        problem = noise(times)
        if problem is None:
            break
        asked = at_terminal()
        if asked and click.confirm(f"{problem[0].upper()}{problem[1:]}. Measure again?", err=True):
            continue
        raise MlxspecError(
            f"{given_name(name)}: {'' if asked else problem + '; '}nothing is kept, and what was "
            "known stays: close other programs and measure again"
        )
    key = cost_key(model).of_sequences(sequences)
    known = known_range(times, CAREFUL, "careful", given_name(name))
    range_end = context_range(context or CAREFUL.context)
    cache.update(key, {range_end: known})
    kept = cache.read(key).get(range_end)
    if kept and len(kept.times) > len(known.times):
        note(
            f"the step times of {len(kept.times)} numbers of rows that were known are kept, since "
            f"this measurement has {len(known.times)}"
        )
    return _Curve(key, range_end, known, chain_capability(model))


def _kept(
    cache: CostCache, name: str | None, adapter_path: str | None, context: int | None
) -> list[_Curve]:
    """What the cache has: of one model on this machine, or of all."""
    from ..drafting.costs import context_range
    from ..engine.capability import chain_capability
    from ..engine.costs import cost_key
    from ..models.model import load
    from ..models.model_files import given_name

    capability = None
    if name is None:
        entries = list(cache.entries())
    else:
        model = load(name, adapter_path=adapter_path, lazy=True)[0]
        capability = chain_capability(model)
        key = cost_key(model)
        keys = [key.of_sequences(count) for count in range(1, _MOST_SEQUENCES + 1)]
        entries = [(key, cache.read(key)) for key in keys]
    curves = []
    for key, ranges in entries:
        for end, known in sorted(ranges.items()):
            if context is None or context_range(context) == end:
                # Steps that decoding has measured by itself have no name yet.
                called = known.name or (given_name(name) if name else "")
                curves.append(_Curve(key, end, replace(known, name=called), capability))
    return curves


def _print(curves: list[_Curve], model: str | None) -> None:
    console = output_console()
    if not curves:
        of_what = f" of {visible(model)} on this machine" if model else ""
        console.print(
            f"No step times{of_what} are known yet: mlxspec calibrate MODEL measures them."
        )
    for curve in curves:
        _print_curve(curve, console)


def _print_curve(curve: _Curve, console: Console) -> None:
    console.print(curve.title, style="bold")
    for line in curve.about:
        console.print(line)
    points = curve.points()
    console.print(_table(points, bars=len(points) > 1 and not console.options.ascii_only))
    if len(points) == 1:
        none = curve.capability and curve.capability.value == "plain"
        reason = "This model verifies no drafts, so only" if none else "Only"
        console.print(f"{reason} plain steps were measured.")
    elif curve.sequences > 1:
        console.print(
            f"T(1) is a plain step of all {curve.sequences} sequences; each further row is one of "
            "a draft."
        )
    else:
        console.print("A draft pays when its step emits more than T(M)/T(1) tokens.")
    if len(points) > 1:
        console.print(
            "± is half the width of a 95 % confidence interval of T(M)/T(1).", style="dim"
        )
    console.print()


def _table(points: Sequence[dict[str, float]], bars: bool) -> Table:
    """Rows, milliseconds and costs, the costs as bars, too."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1), expand=bars)
    for heading in ("rows", "ms", "T(M)/T(1)", "ms/row", "±"):
        table.add_column(heading, justify="right", no_wrap=True)
    if bars:
        table.add_column(ratio=1, max_width=_WIDEST_BAR)
    highest = max(point["cost"] for point in points)
    for point in points:
        bar = [Bar(highest, 0, point["cost"], color="blue")] if bars else []
        table.add_row(
            str(point["rows"]),
            _milliseconds(point["seconds"]),
            f"{point['cost']:.2f}",
            _milliseconds(point["seconds_per_row"]),
            f"{point['error']:.0%}" if point["rows"] > 1 else "–",
            *bar,
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _picture(curve: _Curve) -> str:
    """What is printed of a curve, as an SVG that needs no network."""
    console = Console(file=io.StringIO(), record=True, width=100, force_terminal=True)
    _print_curve(curve, console)
    svg = console.export_svg(title="mlxspec calibrate")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return re.sub(r"<!-- Generated with Rich .*? -->", "<!-- mlxspec -->", svg)
