"""The process that tries out a constraint; :mod:`mlxspec.engine.compiling` starts it.

It runs as a script and imports nothing from mlxspec, to start quickly. It reads the arguments of
:func:`main` as JSON, and writes the result of :func:`tried` as a JSON list. A constraint that
crashes llguidance or exceeds a limit ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any


def main(path: str, seconds: float, memory: int, stack: int, **constraint: Any) -> None:
    """Try a constraint within limits.

    Args:
        path: the directory that contains llguidance.
        seconds: the CPU time that compiling may take.
        memory: the bytes that the process may take, if the system can limit them.
        stack: the bytes of the compiling thread's stack.
        constraint: the arguments of :func:`tried`.
    """
    sys.path.append(path)
    import llguidance  # noqa: F401 (before the time limit starts)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the time limit bounds the memory, too
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    threading.stack_size(stack)
    threading.Thread(target=lambda: print(json.dumps(tried(**constraint)))).start()


def tried(
    kind: str, text: str, lead: str, json_format: Any, outline: Any, limits: Any
) -> tuple[str, str]:
    """Convert a constraint to a definition, and follow it to the first token that it leaves open.

    Args:
        kind, text, lead: as in :class:`mlxspec.engine.params.Constraint`.
        json_format: llguidance's options for white space in JSON.
        outline: the arguments of :func:`_outlined`, by name.
        limits: llguidance's limits.

    Returns:
        the definition in llguidance's form, and llguidance's error, or "" without one.
    """
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

    try:
        if kind == "json_schema":
            definition = LLMatcher.grammar_from_json_schema(
                json.loads(text), defaults=json_format, overrides={"lenient": False}
            )
        else:
            definition = grammar_from(kind, text)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        return "", str(error)
    if lead:
        inner = {"lark_grammar": definition}
        if kind in ("json_schema", "regex"):
            (inner,) = json.loads(definition)["grammars"]
        lark = f"start: LEAD? @output\nLEAD: /{lead}/"
        definition = json.dumps({"grammars": [{"lark_grammar": lark}, {**inner, "name": "output"}]})
    tokenizer = _outlined(**outline)
    tokens = LLTokenizer(
        TokenizerWrapper(tokenizer), n_vocab=len(tokenizer.tokens), eos_token=outline["ends"]
    )
    matcher = LLMatcher(tokens, definition, log_level=0, limits=LLParserLimits(**limits))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():  # consume the forced tokens, as every generation does
        matcher.try_consume_tokens(matcher.compute_ff_tokens())
    return definition, matcher.get_error()


class ByteTokens:
    """The tokenizer that llguidance calls.

    Args:
        tokens: the bytes of each token.
        special: the ids of tokens without text; grammars may name these tokens.
        end: the first id that ends an output.
        encode: returns the ids of a text.
    """

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Sequence[int],
        end: int,
        encode: Callable[[bytes], list[int]],
    ) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id = end
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def _outlined(size: int, ends: list[int], special: dict[str, str]) -> ByteTokens:
    """A stand-in for the model's tokenizer that has only special tokens and single bytes.

    Other tokens barely affect the time and memory of compiling.

    Args:
        size: the number of the model's token ids; the ids of the bytes follow.
        ends: the ids that end an output.
        special: the text of each special token, one character per byte, by its id in decimal.
    """
    tokens = [b""] * size + [bytes([byte]) for byte in range(256)]
    for token, text in special.items():
        tokens[int(token)] = text.encode("latin-1")
    special_ids = [*map(int, special)]
    return ByteTokens(tokens, special_ids, ends[0], lambda text: [size + byte for byte in text])


if __name__ == "__main__":
    main(**json.load(sys.stdin))
