"""Standard streams that are closed before a program starts."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mlxspec
from tests.support.scripted_model import write_scripted_model

pytestmark = pytest.mark.slow

ROOT = Path(mlxspec.__file__).parents[1]
LIBRARY = "import os, sys, mlxspec; mlxspec.load(sys.argv[1]); os.write(3, b'loaded')"


@pytest.fixture(scope="module")
def finite_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pieces = ("one", " two", " three", " four", "\n")
    return write_scripted_model(tmp_path_factory.mktemp("closed") / "model", pieces, ends=True)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_a_command_answers_with_closed_standard_streams(finite_model: Path, closed: str) -> None:
    options = ("--model", str(finite_model), "--prompt", "a", "--decoder", "plain")
    done = subprocess.run(
        f"{shlex.join([sys.executable, 'decoder.py', *options])} {closed}",
        shell=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "one two three four\n")


@pytest.mark.nightly
def test_a_program_loads_a_model_with_closed_standard_streams(finite_model: Path) -> None:
    program = shlex.join([sys.executable, "-c", LIBRARY, str(finite_model)])
    command = f"{program} 3>&1 >&- <&- 2>&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, b"loaded")
