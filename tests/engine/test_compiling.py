"""Constraints that would crash or hang the process are refused with a one-line error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import cache, partial
from pathlib import Path

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec import Constraint
from mlxspec.engine import compiling
from mlxspec.engine.grammar import Vocabulary
from mlxspec.errors import OptionError
from tests.support.chains import CHAINS
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.hostile import harmless

SMALL = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "string"}}})
PATTERNS = [f"^{name}{number}[a-z]+$" for name in "abcdefgh" for number in range(100)]
SLOW = Constraint.json_schema(
    {"allOf": [{"patternProperties": dict.fromkeys(PATTERNS[i::8], True)} for i in range(8)]}
)
"""Takes a minute to compile: each of 800 patterns is compared with every other."""


@cache
def vocabulary() -> Vocabulary:
    tokenizer = chat_tokenizer()
    return Vocabulary.of(tokenizer, len(tokenizer))


def compiled(constraint: Constraint) -> llguidance.LLMatcher:
    """Compile a constraint without the cache."""
    vocabulary()._compiled.clear()
    return vocabulary().matcher(constraint)


def outcome(constraint: Constraint) -> str:
    """Return the error for a constraint, or "" if it compiles."""
    try:
        compiled(constraint)
    except OptionError as error:
        message = str(error)
    else:
        return ""
    assert message
    assert "\n" not in message
    return message


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHAINS)
def test_chains_of_references_are_followed_to_some_depth(kind: str) -> None:
    assert outcome(CHAINS[kind](200)) == ""
    for length in (1500, 5000):
        refusal = outcome(CHAINS[kind](length))
        assert not refusal or "cannot be used" in refusal
    assert outcome(SMALL) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["objects", "bare", "terminals"])
def test_what_crashes_ends_another_process(kind: str) -> None:
    refusal = outcome(CHAINS[kind](10_000))
    assert f"(status {-signal.SIGSEGV})" in refusal or f"(status {-signal.SIGBUS})" in refusal
    assert outcome(SMALL) == ""


@pytest.mark.nightly
@pytest.mark.slow
@given(st.sampled_from(sorted(CHAINS)), st.integers(0, 3000))
def test_a_chain_of_any_kind_and_length_is_usable_or_refused_in_a_line(
    kind: str, length: int
) -> None:
    constraint = CHAINS[kind](length)
    result = harmless(partial(compiled, constraint))
    if not isinstance(result, llguidance.LLMatcher):
        assert isinstance(result, OptionError)
        assert "\n" not in str(result)
    elif length:
        assert result.deep_copy().compute_bitmask()


@pytest.mark.slow
def test_what_takes_long_or_much_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_SECONDS", 0.3)
    assert "takes more than" in outcome(SLOW)
    # Python's loops are limited, too: converting these would take hours.
    assert "takes more than" in outcome(Constraint.grammar("\n" * 900_000))
    assert outcome(SMALL) == ""
    monkeypatch.setattr(compiling, "_SECONDS", 20.0)
    monkeypatch.setattr(compiling, "_MEMORY", 130 << 20)
    assert "130 MB" in outcome(Constraint.regex("(x{1000}){1000}"))
    assert outcome(SMALL) == ""


def test_a_slow_constraint_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_SECONDS", 0.6)
    outcomes: list[str] = []
    slow = threading.Thread(target=lambda: outcomes.append(outcome(SLOW)))
    slow.start()
    assert outcome(SMALL) == ""
    assert slow.is_alive()
    slow.join()
    assert "takes more than" in outcomes[0]


@pytest.mark.slow
def test_many_repetitions_are_usable_or_refused() -> None:
    for many in (
        Constraint.regex("x{1000000000}"),
        Constraint.regex("(x{1000}){1000}"),
        Constraint.grammar('start: "b" A\nA: "x"{1000000000}'),
    ):
        assert "cannot be used" in outcome(many)
    for usable in (r"x{0,1000000000}", r"\{99999999\}", r"[{99999999}]+", "x{40000}", '"{7}'):
        assert outcome(Constraint.regex(usable)) == ""
    assert outcome(Constraint.json_schema({"type": "string", "maxLength": 10**9})) == ""
    assert outcome(Constraint.grammar('start: "{99999999}" A\nA: "x"{3}')) == ""


@pytest.mark.slow
def test_special_tokens_can_be_named_by_their_text_and_by_their_id() -> None:
    size = vocabulary().vocab_size
    usable = ["<think>", f"<[{size - 1}]>", "<[5]>", f"<[1-{size - 1}]>", '"a" <think> "b"']
    for named in usable:
        assert outcome(Constraint.grammar(f"start: {named}")) == ""
    assert "nobody" in outcome(Constraint.grammar("start: <nobody>"))
    assert str(size) in outcome(Constraint.grammar(f"start: <[{size}]>"))


@pytest.mark.nightly
@pytest.mark.slow
def test_many_patterns_in_many_objects_are_kept() -> None:
    one = {"type": "object", "patternProperties": {"^x": {"type": "string"}}}
    assert outcome(Constraint.json_schema({"properties": {f"k{i}": one for i in range(300)}})) == ""
    wide = {"type": "object", "patternProperties": dict.fromkeys(PATTERNS, True)}
    assert "takes more than 2 seconds" in outcome(Constraint.json_schema({"items": wide}))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"anyOf": [{"$ref": "#/x/0"}]}}, "x": [True]},
        {"$ref": "#/nowhere"},
        {"$ref": "#/x/999999999999999999999", "x": []},
        {"$ref": "#/x/y/z", "x": 3},
        {"$ref": "%%%"},
        {"$ref": 3},
        {"properties": {"$ref": {"$ref": "#"}}},
        {"const": {"$ref": "#"}},
    ],
)
def test_references_of_any_kind_are_followed_or_refused(schema: dict[str, object]) -> None:
    harmless(partial(outcome, Constraint.json_schema(schema)))


@pytest.mark.slow
def test_texts_may_be_long_together_if_one_of_them_may_come() -> None:
    texts = [f"text {number}" for number in range(5000)]
    assert outcome(Constraint.regex("|".join(texts))) == ""
    assert outcome(Constraint.json_schema({"enum": texts, "description": "long " * 10_000})) == ""


@pytest.mark.parametrize("depth", [130, 900, 20_000])
def test_what_is_nested_too_deeply_is_refused(depth: int) -> None:
    nested = Constraint("json_schema", '{"items":' * depth + "{}" + "}" * depth)
    assert "cannot be used" in outcome(nested)


PROGRAM = f"""
import os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from mlxspec.engine import compiling
from tests.engine.test_compiling import SLOW, outcome
compiling._SECONDS = 0.5
def end():
    children = Path(f"/proc/self/task/{{threading.main_thread().native_id}}/children")
    while not children.read_text():
        time.sleep(0.001)
    print(children.read_text(), flush=True)
    %s
threading.Thread(target=end).start()
outcome(SLOW)
"""


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children are listed by Linux")
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("os._exit(3)", 3),
        ("pass", 0),
    ],
)
def test_no_process_is_left(end: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % end], stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == status
    while is_running(int(done.stdout)):  # at the latest when its time limit is reached
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    try:
        os.kill(pid, 0)
        return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
    except (ProcessLookupError, FileNotFoundError):
        return False
