"""Raise KeyboardInterrupt at each line of chosen functions."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from tests.support.examples import LONG

Prepared = TypeVar("Prepared")


def functions_of(*places: type | ModuleType) -> list[FunctionType]:
    """Return mlxspec's functions and methods in classes and modules, decorated ones included."""
    functions = []
    for place in places:
        for member in vars(place).values():
            if inspect.isfunction(member) and member.__module__.startswith("mlxspec."):
                functions.append(inspect.unwrap(member))
            elif inspect.isclass(member) and member.__module__ == getattr(place, "__name__", ""):
                functions += functions_of(member)
    return functions


def interrupted_anywhere(
    functions: Sequence[FunctionType],
    prepare: Callable[[], Prepared],
    action: Callable[[Prepared], object],
) -> Iterator[Prepared]:
    """Run an action once, and again with an interrupt at each line of these functions in turn.

    A line that runs repeatedly is interrupted at its first and last run; with ``MLXSPEC_LONG=1``,
    at each one.

    Yields:
        the prepared object after each run: first the complete one, then each interrupted one.
    """
    prepared = prepare()
    lines = _lines_run(functions, lambda: action(prepared))
    yield prepared
    for line in lines:
        again = prepare()
        assert _interrupted(line, functions, lambda: action(again))  # noqa: B023
        yield again


def _lines_run(functions: Iterable[FunctionType], action: Callable[[], object]) -> list[int]:
    visits: dict[tuple[CodeType, int], list[int]] = defaultdict(list)
    count = 0

    def note(frame: FrameType) -> None:
        nonlocal count
        visits[frame.f_code, frame.f_lineno].append(count)
        count += 1

    with _at_each_line(functions, note):
        action()
    assert count, "none of the functions ran"
    if LONG:
        return list(range(count))
    return sorted({number for seen in visits.values() for number in (seen[0], seen[-1])})


def _interrupted(
    lines: int, functions: Iterable[FunctionType], action: Callable[[], object]
) -> bool:
    """Interrupt an action after ``lines`` lines; return whether it was still running."""
    left = lines

    def interrupt(frame: FrameType) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt  # also ends the tracing
        left -= 1

    with _at_each_line(functions, interrupt):
        try:
            action()
        except KeyboardInterrupt:
            return True
    return False


@contextmanager
def _at_each_line(
    functions: Iterable[FunctionType], act: Callable[[FrameType], None]
) -> Iterator[None]:
    codes = {function.__code__ for function in functions}

    def at_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            act(frame)
        return at_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: at_line if frame.f_code in codes else None)
    try:
        yield
    finally:
        sys.settrace(before)
