"""Test readers with malicious input.

For any input, a reader must return a correct result or raise the package's own error, quickly and
in little memory::

    @given(mutated(WHOLE))
    def test_a_damaged_file_is_refused_or_read(data: bytes) -> None:
        path.write_bytes(data)
        result = harmless(lambda: read(path))
        assert isinstance(result, MlxspecError) or is_right(result)
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hypothesis import strategies as st

from mlxspec.errors import MlxspecError

SECONDS = 3.0  # of CPU time, which may double or triple on a busy machine
PATIENCE = 20.0  # seconds of wall time, for a reader that blocks
MEGABYTES = 200
SAFETY = 4 << 30  # bytes of address space that a reader may allocate
LONGEST_MESSAGE = 2000  # characters

Result = TypeVar("Result")


def harmless(read: Callable[[], Result]) -> Result | MlxspecError:
    """Run a reader; return its result or the package's error that it raised.

    Other exceptions propagate. Too much time, too much memory or too long a message is an
    AssertionError. The reader may run twice, so that imports and caches of the first run do not
    count.
    """
    result, seconds, megabytes = _measured(read)
    if seconds > SECONDS or megabytes > MEGABYTES:
        result, seconds, megabytes = _measured(read)
    assert seconds <= SECONDS, f"took {seconds:.1f} s"
    assert megabytes <= MEGABYTES, f"took {megabytes:.0f} MB"
    if isinstance(result, MlxspecError):
        assert 0 < len(str(result)) <= LONGEST_MESSAGE, f"{len(str(result))} characters"
    return result


def mutated(whole: bytes) -> st.SearchStrategy[bytes]:
    """Generate a file's bytes with some overwritten, deleted, inserted, repeated or cut off."""
    place = st.integers(0, len(whole))
    edit = st.tuples(
        st.sampled_from(EDITS),
        place,
        st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(SPICE)),
        st.integers(1, 64),
    )
    return st.lists(edit, min_size=1, max_size=4).map(lambda edits: edited(whole, edits))


LEAVES = [
    *(None, True, False, "", "\ud800", "\x1b[31m", "../x", "[red]x"),
    *(0, -1, 1, 2**31, 2**63, 2**64, 10**25, -(10**25)),
    *(0.5, 1e308, float("inf"), float("-inf"), float("nan")),
]

json_values: st.SearchStrategy[object] = st.recursive(
    st.one_of(
        st.sampled_from(LEAVES),
        st.integers(-300, 300),
        st.text(max_size=5),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
"""Arbitrary JSON values, to put where a reader expects another type."""

EDITS = ("write", "insert", "delete", "repeat", "cut")
SPICE = [
    *(b"\0", b"\xff", b"\xff\xfe", b"\xed\xa0\x80", b"null", b"NaN", b"Infinity", b"-1", b"1e999"),
    *(b"[]", b"{}", b"[" * 64, b'{"":' * 64, b"9" * 30, b'"', b"true", b"\n", b"\x1b[31m"),
]


def edited(whole: bytes, edits: list[tuple[str, int, bytes, int]]) -> bytes:
    """Apply edits, each a kind, a place, new bytes and a length."""
    data = bytearray(whole)
    for kind, place, new, length in edits:
        if kind == "write":
            data[place : place + len(new)] = new
        elif kind == "insert":
            data[place:place] = new
        elif kind == "delete":
            del data[place : place + length]
        elif kind == "repeat":
            data[place:place] = data[place : place + length]
        else:
            del data[place:]
    return bytes(data)


def _measured(read: Callable[[], Result]) -> tuple[Result | MlxspecError, float, float]:
    """Run a reader; return its result, its CPU seconds and its peak memory in megabytes."""
    before = _peak(reset=True)
    started = time.process_time()
    result: Result | MlxspecError
    with _time_limit(), _memory_limit():
        try:
            result = read()
        except MlxspecError as error:
            result = error
    return result, time.process_time() - started, (_peak() - before) / 1e6


def _peak(*, reset: bool = False) -> int:
    """Return the most bytes that this process has had in memory since the last reset.

    Only Linux can reset it. Elsewhere, a reader that stays below an earlier one's peak passes.
    """
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@contextmanager
def _time_limit() -> Iterator[None]:
    """Fail a reader that blocks."""

    def fail(*_: object) -> None:
        raise AssertionError(f"not done after {PATIENCE:.0f} seconds")

    handler = signal.signal(signal.SIGALRM, fail)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, PATIENCE)  # the test's own limit
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def _memory_limit() -> Iterator[None]:
    """Keep a reader from exhausting the machine's memory."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform != "linux":  # macOS ignores RLIMIT_AS
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + SAFETY
    if limits[1] != resource.RLIM_INFINITY:
        allowed = min(allowed, limits[1])
    resource.setrlimit(resource.RLIMIT_AS, (allowed, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
