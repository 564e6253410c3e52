"""Fixtures shared by all tests."""

import gc
import os

# Equality tests run on the BLAS of MLX's wheel, where a forward over several rows equals
# single-row forwards bit for bit. tests/engine/test_openblas.py repeats some with OpenBLAS.
os.environ.setdefault("MLXSPEC_OPENBLAS", "0")

# Output must not depend on the user's terminal, nor on a width that the shell or pytest-xdist sets:
# tables are as wide as their contents.
os.environ["TERM"] = "xterm-256color"
os.environ.pop("NO_COLOR", None)
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("TTY_COMPATIBLE", None)
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

# The tests' servers run on this machine and must not be asked through a proxy.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
# They have no certificates: each client that read the system's would take 50 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull

import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Keep the user's learned step times, saved answers and settings out of the tests.
os.environ["MLXSPEC_CACHE_DIR"] = tempfile.mkdtemp(prefix="mlxspec-tests-")
os.environ["MLXSPEC_DATA_DIR"] = tempfile.mkdtemp(prefix="mlxspec-tests-")
os.environ.pop("MLXSPEC_MEMORY", None)
os.environ["MLXSPEC_CONFIG_DIR"] = tempfile.mkdtemp(prefix="mlxspec-tests-")
os.environ.pop("MLXSPEC_MODEL", None)
os.environ.pop("MLXSPEC_API_KEY", None)

import mlxspec.engine.calibration  # isort: skip  (before mlx.core)
import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

from tests.support.examples import LONG, examples
from tests.support.findings import remove_findings, share_findings
from tests.support.harness import NEAR_TIES
from tests.support.logs import logged_by
from tests.support.shared import SHARED

USER_DIRECTORIES = tuple(os.environ[f"MLXSPEC_{kind}_DIR"] for kind in ("CACHE", "DATA", "CONFIG"))
share_findings(Path(os.environ["MLXSPEC_CACHE_DIR"]))
# With this directory in place, commands do not suggest to save answers.
Path(os.environ["MLXSPEC_DATA_DIR"], "memory").mkdir()

# Shells start background jobs with SIGINT ignored, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a busy machine may be slow. Normal runs repeat the same examples, so that a failure
# comes from a change; MLXSPEC_LONG=1 draws new ones each time.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=not LONG,
    max_examples=examples(24),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

LONGEST = (
    "cli/test_serve.py",
    "cli/test_chat.py",
    "generation/test_heads.py",
    "server/test_prefix_cache.py",
    "server/test_process.py",
    "distributed/test_serving.py",
    "cli/test_process.py",
    "test_examples.py",
    "server/test_endpoints.py",
    "test_readme.py",
    "cli/test_memory.py",
    "server/test_structured.py",
    "engine/test_architectures.py",
    "distributed/test_joining.py",
    "server/test_faults.py",
    "engine/test_compiling.py",
    "generation/test_scheduler.py",
    "generation/test_constrained.py",
    "engine/test_step.py",
    "server/test_catalog.py",
    "distributed/test_generation.py",
    "engine/test_equality.py",
    "engine/test_interrupts.py",
    "corpus/test_kept.py",
    "generation/test_asynchronous.py",
    "server/test_responses.py",
    "engine/test_loaded_model.py",
    "server/test_memory_bound.py",
    "generation/test_session.py",
    "server/test_admission.py",
    "cli/test_form.py",
)
"""The slowest files. They run first, so that no process is left with one at the end."""

LIMIT = 3600 if LONG else 180
"""Seconds that a test and its fixtures may take. The slowest test takes about 20."""


@pytest.fixture(scope="session")
def shared() -> Path:
    """Third-party models, tokenizers and traces that are not part of the repository."""
    if not SHARED.is_dir():
        pytest.skip("needs the third-party data in ../shared/data")
    return SHARED


@pytest.fixture(autouse=True)
def no_note_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept noisy timings, since other tests run at the same time. Some tests override this."""
    monkeypatch.setattr(mlxspec.engine.calibration, "noise", lambda times: None)


@pytest.fixture(autouse=True)
def few_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure long-context costs with few steps. Exact ones would take a second."""
    few = replace(
        mlxspec.engine.calibration.FIRST_LONG_CONTEXT, rows=(2, 4, 8), rounds=2, seconds=60.0
    )
    monkeypatch.setattr(mlxspec.engine.calibration, "FIRST_LONG_CONTEXT", few)


@pytest.fixture(autouse=True)
def no_experience_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not save experience to disk, except in the tests of saving it."""
    monkeypatch.setattr(mlxspec.Decoder, "keeps_experience", False)


@pytest.fixture(autouse=True)
def planning_faults() -> Iterator[list[str]]:
    """Fail a test if the planner logs a fault. Such faults change no output.

    A test that provokes faults checks this list and empties it.
    """
    with logged_by("mlxspec.drafting.planner") as lines:
        yield lines
    assert not lines


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Disable ``mx.compile``, except in tests marked ``compiled`` and with ``MLXSPEC_LONG=1``.

    On a CPU it calls a C++ compiler, which takes two seconds for each new function and shape. This
    hook runs before fixtures are set up.
    """
    if LONG or item.get_closest_marker("compiled"):
        mx.enable_compile()
    else:
        mx.disable_compile()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that hangs, for example one that waits for a process that never ends."""

    def fail(*_: object) -> None:
        pytest.fail(f"took longer than {LIMIT} seconds")

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect nightly tests, unless a test is named; run the slowest files first."""
    if not LONG and not any("::" in argument for argument in config.args):
        left = nightly(items)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def nightly(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return all but two of each slow test's cases; with ``nightly(keep=n)``, all but n.

    The cases that are kept are spread. Every second one has an odd index; otherwise, if the first
    decorator's parameter has two values, all cases would have the first of these.
    """
    slow: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            slow.setdefault((item.path, getattr(item, "originalname", "")), []).append(item)
    left = set()
    for same in slow.values():
        marker = same[0].get_closest_marker("nightly")
        keep = marker.kwargs.get("keep", 0) if marker else 2
        places = (n * len(same) // keep for n in range(keep))
        odd = (place + (place ^ n) % 2 for n, place in enumerate(places))
        left |= set(same) - {same[min(place, len(same) - 1)] for place in odd}
    return left


def pytest_collection_finish() -> None:
    gc.freeze()  # the libraries' objects live until the end; the collector need not scan them


def pytest_unconfigure() -> None:
    for directory in USER_DIRECTORIES:
        shutil.rmtree(directory, ignore_errors=True)
    remove_findings()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With pytest-xdist, send this process's near ties to the one that reports them."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["near ties"] = NEAR_TIES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    NEAR_TIES.extend(getattr(node, "workeroutput", {}).get("near ties", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of near ties at which outputs differed, and the margins (invariant 1)."""
    margins = ", ".join(f"{margin:.1e}" for margin in NEAR_TIES)
    terminalreporter.write_line(f"outputs that differ at near ties: {len(NEAR_TIES)} {margins}")
