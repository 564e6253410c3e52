"""Explained steps as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len

from ..bench.page import TreeDrawing, TreeNode, render
from ..drafting.sources import RecordedStep
from .explained import (
    Cell,
    Explained,
    Fate,
    Node,
    Pieces,
    ShownStep,
    described_counts,
    nodes_of,
    shortened,
    walk_first,
    window_levels,
)

_PIECE_WIDTH = 24


def explain_page(explained: Explained) -> str:
    """The HTML page; whatever tokens hold is escaped."""
    pieces = explained.pieces
    return render(
        "explain.html",
        decoder=explained.decoder,
        summary=explained.summary,
        opening=explained.opening,
        key={fate.name.lower(): fate.value for fate in Fate},
        prompt=pieces.text(explained.prompt),
        prompt_tokens=len(explained.prompt),
        of=len(explained.steps),
        steps=[_step(step, pieces) for step in explained.shown()],
    )


def _step(step: ShownStep, pieces: Pieces) -> dict[str, Any]:
    return {
        "number": step.number,
        "counts": described_counts(step.recorded),
        "before": step.before,
        "drawing": TreeDrawing(_nodes(step.recorded, pieces)),
        "window": [
            {"name": level.name, "cells": [_cell(cell, pieces) for cell in level.cells]}
            for level in window_levels(step.recorded)
        ],
    }


def _cell(cell: Cell | None, pieces: Pieces) -> dict[str, Any] | None:
    if cell is None:
        return None
    piece = shortened(pieces[cell.token], _PIECE_WIDTH)
    return {"piece": piece, "place": cell.place, "accepted": cell.fate is Fate.ACCEPTED}


def _nodes(step: RecordedStep, pieces: Pieces) -> list[TreeNode]:
    """The tree's nodes in the order in which they are drawn, the bonus token among them."""
    nodes = nodes_of(step)
    result: list[TreeNode] = []
    waiting = [(0, -1)]
    while waiting:
        number, parent = waiting.pop()
        node = nodes[number]
        new = number > 0 and node.origin != nodes[node.parent].origin
        result.append(_drawn(node, parent, new, pieces))
        waiting += ((child, len(result) - 1) for child in reversed(_in_order(node, nodes)))
    return result


def _in_order(node: Node, nodes: Sequence[Node]) -> list[int]:
    """A node's children: the walk's, the bonus token, then the others.

    Where the walk came by, the small ones come first: guesses above the window. Elsewhere the
    largest does, so that the window's trunk runs straight on.
    """
    sign = 1 if node.fate in (Fate.ROOT, Fate.ACCEPTED) else -1
    return sorted(
        node.children, key=lambda child: (walk_first(nodes[child]), sign * nodes[child].size)
    )


def _drawn(node: Node, parent: int, new_origin: bool, pieces: Pieces) -> TreeNode:
    """What is written at a node."""
    label, kind = shortened(pieces[node.token], _PIECE_WIDTH), node.fate.name.lower()
    if node.choice is None:
        title = f"token {node.token}: {node.fate.value}"
        return TreeNode(parent, label, cell_len(label), kind, title=title)
    choice = pieces[node.choice]
    return TreeNode(
        parent,
        label,
        cell_len(label),
        kind,
        above=node.origin if new_origin else "",
        after="" if node.children else f"→ {shortened(choice, _PIECE_WIDTH)}",
        title=f"token {node.token}, {node.origin}: {node.fate.value}; the target's next choice is "
        f"{choice}",
    )
