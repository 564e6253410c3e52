"""Trees drawn from left to right; ``templates/tree.html`` makes them SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Pixels; a letter's width is that of 13-pixel monospace fonts.
_LETTER, _PADDING, _GAP = 7.9, 16, 20
_CHIP_HEIGHT, _ROW_HEIGHT, _WORD_HEIGHT, _HEAD_HEIGHT = 22, 28, 12, 26


@dataclass(frozen=True)
class TreeNode:
    """A node to draw.

    Attributes:
        parent: the index of its parent, which stands before it; -1 for the root.
        label: the text in its chip.
        letters: how wide the label is.
        kind: the CSS class that says how it looks.
        above: a word above the chip.
        after: a text behind the chip, where the node has no children.
        title: what a pointer over the chip shows.
    """

    parent: int
    label: str
    letters: int
    kind: str
    above: str = ""
    after: str = ""
    title: str = ""


@dataclass(frozen=True)
class Chip:
    """A node in its place; x and y are the middle of its left side, in pixels."""

    node: TreeNode
    x: float
    y: float
    width: float

    @property
    def right(self) -> float:
        return self.x + self.width


class TreeDrawing:
    """A tree whose depth grows to the right: nodes of one depth stand below each other.

    A node's first child continues its row and the others get rows of their own below, so no
    lines cross.

    Args:
        nodes: parents before children; siblings in the order in which they are drawn.
    """

    chip_height = _CHIP_HEIGHT

    def __init__(self, nodes: Sequence[TreeNode]) -> None:
        children: list[list[int]] = [[] for _ in nodes]
        depths = [0] * len(nodes)
        for index, node in enumerate(nodes[1:], start=1):
            children[node.parent].append(index)
            depths[index] = depths[node.parent] + 1
        rows = _rows(children)
        widths = [_LETTER * node.letters + _PADDING for node in nodes]
        self.columns = _columns(depths, widths)
        """Per depth, the x where its chips begin."""
        worded = {row for node, row in zip(nodes, rows, strict=True) if node.above}
        middles = [_HEAD_HEIGHT + _ROW_HEIGHT / 2 + _WORD_HEIGHT * (0 in worded)]
        for row in range(1, max(rows) + 1):
            middles.append(middles[-1] + _ROW_HEIGHT + _WORD_HEIGHT * (row in worded))
        self.chips = [
            Chip(node, self.columns[depth], middles[row], width)
            for node, depth, row, width in zip(nodes, depths, rows, widths, strict=True)
        ]
        self.height = middles[-1] + _ROW_HEIGHT / 2
        self.width = max(
            chip.right + _GAP + _LETTER * (len(chip.node.after) + 1) for chip in self.chips
        )

    @property
    def edges(self) -> list[tuple[Chip, str]]:
        """Per child its chip and the path that leads to it, as SVG has it; the first is below."""
        return [
            (chip, _path(self.chips[chip.node.parent], chip))
            for chip in sorted(self.chips, key=lambda chip: -chip.y)
            if chip.node.parent >= 0
        ]


def _rows(children: Sequence[Sequence[int]]) -> list[int]:
    """The row of each node."""
    rows = [0] * len(children)
    used = 1
    waiting = [(0, True)]
    while waiting:
        node, in_parent_s_row = waiting.pop()
        if not in_parent_s_row:
            rows[node] = used
            used += 1
        for child in reversed(children[node]):
            rows[child] = rows[node]
            waiting.append((child, child == children[node][0]))
    return rows


def _columns(depths: Sequence[int], widths: Sequence[float]) -> list[float]:
    """Where each depth begins: behind the widest chip of the one before."""
    columns = [2.0]
    for depth in range(max(depths)):
        widest = max(width for at, width in zip(depths, widths, strict=True) if at == depth)
        columns.append(columns[-1] + widest + _GAP)
    return columns


def _path(parent: Chip, child: Chip) -> str:
    """Straight on, or down from behind the parent and then to the right."""
    if parent.y == child.y:
        return f"M{parent.right:.1f} {parent.y:.1f}H{child.x:.1f}"
    turn = child.x - _GAP / 2
    return f"M{parent.right:.1f} {parent.y:.1f}H{turn:.1f}V{child.y - 5:.1f}q0 5 5 5H{child.x:.1f}"
