"""Fixtures shared by all tests."""

import gc
import os

# Equality tests run on the BLAS of MLX's wheel, where a forward over several rows equals
# single-row forwards bit for bit. tests/engine/test_openblas.py repeats some with OpenBLAS.
os.environ.setdefault("MLXSPEC_OPENBLAS", "0")

# Output looks the same whatever the user's terminal can do. Tables are as wide as what they hold,
# whatever width the shell or pytest-xdist has set.
os.environ["TERM"] = "xterm-256color"
os.environ.pop("NO_COLOR", None)
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("TTY_COMPATIBLE", None)
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

# The tests' servers are on this machine, where no proxy finds them.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"

import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Nor do tests touch the step times that the user's machine has learned.
os.environ["MLXSPEC_CACHE_DIR"] = tempfile.mkdtemp(prefix="mlxspec-tests-")
# Nor the answers that the user keeps.
os.environ["MLXSPEC_DATA_DIR"] = tempfile.mkdtemp(prefix="mlxspec-tests-")
os.environ.pop("MLXSPEC_MEMORY", None)
# Nor what the user has set for all commands.
os.environ["MLXSPEC_CONFIG_DIR"] = tempfile.mkdtemp(prefix="mlxspec-tests-")
os.environ.pop("MLXSPEC_MODEL", None)
os.environ.pop("MLXSPEC_API_KEY", None)

import mlxspec.engine.costs  # isort: skip  (before mlx.core)
import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

from tests.support.examples import LONG, examples
from tests.support.harness import NEAR_TIES
from tests.support.logs import logged_by
from tests.support.shared import SHARED

OF_THE_USER = tuple(os.environ[f"MLXSPEC_{kind}_DIR"] for kind in ("CACHE", "DATA", "CONFIG"))
# Who has a directory for answers is not told that they could be kept.
Path(os.environ["MLXSPEC_DATA_DIR"], "memory").mkdir()

# A shell starts what runs in the background with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine may take long over an example. Each run tries the same examples, so that what fails
# is what has changed; the long form draws others each time.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=not LONG,
    max_examples=examples(24),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

LONGEST = (
    "generation/test_heads.py",
    "distributed/test_serving.py",
    "server/test_prefix_cache.py",
    "generation/test_constrained.py",
    "test_examples.py",
    "cli/test_process.py",
    "cli/test_serve.py",
    "cli/test_chat.py",
    "engine/test_architectures.py",
    "server/test_memory_bound.py",
    "distributed/test_generation.py",
    "cli/test_conversation.py",
    "test_readme.py",
    "server/test_process.py",
    "server/test_faults.py",
    "generation/test_engine.py",
    "server/test_structured.py",
    "server/test_endpoints.py",
    "cli/test_memory.py",
    "server/test_catalog.py",
    "engine/test_compiling.py",
    "engine/test_interrupts.py",
    "corpus/test_kept.py",
    "cli/test_form.py",
    "cli/test_model_choice.py",
    "cli/test_cache_prompt.py",
    "bench/test_reference_figures.py",
    "engine/test_openblas.py",
    "generation/test_asynchronous.py",
    "generation/test_joint_drafts.py",
    "engine/test_equality.py",
)
"""The files that take longest. They come first, so that no process runs one of them at the end."""

LIMIT = 3600 if LONG else 180
"""Seconds after which a test, its fixtures included, has failed: the slowest takes some 20."""


@pytest.fixture(scope="session")
def shared() -> Path:
    """Third-party models, tokenizers and traces that are not part of the repository."""
    if not SHARED.is_dir():
        pytest.skip("needs the third-party data in ../shared/data")
    return SHARED


@pytest.fixture(autouse=True)
def no_note_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured while other tests run does for tests; some override this."""
    monkeypatch.setattr(mlxspec.engine.costs, "noise", lambda times: None)


@pytest.fixture(autouse=True)
def few_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does any need costs that are exact: those after a long context would take a second."""
    few = replace(mlxspec.engine.costs.QUICK_LONG, rows=(2, 4, 8), rounds=2, seconds=60.0)
    monkeypatch.setattr(mlxspec.engine.costs, "QUICK_LONG", few)


@pytest.fixture(autouse=True)
def no_experience_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What drafts teach stays in a decoder, but in the tests of how it is kept."""
    monkeypatch.setattr(mlxspec.Decoder, "keeps_experience", False)


@pytest.fixture(autouse=True)
def planning_faults() -> Iterator[list[str]]:
    """What the log says of faults in planning, which change no output and would pass unseen.

    A test that makes some checks them, and empties the list.
    """
    with logged_by("mlxspec.drafting.planner") as lines:
        yield lines
    assert not lines


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let ``mx.compile`` leave functions as they are, but in tests that are marked ``compiled``.

    On a CPU it calls a C++ compiler: two seconds for each function and shape that nobody has used
    before on the machine. In the long form it does so in all tests. Fixtures are made after this.
    """
    if LONG or item.get_closest_marker("compiled"):
        mx.enable_compile()
    else:
        mx.disable_compile()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let no test wait forever, for a process that never ends or a terminal that stays empty."""

    def fail(*_: object) -> None:
        pytest.fail(f"took longer than {LIMIT} seconds")

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is nightly, unless it is asked for by name; put the longest files first."""
    if not LONG and not any("::" in argument for argument in config.args):
        left = nightly(items)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def nightly(items: list[pytest.Item]) -> set[pytest.Item]:
    """All but two of each test's slow parameters, evenly spread; ``nightly(keep=n)``: all but n."""
    slow: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            slow.setdefault((item.path, getattr(item, "originalname", "")), []).append(item)
    left = set()
    for same in slow.values():
        marker = same[0].get_closest_marker("nightly")
        keep = marker.kwargs.get("keep", 0) if marker else 2
        left |= set(same) - {same[n * len(same) // keep] for n in range(keep)}
    return left


def pytest_collection_finish() -> None:
    gc.freeze()  # what the libraries have made by now lives until the end: no need to search it


def pytest_unconfigure() -> None:
    for directory in OF_THE_USER:
        shutil.rmtree(directory, ignore_errors=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With pytest-xdist: hand the near ties of this process to the one that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["near ties"] = NEAR_TIES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    NEAR_TIES.extend(getattr(node, "workeroutput", {}).get("near ties", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at how many near ties outputs differed, and by how much (invariant 1)."""
    margins = ", ".join(f"{margin:.1e}" for margin in NEAR_TIES)
    terminalreporter.write_line(f"outputs that differ at near ties: {len(NEAR_TIES)} {margins}")
