"""Forced tokens as drafts, beside other drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxspec.drafting.candidates import Candidates, TreeNode
from mlxspec.drafting.sources import forced_chain
from mlxspec.drafting.tree import DraftTree


class Spelled:
    """A guide to a single text, or to two texts with a common prefix."""

    def __init__(self, *texts: str) -> None:
        self._texts = [[*map(ord, text)] for text in texts]
        self.at: list[int] = []

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        found: list[int] = []
        while len({*(follows := self._following([*self.at, *path, *found]))}) == 1:
            found.append(follows[0])
        return found

    def allowed(self, tree: DraftTree) -> DraftTree:
        paths: list[list[int]] = [[]]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            paths.append([*paths[parent], token])
        return tree.filtered([any(t[: len(path)] == path for t in self._texts) for path in paths])

    def _following(self, path: list[int]) -> list[int]:
        return [t[len(path)] for t in self._texts if t[: len(path)] == path and len(t) > len(path)]


def chain(text: str) -> DraftTree:
    return DraftTree.chain(0, map(ord, text))


def text_of(candidates: DraftTree, node: int) -> str:
    text = ""
    while node:
        text = chr(candidates.tokens[node]) + text
        node = candidates.parents[node]
    return text


def test_disallowed_candidates_are_dropped_and_forced_ones_added() -> None:
    tree = DraftTree(
        tuple(map(ord, "\0abzxq")),
        (-1, 0, 1, 0, 2, 2),
        (0.5, 0.4, 0.3, 0.2, 0.1),
        ("lookup",) * 5,
    )
    guide = Spelled("abxcd", "abyef")
    roots = [TreeNode(forced_chain(0, guide.forced())), TreeNode(guide.allowed(tree))]
    found = Candidates(0, roots, branching=True, max_depth=16).tree(16)
    texts = [text_of(found, node) for node in range(1, len(found.tokens))]
    reached = dict(zip(texts, found.p_reached, strict=True))
    assert set(reached) == {"a", "ab", "abx"}
    assert reached["a"] == pytest.approx(0.99)
    assert reached["ab"] == pytest.approx(0.99**2)
    assert reached["abx"] == pytest.approx(0.99**2 * 0.5)
    assert found.origins == ("grammar", "grammar", "lookup")
    assert len(Candidates(0, roots, branching=True, max_depth=2).tree(16)) == 3
    assert forced_chain(0, Spelled("abx").forced()) == chain("abx")
