"""Consistency of the project's metadata files."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from packaging.markers import Environment
from packaging.requirements import Requirement

import mlxspec

ROOT = Path(mlxspec.__file__).parent.parent

if not (ROOT / "pyproject.toml").is_file():
    pytest.skip("mlxspec is installed without its repository", allow_module_level=True)


def project() -> dict[str, Any]:
    """The project table of pyproject.toml."""
    return tomlkit.parse((ROOT / "pyproject.toml").read_text()).unwrap()["project"]


def test_requirements_are_those_of_the_package() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = {Requirement(line) for line in lines if not line.startswith("#")}
    assert listed == {Requirement(line) for line in project()["dependencies"]}


@pytest.mark.parametrize(("platform", "extras"), [("darwin", set()), ("linux", {"cpu"})])
def test_each_platform_gets_one_back_end(platform: str, extras: set[str]) -> None:
    """MLX's macOS wheel includes Metal; on Linux, MLX needs an extra for a back end."""
    requirements = map(Requirement, project()["dependencies"])
    where: Environment = {"sys_platform": platform}  # type: ignore[typeddict-item]
    ours = [r for r in requirements if r.name == "mlx" and r.marker and r.marker.evaluate(where)]
    assert [r.extras for r in ours] == [extras]


@pytest.mark.slow
def test_a_directory_called_mlxspec_does_not_hide_the_package(tmp_path: Path) -> None:
    """Such as a clone beside a script. In an editable install, this tests the install's mode."""
    (tmp_path / "mlxspec").mkdir()
    code = "import mlxspec; print(mlxspec.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.strip() == mlxspec.__version__


def test_an_editable_install_adds_a_path() -> None:
    """Only this setting makes setuptools add a path. Its import hooks rank after directories."""
    text = (ROOT / "pyproject.toml").read_text()
    assert tomlkit.parse(text).unwrap()["tool"]["setuptools"]["package-dir"] == {"": "."}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
@pytest.mark.parametrize("name", ["mlx_model", "mlx_head", "mlx_anything", ".mlx_model.partial"])
def test_what_convert_writes_into_a_clone_is_no_untracked_file(name: str) -> None:
    done = subprocess.run(["git", "check-ignore", "-q", f"{name}/config.json"], cwd=ROOT)
    assert done.returncode == 0


def test_the_version_is_the_same_everywhere() -> None:
    assert project()["version"] == mlxspec.__version__


def test_the_changelog_has_a_section_for_each_version() -> None:
    """Sections come newest first, each with a date, after the unreleased changes."""
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    released = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \(\d{4}-\d\d-\d\d\)", h) for h in headings[1:]]
    assert all(released)
    numbers = [tuple(map(int, found.groups())) for found in released if found]
    assert numbers == sorted(set(numbers), reverse=True)


@pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="an sdist has no .ci")
def test_a_release_has_the_changelogs_section_of_its_version() -> None:
    section = runpy.run_path(str(ROOT / ".ci" / "release_notes.py"))["section"]
    parts = (
        "# Changelog",
        "## Unreleased",
        "## 0.2.0 (2027-01-02)",
        "- B.",
        "## 0.1.0 (…)",
        "- A.",
    )
    changelog = "\n\n".join(parts)
    assert section(changelog, "0.2.0") == "- B."
    assert section(changelog, "0.1.0") == "- A."
    assert section(changelog, "0.1") is None
    assert section(changelog, "Unreleased") is None
