"""The page of ``mlxspec bench``: what it shows, and that it needs nothing else."""

from __future__ import annotations

from html.parser import HTMLParser

from mlxspec.bench.measure import Difference, Report, what_differs
from mlxspec.cli.bench import page_parts
from mlxspec.cli.common.output import html_page
from tests.bench.test_report import FACTS, measured, report

HOSTILE = "<script src='https://example.org/x.js'>alert(1)</script><img src=x onerror=y>&\"'"


def bench_page(report: Report) -> str:
    return html_page(page_parts(report))


class Page(HTMLParser):
    """The elements, attributes and text of a page, as a browser would understand it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def text_of(html: str) -> str:
    return " ".join(Page(html).text.split())


def test_what_is_wrong_and_what_is_rough_is_shown() -> None:
    rates = {"plain": [10.0], "fast": [40.0], "wrong": [90.0]}
    result = report(measured(rates), measured(rates, "talk", {"wrong": [Difference(3, 2.5, 1e-4)]}))
    (line,) = what_differs(result)
    assert line in text_of(bench_page(result))
    assert result["rough"] in text_of(bench_page(result))
    assert f"max tokens {FACTS['settings']['max_tokens']}" in text_of(bench_page(result))


def test_a_page_holds_texts_only_when_asked_to() -> None:
    prompt = measured({"plain": [10], "fast": [20]}, question="secret one", text="secret two")
    assert "secret" not in bench_page(report(prompt))
    full = bench_page(report(prompt, include_text=True))
    assert "secret one" in full
    assert "secret two" in full


def test_a_page_needs_nothing_but_itself_and_runs_nothing() -> None:
    prompt = measured(
        {"plain": [10], "fast": [20]}, HOSTILE, question=HOSTILE, text=f"answer {HOSTILE}"
    )
    html = bench_page(report(prompt, include_text=True))
    page = Page(html)
    assert {"script", "img", "link", "iframe", "object", "embed", "form"}.isdisjoint(page.tags)
    names = {name for name, _ in page.attributes}
    assert {"src", "href", "srcset", "action", "data", "onerror"}.isdisjoint(names)
    assert "url(" not in html
    assert "@import" not in html
    # What the model wrote is there to be read, letter by letter.
    assert f"answer {HOSTILE}" in page.text


def test_bars_have_the_length_of_their_speed() -> None:
    page = Page(bench_page(report(measured({"plain": [10], "fast": [40]}))))
    bars = [line.count("█") for line in page.text.splitlines() if "█" in line]
    assert bars == [15, 60] * 2  # over all and in the category
    assert "fast" in page.text
    assert "4.00×" in page.text
