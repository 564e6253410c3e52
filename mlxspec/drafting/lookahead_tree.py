"""Guesses and window as one draft tree, with the way back from window rows to nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .tree_builder import TreeBuilder


class LookaheadTree(TreeBuilder):
    """The tree that one step of lookahead decoding verifies.

    Guesses are branches at the root. The window's level 0 is a trunk that starts there; the
    deeper levels of its column i are a branch of the trunk's node i. So the ancestors of a row
    are exactly what the paper's mask lets it see, and its depth gives the paper's position.
    Where a guess and the window, or two guesses, begin alike they share nodes: what stands
    above is the same, so are their rows.

    Guesses are to be added first: a target that verifies no branches gets the first one.

    Args:
        root: the current token.

    Attributes:
        rows: ``rows[l][i]`` is the node of the window's row (l, i).
        guess_nodes: how many nodes the guesses have; they are the nodes from 1 on.
    """

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self.rows: list[list[int]] = []
        self.guess_nodes = 0

    def add_guesses(self, guesses: Iterable[Sequence[int]]) -> None:
        """Add what may follow the current token, best first."""
        for guess in guesses:
            node = 0
            for token in guess:
                node = self.child(node, token)
        self.guess_nodes = len(self) - 1

    def add_window(self, levels: Sequence[Sequence[int]], columns: int | None = None) -> None:
        """Add the first columns of a window.

        Args:
            levels: as :class:`mlxspec.drafting.jacobi_window.JacobiWindow` has them.
            columns: how many, at least 1; None for all.
        """
        trunk = [0]
        for token in levels[0][1:columns]:
            trunk.append(self.child(trunk[-1], token))
        self.rows.append(trunk)
        for level in levels[1:]:
            pairs = zip(self.rows[-1], level, strict=False)
            self.rows.append([self.child(node, token) for node, token in pairs])

    def origins(self) -> tuple[str, ...]:
        """Per node, what has proposed it: "root", "guess" or "window"."""
        window_nodes = len(self) - 1 - self.guess_nodes
        return "root", *["guess"] * self.guess_nodes, *["window"] * window_nodes

    def window_rows(self) -> dict[tuple[int, int], int]:
        """The node of each of the window's rows (level, column)."""
        return {
            (level, column): node
            for level, nodes in enumerate(self.rows)
            for column, node in enumerate(nodes)
        }
