"""A pytest plugin that runs the tests in a hostile environment and in random order.

``python -m pytest -p tests.support.elsewhere`` finds tests that pass only in your environment. The
processor has a long name. The user has no home, a narrow terminal without colours, a proxy, another
time zone, and a temporary directory with a space and an accent in its name. ``SEED=N`` before the
command repeats the order of an earlier run.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
import time
from typing import Any

import pytest

CHIP = "Intel(R) Xeon(R) Processor @ 2.80GHz"
_REPORTS = "PYTEST_XDIST_WORKER" not in os.environ
"""Whether this process prints the results. pytest-xdist's workers inherit its environment."""

if _REPORTS:
    os.environ.setdefault("SEED", str(random.randrange(10_000)))
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="Zoë's (new) files ")
    atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
    os.environ |= {"HOME": "/dev/null/home", "LC_ALL": "C", "TZ": "Pacific/Chatham"}
    os.environ |= {"COLUMNS": "47", "TERM": "dumb", "NO_COLOR": "1"}
    os.environ |= dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    os.environ |= {"MLXSPEC_MODEL": "of-the-user", "MLXSPEC_MEMORY": "on", "MLXSPEC_API_KEY": "key"}
    time.tzset()
    tempfile.tempdir = None  # read it again


def pytest_configure() -> None:
    import mlx.core as mx  # not earlier: conftest.py must import mlxspec first

    device_info = mx.device_info
    mx.device_info = lambda *device: {**device_info(*device), "device_name": CHIP}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests in each file."""
    order = random.Random(os.environ["SEED"])
    of_file: dict[Any, list[pytest.Item]] = {}
    for item in items:
        of_file.setdefault(item.path, []).append(item)
    files = sorted(of_file.values(), key=lambda _: order.random())
    items[:] = [item for tests in files for item in order.sample(tests, len(tests))]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"random order: SEED={os.environ['SEED']}")
