"""How many wrong comparisons the tests find: flips one at a time and runs the package's tests.

    python .ci/mutations.py --count 20 --seed 1 engine drafting corpus server

A survivor is not always a gap: ``<`` and ``<=`` may be equivalent. So compare rates, of the same
packages, seed and count, before and after a change. Takes minutes; nothing in the checkout changes.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLIPPED = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}


def comparisons(path: Path) -> list[tuple[int, int, str]]:
    """Where a file's comparisons with one operator are: start, end (characters) and operator."""
    source = path.read_text(encoding="utf-8")
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and source.isascii():
            start = starts[(node.left.end_lineno or 1) - 1] + (node.left.end_col_offset or 0)
            end = starts[node.comparators[0].lineno - 1] + node.comparators[0].col_offset
            operator = source[start:end].strip(" ()\n")
            if operator in FLIPPED:
                at = source.index(operator, start)
                found.append((at, at + len(operator), operator))
    return found


def caught(copy: Path, tests: list[Path], limit: float) -> bool:
    """Whether quick tests fail in a copy of the checkout, or run into the limit."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile"]
    command += ["-m", "not slow", "-p", "no:cacheprovider", *map(str, tests)]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)  # 5: all of the file's tests are slow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "packages", nargs="+", help="folders of mlxspec/, or PACKAGE/WORD for some files"
    )
    parser.add_argument("--count", type=int, default=20, help="comparisons to flip, per package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run of tests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, "mlxspec")
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for chosen in arguments.packages:
            package, _, word = chosen.partition("/")
            paths = [p for p in sorted(ROOT.glob(f"mlxspec/{package}/**/*.py")) if word in p.stem]
            places = [(path, *place) for path in paths for place in comparisons(path)]
            tests = copy / "tests" / package
            if caught(copy, [tests], arguments.limit):
                sys.exit(f"the tests of {package} fail without a change")
            sample = random.Random(arguments.seed).sample(places, min(arguments.count, len(places)))
            found = 0
            for path, start, end, operator in sample:
                mutated = copy / path.relative_to(ROOT)
                source = mutated.read_text(encoding="utf-8")
                changed = source[:start] + FLIPPED[operator] + source[end:]
                mutated.write_text(changed, encoding="utf-8")
                own = sorted(tests.glob(f"test_{path.stem}*.py"))  # the likeliest to fail, soonest
                hit = any(caught(copy, part, arguments.limit) for part in (own, [tests]) if part)
                mutated.write_text(source, encoding="utf-8")
                found += hit
                if not hit:
                    line = source.count("\n", 0, start) + 1
                    text = source.splitlines()[line - 1].strip()
                    place = f"{path.relative_to(ROOT)}:{line}"
                    print(f"not found: {place}: {FLIPPED[operator]} in {text}", flush=True)
            print(f"{chosen}: {found} of {len(sample)} found", flush=True)


if __name__ == "__main__":
    main()
