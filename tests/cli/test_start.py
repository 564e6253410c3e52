"""Ctrl-C while a command's modules are imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mlxspec

ROOT = Path(mlxspec.__file__).parents[1]

# Blocks the import of one module until it is interrupted.
SLOW_IMPORT = """
import os, sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["SLOW_MODULE"]:
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
"""


MAIN = ("-c", "from mlxspec.__main__ import main; main()")


@pytest.mark.parametrize(
    ("arguments", "during"),
    [
        (["decoder.py"], "mlxspec.cli.generate"),
        (["convert.py"], "mlxspec.cli.convert"),
        ([*MAIN, "--version"], "mlxspec.cli.main"),
        ([*MAIN, "generate"], "mlxspec.cli.generate"),
    ],
)
def test_ctrl_c_during_the_imports_is_one_line_and_130(
    tmp_path: Path, arguments: list[str], during: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "SLOW_MODULE": during},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    errors = process.communicate()[1]
    assert process.returncode == 130
    assert errors == "\nInterrupted.\n"


def test_an_ignored_interrupt_stays_ignored() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "import mlxspec.__main__\n"
        "try: mlxspec.__main__.main()\n"
        "except SystemExit: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "True"
