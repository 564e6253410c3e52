"""Explained steps as a page."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len

from ..draft.recording import RecordedStep
from ..eval.page import TreeDrawing, TreeNode, render
from .explained import (
    BONUS,
    Cell,
    Explained,
    Fate,
    Pieces,
    ShownStep,
    TreeShape,
    described_counts,
    fates,
    shortened,
    window_levels,
)

_PIECE_WIDTH = 24
_KINDS = {
    Fate.ROOT: "root",
    Fate.ACCEPTED: "accepted",
    Fate.REJECTED: "rejected",
    Fate.UNREACHED: "unreached",
    Fate.BONUS: "bonus",
}


def explain_page(explained: Explained) -> str:
    """The HTML page; whatever tokens hold is escaped."""
    pieces = explained.pieces
    return render(
        "explain.html",
        decoder=explained.decoder,
        summary=explained.summary,
        key={kind: fate.value for fate, kind in _KINDS.items()},
        prompt=pieces.text(explained.prompt),
        prompt_tokens=len(explained.prompt),
        of=len(explained.steps),
        steps=[_step(step, pieces) for step in explained.shown()],
    )


def _step(step: ShownStep, pieces: Pieces) -> dict[str, Any]:
    return {
        "number": step.number,
        "counts": described_counts(step.recorded.verified),
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
    shape = TreeShape(step.verified)
    describe = _Description(step, pieces)
    result: list[TreeNode] = []
    waiting = [(0, -1)]
    while waiting:
        node, parent = waiting.pop()
        children = shape.children[node] if node != BONUS else []
        result.append(describe.node(node, parent, is_leaf=not children))
        waiting += ((child, len(result) - 1) for child in reversed(_in_order(shape, node)))
    return result


def _in_order(shape: TreeShape, node: int) -> list[int]:
    """A node's children: the walk's, the bonus token, then the others.

    Where the walk came by, the small ones come first: guesses above the window. Elsewhere the
    largest does, so that the window's trunk runs straight on.
    """
    if node == BONUS:
        return []
    walked = node == 0 or shape.is_accepted(node)

    def rank(child: int) -> tuple[int, int]:
        if child == BONUS:
            return 1, 0
        size = shape.sizes[child]
        return (0 if shape.is_accepted(child) else 2), (size if walked else -size)

    return sorted(shape.children[node], key=rank)


class _Description:
    """What is written at the nodes of one step."""

    def __init__(self, step: RecordedStep, pieces: Pieces) -> None:
        self._verified, self._origins = step.verified, step.origins
        self._pieces = pieces
        self._fates = fates(step.verified)

    def node(self, node: int, parent: int, is_leaf: bool) -> TreeNode:
        tree, pieces = self._verified.tree, self._pieces
        if node == BONUS:
            label = shortened(pieces[self._verified.tokens[-1]], _PIECE_WIDTH)
            title = f"token {self._verified.tokens[-1]}: {Fate.BONUS.value}"
            return TreeNode(parent, label, cell_len(label), _KINDS[Fate.BONUS], title=title)
        token, fate, origin = tree.tokens[node], self._fates[node], self._origins[node]
        choice = pieces[self._verified.choices[node]]
        label = shortened(pieces[token], _PIECE_WIDTH)
        new = node != 0 and origin != self._origins[tree.parents[node]]
        return TreeNode(
            parent,
            label,
            cell_len(label),
            _KINDS[fate],
            above=origin if new else "",
            after=f"→ {shortened(choice, _PIECE_WIDTH)}" if is_leaf else "",
            title=f"token {token}, {origin}: {fate.value}; the target's next choice is {choice}",
        )
