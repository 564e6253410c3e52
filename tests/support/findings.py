"""What trial steps show about models: one directory for all processes of a test run."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_STARTED_HERE = "TESTS_FINDINGS" not in os.environ
if _STARTED_HERE:
    os.environ["TESTS_FINDINGS"] = tempfile.mkdtemp(prefix="mlxspec-tests-")
_FINDINGS = os.environ["TESTS_FINDINGS"]


def share_findings(cache: Path) -> None:
    """Let what is known about models, and nothing else, be found in a cache directory."""
    cache.mkdir(exist_ok=True)
    (cache / "findings").symlink_to(_FINDINGS)


def remove_findings() -> None:
    """Remove the directory, if this process has made it."""
    if _STARTED_HERE:
        shutil.rmtree(_FINDINGS, ignore_errors=True)
