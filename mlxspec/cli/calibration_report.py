"""What ``mlxspec calibrate`` does: measure and keep, or look up, and show."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ..engine.calibration import calibrate
from ..engine.capability import Capability, chain_capability
from ..engine.costs import cost_key, known_range
from ..errors import OptionError
from ..eval.page import write_report
from ..loading.model import load
from ..plan.cost_file import CostCache, CostKey, KnownRange
from ..plan.live_costs import context_range
from ..plan.measurement import CAREFUL
from ..terminal import visible
from .consoles import error_console, output_console
from .cost_picture import check_picture, drawn_curve
from .cost_points import CostPoint, kept_points, measured_points
from .cost_terminal import cost_plot, cost_table
from .measuring_progress import MeasuringProgress
from .outcome import note


@dataclass(frozen=True)
class _Curve:
    """One curve to show: of what, at which context lengths, and how it came about."""

    key: CostKey
    range_end: int
    source: str
    updated: str
    points: list[CostPoint]
    error_is: str
    capability: Capability | None
    """What the model verifies; None where it is not at hand."""

    @property
    def title(self) -> str:
        model = self.key.model
        millions = float(model.get("parameters") or 0) / 1e6
        size = f"{millions / 1000:.1f} B" if millions >= 1000 else f"{millions:.1f} M"
        return visible(
            f"{model.get('type')}, {size} parameters, {model.get('bits_per_weight')} bits each "
            "in memory"
        )

    @property
    def subtitle(self) -> str:
        machine = self.key.machine
        known = [machine.get("chip"), machine.get("device")]
        if machine.get("blas") not in (None, "own"):
            known.append(machine["blas"])
        known.append(f"MLX {machine.get('mlx')}")
        known.append(f"context below {self.range_end:,}")
        known.append(f"{self.source}, {self.updated[:10]}")
        return visible(", ".join(map(str, known)))

    def report(self) -> dict[str, Any]:
        return {
            "machine": self.key.machine,
            "model": self.key.model,
            "context_below": self.range_end,
            "source": self.source,
            "updated": self.updated,
            "times": [
                {**asdict(point), "seconds_per_row": point.seconds_per_row} for point in self.points
            ],
        }


def run(
    *,
    model: str | None,
    context: int | None,
    show: bool,
    png: Path | None,
    svg: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Measure or look up, then show; the arguments are the options of the command line.

    Raises:
        MlxspecError: an option or the model is at fault; nothing was measured.
    """
    pictures = {kind: path for kind, path in (("png", png), ("svg", svg)) if path}
    for kind, path in pictures.items():
        check_picture(f"--{kind}", path, force=force)
    if context is not None and context < 1:
        raise OptionError(f"--context is {context}: it is at least 1")
    cache = CostCache()
    if show:
        curves = _kept(cache, model, context)
    elif model is None:
        raise OptionError("name a model to measure, or see what is known with --show")
    else:
        curves = [_measured(cache, model, context)]
    if pictures and len(curves) != 1:
        raise OptionError(
            f"a picture shows one curve, and there are {len(curves)}: name the model, and a "
            "--context where several ranges are known"
        )
    if as_json:
        _write_json([curve.report() for curve in curves], many=show)
    else:
        _print(curves, model)
    for kind, path in pictures.items():
        picture = drawn_curve(kind, curves[0].points, curves[0].title, curves[0].subtitle)
        write_report(path, picture, f"--{kind}", force=force)


def _measured(cache: CostCache, name: str, context: int | None) -> _Curve:
    """Measure carefully, and keep it. An interrupt before the end leaves the cache as it was."""
    model, _ = load(name)
    with (
        MeasuringProgress(error_console(None), "Prefill") as prefill,
        MeasuringProgress(error_console(None)) as measuring,
    ):
        times = calibrate(
            model,
            CAREFUL,
            context=context,
            on_prefill=lambda done, total: prefill(done / total),
            on_progress=measuring,
        )
    key, known = cost_key(model), known_range(times, CAREFUL, "careful")
    range_end = context_range(context or CAREFUL.context)
    cache.update(key, {range_end: known})
    kept = cache.read(key).get(range_end)
    if kept and len(kept.times) > len(known.times):
        note(
            f"the step times of {len(kept.times)} numbers of rows that were known are kept, since "
            f"this measurement has {len(known.times)}"
        )
    points, capability = measured_points(times), chain_capability(model)
    return _Curve(key, range_end, known.source, known.updated, points, "spread", capability)


def _kept(cache: CostCache, name: str | None, context: int | None) -> list[_Curve]:
    """What the cache has: of one model on this machine, or of all."""
    capability = None
    if name is None:
        entries = list(cache.entries())
    else:
        model = load(name, lazy=True)[0]
        capability = chain_capability(model)
        key = cost_key(model)
        entries = [(key, cache.read(key))]
    return [
        _kept_curve(key, end, known, capability)
        for key, ranges in entries
        for end, known in sorted(ranges.items())
        if context is None or context_range(context) == end
    ]


def _kept_curve(key: CostKey, end: int, known: KnownRange, capability: Capability | None) -> _Curve:
    points = kept_points(known.times)
    return _Curve(key, end, known.source, known.updated, points, "standard error", capability)


def _write_json(reports: list[dict[str, Any]], many: bool) -> None:
    report = {"curves": reports} if many else reports[0]
    click.echo(json.dumps(report).replace("\x7f", "\\u007f"))  # DEL is the one that json leaves


def _print(curves: list[_Curve], model: str | None) -> None:
    console = output_console()
    if not curves:
        of_what = f" of {visible(model)} on this machine" if model else ""
        console.print(
            Text(f"No step times{of_what} are known yet: mlxspec calibrate MODEL measures them.")
        )
    for curve in curves:
        _print_curve(console, curve)


def _print_curve(console: Console, curve: _Curve) -> None:
    console.print(Text(curve.title, style="bold"))
    console.print(Text(curve.subtitle))
    console.print(cost_table(curve.points))
    if len(curve.points) > 1:
        console.print(cost_plot(curve.points, console))
        console.print(Text("A draft pays when its step emits more than T(M)/T(1) tokens."))
    elif curve.capability is Capability.PLAIN:
        console.print(Text("This model verifies no drafts, so only plain steps were measured."))
    else:
        console.print(Text("Only plain steps were measured."))
    console.print(Text(f"± is the {curve.error_is}.\n", style="dim"))
