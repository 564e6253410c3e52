"""What of recorded conversations is replayed."""

import json
from pathlib import Path

import pytest

from mlxspec.errors import OptionError
from mlxspec.eval.replay import TraceTokenizer, read_workload

LETTERS = TraceTokenizer(
    encode=lambda text: [ord(c) for c in text], bos_id=1, eos_id=2, classes=b""
)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    with path.open("w") as file:
        for number in range(20):
            for category in ("a", "b") if number < 3 else ("a",):
                messages = [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": chr(ord("A") + number)},
                ]
                print(json.dumps({"category": category, "messages": messages}), file=file)
    return path


def test_conversations_of_a_category_are_taken_evenly_spaced(traces: Path) -> None:
    workload = read_workload([traces], LETTERS, limit=4)
    taken = [(c.category, chr(c.output[0])) for c in workload.completions]
    assert taken == [("a", c) for c in "AFKP"] + [("b", c) for c in "ABC"]


def test_a_limit_below_one_is_refused(traces: Path) -> None:
    with pytest.raises(OptionError, match="--limit is 0"):
        read_workload([traces], LETTERS, limit=0)
