"""How many examples a property test tries."""

from __future__ import annotations

import os

_TIMES = 8


def examples(usual: int, long: int | None = None) -> int:
    """``usual``, or many more where the environment says ``MLXSPEC_LONG=1``."""
    if os.environ.get("MLXSPEC_LONG") != "1":
        return usual
    return long or usual * _TIMES
