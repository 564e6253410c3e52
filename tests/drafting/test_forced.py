"""Forced tokens as drafts, alone and beside other drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.candidates import Candidates, TreeNode
from mlxspec.drafting.drafter import Drafter
from mlxspec.drafting.sources import forced_chain, with_forced
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


class Fixed(Drafter):
    """Always drafts the same tokens."""

    def __init__(self, tree: DraftTree, branching: bool = True) -> None:
        self.tree, self.branching = tree, branching
        self.seen: list[VerifiedStep] = []

    def propose(self, max_depth: int) -> DraftTree:
        return self.tree

    def observe(self, step: VerifiedStep) -> None:
        self.seen.append(step)


def chain(text: str) -> DraftTree:
    return DraftTree.chain(0, map(ord, text))


def text_of(candidates: DraftTree, node: int) -> str:
    text = ""
    while node:
        text = chr(candidates.tokens[node]) + text
        node = candidates.parents[node]
    return text


@pytest.mark.parametrize("branching", [True, False])
def test_forced_tokens_come_first_and_each_drafter_sees_its_own(branching: bool) -> None:
    own = Fixed(chain("abx"), branching)
    drafter = with_forced(own, Spelled("abc"))
    assert drafter.branching == branching
    drafter.begin([0])
    tree = drafter.propose(8)
    assert tree.first_chain() == chain("abc")
    assert tree.origins[:3] == ("grammar", "grammar", "grammar")
    tokens = tuple(map(ord, "abc"))
    drafter.observe(VerifiedStep(tree, (*tokens, 0, 0), (*tokens, 0, 0), (1, 2, 3), (*tokens, 0)))
    assert own.seen[0].tree == chain("abx")
    assert own.seen[0].accepted == (1, 2)


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
