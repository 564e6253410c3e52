"""``mlxspec bench`` on the demo model with each BLAS of MLX's CPU back end.

    python benchmarks/side_by_side.py [any option of mlxspec bench]

On Linux's CPU back end everything runs twice, in separate processes: with the BLAS of MLX's wheel,
where a forward over M rows costs M times as much as over one, and with OpenBLAS, where the cost is
nearly flat. Geometric means over the grounded prompts and over the free ones follow the tables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import geometric_mean

from mlxspec.cli.bench import bench_tables
from mlxspec.cli.common.output import print_tables

COMMAND = [sys.executable, "-c", "from mlxspec.cli.main import main; main()"]
KINDS = {
    "grounded prompts": ("repeat", "rename", "edit JSON", "quote"),
    "free continuation": ("free code", "free text"),
}


def measure(openblas: bool) -> dict:
    """Run the bench in a separate process."""
    process = subprocess.run(
        [*COMMAND, "bench", "demo", "--json", *sys.argv[1:]],
        env={**os.environ, "MLXSPEC_OPENBLAS": str(int(openblas))},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(process.stdout)


def means(report: dict) -> str:
    """One line per decoder: the geometric mean over each kind of prompts."""
    lines = []
    for name in report["decoders"]:
        by_category = {
            c: of["decoders"][name]["vs_mlx_lm"] for c, of in report["categories"].items()
        }
        kinds = (
            f"{kind} {geometric_mean(by_category[category] for category in categories):.3f}"
            for kind, categories in KINDS.items()
        )
        lines.append(f"{name} against mlx-lm: {', '.join(kinds)}")
    return "\n".join(lines)


def main() -> None:
    blas = {"with the BLAS of MLX's wheel": False, "with OpenBLAS, where installed": True}
    for title, openblas in blas.items() if sys.platform == "linux" else [("", True)]:
        report = measure(openblas)
        print(f"\n{title}\n")
        print_tables(bench_tables(report))
        print(means(report))


if __name__ == "__main__":
    main()
