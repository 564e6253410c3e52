"""Messages that the library logs under the name "mlxspec"."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlxspec
from mlxspec.drafting.cost_file import Calibration, StepTime
from mlxspec.engine import calibration
from mlxspec.engine.calibration import costs_for
from mlxspec.engine.loaded_model import LoadedModel
from tests.support.demo import stand_in_decoder
from tests.support.llamas import repetitive_llama

pytestmark = pytest.mark.slow

MEASURED = (1, 0.02), (2, 0.022), (4, 0.03), (8, 0.04)


def test_models_costs_and_capabilities_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlxspec")
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    times = [StepTime(rows, seconds, 0.02 / 1.96, 9) for rows, seconds in MEASURED]
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: Calibration(times, "quick"))
    tokenizer = mlxspec.load("demo")[1]
    for _ in range(2):
        costs_for(LoadedModel(repetitive_llama()))
    decoder = mlxspec.Decoder(repetitive_llama(), tokenizer)
    _ = decoder.loaded.capability, decoder.loaded.joint_mode
    loaded, measured, known, tried, verifies, *_, shares = caplog.messages
    assert re.fullmatch(r"loaded .*demo_model in \d+\.\d s", loaded)
    times_in_words = r"T\(1\) 20\.0 ms, .*, T\(8\) 40\.0 ms"
    assert re.fullmatch(rf"measured .* after 64 tokens: {times_in_words}", measured)
    assert re.fullmatch(rf"step times are known from {re.escape(str(tmp_path))}/\S*\.json", known)
    assert tried == "trial steps run on a miniature"
    assert verifies.startswith("drafts that the model can verify: tree (branching steps equal")
    assert shares == "how several sequences share forwards: joint"


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "left early"])
def test_each_generation_is_logged_once_with_its_figures(
    whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "mlxspec.generation.request")
    decoder = stand_in_decoder(mlxspec.PromptLookupDecoder)
    stream = decoder.stream([5, 6, 7, 5, 6], 9)
    last = [*stream][-1] if whole else next(stream)
    stream.close()
    (line,) = caplog.messages
    stats = last.stats
    assert line.startswith(
        f"generation ended ({'length' if whole else 'left'}): 5 prompt tokens, 0 of them "
        f"cached; {last.generation_tokens} tokens in {stats.steps} steps, "
    )
    assert line.endswith(f" a second; {stats.accepted} of {stats.drafted} drafted tokens accepted")


def test_nothing_is_logged_by_the_way_while_a_generation_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "mlxspec")
    decoder = stand_in_decoder(mlxspec.PromptLookupDecoder)
    stream = decoder.stream([5, 6, 7], 5)
    next(stream)
    caplog.clear()
    for _ in range(3):
        next(stream)
    assert caplog.messages == []


WARNS = """
import logging, sys
import mlxspec
from mlxspec.drafting.cost_file import CostFile
if sys.argv[1:]:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
CostFile({}, {}, __import__("pathlib").Path("/dev/null/x")).update({})
"""


@pytest.mark.parametrize("set_up", [True, False])
def test_a_program_sees_what_it_has_set_up_to_see(set_up: bool) -> None:
    arguments = [sys.executable, "-c", WARNS, *(["set up"] if set_up else [])]
    seen = subprocess.run(arguments, capture_output=True, text=True, check=True).stderr
    if set_up:
        assert seen.startswith(
            "WARNING mlxspec.cache_files: step times, experience and findings about models "
            "cannot be kept in /dev"
        )
    else:
        assert seen == ""


def test_the_commands_show_warnings_as_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlxspec.cli.common.notes import reported

    log = logging.getLogger("mlxspec.anything")
    with reported():
        log.warning("the disk is %s", "full")
        log.info("by the way")
        try:
            raise ValueError("oh")
        except ValueError:
            log.exception("it has failed")
    log.warning("afterwards")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Note: the disk is full", "it has failed"]
    assert lines[2].startswith("Traceback")
    assert lines[-1] == "ValueError: oh"
