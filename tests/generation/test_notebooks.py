"""The HTML of results in notebooks."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mlxspec import GenerationResult, PromptLookupDecoder, SpeculationStats
from tests.support.browser import screenshot, shown_document
from tests.support.demo import stand_in_decoder
from tests.support.drop_in import REPEAT


class Read(HTMLParser):
    """The text of a page, and its marked parts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.marked: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.append(tag)
        if tag == "div":
            self.texts.append("")
        if tag == "span" and len(self.texts) == 1:
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data
        if self.tags[-1] == "span" and len(self.texts) == 1:
            self.marked[-1] += data


def result(segments: list[str], from_draft: list[bool]) -> GenerationResult:
    return GenerationResult(
        text="".join(segments),
        tokens=[*range(len(segments))],
        from_draft=from_draft,
        finish_reason="stop",
        prompt_tokens=5,
        prompt_tps=100.0,
        generation_tps=56.78,
        peak_memory=0.0,
        stats=SpeculationStats(steps=2, rows=6, drafted=4, accepted=3, emitted=5),
        segments=segments,
    )


def test_the_text_is_the_results_and_runs_of_drafts_are_marked() -> None:
    read = Read(result(["a", " b", " c", "", " d"], [False, True, True, True, False])._repr_html_())
    assert read.texts == [
        "a b c d",
        "5 tokens in 2 steps, 2.50 a step; 3 of 4 drafted tokens accepted; 56.8 tokens/s; stop",
    ]
    assert read.marked == [" b c"]


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", "a & b &amp; <b>", "\n\n  x\n", "</span></div>", "\"'", "é漢🙂"],
)
@pytest.mark.parametrize("drafted", [True, False])
def test_texts_are_escaped(text: str, drafted: bool) -> None:
    read = Read(result([text], [drafted])._repr_html_())
    assert read.texts[0] == text
    assert {tag.strip("/") for tag in read.tags} == {"div", "span"}


def test_an_empty_output_is_figures() -> None:
    assert Read(result([], [])._repr_html_()).texts[0] == ""


def test_a_generations_result_is_shown_as_it_came() -> None:
    decoder = stand_in_decoder(PromptLookupDecoder)
    found = decoder.prompt_lookup(REPEAT, 30, color=False)
    assert "".join(found.segments) == found.text
    assert len(found.segments) == len(found.tokens)
    read = Read(found._repr_html_())
    assert read.texts[0] == found.text
    assert read.marked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text_color", "background"), [("#1c1c1c", "#ffffff"), ("#e6e6e6", "#111111")]
)
def test_it_reads_in_light_and_dark_notebooks(
    tmp_path: Path, text_color: str, background: str
) -> None:
    """The tint differs from the background, and text on it has enough contrast."""
    html = result(["mark: ", " " * 20], [False, True])._repr_html_()
    page = tmp_path / "page.html"
    style = f"body{{margin:0;color:{text_color};background:{background};font-size:40px}}"
    page.write_text(f"<meta charset=utf-8><style>{style}</style>{html}")
    assert "mark: " in shown_document(page)
    picture = screenshot(page, 400, 200)
    colors, counts = np.unique(picture[:40].reshape(-1, 3), axis=0, return_counts=True)
    plain, tint = (colors[index] for index in np.argsort(-counts)[:2])

    def luminance(color: np.ndarray) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color / 255]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    def contrast(one: np.ndarray, other: np.ndarray) -> float:
        low, high = sorted([luminance(one), luminance(other)])
        return (high + 0.05) / (low + 0.05)

    text = np.array([int(text_color[at : at + 2], 16) for at in (1, 3, 5)])
    assert contrast(tint, text) > 7
    assert contrast(tint, plain) > 1.2
