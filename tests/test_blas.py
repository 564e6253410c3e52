"""OpenBLAS preloaded for MLX's CPU back end; each case runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.openblas import needs_openblas

PRODUCT = "import mlx.core as mx; a = mx.ones((64, 64)); mx.eval(a @ a)"
# Without /proc, nothing is loaded.
LOADED = """
import os
maps = "/proc/self/maps"
print(os.path.exists(maps) and "openblas" in open(maps).read())
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    set_here = {"MLXSPEC_OPENBLAS", "OPENBLAS_THREAD_TIMEOUT"}
    variables = {k: v for k, v in os.environ.items() if k not in set_here}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


@needs_openblas
def test_it_is_loaded_without_setting_anything() -> None:
    run = run_python(f"import mlxspec\n{LOADED}")
    assert run.stdout.strip() == "True"
    assert not run.stderr


@pytest.mark.slow
@needs_openblas
def test_mlx_calls_its_products() -> None:
    """The dynamic linker reports where MLX's calls go."""

    def provider(**environment: str) -> list[str]:
        run = run_python(f"import mlxspec; {PRODUCT}", LD_DEBUG="bindings", **environment)
        lines = [line for line in run.stderr.splitlines() if "`cblas_sgemm'" in line]
        return [line for line in lines if "libmlx.so" in line.split(" to ")[0]]

    (binding,) = provider()
    assert "libopenblas" in binding
    (binding,) = provider(MLXSPEC_OPENBLAS="0")
    assert "libopenblas" not in binding


@needs_openblas
def test_the_environment_variable_turns_it_off() -> None:
    assert run_python(f"import mlxspec\n{LOADED}", MLXSPEC_OPENBLAS="0").stdout == "False\n"


@needs_openblas
def test_its_idle_threads_sleep_unless_the_user_says_otherwise() -> None:
    spinning = "import os, mlxspec; print(os.environ.get('OPENBLAS_THREAD_TIMEOUT'))"
    assert run_python(spinning).stdout == "16\n"
    assert run_python(spinning, OPENBLAS_THREAD_TIMEOUT="26").stdout == "26\n"
    assert run_python(spinning, MLXSPEC_OPENBLAS="0").stdout == "None\n"


@needs_openblas
def test_importing_mlx_first_warns_what_to_do() -> None:
    run = run_python("import mlx.core\nimport mlxspec")
    assert "import mlxspec first" in run.stderr
    silent = run_python("import mlx.core\nimport mlxspec", MLXSPEC_OPENBLAS="0")
    assert not silent.stderr
    library = Path(find_spec("scipy_openblas32").origin).parent / "lib/libopenblas_python.so"
    preloaded = run_python("import mlx.core\nimport mlxspec", LD_PRELOAD=str(library))
    assert not preloaded.stderr


@pytest.mark.parametrize("missing", ["platform", "wheel"])
def test_nothing_happens_elsewhere(missing: str) -> None:
    code = {
        "platform": "import sys; sys.platform = 'darwin'",
        "wheel": (
            "import importlib.metadata as m\n"
            "def version(name): raise m.PackageNotFoundError(name)\n"
            "m.version = version"
        ),
    }[missing]
    run = run_python(f"import mlx.core\n{code}\nimport mlxspec\n{LOADED}")
    assert run.stdout.strip() == "False"
    assert not run.stderr
