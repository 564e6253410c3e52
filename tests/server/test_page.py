"""The status page in a browser while the server works."""

from __future__ import annotations

import html
import re
from importlib.resources import files
from typing import Any

import httpx
import pytest

from tests.support.browser import shown_document
from tests.support.serving import running_server

pytestmark = pytest.mark.slow

ASK: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "user", "content": "Again: one two."}],
}
PAGE = (files("mlxspec.server") / "page.html").read_text(encoding="utf-8")


def shown_text(document: str) -> str:
    """Return a document's visible text, without scripts, templates and hidden parts."""
    document = re.sub(r"(?s)<(script|style|template)\b.*?</\1>", "", document)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", document)).split())


def rows(document: str) -> list[list[str]]:
    """Return the cells of the table of requests."""
    body = re.search(r"(?s)<tbody.*?</tbody>", document)
    assert body
    return [
        [shown_text(cell) for cell in re.findall(r"(?s)<td.*?</td>", row)]
        for row in re.findall(r"(?s)<tr.*?</tr>", body[0])
    ]


def test_the_page_shows_the_figures_of_the_status() -> None:
    with running_server() as server:
        idle = shown_document(server.address + "/")
        assert "No requests yet." in shown_text(idle)
        assert f"mlxspec chat --server {server.address}" in shown_text(idle)
        figures = re.findall(r'class="figure[^"]*">([^<]*)<', idle)
        assert set(figures) == {"–"}  # and no large zeros
        for _ in range(3):
            server.client().chat.completions.create(**ASK, max_tokens=64)
        page = shown_document(server.address + "/")
        status = httpx.get(server.address + "/status").json()
    totals, cache = status["totals"], status["models"][0]["cache"]
    assert status["sources"]
    text = shown_text(page)
    assert totals["generated"] == sum(status["history"]["generated"])
    assert f"{server.address}/v1" in text
    assert f"generated tokens {totals['generated']} " in text
    assert f"prompt tokens {totals['prompt']} of them cached {totals['cached']} (" in text
    for drafted in status["sources"].values():
        assert f"{drafted['accepted']} of {drafted['drafted']} accepted" in text
    assert f"{cache['hits']} of 3 prompts" in text
    assert "A step over 8 rows, a draft of 7 tokens, takes" in text
    assert [row[0] for row in rows(page)] == [str(one["number"]) for one in status["recent"][::-1]]
    for row, one in zip(rows(page), status["recent"][::-1], strict=True):
        assert row[2:4] == [str(one["prompt_tokens"]), str(one["tokens"])]
        assert row[4] == f"{one['tokens_per_step']:.2f}"


def test_the_page_shows_requests_that_run_and_that_wait() -> None:
    with running_server(limits={"active": 1}) as server, server.client() as client:
        asked = [
            client.chat.completions.create(**ASK, max_tokens=30_000, stream=True) for _ in range(2)
        ]
        page = shown_document(server.address + "/")
        for stream in asked:
            stream.close()
    assert "1 active, 1 queued" in shown_text(page)
    assert [row[1].split(" of ")[0] for row in rows(page)] in (
        ["writes", "waits"],
        ["waits for its reader", "waits"],
    )


def test_a_server_with_keys_shows_nothing_without_one() -> None:
    with running_server(keys=["secret"]) as server:
        page = shown_document(server.address + "/")
        text = httpx.get(server.address + "/").text
    assert text == PAGE
    assert '<form id="lock">' in page
    assert '<main hidden="">' in page


def test_no_tile_stands_alone() -> None:
    tiles = PAGE[PAGE.index("const TILES") : PAGE.index("for (const tile of TILES)")].count(
        "title:"
    )
    columns = re.findall(r"\.tiles \{.*?grid-template-columns: repeat\((\d+)", PAGE)
    assert len(columns) >= 2
    assert all(tiles % int(number) == 0 for number in columns)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert not re.search(r"//(?!www\.w3\.org/2000/svg)\w|@import|url\(", PAGE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", PAGE)
