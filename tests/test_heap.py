"""Memory that a long-lived process returns to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes
from click.testing import CliRunner
from mlxspec.cli.serve import serve_command

class MallInfo(ctypes.Structure):
    names = "arena ordblks smblks hblks mapped usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = MallInfo
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]

CliRunner().invoke(serve_command, ["--model", "./nowhere", "--port", "0"])
libc.free(libc.malloc(16 << 20))  # after that glibc would keep blocks of this size
before = libc.mallinfo2().mapped
held = libc.malloc(12 << 20)
assert libc.mallinfo2().mapped >= before + (12 << 20)
libc.free(held)
assert libc.mallinfo2().mapped == before
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="needs glibc",
)
def test_a_server_gives_large_blocks_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
