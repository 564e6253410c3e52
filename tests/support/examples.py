"""The number of examples that a test tries. ``MLXSPEC_LONG=1`` raises it."""

from __future__ import annotations

import os

LONG = os.environ.get("MLXSPEC_LONG") == "1"
_TIMES = 12


def examples(usual: int, long: int | None = None) -> int:
    """Return ``usual``; with ``MLXSPEC_LONG=1``, ``long`` or twelve times ``usual``."""
    return (long or usual * _TIMES) if LONG else usual
