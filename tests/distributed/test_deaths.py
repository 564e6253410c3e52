"""If a rank dies, the others end with one line each."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.distributed.conftest import SECONDS, launched

pytestmark = pytest.mark.slow


@pytest.mark.nightly
@pytest.mark.parametrize(("rank", "death"), [(1, signal.SIGKILL), (0, signal.SIGTERM)])
def test_a_rank_that_is_gone_ends_the_other(
    rank: int, death: signal.Signals, small_model: Path, tmp_path: Path
) -> None:
    endless = ("--decoder", "plain", "--max-tokens", "1000000")
    command = ("generate", "--model", str(small_model), "--prompt", "a", *endless)
    script = ("-m", "tests.support.command", str(tmp_path))
    with launched(*script, *command) as launcher:
        assert launcher.stdout
        assert launcher.stdout.read(1)
        os.kill(int((tmp_path / f"rank {rank}").read_text()), death)
        _, errors = launcher.communicate(timeout=SECONDS)
    # mlx.launch mixes in its own output, sometimes partial lines. Occasionally MLX crashes before
    # the thread that watches the other ranks runs.
    line = f"Error: rank {rank} is gone, so rank {1 - rank} ends, too"
    assert line in errors or f"rank {1 - rank} exited with code -" in errors, errors
    assert errors.count("Error: rank") <= 1
    assert "Traceback" not in errors
    assert len(re.findall("rank [01] exited with code -?[1-9]", errors)) == 2
