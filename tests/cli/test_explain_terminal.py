"""Explained steps in a terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from mlxspec.cli.explain_terminal import print_explained
from mlxspec.draft.drafter import DraftTree
from mlxspec.draft.recording import RecordedStep
from tests.support.explained_steps import Letters, explained, lookahead_step, verified

TREE = """\
● a
├─✓ b c (guess)
│ ├─★ e
│ └─✗ d → ?
├─✗ m → M (window)
✗ x ─ n → N (window)
○ y → ?
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
    shown = printed(RecordedStep(verified(DraftTree.chain(97), "b"), ("root",), {}), width=40)
    assert "1 row, no draft, 1 emitted" in shown
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
