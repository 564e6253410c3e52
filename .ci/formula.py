"""Write the Homebrew formula; this repository is its tap.

Its resources are the wheels that Formula/pylock.toml pins, for Apple silicon. Building them would
take Rust and Xcode; Homebrew installs wheels as they are.

    python .ci/formula.py                  # after a change of the dependencies
    python .ci/formula.py --upgrade        # pin the newest versions
    python .ci/formula.py --release SDIST  # install this release; the workflow does so
    python .ci/formula.py --check          # change nothing; with pip, try each pinned file
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging import tags
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parent.parent
FORMULA = ROOT / "Formula" / "mlxspec.rb"
LOCK = ROOT / "Formula" / "pylock.toml"
PYTHON = (3, 13)
MACOS = {"tahoe": 26, "sequoia": 15, "sonoma": 14}
"""The versions of macOS, by Homebrew's names. MLX's wheels for a newer one do more."""
DARWIN = {"sys_platform": "darwin", "platform_machine": "arm64", "python_version": "3.13"}

TEMPLATE = """\
# Written by .ci/formula.py, which pins the resources.
class Mlxspec < Formula
  include Language::Python::Virtualenv

  desc "Lossless speculative decoding for LLMs on Apple MLX"
  homepage "https://mlxspec.github.io/mlxspec/"
{release}  license "MIT"
  head "https://github.com/mlxspec/mlxspec.git", branch: "main"

  depends_on "libyaml" => :build # for `brew style`; PyYAML's wheel has it inside
  depends_on arch: :arm64
  depends_on macos: :{oldest}
  depends_on "python@{python}"

  # Libraries in wheels leave no room for the longer names that Homebrew would give them.
  preserve_rpath

{resources}
  def install
    venv = virtualenv_create(libexec, "python{python}", system_site_packages: false)
    resources.each do |wheel|
      wheel.stage {{ venv.pip_install Pathname.pwd/wheel.downloader.basename }}
    end
    venv.pip_install_and_link buildpath, build_isolation: false
  end

  test do
    ENV["MLXSPEC_CACHE_DIR"] = testpath/"cache"
    prompt = "Repeat the following phrase 3 times: 'Hello there.'."
    answer = shell_output("#{{bin}}/mlxspec generate --quiet --model demo \\"#{{prompt}}\\"")
    assert_match "Hello there.", answer
  end
end
"""


def lock(*, upgrade: bool) -> None:
    """Pin what the package needs on a Mac, and what builds it. Pins that fit stay."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
    command += ["--format", "pylock.toml", "--output-file", str(LOCK), "--only-binary", ":all:"]
    command += ["--python-platform", "aarch64-apple-darwin", "--python-version", dotted(PYTHON)]
    command += ["--upgrade"] if upgrade else []
    newest = {"MACOSX_DEPLOYMENT_TARGET": f"{max(MACOS.values())}.0"}  # and wheels for older ones
    subprocess.run(
        [*command, "pyproject.toml", "-"],
        cwd=ROOT,
        env={**os.environ, **newest},
        input="\n".join(project()["build-system"]["requires"]),
        text=True,
        check=True,
    )


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages() -> list[dict[str, Any]]:
    """The pinned packages: their names, versions and wheels."""
    pinned: list[dict[str, Any]] = tomllib.loads(LOCK.read_text())["packages"]
    return pinned


def unmet(pinned: list[dict[str, Any]]) -> list[str]:
    """The requirements of pyproject.toml that the pinned versions do not meet."""
    versions = {package["name"]: package["version"] for package in pinned}
    wanted = [*project()["project"]["dependencies"], *project()["build-system"]["requires"]]
    return [
        str(need)
        for need in map(Requirement, wanted)
        if need.marker is None or need.marker.evaluate(DARWIN)
        if (version := versions.get(canonicalize_name(need.name))) is None
        or version not in need.specifier
    ]


def wheel(package: dict[str, Any], macos: int) -> dict[str, Any]:
    """The wheel that pip prefers on a version of macOS; ends if there is none."""
    platforms = list(tags.mac_platforms((macos, 0), "arm64"))
    supported = [
        *tags.cpython_tags(PYTHON, platforms=platforms),
        *tags.compatible_tags(PYTHON, f"cp{PYTHON[0]}{PYTHON[1]}", platforms),
    ]
    rank = {tag: place for place, tag in enumerate(supported)}
    fitting: list[tuple[int, dict[str, Any]]] = []
    for candidate in package["wheels"]:
        places = [rank[tag] for tag in parse_wheel_filename(name_of(candidate))[3] if tag in rank]
        fitting += [(min(places), candidate)] if places else []
    if not fitting:
        sys.exit(f"{package['name']} {package['version']} has no wheel for macOS {macos}")
    return min(fitting, key=lambda found: found[0])[1]


def name_of(wheel: dict[str, Any]) -> str:
    """The name of a wheel's file."""
    return str(wheel["url"]).rpartition("/")[2]


def resource(package: dict[str, Any]) -> str:
    """The part of the formula for a package, with a wheel for each macOS if they differ."""
    wheels = {name: wheel(package, macos) for name, macos in MACOS.items()}
    lines = [f'  resource "{package["name"]}" do']
    if len({name_of(found) for found in wheels.values()}) == 1:
        lines += [f"    {line}" for line in source(*wheels.values())]
    else:
        for name, found in wheels.items():
            newer = " :or_newer" if name == next(iter(MACOS)) else ""
            lines += [f"    on_{name}{newer} do", *(f"      {line}" for line in source(found))]
            lines += ["    end"]
    return "\n".join([*lines, "  end", ""])


def source(wheel: dict[str, Any], *_same: dict[str, Any]) -> tuple[str, str]:
    return f'url "{wheel["url"]}"', f'sha256 "{wheel["hashes"]["sha256"]}"'


def formula(pinned: list[dict[str, Any]], release: str) -> str:
    """The formula's text. ``release``: its lines of the released sdist, or "" before the first."""
    return TEMPLATE.format(
        release=release,
        oldest=list(MACOS)[-1],
        python=dotted(PYTHON),
        resources="\n".join(map(resource, pinned)),
    )


def released() -> str:
    """The lines of the formula that name the released sdist."""
    found = re.search(r'^  url .*\n  sha256 ".*"\n', FORMULA.read_text(), flags=re.MULTILINE)
    return found.group() if found else ""


def release(sdist: Path) -> str:
    """The lines of a formula that installs this sdist, from the release on GitHub."""
    named = re.fullmatch(r"mlxspec-(\d+\.\d+\.\d+)\.tar\.gz", sdist.name)
    if not named:
        sys.exit(f"{sdist.name} is no sdist of a release: give dist/mlxspec-0.x.y.tar.gz")
    url = f"https://github.com/mlxspec/mlxspec/releases/download/v{named[1]}/{sdist.name}"
    return f'  url "{url}"\n  sha256 "{hashlib.sha256(sdist.read_bytes()).hexdigest()}"\n'


def problems() -> Iterator[str]:
    """What is stale, without a network."""
    for need in unmet(packages()):
        yield f"Formula/pylock.toml does not have {need}"
    if FORMULA.read_text() != formula(packages(), released()):
        yield "Formula/mlxspec.rb is not what Formula/pylock.toml gives"


def try_out(macos: int, scratch: str) -> None:
    """Let pip fetch the pinned files for a version of macOS, and compare their hashes."""
    needs = Path(scratch) / "requirements.txt"
    found = [(package["name"], wheel(package, macos)) for package in packages()]
    needs.write_text(
        "".join(f"{name} @ {w['url']} --hash=sha256:{w['hashes']['sha256']}\n" for name, w in found)
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--platform", f"macosx_{macos}_0_arm64"]
    command += ["--python-version", dotted(PYTHON), "--dest", scratch, "--requirement", str(needs)]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--upgrade", action="store_true", help="pin the newest versions")
    parser.add_argument("--release", type=Path, metavar="SDIST", help="install this release")
    parser.add_argument("--check", action="store_true", help="change nothing; try the files")
    options = parser.parse_args()
    if options.check:
        if found := list(problems()):
            sys.exit("\n".join([*found, "run: .venv/bin/python .ci/formula.py"]))
        with tempfile.TemporaryDirectory() as scratch:
            for macos in MACOS.values():
                try_out(macos, scratch)
        return
    if not options.release:
        lock(upgrade=options.upgrade)
    lines = release(options.release) if options.release else released()
    FORMULA.write_text(formula(packages(), lines))


if __name__ == "__main__":
    main()
