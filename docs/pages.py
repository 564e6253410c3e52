"""What MkDocs needs to know of mlxspec: its docstrings' roles and the curves of chips.

MkDocs loads it as a hook, and mkdocstrings as an extension of Griffe, which reads the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from mlxspec.drafting.chips import Chip

_ROOT = Path(__file__).parent.parent
_SHOWN_ROWS = (2, 4, 8, 16, 32)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the known curves and the chips without one where a page asks for them."""
    for mark, made in (
        ("<!-- chips -->", _table_of_chips),
        ("<!-- other chips -->", _table_of_other_chips),
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
