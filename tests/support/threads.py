"""Run calls in concurrent threads that switch as often as possible, or each in a new thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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


def each_in_a_new_thread(items: Iterator[Result]) -> Iterator[Result]:
    """Yield the same items; each is made in a thread that then ends."""
    end = object()
    while True:
        with ThreadPoolExecutor(1) as pool:
            item = pool.submit(next, items, end).result()
        if item is end:
            return
        yield item  # type: ignore[misc]
