"""The pages of the documentation, as far as building them checks nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mlxspec

ROOT = Path(mlxspec.__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")

if not (ROOT / "mkdocs.yml").is_file():
    pytest.skip("mlxspec is installed without its repository", allow_module_level=True)


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_to_files_lead_somewhere(name: str) -> None:
    """Those of the pages that MkDocs does not build, since it checks its own."""
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: mlxspec\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(mlxspec.__all__)


def test_every_example_is_shown_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    shown = re.findall(r'^--8<-- "examples/(\w+)\.py"$', pages, flags=re.MULTILINE)
    assert sorted(shown) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def test_the_picture_of_the_demo_shows_the_default_decoder() -> None:
    """Its speed is estimated for that one alone; and it needs no font and nothing from elsewhere."""
    shown = (ROOT / "docs/demo.svg").read_text().replace("&#160;", " ")
    for text in ("$ make demo", "against plain", "estimated", "accepted draft"):
        assert text in shown
    assert "url(http" not in shown
    recipe = re.search(r"decoder\.py (.*)", (ROOT / "Makefile").read_text())
    assert recipe and "--decoder" not in recipe[1]
