"""The HTML page of ``mlxspec bench``: its content, and that it is self-contained."""

from __future__ import annotations

from html.parser import HTMLParser

from mlxspec.bench.measure import Report
from mlxspec.cli.bench import bench_tables
from mlxspec.cli.common.output import html_page
from tests.bench.test_report import measured, report

HOSTILE = "<script src='https://example.org/x.js'>alert(1)</script><img src=x onerror=y>&\"'"


def bench_page(report: Report) -> str:
    return html_page(bench_tables(report))


class Page(HTMLParser):
    """The elements, attributes and text of a page, as a browser parses it."""

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


def test_a_page_needs_nothing_but_itself_and_runs_nothing() -> None:
    html = bench_page(report(measured({"plain": [10], "fast": [20]}, HOSTILE)))
    page = Page(html)
    assert {"script", "img", "link", "iframe", "object", "embed", "form"}.isdisjoint(page.tags)
    names = {name for name, _ in page.attributes}
    assert {"src", "href", "srcset", "action", "data", "onerror"}.isdisjoint(names)
    assert "url(" not in html
    assert "@import" not in html
    # The page shows every category's name unchanged.
    assert HOSTILE in page.text
