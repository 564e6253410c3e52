"""The page of ``mlxspec explain``: what stands in it, and what a browser shows."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mlxspec.cli.explain import explain_command
from mlxspec.cli.explain_page import explain_page
from mlxspec.drafting.sources import RecordedStep
from tests.support.browser import screenshot, shown_document
from tests.support.explained_steps import Letters, explained, lookahead_step
from tests.support.scripted_model import write_scripted_model

ATTACK = ("</title><script>alert(1)</script>", '"onload="alert(2)', "&lt;b&gt;", "<img/src=x>")
ACCEPTED = (11, 98, 196)  # the page's blue


class Document(HTMLParser):
    """The elements of a page and the text in them."""

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


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(explain_page(explained(lookahead_step())), encoding="utf-8")
    return path


def test_the_page_has_every_node_the_walk_and_the_window(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    chips = re.findall(r'<g class="(\w+)">\n<title>.*\n.*\n<text class="label"[^>]*>(.)<', html)
    assert sorted(chips) == sorted(
        [
            *(("root", "a"), ("accepted", "b"), ("accepted", "c"), ("bonus", "e")),
            *(("rejected", letter) for letter in "dmx"),
            *(("unreached", letter) for letter in "nyozp"),
        ]
    )
    levels = re.findall(r"<tr><th>(\S*)</th>\n((?:<td.*\n)+)", html)
    cells = {name: re.findall(r"<small>(\d+)</small>(.)", row) for name, row in levels}
    assert cells == {
        "t−2": [("0", "a"), ("1", "x"), ("2", "y"), ("3", "z")],
        "t−1": [("1", "m"), ("2", "n"), ("3", "o"), ("4", "p")],
        "now": [("2", "M"), ("3", "N"), ("4", "O"), ("5", "P")],
    }
    assert "11 rows: 2 of 10 draft tokens accepted, 3 emitted" in html


def test_the_page_asks_the_network_for_nothing(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
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
    own = Document(explain_page(explained(lookahead_step())))
    document = Document(path.read_text(encoding="utf-8"))
    assert set(document.tags) <= set(own.tags)
    assert document.attributes <= own.attributes
    for piece in ATTACK:
        assert any(piece[:20] in text for text in document.text)


def test_a_browser_shows_the_accepted_path_and_nothing_beyond_the_window(page: Path) -> None:
    picture = screenshot(page)
    blue = np.all(abs(picture - ACCEPTED) < 12, axis=-1)
    # The line through the accepted chips is 3 pixels thick; borders alone would give less.
    assert blue.sum() > 200
    assert blue.any(axis=0).sum() > 40
    document = Document(shown_document(page))
    assert "script" not in document.tags
    assert any("Step 1 of 1" in text for text in document.text)


def test_a_narrow_browser_scrolls_the_tree_and_not_the_page(tmp_path: Path) -> None:
    class Long(Letters):
        def __getitem__(self, token: int) -> str:
            return chr(token) * 20

    path = tmp_path / "page.html"
    path.write_text(explain_page(explained(lookahead_step(), pieces=Long())), encoding="utf-8")
    picture = screenshot(path, width=500, height=900)
    background = picture[-1, 0]
    assert np.all(picture[:, -8:] == background)  # the page's margin is free


def test_a_page_without_a_window_has_no_table() -> None:
    step = lookahead_step()
    html = explain_page(explained(RecordedStep(step.verified, step.origins, {})))
    assert "<table" not in html
