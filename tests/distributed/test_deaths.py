"""A rank that dies takes the others with it, each with one line of its own."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.distributed.conftest import SECONDS, launched

pytestmark = pytest.mark.slow

# Now and then MLX crashes before the thread that watches the other ranks has had its turn.
SURVIVOR = (
    "Error: rank 1 is gone, so rank 0 ends, too|"
    "Error: rank 0 was ended by SIG[A-Z]+, as MLX can be when another rank is gone"
)


@pytest.mark.parametrize(
    ("process", "death", "lines"),
    [
        ("worker 1", signal.SIGKILL, [SURVIVOR, "Error: rank 1 was ended by SIGKILL"]),
        (
            "supervisor 0",
            signal.SIGTERM,
            [
                SURVIVOR.replace("rank 1", "rank X").replace("rank 0", "rank 1").replace("X", "0"),
                "Error: rank 0 was ended by SIGTERM",
            ],
        ),
    ],
)
def test_each_process_adds_a_line(
    process: str, death: signal.Signals, lines: list[str], small_model: Path, tmp_path: Path
) -> None:
    endless = ("--decoder", "plain", "--max-tokens", "1000000")
    command = ("generate", "--model", str(small_model), "--prompt", "a", *endless)
    script = ("-m", "tests.support.command", str(tmp_path))
    with launched(*script, *command, folder=tmp_path) as launcher:
        assert launcher.stdout
        assert launcher.stdout.read(1)
        os.kill(int((tmp_path / process).read_text()), death)
        _, errors = launcher.communicate(timeout=SECONDS)
    # mlx.launch writes its own words between, and not always whole lines of them.
    assert all(re.search(line, errors) for line in lines), errors
    assert len(re.findall("Error: rank", errors)) == len(lines)
    assert "Traceback" not in errors
    assert len(re.findall("rank [01] exited with code [1-9]", errors)) == 2  # mlx.launch's words
