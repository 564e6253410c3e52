"""Run what `make demo` runs, and draw its terminal output: README's first picture.

    python benchmarks/plot_demo.py docs/demo.svg

The model is `mlx_model`, which `make demo` has fetched.
"""

from __future__ import annotations

import io
import os
import platform
import pty
import re
import shlex
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parent.parent
COLUMNS = 48
WIDTH = 560  # pixels, if the page has room for them
_BLACK, _GREY, _WHITE = (13, 17, 23), (201, 209, 217), (255, 255, 255)
# Its own background and light text: readable on light and dark pages.
THEME = TerminalTheme(_BLACK, _GREY, [_BLACK, *[_GREY] * 6, _WHITE])
FONTS = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace'


def command() -> list[str]:
    """The command of `make demo` with `mlx_model`, with this interpreter."""
    dry_run = ["make", "--dry-run", "demo-model"]
    line = subprocess.run(dry_run, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [sys.executable, *shlex.split(line)[1:]]


def at_terminal(words: list[str]) -> str:
    """Run a command at a terminal; return and show its output.

    Raises:
        SystemExit: the command fails.
    """
    shown = bytearray()

    def read(terminal: int) -> bytes:
        part = os.read(terminal, 4096)
        shown.extend(part)
        return part

    status = os.waitstatus_to_exitcode(pty.spawn(words, read))
    if status:
        sys.exit(f"status {status}: {shlex.join(words)}")
    return shown.decode().replace("\r\n", "\n")


def title() -> str:
    """Where and when the figures of the picture were measured."""
    machine = f"{platform.system()} {platform.machine()}"
    return f"{machine}, mlx {version('mlx')}, {date.today().isoformat()}"


def drawn(text: str) -> str:
    """A terminal window with a text, as SVG without external fonts."""
    # With a height, too, since otherwise a dumb terminal has 80 columns.
    console = Console(
        record=True, width=COLUMNS, height=25, file=io.StringIO(), force_terminal=True
    )
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title=title(), theme=THEME, unique_id="demo")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("<svg ", f'<svg width="{WIDTH}" ', 1)
    svg = svg.replace("Fira Code, monospace", FONTS).replace("arial", "sans-serif")
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def main(target: str) -> None:
    words = command()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as costs:
        os.environ |= {
            "COLUMNS": str(COLUMNS),
            "TERM": "dumb",  # no progress bars; the Makefile asks for colours
            "MLXSPEC_CACHE_DIR": costs,
            "MLXSPEC_MEMORY": "off",
        }
        at_terminal(words)  # measures what steps cost
        text = at_terminal(words)
    if re.search(r"\r|\x1b\[[\d;?]*[^\d;?m]", text):
        sys.exit("something was drawn and erased, perhaps since the machine is busy: try again")
    Path(target).write_text(drawn(f"$ make demo\n{text.rstrip()}"), encoding="utf-8")


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
