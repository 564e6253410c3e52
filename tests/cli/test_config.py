"""``mlxspec config`` and its effect on the other commands."""

import errno
import json
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import mlxspec
from mlxspec.cli.settings import load_config
from tests.support.command_line import run

REPOSITORY = "mlx-community/Mistral-7B-Instruct-v0.3-4bit"
ROOT = Path(mlxspec.__file__).parents[1]


@pytest.fixture(autouse=True)
def file(nothing_set: Path) -> Path:
    """The path of the user's settings, which do not exist yet; the working directory is empty."""
    return nothing_set.parent / "config" / "config.toml"


def test_all_commands_report_a_read_only_place_in_the_same_words(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "somewhere")

    monkeypatch.setenv("MLXSPEC_DATA_DIR", str(file.parent / "data"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", read_only)
        shown = [run(*asked).stderr for asked in (("config", "set", "temp", "1"), ("memory", "on"))]
    file.parent.mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda *_: False)
        patched.setattr("os.statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
        shown.append(run("config", "set", "temp", "1").stderr)
    memory = file.parent / "data" / "memory" / "settings.json"
    how = "cannot be written (Read-only file system); set MLXSPEC"
    assert shown == [
        f"Error: {file}: {how}_CONFIG_DIR to another directory\n",
        f"Error: {memory}: {how}_DATA_DIR to another directory\n",
        f"Error: {file}: {how}_CONFIG_DIR to another directory\n",
    ]


def test_what_is_set_is_shown_and_can_be_taken_out_again(file: Path):
    assert f"{file} (does not exist yet)" in run("config").stdout
    for key, value in (
        ("model", REPOSITORY),
        ("max-tokens", "20"),
        ("temp", "0.5"),
        ("system-prompt", "- Be brief"),
        ("alias.fast", "demo"),
        ("alias.qwen2.5", "mlx-community/Qwen2.5"),
    ):
        done = run("config", "set", key, value)
        assert (done.exit_code, done.stderr) == (0, "")
    assert tomllib.loads(file.read_text()) == {
        "model": REPOSITORY,
        "max-tokens": 20,
        "temp": 0.5,
        "system-prompt": "- Be brief",
        "alias": {"fast": "demo", "qwen2.5": "mlx-community/Qwen2.5"},
    }
    shown = run("config").stdout.splitlines()
    assert shown[0].split(maxsplit=1) == ["file", str(file)]
    assert [line.split()[0] for line in shown[1:-1]] == [
        *("model", "max-tokens", "temp", "system-prompt", "alias.fast", "alias.qwen2.5")
    ]
    assert shown[-1] == f"The default model is {REPOSITORY}."
    assert run("config", "get", "alias.fast").stdout == "demo\n"
    assert run("config", "set", "alias.page", "https://huggingface.co/owner/name").exit_code == 0
    assert run("config", "unset", "alias.fast").exit_code == 0
    assert "alias.fast" not in run("config").stdout
    got = run("config", "get", "alias.fast")
    assert (got.exit_code, got.stdout) == (1, "")
    assert "alias.fast is not set" in got.stderr


def test_comments_stay_and_a_directory_is_found_from_everywhere(file: Path, tmp_path: Path):
    file.parent.mkdir()
    file.write_text("# Mine.\ntemp = 1.0  # warm\n")
    Path("own").mkdir()
    assert run("config", "set", "model", "own").exit_code == 0
    assert file.read_text() == (
        f'# Mine.\ntemp = 1.0  # warm\nmodel = "{tmp_path / "work" / "own"}"\n'
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("set", "modle", "x"), "unknown setting 'modle': give one of model, max-tokens,"),
        (("set", "alias", "x"), "unknown setting 'alias'"),
        (("unset", "alias"), "alias: name one of them, alias.NAME"),
        (("set", "system-prompt", "\udcff"), "it is not UTF-8 text"),
        (("set", "max_tokens", "1"), "unknown setting 'max_tokens': give one of model, max-tokens"),
        (("get", "max_tokens"), "max_tokens is not set"),
        (("set", "model", "nothing"), "nothing: no such directory"),
        (("set", "model", " "), " : no such directory"),
        (("set", "max-tokens", "many"), "max-tokens is 'many': 'many' is not a valid integer"),
        (("set", "max-tokens", "0"), "max-tokens is '0': 0 is not in the range x>=1"),
        (("set", "temp", "-1"), "temp is '-1': -1.0 is not in the range x>=0"),
        (("set", "alias.a/b", REPOSITORY), "alias.a/b: use only letters"),
        (("set", "alias.", REPOSITORY), "alias.: use only letters"),
    ],
)
def test_what_cannot_be_set_is_one_line(arguments: tuple[str, ...], expected: str, file: Path):
    run("config", "set", "alias.a", "demo")
    before = file.read_text()
    result = run("config", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert expected.strip() in result.stderr
    assert result.stderr.count("\n") == 1
    assert file.read_text() == before


def test_a_byte_order_mark_is_read_and_stays(file: Path):
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xef\xbb\xbftemp = 0.5 # mine\n")
    assert "0.5" in run("config").stdout
    assert run("config", "set", "max-tokens", "20").exit_code == 0
    assert file.read_bytes().startswith(b"\xef\xbb\xbftemp = 0.5 # mine\n")
    assert load_config() == {"temp": 0.5, "max-tokens": 20}


def test_an_alias_of_another_one_stands_for_its_model():
    run("config", "set", "alias.a", REPOSITORY)
    run("config", "set", "alias.b", "a")
    assert run("config", "get", "alias.b").stdout == f"{REPOSITORY}\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"model = \n", "Invalid value"),
        (b"\xff\xfe", "can't decode byte"),
        (b"modle = 'x'\n", "unknown setting 'modle'"),
        (b"max-tokens = [1]\n", "max-tokens is [1]: "),
        (b"max-tokens = true\n", "max-tokens is True: "),
        (b"temp = inf\n", "temp is inf: choose a finite number"),
        (b"max-tokens = 2.9\n", "max-tokens is 2.9: "),
        (b"model = ['a']\n", "model is ['a']: write it in quotes"),
        (b"alias = 'x'\n", "unknown setting 'alias'"),
        (b"[alias]\n'a/b' = 'demo'\n", "alias.a/b: use only letters"),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(content: bytes, expected: str, file: Path):
    file.parent.mkdir()
    file.write_bytes(content)
    for arguments in (
        ("config",),
        ("config", "set", "temp", "1"),
        ("generate", "--prompt", "a"),
        ("generate", "--model", "demo", "--prompt", "a"),
        ("inspect", "demo"),
    ):
        result = run(*arguments)
        message = result.stderr or str(result.exception)  # run_command would print it
        assert result.exit_code == 1
        assert str(file) in message
        assert expected in message
    assert file.read_bytes() == content
    assert run("generate", "--help").exit_code == 0


def test_a_file_that_cannot_be_read(file: Path):
    file.mkdir(parents=True)
    assert f"{file}: cannot be read (Is a directory)" in run("config").stderr


def generated(*options: object) -> dict:
    result = run("generate", "--prompt", "Say a b c.", "--json", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout) | {"stderr": result.stderr}


@pytest.mark.slow
def test_defaults_of_options_are_what_is_set(endless: Path):
    run("config", "set", "max-tokens", "3")
    run("config", "set", "model", endless)
    assert len(generated()["tokens"]) == 3
    assert len(generated("--max-tokens", 5)["tokens"]) == 5
    assert "[default: 3;" in run("generate", "--help").stdout
    assert "[default: 250;" in run("bench", "--help").stdout  # a measurement stays the same
    # Greedy decoding always gives the same output; a high temperature gives any.
    greedy = generated("--max-tokens", 40, "--seed", 1)
    run("config", "set", "temp", "1000")
    assert generated("--max-tokens", 40, "--seed", 1)["text"] != greedy["text"]


def test_a_system_prompt_that_is_set_is_that_of_chat():
    assert "Briefly." not in run("chat", "--help").stdout
    run("config", "set", "system-prompt", "Briefly.")
    assert "[default: Briefly.]" in " ".join(run("chat", "--help").stdout.split())
