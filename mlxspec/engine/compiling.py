"""Compiling constraints so that none can end this process, or keep it busy for long.

A constraint is first compiled in another process, which may crash and is killed at a limit of time
or memory. Only what that process survives is compiled here, on a stack that is twice as large.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, TypeVar

import llguidance

from ..errors import OptionError
from . import compiling_process
from .constraint import ONE_LINE, Constraint
from .constraint_bounds import check_bounds

# llguidance's own limits, but for the grammar's size, with the cube of which the time of properties
# that may be left out grows (a second for 2000 of them); for the automaton's states, of which each
# takes a kilobyte or two; and for errors, which would repeat the output.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # some 20 ms
    "step_lexer_fuel": 200_000,  # some 15 ms
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 20_000,
    "verbose_errors": False,
}
_SECONDS = 2.0  # of CPU time
_MEMORY = 512 << 20  # bytes; on Linux of addresses, of which the process has 100 MB to begin with
_STACK = 8 << 20  # bytes: enough for a thousand references in a chain

_CAUSES: dict[int, str] = {
    signal.SIGPROF: f"it takes more than {_SECONDS:.0f} seconds to compile; make it simpler",
    signal.SIGABRT: "it takes too much memory to compile; make it simpler",
    signal.SIGKILL: "it takes too much memory to compile; make it simpler",
}

Result = TypeVar("Result")

_idle: list[Popen[bytes]] = []
"""The process that waits for the next constraint, if there is one."""


def outline_of(size: int, ends: Sequence[int], special: Mapping[int, bytes]) -> str:
    """What the process that tries has to know of a tokenizer.

    Args:
        size: the number of its ids.
        ends: the ids that end an output.
        special: by id, the tokens that are no text, which grammars may name.
    """
    texts = {token: text.decode("latin-1") for token, text in special.items()}
    return json.dumps({"size": size, "ends": ends, "special": texts})


def compiled(
    constraint: Constraint, tokens: llguidance.LLTokenizer, outline: str
) -> llguidance.LLMatcher:
    """A matcher at the constraint's beginning, whose first mask has been computed.

    Args:
        constraint: what the output has to be.
        tokens: the model's.
        outline: of these tokens, from :func:`outline_of`.

    Raises:
        OptionError: the constraint is not sound, or cannot be kept, or is too large.
    """
    definition = definition_of(constraint)
    _tried("llguidance", definition, outline, constraint.noun)

    def compile() -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(tokens, definition, log_level=0, limits=limits)
        if not matcher.is_error():  # the first mask shows what the definition does not
            matcher.compute_bitmask()
        return matcher

    matcher = _on_large_stack(compile)
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise _refusal(constraint.noun, matcher.get_error() or "nothing satisfies it")
    return matcher


def definition_of(constraint: Constraint) -> str:
    """The constraint as llguidance takes it; whether it is a sound one is found out later.

    Raises:
        OptionError: it is not even in the language that it is said to be, or is too large.
    """
    kind, text = constraint.kind, constraint.text
    try:
        check_bounds(constraint)
        if kind == "json_schema":
            definition = llguidance.LLMatcher.grammar_from_json_schema(
                json.loads(text), defaults=ONE_LINE, overrides={"lenient": False}
            )
        elif kind == "regex":
            definition = llguidance.LLMatcher.grammar_from_regex(text)
        elif kind == "lark":
            definition = llguidance.LLMatcher.grammar_from_lark(text)
        else:  # llguidance's conversion of GBNF takes minutes for some
            definition = _tried("grammar", text, None, constraint.noun)
    except OptionError:
        raise
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the {constraint.noun} cannot be used: {in_one_line(error)}") from error
    if not constraint.lead:
        return definition
    own = {"lark_grammar": definition}
    if kind in ("json_schema", "regex"):
        (own,) = json.loads(definition)["grammars"]
    lark = f"start: LEAD? @output\nLEAD: /{constraint.lead}/"
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**own, "name": "output"}]})


def in_one_line(message: object) -> str:
    """What llguidance says, without its pictures of the place."""
    lines = [" ".join(line.split()) for line in str(message).splitlines()] or [""]
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0], *reasons[:1]])


def _refusal(noun: str, told: str) -> OptionError:
    return OptionError(
        f"the {noun} cannot be used: {in_one_line(told)}; leave that out, or say it in another way"
    )


def _tried(format: str, text: str, outline: str | None, noun: str) -> str:
    """Convert a constraint in another process, and compile it there.

    Args:
        format, text: as for llguidance's ``grammar_from``.
        outline: of the model's tokens; None to convert it only.
        noun: what messages call the constraint.

    Returns:
        its definition.

    Raises:
        OptionError: llguidance refuses it, or crashes or takes too much while it compiles it.
    """
    if getattr(sys, "frozen", False):  # the executable is no Python that could run a file
        return llguidance.grammar_from(format, text)  # type: ignore[arg-type]
    process = _waiting() or _started()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it has been killed meanwhile
            process.stdin.write(json.dumps([format, text, outline]).encode() + b"\n")
            process.stdin.flush()
        answer = process.stdout.readline()
    except BaseException:
        _end(process)
        raise
    if not answer.endswith(b"\n"):
        status = process.wait()
        _end(process)
        crash = f"compiling it crashes (status {status}), as it does where references or nesting "
        cause = _CAUSES.get(-status, crash + "are too deep; make it flatter")
        raise OptionError(f"the {noun} cannot be used: {cause}")
    if _idle:
        _end(process)
    else:
        _idle.append(process)
    definition, error = json.loads(answer)
    if error:
        raise _refusal(noun, error)
    return str(definition)


def _waiting() -> Popen[bytes] | None:
    """A process that has been started before, unless something has ended it."""
    with suppress(IndexError):
        while True:
            process = _idle.pop()
            if process.poll() is None:
                return process
            _end(process)
    return None


def _started() -> Popen[bytes]:
    settings = {
        "path": os.path.dirname(os.path.dirname(llguidance.__file__)),
        "limits": _LIMITS,
        "seconds": _SECONDS,
        "memory": _MEMORY,
        "stack": _STACK,
    }
    command = [sys.executable, "-I", "-S", compiling_process.__file__, json.dumps(settings)]
    try:
        # In a session of its own, since an interrupt at the terminal is not meant for it.
        return Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True)
    except OSError as error:
        raise OptionError(
            f"constraints are compiled in another process, but {sys.executable} cannot be started "
            f"({error.strerror}): end other programs, or use no constraint"
        ) from error


def _end(process: Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError), process:  # which closes its pipes and waits
        pass


@atexit.register
def _end_idle() -> None:
    while process := _waiting():
        _end(process)


os.register_at_fork(after_in_child=_idle.clear)  # the other side of its pipes is the parent's


_changing_size = threading.Lock()


def _on_large_stack(make: Callable[[], Result]) -> Result:
    """What a function makes, in a thread with twice the stack of the process that tries."""
    made: Future[Result] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    with _changing_size:
        # That of all threads to come: another's that begins now has a larger one than it needs.
        usual = threading.stack_size(2 * _STACK)
        try:
            threading.Thread(target=run).start()
        finally:
            threading.stack_size(usual)
    return made.result()
