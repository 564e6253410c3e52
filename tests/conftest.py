"""Fixtures shared by all tests."""

import os

# Equality tests run on the BLAS of MLX's wheel, where a forward over several rows equals
# single-row forwards bit for bit. tests/decoding/test_openblas.py repeats some with OpenBLAS.
os.environ.setdefault("MLXSPEC_OPENBLAS", "0")

import tempfile
from pathlib import Path

# Nor do tests touch the step times that the user's machine has learned.
os.environ["MLXSPEC_CACHE_DIR"] = tempfile.mkdtemp(prefix="mlxspec-tests-")

import pytest

import mlxspec  # noqa: F401  (before mlx.core)

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Third-party models, tokenizers and traces that are not part of the repository."""
    if not SHARED.is_dir():
        pytest.skip("needs the third-party data in ../shared/data")
    return SHARED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at how many near ties outputs differed, and by how much (invariant 1)."""
    from .decoding.harness import NEAR_TIES

    margins = ", ".join(f"{margin:.1e}" for margin in NEAR_TIES)
    terminalreporter.write_line(f"outputs that differ at near ties: {len(NEAR_TIES)} {margins}")
