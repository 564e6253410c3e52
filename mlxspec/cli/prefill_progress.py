"""A progress bar for prefills that take long enough to wonder."""

from __future__ import annotations

from threading import Lock, Timer
from types import TracebackType

from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from .progress_bar import progress_bar


class PrefillProgress:
    """Shows a bar on an interactive terminal once a prefill has lasted ``delay`` seconds.

    Called with prompt tokens done and prompt tokens in all. A timer brings up the bar, since
    the first chunk alone may take longer than that. The bar is erased at the end.

    Args:
        console: where the bar is drawn, if it is a terminal.
        delay: seconds.
    """

    def __init__(self, console: Console, delay: float = 1.0) -> None:
        self._bar = progress_bar(console, MofNCompleteColumn(), TimeElapsedColumn())
        self._task = self._bar.add_task("prefill", total=None)
        self._timer = Timer(delay, self._show)
        self._timer.daemon = True
        self._lock = Lock()  # the timer may fire while the prefill ends
        self._ended = False

    def __enter__(self) -> PrefillProgress:
        return self

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        if done == total:
            self._end()
        elif done == 0:
            self._timer.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._bar.start()

    def _end(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            self._bar.stop()
