"""A comparison as a page: one look tells which decoder wins on which chip."""

from __future__ import annotations

from collections.abc import Mapping

from .comparison import DECODERS, HINDSIGHT
from .page import Bar, BarChart, BarGroup, render
from .replay_report import ReplayReport

Comparison = Mapping[str, Mapping[str, ReplayReport]]
"""Reports by chip and decoder."""


def replay_page(comparison: Comparison, sources: Mapping[str, str]) -> str:
    """The HTML page.

    Args:
        comparison: from :func:`mlxspec.eval.comparison.compare`.
        sources: by chip, where its cost curve comes from.
    """
    first = next(iter(next(iter(comparison.values())).values()))
    return render(
        "replay.html",
        verdict=verdict(comparison),
        table=comparison,
        chips=list(comparison),
        decoders={name: DECODERS[name] for name in next(iter(comparison.values()))},
        best={
            chip: max((one.speedup for one in reachable(of).values()), default=None)
            for chip, of in comparison.items()
        },
        hindsight=HINDSIGHT,
        chart=BarChart([_group(chip, of) for chip, of in comparison.items()]),
        sources=sources,
        completions=sum(one.completions for one in first.sets.values()),
        tokens=sum(one.tokens for one in first.sets.values()),
    )


def verdict(comparison: Comparison) -> list[str]:
    """Which decoder wins where, a line for each winner; plain decoding where nothing gains."""
    won: dict[str, list[str]] = {}
    for chip, of in comparison.items():
        reports = reachable(of)
        if not reports:
            continue
        best = max(reports, key=lambda name: reports[name].speedup)
        speed, worst = reports[best].speedup, reports[best].worst
        if speed > 1:
            won.setdefault(best, []).append(f"{chip} ({speed:.2f}×, worst set {worst:.2f}×)")
        else:
            won.setdefault("plain decoding", []).append(chip)
    return [f"{winner} wins on {', '.join(chips)}." for winner, chips in won.items()]


def reachable(reports: Mapping[str, ReplayReport]) -> dict[str, ReplayReport]:
    """The reports of decoders that know no output beforehand."""
    return {name: report for name, report in reports.items() if name != HINDSIGHT}


def _group(chip: str, reports: Mapping[str, ReplayReport]) -> BarGroup:
    return BarGroup(
        chip,
        [
            Bar(name, report.speedup, unreachable=name == HINDSIGHT)
            for name, report in reports.items()
        ],
    )
