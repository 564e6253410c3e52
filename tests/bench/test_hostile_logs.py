"""Fuzzed chat logs are rendered or refused with the package's error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.bench.prompts import (
    read_completions,
    read_prompts,
)
from mlxspec.errors import MlxspecError
from mlxspec.models.model_files import DEMO_DIRECTORY
from mlxspec.models.tokenizer import load_tokenizer_of
from tests.support.examples import examples
from tests.support.hostile import harmless, json_values, mutated

pytestmark = pytest.mark.slow

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
RECORD = {
    "category": "a",
    "model": "vicuna",
    "id": "specbench-1",
    "completions": [1],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "é", "tool_calls": [CALL]},
    ],
}
WHOLE = "\n".join(json.dumps(record) for record in (RECORD, RECORD)).encode()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer_of(DEMO_DIRECTORY)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "log.jsonl"


def read_or_refused(log: Path, tokenizer: Any, content: bytes) -> None:
    log.write_bytes(content)
    result = harmless(lambda: read_completions([log], tokenizer, limit=5))
    if not isinstance(result, MlxspecError):
        assert all(completion.output for completion in result)
        assert all(completion.prompt for completion in result)
    prompts = harmless(lambda: read_prompts(log))
    assert prompts


@settings(max_examples=examples(12))
@given(content=mutated(WHOLE) | st.binary(max_size=50))
def test_a_damaged_log(log: Path, tokenizer: Any, content: bytes) -> None:
    read_or_refused(log, tokenizer, content)


@settings(max_examples=examples(6))
@given(data=st.data())
def test_other_values_in_a_log(log: Path, tokenizer: Any, data: st.DataObject) -> None:
    record = json.loads(json.dumps(RECORD))
    value = data.draw(json_values)
    keys = ["category", "model", "id", "completions", "messages", "prompt", "turns"]
    if data.draw(st.booleans()):
        record[data.draw(st.sampled_from(keys))] = value
    else:
        message = data.draw(st.sampled_from(record["messages"]))
        inner = [message, *message["content"], *message.get("tool_calls", ())]
        place = data.draw(st.sampled_from([part for part in inner if isinstance(part, dict)]))
        place[data.draw(st.sampled_from(sorted(place)))] = value
    read_or_refused(log, tokenizer, json.dumps(record).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 1_000_000,
        b'{"messages":[' + b'{"role":"assistant","content":[]},' * 20_000 + b"{}]}",
        b'{"messages":[{"role":"assistant","content":"' + b"a" * 1_000_000 + b'"}]}',
        b"\n" * 1_000_000,
    ],
    ids=["nested", "many", "long", "empty"],
)
def test_a_large_log(log: Path, tokenizer: Any, content: bytes) -> None:
    read_or_refused(log, tokenizer, content)
