"""The process in which constraints are tried out; :mod:`mlxspec.engine.compiling` starts it.

It is run as a file and imports nothing of mlxspec, so that it starts soon. Each line of its input
is JSON: a format and a text for llguidance's ``grammar_from``, and the outline of a tokenizer, or
null where the text is only to be converted. Its answer is a line with the definition and what
llguidance has against it. It ends with its input, and so with the process that started it. A
constraint that crashes or takes too much kills it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from functools import lru_cache
from typing import Any


def main(path: str, limits: dict[str, Any], seconds: float, memory: int, stack: int) -> None:
    """Answer until the input ends.

    Args:
        path: the directory that has llguidance.
        limits: llguidance's.
        seconds: of CPU time that a constraint may take.
        memory: bytes that the process may take.
        stack: bytes of the stack on which it compiles.
    """
    sys.path.append(path)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # other systems ignore it
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which the parent may have ignored,
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # or blocked
    threading.stack_size(stack)
    busy = threading.Event()

    def answer() -> None:
        try:
            _answer(limits, seconds, busy)
        finally:
            os._exit(0)

    threading.Thread(target=answer).start()
    least = _peak()
    while True:  # for systems without that limit; the other thread ends the process
        busy.wait()
        if _peak() - least > memory:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)


def _answer(limits: dict[str, Any], seconds: float, busy: threading.Event) -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

    @lru_cache(maxsize=4)
    def tokens_of(outline: str) -> LLTokenizer:
        tokenizer = _Outlined(**json.loads(outline))
        size = len(tokenizer.tokens)
        return LLTokenizer(TokenizerWrapper(tokenizer), n_vocab=size, eos_token=tokenizer.ends)

    def tried(format: Any, text: str, outline: str | None) -> tuple[str, str]:
        definition = grammar_from(format, text)
        if outline is None:
            return definition, ""
        parsing = LLParserLimits(**limits)
        matcher = LLMatcher(tokens_of(outline), definition, log_level=0, limits=parsing)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():  # as far as there is no choice, which generating gets to anyway
            matcher.try_consume_tokens(matcher.compute_ff_tokens())
        return definition, matcher.get_error()

    for line in sys.stdin.buffer:
        busy.set()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            definition, error = tried(*json.loads(line))
        except MemoryError:
            os.abort()
        except Exception as raised:
            definition, error = "", str(raised) or type(raised).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        busy.clear()
        sys.stdout.write(json.dumps([definition, error]) + "\n")
        sys.stdout.flush()


class _Outlined:
    """A tokenizer with only the special tokens of another, which grammars may name, and all bytes.

    What compiling takes hardly depends on the others.

    Args:
        size: the number of the other's ids; those of the bytes come after them.
        ends: the ids that end an output.
        special: by id, in decimal, the text of a special token, a character for each byte.
    """

    bos_token_id = None

    def __init__(self, size: int, ends: list[int], special: dict[str, str]) -> None:
        self.tokens = [b""] * size + [bytes([byte]) for byte in range(256)]
        for token, text in special.items():
            self.tokens[int(token)] = text.encode("latin-1")
        self.special_token_ids = list(map(int, special))
        self.ends = ends
        self.eos_token_id = ends[0]
        self._size = size

    def __call__(self, text: bytes) -> list[int]:
        return [self._size + byte for byte in text]


def _peak() -> int:
    """The most bytes that this process has had in memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
