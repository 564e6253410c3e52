"""Compiling constraints so that none can end this process, or keep it busy for long.

What would take long while generating is refused by its text. Then a constraint is compiled in
another process, which may crash and is killed at a limit of time or memory. Only what that process
survives is compiled here, on a stack that is twice as large.
"""

from __future__ import annotations

import atexit
import json
import os
import re
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

# llguidance's own limits, except for the grammar's size (compiling optional properties takes time
# that grows with its cube: a second for 2000 of them), the automaton's states (a kilobyte or two
# each), and errors, which would repeat the output.
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
_MEMORY = 512 << 20  # bytes; on Linux of address space, of which the process starts with 100 MB
_STACK = 8 << 20  # bytes: enough for a thousand references in a chain

_MOST_REPETITIONS = 50_000  # each takes a state of the automaton: max_lexer_states
_LONGEST_TEXT = 20_000  # fixed characters; with this many, each mask before them takes 12 ms
_LEAST = re.compile(r'"(min(?:Length|Items|Properties))"\s*:\s*(\d+)')
_IN_REGEX = re.compile(r"\\.|\[(?:[^]\\]|\\.)*\]?|\{(\d+)", re.DOTALL)
_IN_GRAMMAR = re.compile(r'"(?:[^"\\\n]|\\.)*"?|(?:#|//)[^\n]*|\\.|[{~]\s*(\d+)')

_CAUSES: dict[int, str] = {
    signal.SIGPROF: f"it takes more than {_SECONDS:.0f} seconds to compile; make it simpler",
    signal.SIGABRT: "it takes too much memory to compile; make it simpler",
    signal.SIGKILL: "it takes too much memory to compile; make it simpler",
}

Result = TypeVar("Result")

_idle: list[Popen[bytes]] = []
"""The process that waits for the next constraint, if there is one."""


def outline_of(size: int, ends: Sequence[int], special: Mapping[int, bytes]) -> str:
    """What the other process needs of a tokenizer, as JSON.

    Args:
        size: the number of its ids.
        ends: the ids that end an output.
        special: by id, the tokens without text, which grammars may name.
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


def check_bounds(constraint: Constraint) -> None:
    """Refuse a constraint that compiles soon and takes long to follow.

    All of it takes linear time whatever the text.

    Raises:
        OptionError: it fixes a text that is too long, or requires too many repetitions.
    """
    text = constraint.text
    if constraint.kind == "regex":
        longest = max(map(len, text.split("|")))
        numbers = _IN_REGEX.findall(text)
    elif constraint.kind == "json_schema":
        longest, patterns = _texts_of(json.loads(text))
        numbers = [number for pattern in patterns for number in _IN_REGEX.findall(pattern)]
    else:  # whose schemas may be written with escapes
        text = re.sub(r"\\u00([2-7][0-9a-fA-F])", lambda code: chr(int(code[1], 16)), text)
        longest = max(map(len, re.split(r"[|\n]", text)))
        numbers = _IN_GRAMMAR.findall(text)
    if longest > _LONGEST_TEXT:
        raise OptionError(
            f"the {constraint.noun} cannot be used: it fixes a text of {longest:,} characters, or "
            f"has a part as long without an alternative; {_LONGEST_TEXT:,} are the most"
        )
    for number in [*numbers, *(number for _, number in _LEAST.findall(text))]:
        if len(number) > 18 or int(number or 0) > _MOST_REPETITIONS:
            raise OptionError(
                f"the {constraint.noun} cannot be used: {number[:18]} is the least number of "
                f"repetitions of something, which takes too much; use {_MOST_REPETITIONS:,} at most"
            )


def _texts_of(schema: Any) -> tuple[int, list[str]]:
    """The characters of the longest text that a schema fixes, and its regular expressions."""
    texts: list[str] = []
    patterns: list[str] = []
    constants = 0  # one may follow the other, and all that is between them may be fixed, too
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if not isinstance(value, dict):
            continue
        waiting += value.values()
        if "const" in value:
            constants += len(json.dumps(value["const"]))
        if isinstance(value.get("enum"), list):
            texts += map(json.dumps, value["enum"])
        if isinstance(value.get("properties"), dict):
            texts += value["properties"]
        if isinstance(value.get("patternProperties"), dict):
            patterns += value["patternProperties"]
        if isinstance(value.get("pattern"), str):
            patterns.append(value["pattern"])
    texts += [branch for pattern in patterns for branch in pattern.split("|")]
    return max(constants, max(map(len, texts), default=0)), patterns


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


def _refusal(noun: str, problem: str) -> OptionError:
    return OptionError(
        f"the {noun} cannot be used: {in_one_line(problem)}; leave that out or write it differently"
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
    if getattr(sys, "frozen", False):  # the executable is not a Python that could run a file
        raise OptionError("constraints are compiled by another Python process: install mlxspec")
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
    """Call a function in a thread with twice the stack of the other process."""
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
