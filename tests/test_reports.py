"""Reports in the repository: how an issue's becomes a file, a chip of the package, and a page."""

from __future__ import annotations

import json
import re
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import mlxspec
from mlxspec.bench.submission import BenchReport
from mlxspec.drafting import chips
from mlxspec.errors import OptionError
from tests.bench.test_submission import MODEL, WRONG, bench, changed, curve, sent
from tests.test_packaging import project

ROOT = Path(mlxspec.__file__).parent.parent
SCRIPT = ROOT / ".ci" / "report.py"

if not SCRIPT.is_file():
    pytest.skip("an sdist has no .ci", allow_module_level=True)

CI = runpy.run_path(str(SCRIPT))
FORM = "### Report\n\n```json\n{}\n```\n\n### Anything else\n\n{}"


def pages() -> dict[str, Any]:
    pytest.importorskip("griffe")
    return runpy.run_path(str(ROOT / "docs" / "pages.py"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The folders of a repository without reports."""
    (tmp_path / "mlxspec" / "drafting").mkdir(parents=True)
    return tmp_path


def issue(body: str | None, number: int = 12, day: str = "2027-01-02") -> dict[str, object]:
    return {"number": number, "created_at": f"{day}T23:59:59Z", "body": body}


def filed(repository: Path, report: BenchReport, number: int = 12, day: str = "2027-01-02") -> Path:
    body = FORM.format(report.text().strip(), "_No response_")
    path: Path = CI["file_report"](issue(body, number, day), repository)
    return path


def everything(repository: Path) -> list[str]:
    return sorted(str(p.relative_to(repository)) for p in repository.rglob("*") if p.is_file())


def known_chips(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package know the chips of these reports, beside its own."""
    own = json.loads((ROOT / "mlxspec/drafting/chips.json").read_text())
    reported = json.loads((repository / CI["CHIPS"]).read_text())
    monkeypatch.setattr(chips, "_known", lambda: chips._with_reports(own, reported))


def test_the_package_knows_the_chips_of_the_reports_and_no_others() -> None:
    assert (ROOT / CI["CHIPS"]).read_text() == CI["chips_text"](ROOT)


def test_the_address_of_the_repository_is_that_of_the_project() -> None:
    assert project()["urls"]["Issues"] == chips.ISSUES


def test_a_report_becomes_a_file_by_chip_date_and_issue(repository: Path) -> None:
    path = filed(repository, sent())
    assert everything(repository) == [
        "benchmarks/reports/m9-max/2027-01-02-12.json",
        "mlxspec/drafting/reported_chips.json",
    ]
    assert path.read_text() == sent().text()


def test_an_edited_issue_replaces_its_report_and_no_other(repository: Path) -> None:
    filed(repository, sent(), 2)
    filed(repository, sent(chip="Apple M8"), 12)
    filed(repository, sent(), 12)
    files = [name for name in everything(repository) if "reports/" in name]
    assert files == [f"benchmarks/reports/m9-max/2027-01-02-{n}.json" for n in (12, 2)]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_else_the_issue_says_is_not_filed(repository: Path, end: str) -> None:
    body = FORM.format(sent().text().strip(), "```json\n{}\n```\n<script>").replace("\n", end)
    path = CI["file_report"](issue(body), repository)
    assert path.read_text() == sent().text()


BODIES = [
    None,
    "",
    "```json\n",
    "```json\n{",
    "```json\n{}\n```",
    "```json\n" * 9000,
    FORM.format("{" * 60_000, ""),
    FORM.format(sent().text().strip(), "x" * 70_000),
    *(FORM.format(json.dumps(changed(path, value)), "") for path, value in WRONG),
]


@pytest.mark.parametrize("body", BODIES)
def test_a_hostile_issue_leaves_no_trace(repository: Path, body: str | None) -> None:
    with pytest.raises(OptionError) as refused:
        CI["file_report"](issue(body), repository)
    assert everything(repository) == []
    assert not set("<>`") & set(str(refused.value))


@given(st.text())
def test_no_text_is_taken_for_a_report(body: str) -> None:
    with pytest.raises(OptionError):
        CI["report_in"](FORM.format("{" + body, body))


def test_the_comment_says_what_is_wrong_and_the_exit_status_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event, comment = tmp_path / "event.json", tmp_path / "comment.md"
    body = FORM.format(json.dumps(changed("machine.chip", "@everyone ```")), "")
    event.write_text(json.dumps({"issue": issue(body)}))
    monkeypatch.setenv("GITHUB_EVENT_PATH", str(event))
    monkeypatch.setattr(sys, "argv", ["report.py", str(comment)])
    with pytest.raises(SystemExit) as ended:
        CI["main"]()
    assert ended.value.code == 1
    assert "machine.chip: String should match" in comment.read_text()
    assert "@everyone" not in comment.read_text()


def test_replay_knows_the_newest_curve_of_a_chip(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer, toy = bench(), bench(), bench()
    newer["curves"] = [curve(1, 5, 5, context=8000), curve(1, 1.5, 2)]
    toy["curves"], toy["model"] = [curve(1, 1, 1)], MODEL | {"name": "demo"}
    for number, (report, day) in enumerate(
        ((older, "2027-01-02"), (newer, "2027-03-01"), (toy, "2027-03-02")), start=1
    ):
        filed(repository, BenchReport.of(report), number, day)
    known_chips(repository, monkeypatch)
    chip = chips.known_chip("apple m9 max")
    assert (chip.name, chip.label) == ("M9 Max", "M9 Max")
    assert chip.curve.table == pytest.approx([0, 1, 1.5, 2])
    assert chip.source == (
        "measured with mlxspec, report #2 of 2027-03-01: mlx-community/Tiny-4bit, 64 GB, "
        "macOS 15.5 arm64, mlx 0.32.4"
    )
    assert "M9 Max" in chips.chip_names()


def test_a_report_replaces_no_published_curve_and_no_guess_is_left(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "M4 Max" in chips.nearest_chips()
    for number, name in enumerate(("Apple M3 Max", "Apple M4 Max"), start=1):
        filed(repository, sent(chip=name), number)
    known_chips(repository, monkeypatch)
    assert chips.known_chip("M3 Max").curve(8) == 2.5
    assert chips.known_chip("M3 Max reported").curve(3) == 1.24
    assert chips.known_chip("M4 Max").curve(3) == 1.24
    assert "M4 Max" not in chips.nearest_chips()


class Elements(HTMLParser):
    """The elements of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


def test_the_page_shows_all_reports_by_chip_newest_first(repository: Path) -> None:
    filed(repository, sent(), 1, "2027-01-02")
    filed(repository, sent(chip="AMD EPYC", device="cpu", cores=2, blas="own"), 2, "2027-02-02")
    filed(repository, sent(), 3, "2027-03-02")
    page = pages()["reports"](repository / CI["REPORTS"])
    shown = re.findall(r"^### (.*)|^\(\[issue (\d+)\]", page, re.MULTILINE)
    assert shown == [("M9 Max", ""), ("", "3"), ("", "1"), ("AMD EPYC CPU", ""), ("", "2")]
    assert "| auto | 67.5 (2.25) | 67.5 (2.25) | 67.5 (2.25) |" in page
    assert "| 64 tokens | 20 ms | 1.06 ± 5% | – | – | – | – |" in page
    assert "CPU, 2 cores, BLAS: own" in page
    assert "no report from a Mac" not in page
    markdown = pytest.importorskip("markdown")
    elements = Elements(markdown.markdown(page, extensions=["tables"])).found
    assert elements.count("table") == 6
    assert {*elements} <= {*["h3", "p", "strong", "a", "table", "thead", "tbody", "tr", "th", "td"]}


def test_without_a_report_from_a_mac_the_page_says_so(repository: Path) -> None:
    reports = pages()["reports"]
    alone = "**There is no report from a Mac yet.**\n"
    assert reports(repository) == alone
    filed(repository, sent(system="Linux 6.8.0 x86_64", chip="NVIDIA"))
    assert reports(repository / CI["REPORTS"]).startswith(alone)


def test_the_workflow_gives_strangers_nothing() -> None:
    """No text of the issue gets into a command, and no token into a step that reads it."""
    text = (ROOT / ".github/workflows/report.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}
    assert set(re.findall(r"github\.event\.[\w.*]+", text)) == {
        "github.event.issue.number",
        "github.event.issue.labels.*.name",
        "github.event.issue.state",
    }
    steps = workflow["jobs"]["report"]["steps"]
    assert steps[0]["with"] == {"persist-credentials": False}
    for step in steps:
        assert "${{" not in step.get("run", "")
        assert ("GH_TOKEN" in step.get("env", {})) is ("gh " in step.get("run", ""))
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bench-report.yml").read_text())
    assert form["labels"] == ["bench"]
    (field,) = (part for part in form["body"] if part.get("id") == "report")
    assert field["attributes"]["render"] == "json"
