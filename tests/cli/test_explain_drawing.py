"""Drawing explained steps at a terminal and on a page."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlxspec.cli.common.output import html_page
from mlxspec.cli.explain import TextOf, explain_command, fates_of
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.tree import DraftTree
from tests.support.explained_steps import explained, letters, lookahead_step, verified
from tests.support.scripted_model import write_scripted_model

TREE = """\
● a
├── ✓ b c (guess)
│   ├── ★ e
│   └── ✗ d → ?
├── ✗ m → M (window)
└── ✗ x → ? (window)
    ├── ○ n → N
    └── ○ y → ?
        ├── ○ o → O
        └── ○ z p → P
"""
ATTACK = ("</title><script>alert(1)</script>", '"onload="alert(2)', "&lt;b&gt;", "<img/src=x>")


def printed(
    *steps: VerifiedStep, width: int, color: bool = False, text_of: TextOf = letters
) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        color_system="256" if color else None,
        force_terminal=color,
        highlight=False,
    )
    for part in explained(*steps, text_of=text_of):
        console.print(part)
    text = stream.getvalue()
    return text if color else "".join(line.rstrip() + "\n" for line in text.splitlines())


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_tree_is_drawn_whole_at_every_width(width: int):
    shown = printed(lookahead_step(), width=width)
    assert TREE in shown
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
    assert "\x1b[1;38;5;32mb\x1b[0m" in shown  # like accepted drafts in generated text
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert [line.rstrip() for line in plain.splitlines()] == printed(step, width=80).splitlines()


def test_long_runs_are_broken_between_tokens_behind_their_guides():
    words = [f"word{number}" for number in range(40)]
    tree = DraftTree.chain(0, range(1, 30), "lookup")
    recorded = verified(tree, "".join(map(chr, (*range(1, 20), 39, *range(21, 31)))))
    shown = printed(
        recorded, width=40, text_of=lambda tokens: words[tokens[0]] if len(tokens) == 1 else ""
    )
    drawn = shown[shown.index("● word0") : shown.index("● emitted")]
    assert max(map(len, drawn.splitlines())) <= 40
    assert re.findall(r"word\d+", drawn) == [
        *words[:20], "word39", *words[20:30], "word30"
    ]  # fmt: skip
    accepted = drawn.splitlines()[1:]
    assert accepted[0].startswith("└── ✓ word1 ")
    assert accepted[1].startswith("    │   word") or accepted[1].startswith("    word")
    assert "    ├── ★ word39" in accepted


def test_a_plain_step_is_its_token():
    step = replace(verified(DraftTree.chain(97), "b"), no_draft="no match")
    shown = printed(step, width=80)
    assert "1 row, 1 emitted; nothing drafted: no match\n" in shown
    assert "● a\n└── ★ b\n" in shown


@st.composite
def steps(draw: st.DrawFn) -> VerifiedStep:
    """Generate verified random trees whose nodes have different tokens."""
    size = draw(st.integers(1, 40))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    tree = DraftTree(tuple(ord("A") + node for node in range(size)), tuple(parents))
    tokens = st.integers(ord("A"), ord("A") + size)
    return verified(tree, "".join(chr(draw(tokens)) for _ in parents))


@given(steps())
def test_every_node_is_drawn_once_below_its_parent(step: VerifiedStep) -> None:
    shown = printed(step, width=1000, text_of=lambda tokens: f"#{tokens[0]}")
    drawn = shown[shown.index("● #") : shown.index("● emitted")]
    parent_of, above, listed = {}, [], []
    for line in drawn.replace(" (draft)", "").splitlines():
        if not line:
            continue
        depth = len(re.match(r"[│├└─ ]*", line)[0]) // 4
        run = re.findall(r"#(\d+)", line.partition(" → ")[0])
        signs = [(above[depth - 1] if depth else None), *run]
        parent_of.update({child: parent for parent, child in pairwise(signs)})
        del above[depth:]
        above.append(run[-1])
        listed += run
    tokens = [str(token) for token in step.tree.tokens]
    bonus = str(step.tokens[-1])
    assert sorted(listed) == sorted([*tokens, bonus])
    for node, parent in enumerate(step.tree.parents):
        if tokens[node] != bonus:
            assert parent_of[tokens[node]] == (None if parent < 0 else tokens[parent])


@given(steps())
def test_a_line_is_accepted_as_a_whole_or_not_at_all(step: VerifiedStep) -> None:
    shown = printed(step, width=1000)
    accepted = [chr(step.tree.tokens[node]) for node in step.accepted]
    lines = [line for line in shown.splitlines() if re.match(r"[│├└─ ]*✓ ", line)]
    assert [
        one for line in lines for one in line.partition("✓ ")[2].replace(" (draft)", "").split()
    ] == accepted


def test_behind_the_end_of_the_output_nothing_is_rejected_and_no_bonus_token_stands() -> None:
    tree = DraftTree((1, 2, 3), (-1, 0, 1))
    step = VerifiedStep(tree, (2, 9, 9), (2, 9, 9), (1,), (2,))  # token 2 ended the output
    fates = fates_of(step)
    assert fates == ["emitted before", "accepted", "not reached"]


class Document(HTMLParser):
    """The elements of a page and their text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page() -> str:
    return html_page(explained(lookahead_step()))


def test_the_page_shows_what_the_terminal_shows() -> None:
    document = Document(page())
    text = "".join(document.text)
    text = "".join(line.rstrip() + "\n" for line in text.splitlines())
    for part in (TREE, "11 rows: 2 of 10 draft tokens accepted, 3 emitted", "Say a"):
        assert part in text


def test_the_page_asks_the_network_for_nothing() -> None:
    html = page()
    document = Document(html)
    assert {"script", "img", "link", "iframe", "object"}.isdisjoint(document.tags)
    assert {"src", "href", "onload"}.isdisjoint(document.attributes)
    assert "url(" not in html
    assert "@import" not in html


def test_what_the_model_wrote_stays_text(tmp_path: Path) -> None:
    model = write_scripted_model(tmp_path / "model", ATTACK)
    path = tmp_path / "page.html"
    result = CliRunner().invoke(
        explain_command,
        [
            *("--model", str(model), "--prompt", "<i>a</i>", "--n-draft", "3", "--html", str(path)),
            *("--max-tokens", "30"),
        ],
    )
    assert result.exit_code == 0, result.stderr
    own = Document(page())
    document = Document(path.read_text(encoding="utf-8"))
    assert set(document.tags) <= set(own.tags)
    assert document.attributes <= own.attributes
    for piece in ATTACK:
        assert any(piece[:20] in text for text in document.text)
