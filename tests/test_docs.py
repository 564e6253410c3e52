"""Checks of the documentation that building it does not make."""

from __future__ import annotations

import os
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mlxspec

ROOT = Path(mlxspec.__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")

if not (ROOT / "mkdocs.yml").is_file():
    pytest.skip("mlxspec is installed without its repository", allow_module_level=True)


PLACES = {
    "https://raw.githubusercontent.com/mlxspec/mlxspec/main/": "",
    "https://github.com/mlxspec/mlxspec/blob/main/": "",
    "https://github.com/mlxspec/mlxspec/tree/main/": "",
    "https://mlxspec.github.io/mlxspec/": "docs",
}
"""The absolute URLs at which files here are published, and their folders."""


def anchors(page: Path) -> set[str]:
    """Return a page's heading anchors as GitHub makes them; MkDocs differs only at dashes."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_to_files_lead_somewhere(name: str) -> None:
    """Check the pages that MkDocs does not build and check itself."""
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


def test_the_readme_s_links_are_absolute_and_lead_somewhere() -> None:
    """PyPI shows the README, too, without the repository's files or the headings' anchors."""
    text = (ROOT / "README.md").read_text()
    assert "<img" not in text
    assert "<a " not in text
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        assert link.startswith("https://"), link
        address, _, fragment = link.partition("#")
        place = next(filter(address.startswith, PLACES), None)
        if place is None:
            assert not address.startswith("https://github.com/mlxspec") or "/issues/" in address, (
                link
            )
            continue
        path = address.removeprefix(place)
        folder = ROOT / PLACES[place]
        target = folder / (f"{path.rstrip('/') or 'index'}.md" if PLACES[place] else path)
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: mlxspec\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(mlxspec.__all__)


def test_every_example_is_shown_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    shown = re.findall(r'^--8<-- "examples/(\w+)\.py"$', pages, flags=re.MULTILINE)
    assert sorted(shown) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def test_the_picture_of_the_demo_shows_measured_speeds() -> None:
    """The speeds are the default decoder's, and the picture loads nothing external."""
    shown = (ROOT / "docs/demo.svg").read_text().replace("&#160;", " ")
    for text in ("$ make demo", "without drafts", "same text", "measured", "accepted draft"):
        assert text in shown
    assert "url(http" not in shown
    recipes = re.findall(r"decoder\.py (.*)", (ROOT / "Makefile").read_text())
    assert [recipe.split()[1] for recipe in recipes] == ["mlx_model", "demo"]
    for recipe in recipes:
        assert "--compare" in recipe
        assert "--decoder" not in recipe


def test_nothing_is_cut_between_the_sidebars() -> None:
    css = (ROOT / "docs" / "pages.css").read_text()
    assert "pre > code { white-space: pre-wrap" in css
    assert "th { min-width: 0; }" in css  # 90 pixels for each of the eight columns


def test_make_says_what_takes_its_time() -> None:
    recipes = (ROOT / "Makefile").read_text().split("\n\n")
    installing = [recipe for recipe in recipes if " pip install " in recipe]
    assert len(installing) == 2
    for recipe in installing:
        said, _, command = recipe.partition(" pip install ")
        assert '@echo "' in said
        assert "-q" not in command.split()


def service_file(language: str) -> str:
    """Return the only block in this language on the page about services."""
    page = (ROOT / "docs" / "service.md").read_text()
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return block


def test_launchd_s_file_is_a_property_list() -> None:
    agent = plistlib.loads(service_file("xml").encode())
    assert agent["ProgramArguments"][1] == "serve"
    assert agent["KeepAlive"] == {"SuccessfulExit": False}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_its_file(tmp_path: Path) -> None:
    unit = tmp_path / "mlxspec.service"
    unit.write_text(service_file("ini").replace("%h/.local/bin/mlxspec", sys.executable))
    verify = ["systemd-analyze", "verify", "--user", "--man=no", unit]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(verify, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
