"""Ctrl-C at any line of some functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType, ModuleType
from typing import Any


def functions_of(*places: type | ModuleType) -> list[FunctionType]:
    """What is defined in classes and modules, decorated functions included."""
    defined = [member for place in places for member in vars(place).values()]
    return [inspect.unwrap(member) for member in defined if inspect.isfunction(member)]


def interrupted(
    lines: int, functions: Iterable[FunctionType], action: Callable[[], object]
) -> bool:
    """Run an action, and interrupt it when so many lines of these functions have run.

    Returns:
        whether it has been interrupted; if not, it has run to its end.
    """
    codes = {function.__code__ for function in functions}
    left = lines

    def at_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "line":
            if left == 0:
                raise KeyboardInterrupt  # which ends the tracing, too
            left -= 1
        return at_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: at_line if frame.f_code in codes else None)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
