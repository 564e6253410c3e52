"""A progress bar while step times are measured."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import TaskProgressColumn

from .progress_bar import progress_bar


class MeasuringProgress:
    """Shows a bar on an interactive terminal, nothing elsewhere; it is erased at the end.

    Called with the share that is done. The bar appears with the first call, so that it may be
    entered around what perhaps measures nothing.

    Args:
        console: where the bar is drawn.
        what: the words before the bar.
    """

    def __init__(self, console: Console, what: str = "Measuring step times") -> None:
        self._bar = progress_bar(console, TaskProgressColumn())
        self._task = self._bar.add_task(what, total=1.0)

    def __enter__(self) -> MeasuringProgress:
        return self

    def __call__(self, share: float) -> None:
        self._bar.start()
        self._bar.update(self._task, completed=share)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
