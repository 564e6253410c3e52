"""How many examples a property test tries."""

from __future__ import annotations

import os

_TIMES = 8  # within the seconds that a test may take


def examples(usual: int) -> int:
    """``usual``, or many more where the environment says ``MLXSPEC_LONG=1``."""
    return usual * (_TIMES if os.environ.get("MLXSPEC_LONG") == "1" else 1)
