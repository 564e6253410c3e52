"""Processes that end right after a thread has generated."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, threading
import mlxspec

decoder = mlxspec.PromptLookupDecoder("demo")
thread = threading.Thread(target=lambda: list(decoder.stream("one two three one two", 20)))
thread.start()
if sys.argv[1] == "joined":
    thread.join()
"""


@pytest.mark.parametrize("joined", ["joined", "not joined"])
def test_a_process_ends_well_right_after_a_thread_has_generated(joined: str) -> None:
    # Of three such processes at least two were aborted.
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", PROGRAM, joined], capture_output=True)
        assert (ended.returncode, ended.stderr) == (0, b"")
