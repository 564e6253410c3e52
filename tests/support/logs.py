"""Capture log messages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged_by(name: str) -> Iterator[list[str]]:
    """Collect the messages that a logger receives in the block."""
    lines: list[str] = []

    class Taking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log, taking = logging.getLogger(name), Taking()
    log.addHandler(taking)
    try:
        yield lines
    finally:
        log.removeHandler(taking)
