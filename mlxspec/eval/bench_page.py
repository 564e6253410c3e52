"""A measurement as a page: who wins, by how much, and whether the outputs are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .backends import PLAIN
from .bench_report import MLX_LM, Report
from .page import Bar, BarChart, BarGroup, render

_SLOW = 0.95  # above, a ratio may as well be 1: it was measured


def bench_page(report: Report) -> str:
    """The HTML page of a report made by :func:`mlxspec.eval.bench_report.bench_report`."""
    ratio = ratio_name(report)
    return render(
        "bench.html",
        report=report,
        verdict=verdict(report),
        wrong=list(what_differs(report)),
        overall=BarChart([_over_all(report, ratio)], _SLOW),
        by_category=BarChart(
            [_category(report, category, ratio) for category in report["categories"]], _SLOW
        ),
        rouge=[
            (category, name, scores)
            for category, entry in report["categories"].items()
            for name, scores in (entry.get("rouge") or {}).items()
        ],
        texts=[_text(prompt) for prompt in report["prompts"] if "outputs" in prompt],
    )


def ratio_name(report: Report) -> str:
    """Which of the figures is the speed against the report's baseline."""
    return "vs_mlx_lm" if report["baseline"] == MLX_LM else "speedup"


def verdict(report: Report) -> str:
    """One sentence: who is fastest."""
    ratio, baseline = ratio_name(report), report["baseline"]
    speeds = {
        name: figures[ratio]
        for name, figures in report["decoders"].items()
        if figures[ratio] is not None
    }
    if len(speeds) < 2:
        return "No speed-up is given: there are no two decoders with the same output."
    best = max(speeds, key=lambda name: speeds[name])
    if best == baseline:
        return f"{baseline} is fastest: nothing else was worth its cost here."
    lowest = min(entry["decoders"][best][ratio] for entry in report["categories"].values())
    return (
        f"{best} is fastest: {speeds[best]:.2f} times the speed of {baseline}, "
        f"{lowest:.2f} times in its worst category."
    )


def what_differs(report: Report) -> Iterator[str]:
    """A line for each output that is wrong."""
    for difference in report["differences"]:
        if difference["near_tie"]:
            continue
        margin = difference["margin"]
        how = (
            "one output ended before the other"
            if margin is None
            else f"the tokens are {margin:.2g} apart, rounding explains {difference['bound']:.2g}"
        )
        place = f"prompt {difference['prompt']} ({difference['category']})"
        yield (
            f"{difference['decoder']} differs from {PLAIN} decoding on {place} "
            f"at token {difference['token']}: {how}"
        )


def _over_all(report: Report, ratio: str) -> BarGroup:
    bars = []
    for name, figures in report["decoders"].items():
        marks = [entry["decoders"][name][ratio] for entry in report["categories"].values()]
        bars.append(_bar(name, figures, ratio, marks))
    return BarGroup("", bars)


def _category(report: Report, category: str, ratio: str) -> BarGroup:
    bars = []
    for name, figures in report["categories"][category]["decoders"].items():
        marks = [
            prompt["decoders"][name][ratio]
            for prompt in report["prompts"]
            if prompt["category"] == category
        ]
        bars.append(_bar(name, figures, ratio, marks))
    return BarGroup(category, bars)


def _bar(name: str, figures: dict[str, Any], ratio: str, marks: list[float | None]) -> Bar:
    known = [mark for mark in marks if mark is not None]
    missing = "differs" if figures["outputs"]["different"] else "–"
    return Bar(name, figures[ratio], known if len(known) > 1 else (), missing)


def _text(prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt with its answers; contestants that wrote the same share one."""
    writers: dict[str, list[str]] = {}
    for name, output in prompt["outputs"].items():
        writers.setdefault(output, []).append(name)
    answers = [(output, ", ".join(names)) for output, names in writers.items()]
    return {**prompt, "answers": answers}
