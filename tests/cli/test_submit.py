"""``mlxspec bench --submit``: what is written, shown and opened, and what ends it early."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner, Result

from mlxspec.bench.measure import BACKENDS
from mlxspec.bench.prompts import BenchPrompt, message
from mlxspec.bench.submission import read
from mlxspec.cli.bench import bench_command
from mlxspec.drafting.learned import KnownTimes
from mlxspec.engine import costs
from mlxspec.errors import FileError
from tests.cli.test_bench import liar
from tests.cli.test_calibrate import NOISE, TIMES

QUICK = ("--max-tokens", "4", "--repeats", "1")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that the browser gets."""
    addresses: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: not addresses.append(url))
    return addresses


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.cli.bench.at_terminal", lambda: True)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the machine measures; a list so that a test can change it."""
    given = [TIMES]
    monkeypatch.setattr(costs, "calibrate", lambda *_, **__: KnownTimes(given[0], "careful"))
    monkeypatch.setattr(costs, "measured_contexts", lambda model, sequences=1: [64])
    return given  # type: ignore[return-value]


@pytest.fixture
def home(
    nothing_set: Path, times: list[object], endless: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A working directory with a model whose folder is named after its owner, and one prompt."""
    prompt = BenchPrompt("repeat", (message("user", "one rosebud"),))
    monkeypatch.setattr("mlxspec.bench.prompts.bundled_prompts", lambda: [prompt])
    shutil.copytree(endless, nothing_set / "rosebud" / "rosebud-model")
    return nothing_set


def submit(*arguments: str, typed: str | None = None) -> Result:
    command = ["rosebud/rosebud-model", "--submit", *QUICK, *arguments]
    return CliRunner().invoke(bench_command, command, input=typed)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.json"))


def test_without_a_terminal_it_writes_the_report_and_opens_nothing(
    home: Path, opened: list[str]
) -> None:
    result = submit()
    assert result.exit_code == 0, result.stderr
    (file,) = files(home)
    text = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o644
    assert f"The whole report, also in {file.name}:\n\n{text}" in result.stdout
    report = read(text)
    assert report.curves[0].rows == [1, 2, 8, 64]
    assert report.curves[0].cost == [1.0, 1.04, 2.68, 52.0]
    assert [*report.decoders] == [*BACKENDS]
    assert report.model.name is None
    url = next(line for line in result.stdout.splitlines() if line.startswith("https://"))
    assert read(parse_qs(urlsplit(url).query)["report"][0]) == report
    assert "rosebud" in result.stdout  # in the table, which is not sent
    assert not any(secret in text + url for secret in ("rosebud", str(home)))
    assert opened == []


@pytest.mark.slow
@pytest.mark.usefixtures("at_terminal")
def test_at_a_terminal_it_asks_first(home: Path, opened: list[str]) -> None:
    for typed, status in (("n\n", 0), ("\n", 0), ("", 1)):  # 1: click's own runner, at the end
        result = submit("--decoder", "auto", typed=typed)
        assert result.exit_code == status
        assert "Open it as a public issue on GitHub? [y/N]" in result.stderr
        assert result.stdout.index('"format"') > 0
    assert opened == []
    result = submit("--decoder", "auto", typed="y\n")
    assert result.exit_code == 0
    (url,) = opened
    assert url.startswith("https://github.com/mlxspec/mlxspec/issues/new?template=bench-report.yml")
    assert url not in result.stdout
    assert "Nothing is sent until you submit the form." in result.stdout


@pytest.mark.usefixtures("at_terminal")
def test_without_a_browser_the_address_is_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    result = submit("--decoder", "auto", typed="y\n")
    assert "open this address:\nhttps://github.com/" in result.stdout


def test_a_busy_machine_ends_it_before_the_bench(
    home: Path, times: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    times[0] = NOISE
    monkeypatch.setattr("mlxspec.bench.measure.measure", pytest.fail)
    result = submit()
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: rosebud-model: the times scatter too much")
    assert files(home) == []


def test_a_wrong_output_is_a_bug_and_no_report(
    home: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "liar", liar)
    result = submit("--decoder", "auto,liar")
    assert result.exit_code == 1
    assert "liar differs from plain decoding" in result.stderr
    assert files(home) == opened == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--prompts", "p.txt"),
        ("--drafter", "mlxspec:PromptLookupDrafter"),
        ("--json",),
        ("--decoder", "plain"),
    ],
)
def test_what_makes_no_report_is_refused_before_the_work(
    home: Path, arguments: tuple[str, ...]
) -> None:
    (home / "p.txt").write_text("Hello.")
    result = submit(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: --submit needs the bundled prompts")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_place_that_cannot_be_written_is_named_before_the_work(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise FileError(f"{path}: cannot be written")

    monkeypatch.setattr("mlxspec.cli.bench.check_writable", refused)
    monkeypatch.setattr(costs, "calibrate", pytest.fail)
    result = submit()
    assert result.exit_code == 1
    assert "mlxspec-report-" in result.stderr
