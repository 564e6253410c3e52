"""Trees drawn from left to right."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.eval.page import Chip, TreeDrawing, TreeNode


@st.composite
def drawings(draw: st.DrawFn) -> TreeDrawing:
    """Random trees in pre-order, with words at some nodes."""
    parents = [-1]
    path = [0]
    for index in range(1, draw(st.integers(1, 30))):
        del path[draw(st.integers(1, len(path))) :]
        parents.append(path[-1])
        path.append(index)
    letters = st.integers(1, 24)
    return TreeDrawing(
        [
            TreeNode(parent, "x", draw(letters), "accepted", above=draw(st.sampled_from(["", "w"])))
            for parent in parents
        ]
    )


def overlap(one: Chip, other: Chip, height: float) -> bool:
    beside = one.right <= other.x or other.right <= one.x
    return not beside and abs(one.y - other.y) < height


@given(drawings())
def test_no_chips_overlap_and_all_are_inside(drawing: TreeDrawing) -> None:
    chips = drawing.chips
    for index, chip in enumerate(chips):
        assert 0 <= chip.x < chip.right <= drawing.width
        half = drawing.chip_height / 2
        assert half <= chip.y <= drawing.height - half
        assert not any(overlap(chip, other, drawing.chip_height) for other in chips[:index])


@given(drawings())
def test_nodes_of_one_depth_begin_below_each_other(drawing: TreeDrawing) -> None:
    depths: list[int] = []
    for chip in drawing.chips:
        depths.append(depths[chip.node.parent] + 1 if chip.node.parent >= 0 else 0)
        assert chip.x == drawing.columns[depths[-1]]
    assert drawing.columns == sorted(set(drawing.columns))


@given(drawings())
def test_lines_lead_from_parent_to_child_and_do_not_cross(drawing: TreeDrawing) -> None:
    spans = []
    for chip, path in drawing.edges:
        parent = drawing.chips[chip.node.parent]
        begin_x, begin_y = map(float, re.findall(r"-?[\d.]+", path)[:2])
        assert abs(begin_x - parent.right) < 0.1
        assert abs(begin_y - parent.y) < 0.1
        assert abs(float(path.rpartition("H")[2]) - chip.x) < 0.1
        spans.append((chip.x, chip.node.parent, parent.y, chip.y))
    assert len(spans) == len(drawing.chips) - 1
    for column, parent, top, bottom in spans:
        # A line goes down in the gap before its column. Another parent's lines in the same gap
        # must keep out of what lies between.
        for other_column, other_parent, other_top, other_bottom in spans:
            if (column, parent) != (other_column, other_parent) and column == other_column:
                assert other_bottom <= top or other_top >= bottom or bottom == top
