"""How much a test tries: what is usual, or more where ``MLXSPEC_LONG=1`` is set."""

from __future__ import annotations

import os

LONG = os.environ.get("MLXSPEC_LONG") == "1"
_TIMES = 12


def examples(usual: int, long: int | None = None) -> int:
    """``usual``, or in the long form twelve times as many or ``long``."""
    return (long or usual * _TIMES) if LONG else usual
