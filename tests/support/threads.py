"""Run calls in concurrent threads that switch as often as possible."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

Result = TypeVar("Result")


def at_once(*calls: Callable[[], Result]) -> list[Result]:
    """Run each call in its own thread; return their results or raise an exception of one."""
    start = Barrier(len(calls))

    def run(call: Callable[[], Result]) -> Result:
        start.wait()
        return call()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(run, calls))
    finally:
        sys.setswitchinterval(interval)
