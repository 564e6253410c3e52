"""Print the changelog's section of a version; end if the project has another version, or none."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def section(changelog: str, version: str) -> str | None:
    """What the changelog says of a version, without the heading."""
    parts = re.split(r"^## (.*)$", changelog, flags=re.MULTILINE)
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        if heading.split(" ")[0] == version:
            return body.strip() or None
    return None


def main() -> None:
    version = sys.argv[1]
    project = (ROOT / "pyproject.toml").read_text()
    if f'\nversion = "{version}"\n' not in project:
        sys.exit(
            f"pyproject.toml has another version than {version}: set it there and in __init__.py"
        )
    notes = section((ROOT / "CHANGELOG.md").read_text(), version)
    if notes is None:
        sys.exit(f'CHANGELOG.md says nothing of {version}: name its section "{version} (DAY)"')
    print(notes)


if __name__ == "__main__":
    main()
