"""Merging several drafters' trees into one tree of all paths, with consistent probabilities."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.corpus.suffix_index import SuffixIndex
from mlxspec.drafting.acceptance import AcceptanceModel
from mlxspec.drafting.costs import CostCurve
from mlxspec.drafting.drafter import DraftTree, Limits, TreeBuilder, merge
from mlxspec.drafting.planner import best_draft, expected_tokens
from mlxspec.drafting.suffix_source import SuffixTree

Path = tuple[int, ...]


@st.composite
def candidates(draw: st.DrawFn, name: str) -> DraftTree:
    """Generate a source's candidates: siblings' probabilities add up to 1 at most, best first."""
    grown = TreeBuilder(9)
    left, p_reached = [1.0], [1.0]
    for parent, token, share in draw(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.floats(0.05, 0.95)), max_size=7)
    ):
        if parent < len(left) and (*paths(grown)[parent], token) not in paths(grown):
            p_reached.append(p_reached[parent] * left[parent] * share)
            left[parent] *= 1 - share
            left.append(1.0)
            grown.child(parent, token, p_reached[-1], name)
    return grown.tree().best_first()


def merged(sources: list[DraftTree], max_nodes: int) -> DraftTree:
    return merge(sources).best_first(max_nodes)


def paths(of: DraftTree | TreeBuilder) -> list[Path]:
    """Return the path of tokens to each node, the root's first."""
    found: list[Path] = [()]
    for token, parent in zip(of.tokens[1:], of.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


@given(candidates("first"), candidates("second"), candidates("third"), st.integers(0, 9))
def test_merged_candidates_are_all_paths_with_probabilities_that_add_up(
    first: DraftTree, second: DraftTree, third: DraftTree, max_nodes: int
) -> None:
    sources = {"first": first, "second": second, "third": third}
    found = merged([first, second, third], 99)
    p_of = dict(zip(paths(found), [1.0, *found.p_reached], strict=True))
    assert len(p_of) == len(found.tokens)
    assert p_of.keys() == {path for source in sources.values() for path in paths(source)}
    assert [*found.p_reached] == sorted(found.p_reached, reverse=True)
    siblings: dict[Path, float] = defaultdict(float)
    for path in paths(found)[1:]:
        siblings[path[:-1]] += p_of[path]
        assert p_of[path] <= p_of[path[:-1]]
    assert all(total <= p_of[above] + 1e-9 for above, total in siblings.items())
    for path, p_first in zip(paths(first)[1:], first.p_reached, strict=True):
        assert p_of[path] >= p_first * (1 - 1e-9)
    for path, origin in zip(paths(found)[1:], found.origins, strict=True):
        assert origin == next(name for name in sources if path in paths(sources[name]))
    cut = merged([first, second, third], max_nodes)
    assert paths(cut) == paths(found)[: max_nodes + 1]
    assert cut.p_reached == found.p_reached[:max_nodes]
    for n_draft in range(len(cut.tokens)):
        by_depth = cut.p_by_depth(n_draft)
        for depth, p_depth in enumerate(by_depth, start=1):
            of_depth = [p_of[path] for path in paths(cut)[1 : n_draft + 1] if len(path) == depth]
            assert abs(p_depth - sum(of_depth)) < 1e-9


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=80),
    st.lists(st.floats(0.02, 0.7), min_size=2, max_size=20).map(sorted),
    st.booleans(),
    st.floats(1.0, 5.0),
)
def test_the_nodes_that_are_left_out_are_in_no_best_draft(
    text: list[int], slopes: list[float], branching: bool, rate: float
) -> None:
    """A tree cut off where further rows cannot pay still has the whole tree's best draft."""
    curve = CostCurve(enumerate(accumulate(slopes, initial=1.0), start=1))
    index, model = SuffixIndex(text), AcceptanceModel()
    evidence = "context", index.tokens, index.occurrences(), model

    def best(least_p: list[float]) -> tuple[float, int]:
        limits = Limits(50, curve.widest - 1, branching, least_p)
        tree = SuffixTree(text[-1], *evidence, limits).tree()
        return best_draft(expected_tokens(tree.p_reached), curve.table, rate)

    assert best(curve.cheapest_rows) == best([0.0] * curve.widest)
