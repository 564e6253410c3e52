"""File the bench report of an issue; what the issue says is not trusted.

GITHUB_EVENT_PATH names the event's file. A report becomes benchmarks/reports/CHIP/DATE-ISSUE.json,
and the newest curve of each chip goes into the package. A wrong one ends with status 1. Either way
the file that is named as argument gets a comment for the issue, which quotes nothing of it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

from mlxspec.bench.submission import BenchReport, filed_reports, read
from mlxspec.errors import OptionError

ROOT = Path(__file__).parent.parent
LONGEST = 1 << 16  # characters; GitHub allows no longer issue
BEGIN, END = "```json\n", "\n```"
REPORTS = "benchmarks/reports"
CHIPS = "mlxspec/drafting/reported_chips.json"


def file_report(issue: dict[str, Any], root: Path) -> Path:
    """Write the report of an issue, and the chips that follow from all of them.

    Args:
        issue: ``number``, ``created_at`` and ``body``, as GitHub has them.
        root: of the repository.

    Returns:
        the report's file. Another report of the same issue is removed.

    Raises:
        OptionError: the issue has no report, or a wrong one; nothing is written.
    """
    number, day = int(issue["number"]), date.fromisoformat(issue["created_at"][:10])
    report = report_in(issue["body"] or "")
    for old in (root / REPORTS).glob(f"*/????-??-??-{number}.json"):
        old.unlink()
    folder = "-".join(re.findall("[a-z0-9]+", report.chip.lower()))
    path = root / REPORTS / folder / f"{day}-{number}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.text(), encoding="utf-8")
    (root / CHIPS).write_text(chips_text(root), encoding="utf-8")
    return path


def report_in(body: str) -> BenchReport:
    """The report in an issue's text, as the form makes it: the first block of JSON.

    Raises:
        OptionError: there is none, or it is wrong. The message quotes nothing of the text.
    """
    body = body.replace("\r\n", "\n")
    begin = body.find(f"{BEGIN}{{") + len(BEGIN)
    end = body.find(END, begin)
    if len(body) > LONGEST or begin < len(BEGIN) or end < 0:
        raise OptionError(
            "the issue has no report, or is too long: the form's field takes the content of the "
            "file that was written"
        )
    return read(body[begin:end])


def chips_text(root: Path) -> str:
    """What the package knows of reports: the newest curve of each chip, a line for each.

    It is the one behind the shortest context. Reports of other models than the demo model come
    first: that one is so small that its steps take little but their submission.
    """
    chips: dict[str, str] = {}
    newest = filed_reports(root / REPORTS)
    for day, issue, report in sorted(newest, key=lambda one: one[2].model.name == "demo"):
        machine, curve = report.machine, min(report.curves, key=lambda one: one.context)
        blas = f", BLAS: {machine.blas}" if machine.blas else ""
        source = (
            f"measured with mlxspec, report #{issue} of {day}: {report.model.label}, "
            f"{machine.memory_gb} GB, {machine.system}, mlx {machine.mlx}{blas}"
        )
        chip = {"rows": curve.rows, "cost": curve.cost, "source": source}
        chips.setdefault(report.chip, json.dumps(chip))
    lines = [f"  {json.dumps(name)}: {chips[name]}" for name in sorted(chips)]
    return "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n"


def main() -> None:
    event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
    comment = Path(sys.argv[1])
    try:
        path = file_report(event["issue"], ROOT)
    except OptionError as error:
        comment.write_text(
            f"This report cannot be filed:\n\n```\n{error}\n```\n\nEdit the issue, and it is "
            "checked again. `mlxspec bench MODEL --submit` writes a report.\n"
        )
        sys.exit(1)
    comment.write_text(
        f"Thank you! The report can be read, and a pull request adds it as "
        f"`{path.relative_to(ROOT)}`.\n"
    )


if __name__ == "__main__":
    main()
