"""Applying a chat template, which is a program that came with the model.

Jinja's sandbox keeps it from the machine, and says nothing about when it ends. So it is watched
as a debugger would: every line of it that runs looks at the clock and at the memory. A timer's
signal would reach the main thread alone, an exception that is sent into a thread could come too
late and hit what follows, and a process of its own takes as long to start as a model to load.

What one operation does, a line cannot stop. Powers, which with a few digits can take hours, are
refused for that reason; no template has a use for them. Texts of gigabytes, which a product or a
filter can make at once, are refused by the system where it bounds what a process may have (Linux,
not macOS).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2.utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import PromptError

Messages = list[dict[str, str]]
"""Turns of a conversation, as chat templates take them: "role" and "content"."""

_SECONDS = 5.0
_BYTES = 500_000_000
_UNIT = 1 if sys.platform == "darwin" else 1024  # of what the system says about memory
_SIZES = Path("/proc/self/statm")  # of the process, in pages; the first is its address space
_LINES = 4  # between two looks at the memory, which take longer than those at the clock
_WATCHED = ("<template>", jinja2.utils.__file__)  # in the latter is the text of a given length


class _Endless(BaseException):
    """Nothing on the way from the template may take it for an error that it can handle."""


def apply_template(tokenizer: TokenizerWrapper, messages: Messages, **how: bool) -> Any:
    """What ``tokenizer.apply_chat_template`` returns.

    Raises:
        PromptError: the template does not apply, or does not end.
    """
    try:
        _check(tokenizer.chat_template)
        with _watched():
            return tokenizer.apply_chat_template(messages, **how)
    except (_Endless, MemoryError):
        cause = "it does not end, or takes too much memory"
    except Exception as error:  # it may do anything
        cause = str(error) or type(error).__name__
    raise PromptError(f"the chat template does not apply ({cause})")


def _check(template: object) -> None:
    """Raise ValueError for a template that computes a power."""
    texts = template.values() if isinstance(template, dict) else [template]
    for text in texts:
        before = "("
        for _, kind, value in jinja2.Environment().lex(text) if isinstance(text, str) else ():
            if value == "**" and kind == "operator" and before not in "(,":
                raise ValueError("it computes a power")
            before = before if kind == "whitespace" else value


@contextmanager
def _watched() -> Iterator[None]:
    """Raise _Endless in this thread once a template has run for too long, or takes too much."""
    deadline, lines = 0.0, 0
    most = _most_memory() + _BYTES

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal deadline, lines
        now = time.monotonic()
        lines += 1
        if lines == 1:
            deadline = now + _SECONDS
        if now > deadline or (lines % _LINES == 0 and _most_memory() > most):
            raise _Endless
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename in _WATCHED else None

    previous = sys.gettrace()
    with _bounded_memory():
        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(previous)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Let what would take too much memory fail, as far as the system can tell."""
    try:
        pages = int(_SIZES.read_text().split()[0])
    except (OSError, ValueError):
        yield
        return
    bound = pages * resource.getpagesize() + 2 * _BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        bound = min(bound, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _most_memory() -> int:
    """The most bytes that the process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
