"""Merging several drafters' trees into one tree of all paths, with consistent probabilities."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.candidates import Candidates, TreeNode
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.planner import best_draft, expected_tokens
from mlxspec.drafting.tree import DraftTree
from tests.support.planners import suffix_planner

Path = tuple[int, ...]


@st.composite
def candidates(draw: st.DrawFn, name: str) -> DraftTree:
    """Generate a source's candidates: siblings' probabilities add up to 1 at most, best first."""
    tokens, parents, left, p_reached = [9], [-1], [1.0], [1.0]
    for parent, token, share in draw(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.floats(0.05, 0.95)), max_size=7)
    ):
        if parent < len(left) and (parent, token) not in zip(parents, tokens, strict=True):
            p_reached.append(p_reached[parent] * left[parent] * share)
            left[parent] *= 1 - share
            left.append(1.0)
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tokens, parents, p_reached[1:], (name,) * (len(tokens) - 1))


def merged(sources: list[DraftTree]) -> Candidates:
    return Candidates(9, [*map(TreeNode, sources)], branching=True, max_depth=99)


def paths(of: DraftTree) -> list[Path]:
    """Return the path of tokens to each node, the root's first."""
    found: list[Path] = [()]
    for token, parent in zip(of.tokens[1:], of.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


def own_of(tree: DraftTree) -> dict[Path, float]:
    """The probability that a tree gives to each path."""
    return dict(zip(paths(tree)[1:], tree.p_reached, strict=True))


@given(candidates("first"), candidates("second"), candidates("third"))
def test_merged_candidates_are_all_paths_with_probabilities_that_add_up(
    first: DraftTree, second: DraftTree, third: DraftTree
) -> None:
    sources = {"first": first, "second": second, "third": third}
    found = merged([first, second, third]).tree(99)
    p_of = dict(zip(paths(found), [1.0, *found.p_reached], strict=True))
    assert len(p_of) == len(found.tokens)
    # Only nodes that are hardly ever right are left out, with all below them.
    proposed = {path for source in sources.values() for path in paths(source)}
    assert p_of.keys() <= proposed
    assert all(p_first < 0.011 or path in p_of for path, p_first in own_of(first).items())
    assert [*found.p_reached] == sorted(found.p_reached, reverse=True)
    siblings: dict[Path, float] = defaultdict(float)
    for path in paths(found)[1:]:
        siblings[path[:-1]] += p_of[path]
        assert p_of[path] <= p_of[path[:-1]]
    assert all(total <= p_of[above] + 1e-9 for above, total in siblings.items())
    for path, p_first in own_of(first).items():
        assert p_of.get(path, 0.01) >= p_first * (1 - 1e-9)
    for path, origin in zip(paths(found)[1:], found.origins, strict=True):
        assert origin == next(name for name in sources if path in paths(sources[name]))
    growing = merged([first, second, third])
    for n_draft in range(len(found)):
        cut = growing.tree(n_draft)
        assert cut == found.filtered([node <= n_draft for node in range(len(found))])
        assert growing.p_of(n_draft) == (*found.p_reached, 0.0)[n_draft]
        assert len(growing) == n_draft  # nothing was added that was not asked for
        for depth, p_depth in enumerate(growing.p_by_depth(n_draft), start=1):
            of_depth = [p_of[path] for path in paths(cut)[1:] if len(path) == depth]
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
    """A plan that ends where no further row can pay has the best draft of all candidates."""
    curve = CostCurve(enumerate(accumulate(slopes, initial=1.0), start=1))
    planner = suffix_planner(curve, branching=branching)
    planner.begin(text)
    planner.policy.rate, planner.policy.bank = rate, 1e9
    everything = planner.search(50).tree(curve.widest - 1)
    best = best_draft(expected_tokens(everything.p_reached), curve.table, rate)[1]
    best_tree = everything.filtered([node <= best for node in range(len(everything))])
    assert planner.propose(50) == best_tree


@given(candidates("first"), candidates("second"))
def test_nothing_follows_a_token_that_ends_the_output(first: DraftTree, second: DraftTree) -> None:
    roots = [TreeNode(first), TreeNode(second)]
    found = Candidates(9, roots, branching=True, max_depth=99, stop_tokens={1, 9}).tree(99)
    possible = [path for path in paths(merged([first, second]).tree(99)) if 1 not in path[:-1]]
    assert sorted(paths(found)) == sorted(possible)
