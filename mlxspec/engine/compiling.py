"""Compiles constraints so that none can crash this process or keep it busy for long.

Each is first compiled in another process, which may crash, and whose time and memory are limited.
If it passes, it is compiled again in this process, which has a larger stack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import llguidance

from ..errors import OptionError
from . import compiling_process
from .params import ONE_LINE, Constraint

# Stricter than llguidance's defaults: the number of the automaton's states (one or two kilobytes
# each), the size of a grammar (compile time grows with the cube of the number of optional
# properties, and 2000 take a second), and verbose errors, which would repeat the output.
_LIMITS: dict[str, Any] = {
    "max_lexer_states": 50_000,
    "max_grammar_size": 20_000,
    "verbose_errors": False,
}
_SECONDS = 2.0  # of CPU time
_MEMORY = 512 << 20  # bytes; on Linux, of address space, of which the process starts with 100 MB
_STACK = 2 << 20  # bytes, enough for a chain of 200 references; this process has more

Outline = dict[str, Any]
"""The parts of a tokenizer that the other process needs, as JSON values: the arguments of
:func:`~mlxspec.engine.compiling_process._outlined` by name.
"""


def compiled(
    constraint: Constraint, tokens: llguidance.LLTokenizer, outline: Outline
) -> llguidance.LLMatcher:
    """Compile a constraint, and compute its first mask.

    Args:
        tokens: the model's tokens in llguidance's form.
        outline: the parts of the same tokenizer for the other process.

    Returns:
        a matcher at the beginning of the constraint.

    Raises:
        OptionError: the constraint is invalid or unsatisfiable, or takes too much time or memory to
            compile or follow.
    """
    definition = compile_in_subprocess(constraint, outline)
    limits = llguidance.LLParserLimits(**_LIMITS)
    matcher = llguidance.LLMatcher(tokens, definition, log_level=0, limits=limits)
    if not matcher.is_error():  # the first mask reveals errors that parsing does not
        matcher.compute_bitmask()
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise _refusal(constraint, matcher.get_error() or "nothing satisfies it")
    return matcher


def compile_in_subprocess(constraint: Constraint, outline: Outline) -> str:
    """Compile a constraint in another process.

    Returns:
        the constraint's definition in llguidance's form.

    Raises:
        OptionError: llguidance refuses the constraint, crashes, or exceeds a limit.
    """
    request = asdict(constraint) | {
        "path": os.path.dirname(os.path.dirname(llguidance.__file__)),
        "json_format": ONE_LINE,
        "outline": outline,
        "limits": _LIMITS,
        "seconds": _SECONDS,
        "memory": _MEMORY,
        "stack": _STACK,
    }
    done = subprocess.run(
        [sys.executable, "-I", "-S", compiling_process.__file__],
        input=json.dumps(request).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C does not reach it
        check=False,
    )
    if done.returncode or not done.stdout:
        raise OptionError(
            f"the {constraint.noun} cannot be used: compiling it takes more than {_SECONDS:g} "
            f"seconds or {_MEMORY >> 20} MB, or crashes (status {done.returncode}); make it "
            "simpler, with fewer levels of nesting and of references"
        )
    definition, problem = json.loads(done.stdout)
    if problem:
        raise _refusal(constraint, problem)
    return str(definition)


def in_one_line(message: object) -> str:
    """One of llguidance's error messages in one line, without its excerpt of the constraint."""
    lines = [" ".join(line.split()) for line in str(message).splitlines()] or [""]
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    return " ".join([lines[0], *reasons[:1]])


def _refusal(constraint: Constraint, problem: object) -> OptionError:
    return OptionError(
        f"the {constraint.noun} cannot be used: {in_one_line(problem)}; remove this or write it "
        "differently"
    )
