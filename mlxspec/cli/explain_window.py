"""Lookahead decoding's window as the paper draws it: levels over columns, the newest below."""

from __future__ import annotations

from dataclasses import dataclass

from ..draft.recording import RecordedStep
from .explain_walk import Fate, fates


@dataclass(frozen=True)
class Cell:
    """A token of the window.

    Attributes:
        token: its id.
        place: how many tokens after the current one it stands.
        fate: what became of its row; None in the level that this step has computed.
    """

    token: int
    place: int
    fate: Fate | None


@dataclass(frozen=True)
class WindowLevel:
    """One Jacobi iteration.

    Attributes:
        name: "t−3" is the iteration of three steps ago, "now" this step's.
        cells: by column; None where the step had no room for a row.
    """

    name: str
    cells: tuple[Cell | None, ...]


def window_levels(step: RecordedStep) -> list[WindowLevel]:
    """The window's levels from the oldest to the one that the step has computed.

    A column read downwards is an n-gram; the current token is the first of the first column
    (Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
    2024, figure 2). Empty without a window.
    """
    if not step.window:
        return []
    verified, became = step.verified, fates(step.verified)
    height = 1 + max(level for level, _ in step.window)
    columns = range(1 + max(column for _, column in step.window))

    def cell(level: int, column: int) -> Cell | None:
        node = step.window.get((level, column))
        if node is None:
            return None
        return Cell(verified.tree.tokens[node], column + level, became[node])

    def outcome(column: int) -> Cell | None:
        node = step.window.get((height - 1, column))
        return None if node is None else Cell(verified.argmaxes[node], column + height, None)

    levels = [
        WindowLevel(f"t−{height - level}", tuple(cell(level, column) for column in columns))
        for level in range(height)
    ]
    return [*levels, WindowLevel("now", tuple(outcome(column) for column in columns))]
