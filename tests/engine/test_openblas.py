"""Some equality tests repeated with OpenBLAS, which sums rows in another order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.examples import LONG
from tests.support.openblas import needs_openblas

pytestmark = pytest.mark.slow

CHOSEN = "random-0.7 or equals_mlx_lm"
if LONG:
    CHOSEN += " or demo_model and 0.7 or published_text or babyllama-0.7"


@needs_openblas
def test_outputs_are_equal_up_to_near_ties_with_openblas() -> None:
    here = Path(__file__).parent
    assert_passes_with_openblas(here / "test_equality.py", "-k", CHOSEN)


@pytest.mark.nightly
@needs_openblas
def test_drafts_in_joint_steps_change_outputs_at_near_ties_only_with_openblas() -> None:
    assert_passes_with_openblas(Path(__file__).parents[1] / "generation/test_joint_drafts.py")


def assert_passes_with_openblas(*arguments: Path | str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MLXSPEC_OPENBLAS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
