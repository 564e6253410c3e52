"""``mlxspec calibrate`` on a model with fixed times."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlxspec.cli.calibrate import calibrate_command
from mlxspec.cli.common.output import ProgressBar
from mlxspec.drafting.cost_file import Calibration, StepTime
from mlxspec.engine import calibration
from mlxspec.models.model import load

TIMES = [
    StepTime(1, 0.025, 0.02, 60),
    StepTime(2, 0.026, 0.02, 12),
    StepTime(8, 0.067, 0.08 / 1.96, 12),
    StepTime(64, 1.3, 0.40 / 1.96, 12),
]
NOISE = [
    StepTime(1, 0.025, 0.2 / 1.96, 60),
    *(StepTime(rows, 0.03, 0.3 / 1.96, 12) for rows in (2, 4, 8)),
]


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the contexts of measurements, which all return TIMES."""
    contexts: list[int] = []

    def calibrate(model, plan, *, context, name, on_progress):
        contexts.append(context)
        on_progress(1.0)
        return Calibration(TIMES, "careful", name=name)

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    monkeypatch.setattr(calibration, "measured_contexts", lambda model: [64])
    return contexts


def calibrate(*arguments: object, columns: int | None = None) -> Result:
    """Return the command's output at a width, or into a pipe, where lines do not wrap."""
    width = str(columns) if columns else None
    return CliRunner(env={"COLUMNS": width}).invoke(calibrate_command, list(map(str, arguments)))


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_table_and_plot_fit_the_width(endless: Path, measurements: list[int], columns: int):
    result = calibrate(endless, columns=columns)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "Note: measuring step times at a context of 64 tokens …\n"
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    bars = ["".join(re.findall("[█▏▎▍▌▋▊▉]", line)) for line in lines]
    assert len({bar for bar in bars if bar}) >= (2 if columns > 40 else 1)
    table = [re.sub("[█▏▎▍▌▋▊▉]", "", line).split() for line in lines]
    # √(0.08² + (1.96 × 0.02)²), where 0.02 is the smallest error of T(1); and so on.
    assert ["1", "25.00", "1.00", "–"] in table
    assert ["8", "67.00", "2.68", "9%"] in table
    if columns > 40:  # where cells wrap
        assert ["64", "1300.00", "52.00", "40%"] in table


def test_a_terminal_without_unicode_gets_ascii(endless: Path, measurements: list[int]):
    runner = CliRunner(charset="ascii")
    result = runner.invoke(calibrate_command, [str(endless)])
    assert result.exit_code == 0
    assert result.stdout_bytes.isascii()
    assert b"T(M)/T(1)" in result.stdout_bytes


def test_what_was_measured_is_shown_without_measuring(endless: Path, measurements: list[int]):
    assert calibrate(endless).exit_code == 0
    assert calibrate(endless, "--context", 3000, "--context", 200).exit_code == 0
    for arguments in (["--show"], [endless, "--show"]):
        shown = calibrate(*arguments).stdout
        assert len(re.findall("rows +ms", shown)) == 3
        for context in ("64", "200", "3,000"):
            assert f"after {context} tokens, careful" in shown
    assert "3,000" not in calibrate("--show", "--context", 200).stdout
    assert measurements == [64, 200, 3000]


def test_a_head_s_drafts_are_measured_too(
    headed: Path, finite: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "mlxspec.engine.heads.TrainedHead._timed", lambda self, target, depth: 0.004 + depth / 1000
    )
    for arguments in ((headed,), (finite, "--head", headed)):
        result = calibrate(*arguments, "--json")
        assert result.exit_code == 0, result.stderr
        head = json.loads(result.stdout)["head"]
        assert head["kind"] == "DSpark"
        assert [draft["tokens"] for draft in head["times"]] == [1, 2, 3, 4]
        second = {"tokens": 2, "seconds": 0.006, "cost": 0.006 / 0.025}
        assert head["times"][1] == pytest.approx(second)
    lines = [line.split() for line in calibrate(headed).stdout.splitlines()]
    assert ["2", "6.00", "0.24"] in lines
    assert json.loads(calibrate(headed, "--json", "--no-head").stdout)["head"] is None
    for option in ("--show", "--no-head"):
        result = calibrate(finite, "--head", headed, option)
        assert result.exit_code == 1
        assert option in result.stderr
        assert result.stderr.count("\n") == 1


def test_times_of_shared_steps_are_shown_beside_the_others(endless: Path, measurements: list[int]):
    assert "4 sequences" not in calibrate(endless).stdout
    file = calibration.cost_file(load(endless, lazy=True)[0])
    file.of_sequences(4).update({64: Calibration(TIMES, "steps")})
    assert "4 sequences" in calibrate("--show", endless).stdout
    curves = json.loads(calibrate("--show", "--json", endless).stdout)["curves"]
    assert {curve["model"].get("sequences") for curve in curves} == {None, 4}


def test_nothing_known_is_said(endless: Path, finite: Path, measurements: list[int]):
    assert calibrate("--show").stdout.startswith("No step times are known yet")
    calibrate(endless)
    result = calibrate(finite, "--show")  # the same shape with another end of its script
    assert "64" in result.stdout
    assert json.loads(calibrate("--show", "--context", 99999, "--json").stdout) == {"curves": []}


def test_json_is_one_object(endless: Path, measurements: list[int]):
    result = calibrate(endless, "--json")
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    assert report["context"] == 64
    assert report.pop("longer_contexts") == []
    assert report.pop("head") is None
    assert report["source"] == "careful"
    assert report["model"]["type"] == "llama"
    assert report["machine"]["mlx"]
    assert report["times"][2] == {
        "rows": 8,
        "seconds": 0.067,
        "cost": pytest.approx(2.68),
        "error": pytest.approx((0.08**2 + 0.0392**2) ** 0.5),
    }
    assert report["name"] == endless.name
    (kept,) = json.loads(calibrate("--show", "--json").stdout)["curves"]
    assert kept == report


def test_longer_contexts_are_measured_and_shown_too(
    endless: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calibration, "measured_contexts", lambda model: [64, 1000, 8000])
    report = json.loads(calibrate(endless, "--json").stdout)
    assert measurements == [64, 1000, 8000]
    longer, _ = report.pop("longer_contexts"), report.pop("head")
    assert [curve["context"] for curve in (report, *longer)] == [64, 1000, 8000]
    assert report["split_attention"] is None
    assert json.loads(calibrate("--show", "--json").stdout)["curves"] == [report, *longer]


def test_a_context_that_is_too_long_is_found_before_anything_is_measured(
    endless: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calibration, "context_length", lambda model: 4096)
    result = calibrate(endless, "--context", 100, "--context", 5000)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: a context of 5000 tokens: choose 1 to ")
    assert measurements == []


def test_attention_is_measured_as_it_runs(
    endless: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
):
    split: list[int] = []

    def measured(loaded, plan, **options):
        split.append(loaded.split_from)
        return Calibration(TIMES, "careful", split=True)

    monkeypatch.setattr(calibration, "calibrate", measured)
    assert calibrate(endless, "--context", 8000).exit_code == 0
    assert calibrate(endless, "--context", 800).exit_code == 0
    assert split == [None, 715]


def test_noise_is_not_kept_and_what_was_known_stays(
    endless: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
):
    calibrate(endless)
    before = calibrate("--show").stdout
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: Calibration(NOISE, "careful"))
    result = calibrate(endless, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    _, error = result.stderr.splitlines()
    assert error.startswith(f"Error: {endless.name}: the times scatter too much: half of")
    assert "±36% or worse, and the limit is ±25%" in error  # √(0.2² + 0.3²)
    assert calibrate("--show").stdout == before


def test_models_of_one_name_are_distinguished(
    endless: Path, tmp_path: Path, measurements: list[int]
):
    other = tmp_path / endless.name
    shutil.copytree(endless, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    for model in (endless, other):
        assert calibrate(model).exit_code == 0
    lines = calibrate("--show").stdout.splitlines()
    assert lines.count(endless.name) == 2
    described = [line for line in lines if "bits each in memory, digest " in line]
    assert len(set(described)) == 2


def test_a_measurement_of_plain_steps_alone_replaces_no_better_one(
    endless: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
):
    calibrate(endless)
    monkeypatch.setattr(
        calibration, "calibrate", lambda *_, **__: Calibration(TIMES[:1], "careful")
    )
    result = calibrate(endless)
    assert result.exit_code == 0
    assert "67.00" in calibrate(endless, "--show").stdout


def test_ctrl_c_leaves_the_cache_as_it_was(
    endless: Path,
    measurements: list[int],
    cache_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    calibrate(endless)
    (path,) = cache_directory.rglob("*.json")
    before = path.read_bytes()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "calibrate", interrupted)
    assert calibrate(endless).exit_code == 130
    assert path.read_bytes() == before
    assert [entry for entry in cache_directory.rglob("*") if entry.is_file()] == [path]


def test_a_spoiled_cache_file_is_one_note(
    endless: Path, measurements: list[int], cache_directory: Path
):
    calibrate(endless)
    (path,) = cache_directory.rglob("*.json")
    path.write_text("{")
    result = calibrate("--show")
    assert result.exit_code == 0
    assert result.stderr.startswith("Note: ignoring the step times in")
    assert result.stderr.count("\n") == 1
    result = calibrate(endless)
    assert result.exit_code == 0
    assert "67.00" in calibrate("--show").stdout


def test_a_model_without_drafts_has_plain_steps_alone(
    endless: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        calibration, "calibrate", lambda *_, **__: Calibration(TIMES[:1], "careful")
    )
    assert "Only plain steps were measured" in calibrate(endless).stdout


def test_a_page_holds_the_curves_and_asks_the_network_for_nothing(
    endless: Path, measurements: list[int], tmp_path: Path
):
    page = tmp_path / "curve.html"
    result = calibrate(endless, "--html", page)
    assert result.exit_code == 0, result.stderr
    drawn = page.read_text()
    assert "llama" in drawn
    assert "52.00" in drawn
    assert "█" in drawn
    assert str(endless) not in drawn
    assert "http:" not in drawn
    assert "https:" not in drawn
    first = page.read_bytes()
    calibrate("--show", "--html", page)
    assert page.read_bytes() == first


def test_a_page_that_cannot_be_written_is_refused_before_measuring(
    endless: Path,
    measurements: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    for path, reason in (
        (tmp_path, "a name *.html"),
        (tmp_path / "no" / "a.html", "no directory"),
    ):
        result = calibrate(endless, "--html", path)
        assert result.exit_code == 1
        assert reason in result.stderr
        assert result.stderr.count("\n") == 1
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "Permission denied" in calibrate(endless, "--html", tmp_path / "a.html").stderr
    assert measurements == []


@pytest.mark.parametrize("arguments", [["no/such/model"], ["--show"]])
def test_a_context_of_nothing_is_one_line(arguments: list[str]):
    result = calibrate(*arguments, "--context", -4)
    assert result.exit_code == 2
    assert "'--context': -4 is not in the range x>=1" in result.stderr.splitlines()[-1]


def test_a_context_that_the_model_cannot_have_is_one_line(endless: Path):
    result = calibrate(endless, "--context", 10**9)
    assert result.exit_code == 1
    assert "context of 1000000000 tokens: choose 1 to" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_bar_is_drawn_on_a_terminal_only_and_erased(capsys: pytest.CaptureFixture[str]):
    from rich.console import Console

    for interactive in (True, False):
        console = Console(
            file=sys.stdout, force_terminal=interactive, force_interactive=interactive, width=40
        )
        with ProgressBar("Measuring", console=console) as progress:
            progress(0.5)
        drawn = capsys.readouterr().out
        assert ("50%" in drawn) == interactive
        if not interactive:
            assert drawn == ""
