"""Explained steps in a terminal."""

from __future__ import annotations

import io
import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlxspec.cli.explain_terminal import outline, print_explained
from mlxspec.cli.explained import Fate, Node, nodes_of
from mlxspec.drafting.drafter import DraftTree, VerifiedStep
from mlxspec.drafting.sources import RecordedStep
from tests.support.explained_steps import Letters, explained, lookahead_step, verified

TREE = """\
● a
├─✓ b c (guess)
│ ├─★ e
│ └─✗ d → ?
├─✗ m → M (window)
└─✗ x ─ n → N (window)
  └─○ y → ?
    ├─○ o → O
    └─○ z p → P
"""
WINDOW = """\
     0 1 2 3
t−2  a x y z
t−1  m n o p
now  M N O P
"""


def printed(*steps: RecordedStep, width: int, color: bool = False, pieces: object = None) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        color_system="256" if color else None,
        force_terminal=color,
        highlight=False,
    )
    print_explained(explained(*steps, pieces=pieces), console)
    text = stream.getvalue()
    return text if color else "".join(line.rstrip() + "\n" for line in text.splitlines())


@pytest.mark.parametrize("width", [40, 80, 160])
def test_tree_and_window_are_drawn_whole_at_every_width(width: int):
    shown = printed(lookahead_step(), width=width)
    assert TREE in shown
    assert WINDOW in shown
    assert "11 rows: 2 of 10 draft tokens accepted, 3 emitted" in " ".join(shown.split())
    assert "after Say a\n" in shown
    assert max(map(len, shown.splitlines())) <= width


def test_without_colours_there_is_no_escape_and_every_fate_has_a_sign_of_its_own():
    shown = printed(lookahead_step(), width=80)
    assert "\x1b" not in shown
    for meaning in (
        *("● emitted before", "✓ accepted", "✗ rejected", "○ not reached", "★ the target's own"),
        *("· space", "↵ newline", "⇥ tab"),
    ):
        assert meaning in shown


def test_colours_change_nothing_but_colours():
    step = lookahead_step()
    shown = printed(step, width=80, color=True)
    assert "\x1b[1;38;5;32mb\x1b[0m" in shown  # as accepted drafts are in generated text
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert [line.rstrip() for line in plain.splitlines()] == printed(step, width=80).splitlines()


def test_long_runs_are_broken_between_tokens_behind_their_guides():
    words = [f"word{number}" for number in range(40)]

    class Words(Letters):
        def __getitem__(self, token: int) -> str:
            return words[token]

        def text(self, tokens: object) -> str:
            return ""

    tree = DraftTree.chain(0, range(1, 30))
    recorded = RecordedStep(
        verified(tree, "".join(map(chr, (*range(1, 20), 39, *range(21, 31))))),
        ("root", *["lookup"] * 29),
        {},
    )
    shown = printed(recorded, width=40, pieces=Words())
    drawn = shown[shown.index("● word0") : shown.index("● emitted")]
    assert max(map(len, drawn.splitlines())) <= 40
    assert re.findall(r"word\d+", drawn) == [
        *words[:20], "word39", *words[20:30], "word30"
    ]  # fmt: skip
    accepted = drawn.splitlines()[1:]
    assert accepted[0].startswith("└─✓ word1 ")
    assert accepted[1].startswith("  │ word")
    assert "  ├─★ word39" in accepted


def test_a_wide_window_is_cut_into_blocks_of_columns():
    columns = 20
    trunk = [ord("A") + number for number in range(columns)]
    tree = DraftTree.chain(trunk[0], trunk[1:])
    recorded = RecordedStep(
        verified(tree, "?" * columns),
        ("root", *["window"] * (columns - 1)),
        {(0, column): column for column in range(columns)},
    )
    shown = printed(recorded, width=40)
    heads = re.findall(r"^     ([\d ]+)$", shown, re.MULTILINE)
    assert " ".join(heads).split() == list(map(str, range(columns)))
    levels = re.findall(r"^t−1 ([ \w]+)$", shown, re.MULTILINE)
    assert "".join(levels).split() == list(map(chr, trunk))
    assert len(levels) == len(heads) > 1


def test_a_plain_step_is_its_token():
    step = RecordedStep(verified(DraftTree.chain(97), "b"), ("root",), {}, "no match")
    shown = printed(step, width=80)
    assert "1 row, 1 emitted; nothing drafted: no match\n" in shown
    assert "● a\n└─★ b\n" in shown
    assert "Window" not in shown


def test_a_terminal_without_unicode_gets_ascii():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_explained(explained(lookahead_step()), Console(file=stream, width=60, highlight=False))
    stream.flush()
    shown = stream.buffer.getvalue().decode("ascii")
    assert "|-+ b c (guess)" in shown
    assert "t-2  a x y z" in shown
    widths = [len(line.rstrip()) for line in shown.splitlines()]
    assert widths == list(map(len, printed(lookahead_step(), width=60).splitlines()))


def nodes_in(step: VerifiedStep) -> list[Node]:
    return nodes_of(RecordedStep(step, ("",) * len(step.tree), {}))


@st.composite
def steps(draw: st.DrawFn) -> VerifiedStep:
    """Walks over random trees."""
    size = draw(st.integers(1, 40))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    letters = st.sampled_from("abc")
    tree = DraftTree(tuple(ord(draw(letters)) for _ in parents), tuple(parents))
    return verified(tree, "".join(draw(letters) for _ in parents))


@given(steps())
def test_every_node_stands_on_one_line_below_its_parent_and_the_bonus_token_once(
    step: VerifiedStep,
) -> None:
    lines = [(*line.nodes, *line.branch) for line in outline(nodes_in(step))]
    listed = [node for line in lines for node in line]
    assert sorted(listed) == list(range(len(step.tree) + 1))  # the last is the bonus token
    seen: set[int] = set()
    for node in listed:
        assert node in (0, len(step.tree)) or step.tree.parents[node] in seen
        seen.add(node)


@given(steps())
def test_lines_are_runs_of_parents_and_children(step: VerifiedStep) -> None:
    for line in outline(nodes_in(step)):
        for run in (line.nodes, (line.nodes[-1], *line.branch)):
            for parent, child in pairwise(run):
                assert step.tree.parents[child] == parent


@given(steps())
def test_a_line_is_accepted_as_a_whole_or_not_at_all(step: VerifiedStep) -> None:
    for line in outline(nodes_in(step)):
        accepted = {node in step.accepted for node in line.nodes}
        assert accepted == {nodes_in(step)[line.nodes[0]].fate is Fate.ACCEPTED}
        assert not set(line.branch) & set(step.accepted)


@given(steps())
def test_the_indentation_grows_with_the_logarithm_of_the_size(step: VerifiedStep) -> None:
    deepest = max(len(line.guides) for line in outline(nodes_in(step))) / 2
    assert deepest <= 8 + math.log2(len(step.tree)) + 2


@given(steps())
def test_guides_are_those_of_a_tree_printed_node_by_node(step: VerifiedStep) -> None:
    """A line's bar stands exactly where a later sibling of it or of an ancestor follows."""
    lines = list(outline(nodes_in(step)))
    if max(len(line.guides) for line in lines) > 16:
        return  # where it goes straight on
    parents = (*step.tree.parents, (0, *step.accepted)[-1])
    starts = {line.nodes[0]: number for number, line in enumerate(lines)}
    line_of = {node: line for line in lines for node in line.nodes}
    for number, line in enumerate(lines[1:], start=1):
        drawn, node = "", line.nodes[0]
        while node:
            follows = any(
                parents[other] == parents[node] and at > starts[node]
                for other, at in starts.items()
                if other
            )
            here = drawn == ""
            drawn = (("├─" if follows else "└─") if here else "│ " if follows else "  ") + drawn
            node = line_of[parents[node]].nodes[0]
        assert line.guides == drawn, number


def test_a_trunk_of_any_length_runs_straight_down() -> None:
    branches = [[1] * length + [2, 3] for length in range(2000)]
    step = verified(DraftTree.from_branches(0, branches), "?" * 6000)
    lines = list(outline(nodes_in(step)))
    assert sum(len(line.nodes) + len(line.branch) for line in lines) == len(step.tree) + 1
    assert max(len(line.guides) for line in lines) <= 18


def test_behind_the_end_of_the_output_nothing_is_rejected_and_no_bonus_token_stands() -> None:
    tree = DraftTree((1, 2, 3), (-1, 0, 1))
    step = VerifiedStep(tree, (2, 9, 9), (2, 9, 9), (1,), (2,))  # token 2 ended the output
    assert [node.fate for node in nodes_in(step)] == [Fate.ROOT, Fate.ACCEPTED, Fate.UNREACHED]
