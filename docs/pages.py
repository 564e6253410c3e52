"""What MkDocs needs to know of mlxspec: its docstrings' roles, the curves of chips, and reports.

MkDocs loads it as a hook, and mkdocstrings as an extension of Griffe, which reads the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from mlxspec.bench.submission import BenchReport, CategoryFigures
    from mlxspec.drafting.chips import Chip

_ROOT = Path(__file__).parent.parent
_REPORTS = _ROOT / "benchmarks" / "reports"
_SHOWN_ROWS = (2, 4, 8, 16, 32)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the known curves, the chips without one, and reports where a page asks for them."""
    for mark, made in (
        ("<!-- chips -->", _table_of_chips),
        ("<!-- other chips -->", _table_of_other_chips),
        ("<!-- reports -->", reports),
    ):
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown


def _table_of_chips() -> str:
    """T(M)/T(1) of each chip that mlxspec knows, and where it comes from."""
    from mlxspec.drafting.chips import ESTIMATED, chip_names, known_chip

    lines = [["", *(f"{rows} rows" for rows in _SHOWN_ROWS)]]
    chips = [known_chip(name) for name in chip_names()]
    for chip in chips:
        costs = (
            f"{ESTIMATED + ' ' if _is_estimate(chip, rows) else ''}{chip.curve(rows):.2f}"
            for rows in _SHOWN_ROWS
        )
        lines.append([chip.name, *costs])
    sources = [f"- {chip.name}: {chip.source}" for chip in chips]
    origin = f"{ESTIMATED}: an estimate, or on the line to one. Where they come from:"
    return "\n".join([*_table(lines), "", origin, "", *sources])


def _is_estimate(chip: Chip, rows: int) -> bool:
    """Whether the cost at ``rows`` rows rests on an estimated point."""
    points = chip.curve.rows
    before = max(point for point in points if point <= rows)
    after = min((point for point in points if point >= rows), default=before)
    return before in chip.estimated or after in chip.estimated


def _table_of_other_chips() -> str:
    """The chips that mlxspec knows no curve of, and the nearest ones that it knows."""
    from mlxspec.drafting.chips import nearest_chips

    nearest: dict[str, list[str]] = {}
    for chip, known in nearest_chips().items():
        nearest.setdefault(" and ".join(known), []).append(chip)
    rows = (f"| {', '.join(chips)} | {known} |" for known, chips in nearest.items())
    return "\n".join(["| no curve is known of | the nearest known |", "|---|---|", *rows])


def reports(directory: Path = _REPORTS) -> str:
    """All reports by chip, newest first, of the chip with the newest report first."""
    from mlxspec.bench.submission import filed_reports

    found = filed_reports(directory)
    chips = list(dict.fromkeys(report.chip for _, _, report in found))
    by_chip = sorted(found, key=lambda one: chips.index(one[2].chip))  # keeps the order
    lines = []
    if not any(report.machine.system.startswith("macOS") for _, _, report in found):
        lines = ["**There is no report from a Mac yet.**", ""]
    for chip, members in groupby(by_chip, lambda one: one[2].chip):
        lines += [f"### {chip}", ""]
        for one in members:
            lines += [*_report(*one), ""]
    return "\n".join(lines)


def _report(day: date, issue: int, report: BenchReport) -> Iterator[str]:
    """A report: what was measured, the speeds by category, and the costs of rows."""
    from mlxspec.drafting.chips import ISSUES

    machine, model = report.machine, report.model
    facts = [
        f"**{day}, {model.label}**",
        f"{model.bits_per_weight:g} bits per weight, {model.dtype}",
        f"with the head {model.head}" if model.head else "",
        f"{machine.memory_gb} GB, {machine.system}",
        f"CPU, {machine.cores} cores, BLAS: {machine.blas}" if machine.device == "cpu" else "",
        f"mlxspec {machine.mlxspec}, mlx {machine.mlx}, mlx-lm {machine.mlx_lm}",
        machine.mlx_settings or "",
        f"at most {report.max_tokens} tokens, repeats: {report.repeats}",
        f"temperature {report.temperature:g}",
        f"{report.outputs - report.differ} of {report.outputs} outputs equal plain decoding's",
        "these figures are **rough**" if report.rough else "",
    ]
    yield "; ".join(fact.replace("_", r"\_") for fact in facts if fact)
    yield f"([issue {issue}]({ISSUES}/{issue}))."
    yield ""
    every: list[Mapping[str, CategoryFigures]] = [report.decoders, *report.categories.values()]
    speeds = [["", "all", *report.categories]]
    for decoder in report.decoders:
        speeds.append([decoder, *(_speed(of.get(decoder)) for of in every)])
    chosen = (of.get("auto") for of in every)
    rows = (f"{of.rows_per_step:.1f}" if of and of.rows_per_step else "–" for of in chosen)
    yield from _table([*speeds, ["rows per step of auto", *rows]])
    yield ""
    costs = [["behind", "plain step", *(f"{rows} rows" for rows in _SHOWN_ROWS)]]
    for curve in report.curves:
        known = dict(zip(curve.rows, zip(curve.cost, curve.error, strict=True), strict=True))
        cells = (
            f"{known[rows][0]:.2f} ± {known[rows][1]:.0%}" if rows in known else "–"
            for rows in _SHOWN_ROWS
        )
        costs.append([f"{curve.context:,} tokens", f"{curve.plain_ms:.3g} ms", *cells])
    yield from _table(costs)


def _speed(of: CategoryFigures | None) -> str:
    """Tokens per second, and in brackets the ratio to plain decoding."""
    if of is None:
        return "–"
    return f"{of.tokens_per_second:.3g}" + (f" ({of.speedup:.2f})" if of.speedup else "")


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table of Markdown; its first row are the headings."""
    heading, *others = rows
    for cells in (heading, ["---"] * len(heading), *others):
        yield f"| {' | '.join(cells)} |"


class Roles(griffe.Extension):
    """Turns the roles of Sphinx in docstrings, such as ``:class:`Name```, into links or code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = in_markdown(obj.docstring.value, obj)


def in_markdown(text: str, of: griffe.Object) -> str:
    """A docstring with what Markdown and Griffe understand instead of what Sphinx does.

    Args:
        text: the docstring.
        of: what it describes; a method's name without its class means one of the same class.
    """
    text = re.sub(r":(\w+):`([^`]+)`", lambda found: _link(found[1], found[2], of), text)
    text = re.sub(r"::\n(\n +)", r":\n\1", text)  # before a block of code
    return re.sub(r"^( *)Options:$", r"\1Other parameters:", text, flags=re.MULTILINE)


def _link(role: str, name: str, of: griffe.Object) -> str:
    """A link to a name that the reference has, and plain code for others."""
    owner = of if of.is_class else of.parent
    if role == "meth" and "." not in name and owner and owner.is_class:
        target = f"{owner.name}.{name}"
    else:
        target = name.removeprefix("mlxspec.")
    if target.partition(".")[0] not in _public_names():
        return f"`{name}`"
    return f"[`{name.removeprefix('mlxspec.')}`][mlxspec.{target}]"


def _public_names() -> set[str]:
    """``mlxspec.__all__``, read without importing anything."""
    stub = _ROOT / "mlxspec" / "__init__.pyi"
    return {*griffe.visit("mlxspec", stub, stub.read_text()).imports}
