"""The progress bar that all commands share."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn


def progress_bar(console: Console, *figures: ProgressColumn) -> Progress:
    """A bar on an interactive terminal, nothing elsewhere; it is erased at the end.

    Args:
        console: where it is drawn.
        figures: what stands behind the task's description and the bar.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),  # as a whole narrow enough for 40 columns with an echoed ^C
        *figures,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_interactive,
    )
