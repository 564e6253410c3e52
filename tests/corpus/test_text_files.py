"""The texts read from files and folders that a user names."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from mlxspec.corpus.text_files import find_files, read_texts
from mlxspec.errors import FileError


def read(path: Path) -> tuple[list[str], Counter[str]]:
    reading = Counter()
    return [text for file in find_files(path) for text in read_texts(file, reading)], reading


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_directories_are_read_in_order_and_hidden_things_left_out(tmp_path: Path):
    for name in ("b.py", "a/z.txt", "a/y.md", ".env", ".git/config", "a/.cache/x", "c/d/e"):
        write(tmp_path / name, name)
    texts, reading = read(tmp_path)
    assert texts == ["b.py", "a/y.md", "a/z.txt", "c/d/e"]
    assert reading == Counter(files=4)


def test_a_hidden_file_that_is_named_is_read(tmp_path: Path):
    assert read(write(tmp_path / ".notes", "text"))[0] == ["text"]


def test_loops_of_links_end_and_a_file_is_read_once(tmp_path: Path):
    file = write(tmp_path / "a" / "text", "text")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "a" / "same").symlink_to(file)
    (tmp_path / "a" / "dangling").symlink_to(tmp_path / "nowhere")
    assert read(tmp_path)[0] == ["text"]


def test_a_link_that_is_named_is_followed(tmp_path: Path):
    write(tmp_path / "real" / "text", "text")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read(tmp_path / "link")[0] == ["text"]


def test_files_that_are_no_text_are_passed_over_and_counted(tmp_path: Path):
    write(tmp_path / "image", b"\x89PNG\0\0")
    write(tmp_path / "latin", "é".encode("latin-1"))
    write(tmp_path / "utf16", "text".encode("utf-16"))
    write(tmp_path / "empty", "")
    write(tmp_path / "marked", b"\xef\xbb\xbftext")
    assert read(tmp_path) == (["text"], Counter(files=1, skipped=3))


def test_pipes_are_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert read(tmp_path) == ([], Counter())
    with pytest.raises(FileError, match="pipe: cannot be read"):
        find_files(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read_are_counted(tmp_path: Path):
    write(tmp_path / "secret", "text").chmod(0)
    assert read(tmp_path) == ([], Counter(skipped=1))


def test_a_file_that_vanishes_is_counted(tmp_path: Path):
    (file,) = find_files(write(tmp_path / "text", "text"))
    (tmp_path / "text").unlink()
    reading = Counter()
    assert list(read_texts(file, reading)) == []
    assert reading == Counter(skipped=1)


def test_a_missing_path_is_named(tmp_path: Path):
    with pytest.raises(FileError, match="nowhere: cannot be read"):
        find_files(tmp_path / "nowhere")


@pytest.mark.parametrize("line", ["short\n", "é" * 99 + "\r\n", "x" * 40_000 + "\n"])
def test_long_files_come_in_stretches_that_make_the_whole(tmp_path: Path, line: str):
    text = line * (200_000 // len(line)) + "the end"
    texts, _ = read(write(tmp_path / "text", text))
    assert "".join(texts) == text
    assert len(texts) > 1
    assert max(map(len, texts)) <= 65_536
    assert all(stretch.endswith("\n") for stretch in texts[:-1] if len(line) < 30_000)


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_half_a_surrogate_pair_in_a_chat_log_is_replaced(tmp_path: Path):
    message = {"role": "assistant", "content": "a\ud800b"}
    texts, _ = read(write(tmp_path / "chat.jsonl", lines({"messages": [message]})))
    assert texts == ["a\ufffdb"]


QUESTION = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "answer"}


def test_of_chat_logs_the_answers_are_read(tmp_path: Path):
    log = lines({"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "more"}]})
    texts, reading = read(write(tmp_path / "log.jsonl", log + "\n" + log[: len(log) // 2]))
    assert texts == ["answer", "more"]
    assert reading == Counter(files=1, bad_lines=1)


def test_other_json_lines_are_text(tmp_path: Path):
    text = lines({"code": 1}, {"messages": [ANSWER]})
    assert read(write(tmp_path / "data.jsonl", text))[0] == [text]
    assert read(write(tmp_path / "broken.jsonl", "{"))[0] == ["{"]


def test_nested_json_without_end_is_no_record(tmp_path: Path):
    deep = "[" * 100_000 + "\n"
    log = lines({"messages": [ANSWER]}) + deep
    assert read(write(tmp_path / "log.jsonl", log)) == (["answer"], Counter(files=1, bad_lines=1))


def test_the_traces_give_their_completions(shared: Path):
    path = shared / "traces" / "code_rewrite_moatless.jsonl"
    expected = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        expected += [record["messages"][index]["content"] for index in record["completions"]]
    assert read(path)[0] == [text for text in expected if text]


def test_a_file_with_a_late_byte_that_is_not_utf_8_is_skipped_as_a_whole(tmp_path: Path):
    text = "a line\n" * 30_000
    texts, _ = read(write(tmp_path / "long.txt", text))
    assert len(texts) > 1
    assert "".join(texts) == text
    late = write(tmp_path / "late.txt", text.encode() + "é".encode("latin-1"))
    assert read(late) == ([], Counter(skipped=1))
