"""``mlxspec store`` as a user runs it."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.filesize import decimal

import mlxspec
from mlxspec.cli.main import main
from mlxspec.corpus.store import Store
from mlxspec.models.tokenizer import load_tokenizer_of

ROOT = Path(mlxspec.__file__).parents[1]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["store", *map(str, arguments)])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    directory = tmp_path / "texts"
    directory.mkdir()
    (directory / "one.txt").write_text("The quick brown fox jumps over the lazy dog.")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    (directory / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\nbroken\n")
    (directory / "picture").write_bytes(b"\x89PNG\0")
    return directory


def test_a_store_is_built_of_a_directory(tmp_path: Path, texts: Path):
    output = tmp_path / "out.store"
    result = run("build", texts, "--model", "demo", "-o", output)
    assert result.exit_code == 0, result.stderr
    tokenizer = load_tokenizer_of("demo")
    store = Store(output, tokenizer)
    expected = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in ("hello there", "The quick brown fox jumps over the lazy dog.")
    ]
    assert store.index.tokens.tolist() == [*expected[0], -1, *expected[1], -1]
    tokens = sum(map(len, expected))
    assert result.stdout.startswith("Read 2 files in ")
    assert f" {output} holds {tokens} tokens in 2 texts, " in result.stdout
    assert result.stderr.splitlines() == [
        "Note: 1 file skipped: not UTF-8 text",
        "Note: 1 chat log line skipped: not a chat record",
    ]


def test_replacing_a_store_says_nothing_but_what_was_written(tmp_path: Path, texts: Path):
    output = tmp_path / "out.store"
    for _ in range(2):
        result = run("build", texts / "one.txt", "--model", "demo", "-o", output, "--force")
        assert result.exit_code == 0
        assert f"{output} holds " in result.stdout
        assert result.stderr == ""


def test_a_store_is_described(tmp_path: Path, texts: Path):
    output = tmp_path / "out.store"
    run("build", texts, "--model", "demo", "-o", output)
    result = run("info", output)
    store = Store(output)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"tokenizer  {store.identity}",
        f"holds      {store.n_tokens} tokens in 2 texts",
        f"size       {decimal(output.stat().st_size)}",
    ]


def test_a_full_store_says_so(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlxspec.corpus.store.MAX_TOKENS", 5)
    output = tmp_path / "out.store"
    result = run("build", texts, "--model", "demo", "-o", output)
    assert result.exit_code == 0
    assert "Note: a store holds 5 tokens at most; the remaining texts were" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("build", "nowhere", "--model", "demo", "-o", "out"), "nowhere: cannot be read"),
        (("build", "texts/picture", "--model", "demo", "-o", "out"), "nothing to write"),
        (("build", "texts", "--model", "no/such/model", "-o", "out"), "no such directory"),
        (("build", "texts", "--model", "demo", "-o", "texts/one.txt"), "texts/one.txt: exists"),
        (("info", "texts/one.txt"), "is not an mlxspec store"),
        (("info", "nowhere"), "nowhere: cannot be read (No such file"),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(
    tmp_path: Path,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    problem: str,
):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    error = result.stderr.splitlines()[-1]
    assert error.startswith("Error: ")
    assert problem in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts"]


@pytest.mark.slow
def test_a_bar_shows_on_a_terminal(tmp_path: Path, texts: Path):
    terminal, child = pty.openpty()
    code = "from mlxspec.cli.main import main; main()"
    arguments = ("build", str(texts), "--model", "demo", "-o", str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, "-c", code, "store", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=child,
        env=os.environ | {"TERM": "xterm"},
    )
    shown = os.read(terminal, 100_000)
    os.close(child)
    os.close(terminal)
    assert done.returncode == 0
    assert b"Reading" in shown


def test_help_does_not_wait_for_mlx():
    code = (
        "import sys; from mlxspec.cli.store import store_command as c\n"
        "c(['build', '--help'], standalone_mode=False)\n"
        "sys.exit(bool({'mlx.core', 'mlx_lm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


def test_why_there_is_nothing_to_write_is_told(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xfe\xfd")
    result = run("build", tmp_path / "image", "--model", "demo", "-o", tmp_path / "out.store")
    assert result.exit_code == 1
    note, error = result.stderr.splitlines()
    assert note == "Note: 1 file skipped: not UTF-8 text"
    assert error.startswith("Error: ")
    assert "nothing to write" in error
