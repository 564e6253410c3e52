"""Build wheel and sdist, and try both as a user gets them.

What they hold is compared with the files that git tracks. Each is installed in an environment of
its own, where the demo model has to answer without a network. Installing needs a package index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
ONLY_IN_GIT = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")
MADE_BY_BUILDING = ("PKG-INFO", "setup.cfg", "mlxspec.egg-info/")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_COLOR": "1"}
PLATFORMS = {
    "macOS": ("--python-platform", "aarch64-apple-darwin"),
    "Linux": ("--python-platform", "x86_64-manylinux_2_36"),
    "Linux, CUDA 12": ("--python-platform", "x86_64-manylinux_2_36", "--extra", "cuda12"),
    "Linux, CUDA 13": ("--python-platform", "x86_64-manylinux_2_36", "--extra", "cuda13"),
}
BACK_ENDS = {
    "macOS": {"mlx-metal"},
    "Linux": {"mlx-cpu"},
    "Linux, CUDA 12": {"mlx-cpu", "mlx-cuda-12"},
    "Linux, CUDA 13": {"mlx-cpu", "mlx-cuda-13"},
}


def run(
    *command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> str:
    """Run a command and return its standard output; end with its errors if it fails."""
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, capture_output=True, text=True
    )
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def uv(*arguments: str | Path, **environment: str) -> str:
    """Run uv, which installs in seconds."""
    return run(sys.executable, "-m", "uv", *arguments, environment=environment)


def tracked() -> set[str]:
    """The files of the repository, as they are in git's index."""
    return set(run("git", "ls-files").splitlines())


def build(into: Path) -> tuple[Path, Path]:
    """Build from the tracked files alone: an sdist, and from it a wheel."""
    with tempfile.TemporaryDirectory() as clean:
        run("git", "checkout-index", "--all", f"--prefix={clean}/")
        uv("build", "--quiet", "--out-dir", into, clean)
    (sdist,), (wheel,) = into.glob("*.tar.gz"), into.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """End unless the sdist holds the tracked files, and the wheel those of the package."""
    with tarfile.open(sdist) as tar:
        inside = {member.name.partition("/")[2] for member in tar if member.isfile()}
    compare(
        sdist,
        {name for name in inside if not name.startswith(MADE_BY_BUILDING)},
        {name for name in tracked() if not name.startswith(ONLY_IN_GIT)},
    )
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    compare(
        wheel,
        {name for name in names if not name.startswith("mlxspec-")},
        {name for name in tracked() if name.startswith("mlxspec/")},
    )


def compare(package: Path, inside: Iterable[str], expected: Iterable[str]) -> None:
    """End with the names of the files that differ, if any do."""
    inside, expected = set(inside), set(expected)
    if inside != expected:
        sys.exit(
            f"{package.name} has too much: {sorted(inside - expected)}, "
            f"and lacks: {sorted(expected - inside)}; see MANIFEST.in"
        )


def try_out(package: Path, directory: Path) -> None:
    """Install a package in a new environment, and let it answer without a network."""
    uv("venv", "--quiet", "--python", sys.executable, directory)
    uv("pip", "install", "--quiet", "--python", directory / "bin" / "python", package)
    command = directory / "bin" / "mlxspec"
    settings = {**OFFLINE, "MLXSPEC_CACHE_DIR": str(directory / "cache")}
    version = run(command, "--version", cwd=directory, environment=settings).split()[-1]
    if f"-{version}" not in package.name:
        sys.exit(f"{package.name} installs a mlxspec that calls itself {version}")
    asked = 'Repeat the following phrase 3 times: "Hello there.". Don\'t say anything else.'
    generate = (command, "generate", "--model", "demo", "--prompt", asked)
    answer = run(*generate, cwd=directory, environment=settings)
    if answer.count("Hello there.") < 3:
        sys.exit(f"from {package.name} the demo model answers {answer!r}")


def check_back_ends() -> None:
    """End unless each platform, and each extra for it, resolves to its own back end of MLX."""
    for platform, options in PLATFORMS.items():
        plainly = ("--quiet", "--no-annotate", "--no-header")
        macos = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest that MLX has wheels for
        compiled = uv("pip", "compile", *plainly, *options, "pyproject.toml", **macos)
        packages = {line.partition("==")[0] for line in compiled.splitlines()}
        found = {name for name in packages if name.startswith("mlx-")} - {"mlx-lm"}
        if found != BACK_ENDS[platform]:
            sys.exit(f"on {platform} pip would install {sorted(found)}")


def main() -> None:
    into = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    into.mkdir(parents=True, exist_ok=True)
    for old in (*into.glob("*.tar.gz"), *into.glob("*.whl")):
        old.unlink()
    sdist, wheel = build(into)
    check_contents(sdist, wheel)
    check_back_ends()
    with tempfile.TemporaryDirectory() as scratch:
        for package in (wheel, sdist):
            try_out(package, Path(scratch) / package.name)
    uv("tool", "run", "--quiet", "--from", wheel, "mlxspec", "--help")
    print(f"{sdist.name}, {wheel.name}: whole, and both answer")


if __name__ == "__main__":
    main()
