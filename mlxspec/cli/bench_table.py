"""A measurement for the eye: who is how fast, by category, and whether outputs are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..eval.bench_report import Report, ratio_name, verdict
from .folding_table import FoldingTable
from .report_output import ratio, shown


def bench_tables(report: Report) -> Iterator[RenderableType]:
    """The tables of a report made by :func:`mlxspec.eval.bench_report.bench_report`."""
    model, machine = report["model"], report["machine"]
    yield shown(
        f"{model['name']}: {model['parameters']:,} parameters, {model['bits_per_weight']} bits "
        f"each in memory, {model['dtype']}"
    )
    blas = f", BLAS: {machine['blas']}" if "blas" in machine else ""
    yield shown(f"{machine['chip']} ({machine['device']}{blas}), {machine['system']}")
    yield (
        f"mlxspec {machine['mlxspec']}, mlx {machine['mlx']}, mlx-lm {machine['mlx_lm']}, "
        f"Python {machine['python']}"
    )
    yield _by_category(report)
    yield _over_all(report)
    if any("rouge" in entry for entry in report["categories"].values()):
        yield _rouge(report)
    if report["rough"]:
        yield report["rough"]
    yield Text(shown(verdict(report)), style="bold")


def _by_category(report: Report) -> RenderableType:
    """Tokens per second, and against the baseline."""
    names, which = list(report["decoders"]), ratio_name(report)
    result = FoldingTable(
        *("category", "prompts", *names),
        caption=f"tokens/s, prefill not counted, and the ratio to {report['baseline']}, turn by "
        "turn",
    )
    for category, entry in report["categories"].items():
        cells = [_speed(entry["decoders"][name], which, name, report) for name in names]
        result.add_row(shown(category), str(entry["prompts"]), *cells)
    return result


def _speed(figures: dict[str, Any], which: str, name: str, report: Report) -> str:
    rate = f"{figures['tokens_per_second']:.1f}"
    if name == report["baseline"]:
        return rate
    return f"{rate}  {'differs' if figures['outputs']['different'] else ratio(figures[which])}"


def _over_all(report: Report) -> RenderableType:
    result = FoldingTable(
        "all",
        *("vs plain", "vs mlx-lm", "worst vs plain", "predicted", "error"),
        *("tokens/step", "rows/step", "accepted", "outputs"),
        caption="geometric means of the categories; outputs compared with plain's",
    )
    for name, figures in report["decoders"].items():
        worst = "–"
        if figures["worst"] is not None:
            worst = f"{shown(figures['worst_category'])} {ratio(figures['worst'])}"
        result.add_row(
            name,
            ratio(figures["speedup"]),
            ratio(figures["vs_mlx_lm"]),
            worst,
            ratio(figures["predicted_speed"]),
            _share(figures["prediction_error"], "+.0%"),
            _number(figures["tokens_per_step"]),
            _number(figures["rows_per_step"]),
            _share(figures["acceptance_rate"], ".0%"),
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


def _rouge(report: Report) -> RenderableType:
    result = FoldingTable("references", "decoder", "ROUGE-1", "ROUGE-2", "ROUGE-L")
    for category, entry in report["categories"].items():
        for name, scores in (entry["rouge"] or {}).items():
            values = [f"{scores[kind]:.4f}" for kind in ("rouge1", "rouge2", "rougeL")]
            result.add_row(shown(category), name, *values)
    return result


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _share(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
