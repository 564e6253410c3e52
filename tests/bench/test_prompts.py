"""Prompts in files of several formats."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mlxspec.bench.prompts import (
    BenchPrompt,
    bundled_prompts,
    limited,
    read_prompts,
)
from mlxspec.errors import PromptError


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_line_is_a_prompt_turns_or_messages(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "Say it.", "category": "say"},
        {"prompt": "Once upon", "raw": True},
        {"turns": ["One?", "Two?"]},
        {"messages": [{"role": "system", "content": "Be brief."}, user("Why?")]},
    )
    assert read_prompts(path) == [
        BenchPrompt("say", (user("Say it."),)),
        BenchPrompt("prompts", (user("Once upon"),), raw=True),
        BenchPrompt("prompts", (user("One?"),), ("Two?",)),
        BenchPrompt("prompts", ({"role": "system", "content": "Be brief."}, user("Why?"))),
    ]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"prompt": "a\udc00b \U0001f600"}))
    assert prompt.messages == (user("a\ufffdb \U0001f600"),)


def test_the_answer_at_the_end_of_a_chat_log_is_cut_off(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "Because."}
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"messages": [user("Why?"), answer]}))
    assert prompt.messages == (user("Why?"),)


def test_messages_may_have_parts_and_calls_of_tools(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Which"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": [{"type": "text", "text": "That one."}]},
    ]
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"messages": messages}))
    assert prompt.messages == (
        user("Which"),
        {"role": "assistant", "content": '{"name": "find", "arguments": {"x": 1}}'},
        {"role": "tool", "content": ""},
    )


def test_any_other_file_is_one_prompt_with_its_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "question.txt"
    path.write_text("\ufeffdef f():\n\n    pass\n", encoding="utf-8")
    (prompt,) = read_prompts(path)
    assert prompt.messages == (user("def f():\n\n    pass"),)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not a JSON object"),
        ("[" * 200_000, "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("{}", '"prompt" or "turns" must have a text'),
        ('{"prompt": ""}', "must have a text"),
        ('{"prompt": 3}', "must have a text"),
        ('{"turns": []}', "must have a text"),
        ('{"turns": "abc"}', "must have a text"),
        ('{"messages": [{"role": "user"}]}', '"messages" contains no question'),
        ('{"messages": [{"role": "user", "content": 3}]}', '"content"'),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no question"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "good"}\n\n' + line + "\n")
    with pytest.raises(PromptError) as error:
        read_prompts(path)
    assert f"{path}, line 3: " in str(error.value)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n")
    with pytest.raises(PromptError, match="is empty"):
        read_prompts(tmp_path / name)


def test_a_file_that_is_missing_or_binary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(PromptError, match="not UTF-8"):
        read_prompts(tmp_path / "binary")


def test_spec_bench_has_80_prompts_in_each_of_six_categories(shared: Path) -> None:
    prompts = read_prompts(shared / "prompts" / "spec_bench" / "question.jsonl")
    assert Counter(prompt.category for prompt in prompts) == {
        "mt_bench": 80,
        "translation": 80,
        "summarization": 80,
        "qa": 80,
        "math_reasoning": 80,
        "rag": 80,
    }
    assert all(len(p.follow_ups) == (p.category == "mt_bench") for p in prompts)


def test_a_limit_holds_per_category_and_spreads_over_it() -> None:
    prompts = [BenchPrompt(c, (user(f"{c}{i}"),)) for i in range(10) for c in "ab"] + [
        BenchPrompt("c", (user("c0"),))
    ]
    texts = [prompt.messages[0]["content"] for prompt in limited(prompts, 2)]
    assert texts == ["a0", "a5", "b0", "b5", "c0"]
    assert Counter(p.category for p in limited(prompts, 99)) == {"a": 10, "b": 10, "c": 1}


def test_the_bundled_prompts_are_grounded_tasks_and_free_texts() -> None:
    kinds = {prompt.category: prompt.raw for prompt in bundled_prompts()}
    assert kinds == {
        **dict.fromkeys(("repeat", "rename", "edit JSON", "quote"), False),
        **dict.fromkeys(("free code", "free text"), True),
    }
