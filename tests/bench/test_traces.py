"""Reading and rendering traces and chat logs."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mlxspec.bench.prompts import read_completions, read_traces, render
from mlxspec.errors import PromptError
from tests.support.examples import LONG


def written(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_reads_the_completions_that_a_trace_names(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    record = {"id": "x-1", "category": "qa", "model": "m", "messages": messages}
    (trace,) = read_traces(written(tmp_path / "t.jsonl", {**record, "completions": [3]}))
    assert (trace.category, trace.model, trace.completions) == ("qa", "m", [3])


def test_mt_bench_counts_as_one_set_in_spec_bench_alone(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": "b"}]
    records = [
        {"id": name, "category": category, "messages": messages}
        for name, category in (
            ("specbench-81", "writing"),
            ("specbench-300", "math_reasoning"),
            ("mine-1", "writing"),
        )
    ]
    traces = read_traces(written(tmp_path / "t.jsonl", *records))
    assert [trace.category for trace in traces] == ["mt_bench", "math_reasoning", "writing"]


def test_a_chat_log_is_a_set_of_its_own(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "shell", "arguments": '{"x": 1}'}}
    log = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "c"},
            {"role": "assistant", "content": "d"},
        ]
    }
    (trace,) = read_traces(written(tmp_path / "chats.jsonl", log))
    assert trace.category == "chats"
    assert trace.completions == [1, 3]
    contents = [message["content"] for message in trace.messages]
    assert contents == ["a", '{"name": "shell", "arguments": {"x": 1}}', "c", "d"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"messages": 3}',
        '{"messages": [{"content": "a"}]}',
        '{"messages": [{"role": "assistant", "content": 3}]}',
        '{"messages": [{"role": "user", "content": "a"}], "completions": [7]}',
        '{"messages": [{"role": "user", "content": "a"}], "completions": [1e999]}',
        "[" * 200_000,
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    good = '{"messages": [{"role": "assistant", "content": "a"}]}'
    path.write_text(f"{good}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(PromptError, match=r"t\.jsonl, line 3"):
        read_traces(path)


def test_lines_end_at_newlines_alone_and_a_bom_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = '{"messages": [{"role": "assistant", "content": "a\u2028b\x85c"}]}'
    path.write_bytes(f"\ufeff{line}\r\n{line}\n".encode())
    contents = [trace.messages[0]["content"] for trace in read_traces(path)]
    assert contents == ["a\u2028b\x85c"] * 2


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "a\ud800b \U0001f600"}
    (trace,) = read_traces(written(tmp_path / "t.jsonl", {"messages": [message]}))
    assert trace.messages[0]["content"] == "a\ufffdb \U0001f600"


def test_a_file_without_outputs_or_without_text_is_refused(tmp_path: Path) -> None:
    questions = written(tmp_path / "q.jsonl", {"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(PromptError, match="no assistant message"):
        read_completions([questions], LETTERS, limit=2)
    with pytest.raises(FileNotFoundError):
        read_traces(tmp_path / "missing.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="is not UTF-8 text"):
        read_traces(tmp_path / "b.jsonl")


def test_each_completion_follows_everything_said_before_it(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "yo\n"},
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": "no"},
    ]
    path = written(tmp_path / "t.jsonl", {"messages": messages})
    first, second = render(read_traces(path)[0], encode, bos_id=1, eos_id=2)
    assert first.prompt == [1, *encode("\n### User:\nhi\n### Assistant:\n")]
    assert first.output == [*encode("yo"), 2]
    turn = encode("\n### User:\nso\n### Assistant:\n")
    assert second.prompt == [*first.prompt, *first.output, *turn]


def test_vicunas_conversations_are_in_vicunas_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path = written(tmp_path / "t.jsonl", {"model": "vicuna-7b", "messages": messages})
    (completion,) = render(read_traces(path)[0], encode, bos_id=1, eos_id=2)
    text = "".join(map(chr, completion.prompt[1:]))
    assert text.startswith("A chat between a curious user and an artificial intelligence")
    assert text.endswith("questions.USER:hiASSISTANT:")


@pytest.mark.slow
def test_a_long_conversation_takes_no_more_memory_than_its_tokens(tmp_path: Path) -> None:
    count = 20_000 if LONG else 4_000
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    (trace,) = read_traces(written(tmp_path / "t.jsonl", {"messages": turns * count}))
    tracemalloc.start()
    try:
        completions = list(render(trace, encode, 1, 2))
        assert tracemalloc.get_traced_memory()[1] < 2500 * count
    finally:
        tracemalloc.stop()
    assert len(completions) == count
    assert completions[-1].prompt[-5:] == encode("ant:\n")


class Letters:
    bos_token_id, eos_token_id = 1, 2

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return encode(text)


LETTERS = Letters()


@pytest.fixture
def letters(tmp_path: Path) -> Path:
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


def test_conversations_of_a_category_are_taken_evenly_spaced(letters: Path) -> None:
    completions = read_completions([letters], LETTERS, limit=4)
    taken = [(c.category, chr(c.output[0])) for c in completions]
    assert taken == [("a", c) for c in "AFKP"] + [("b", c) for c in "ABC"]


def test_a_limit_that_leaves_nothing_to_replay_is_refused(tmp_path: Path) -> None:
    question, answer = ({"role": role, "content": "a"} for role in ("user", "assistant"))
    path = written(tmp_path / "t.jsonl", {"messages": [question]}, {"messages": [answer]})
    assert len(read_completions([path], LETTERS, limit=2)) == 1
    with pytest.raises(PromptError, match="--limit 1 chooses have no assistant message"):
        read_completions([path], LETTERS, limit=1)
