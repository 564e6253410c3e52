"""The programs and commands in README and the docs run, and their options exist.

The Python blocks of a page run in order, as one program. The ``mlxspec`` commands in shell blocks
of the ``TRIED`` pages run, too, with the bundled model in place of any other and as ``mlx_model``,
and with ``FILES`` in the working directory. A block that needs something that a test lacks is only
parsed. A comment on the line before it says what it needs::

    <!-- needs: a checkpoint -->
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

import mlxspec
from mlxspec.models.model_files import DEMO_DIRECTORY
from tests.support import command_line
from tests.support.demo import FLAT, given_costs, keep_costs

ROOT = Path(mlxspec.__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]

if not (ROOT / "mkdocs.yml").is_file():
    pytest.skip("mlxspec is installed without its repository", allow_module_level=True)

TRIED = ("README.md", *(f"docs/{name}.md" for name in ("index", "prompts", "structured-output")))
"""Pages whose commands run. On other pages they are only parsed."""

FILES = {
    "report.txt": "Alice is a baker from Paris who is 30 years old. Henry is a pilot.\n",
    "question.txt": "Repeat the following phrase 2 times: 'A day.'.\n",
    "questions.jsonl": '{"prompt": "Say hello.", "max_tokens": 9}\n{"prompt": [5, 6, 7]}\n',
    "answer.lark": 'start: "yes" | "no"\n',
    "person.json": json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    ),
}


class Block(NamedTuple):
    """A block of code on a page.

    Attributes:
        page, line: the place of its first line.
        language: the language in its fence.
        code: its content.
        needs: the requirement in its comment; empty if it can run.
    """

    page: str
    line: int
    language: str
    code: str
    needs: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


FENCED = re.compile(
    r"^(?:<!-- needs: (?P<needs>.+?) -->\n)? *```(?P<language>\w*)\n(?P<code>.*?)^ *```$",
    flags=re.DOTALL | re.MULTILINE,
)


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, except those that show an example's file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["code"],
            found["needs"] or "",
        )
        for found in FENCED.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in ALL if block.language == "sh"]
OPERATORS = {"|", "||", "&&", ";", "&", "<", ">", ">>", "2>", "(", ")"}


def lines_of(code: str) -> list[str]:
    """Return the commands of a shell block, one line each."""
    return code.replace("\\\n", " ").splitlines()


STARTERS = {"mlx.launch", "uvx"}


def words_of(line: str) -> list[str]:
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    return list(words)


def commands_in(line: str) -> Iterator[list[str]]:
    """Return the arguments of each ``mlxspec`` call in a shell line."""
    calls: list[list[str]] = [[]]
    for word in words_of(line):
        if word in OPERATORS:
            calls.append([])
        elif calls[-1] or not re.match(r"\w+=", word):  # not an environment variable
            calls[-1].append(word)
    for call in filter(None, calls):
        names = [word.rpartition("/")[2] for word in call]
        if names[0] == "mlxspec" or (names[0] in STARTERS and "mlxspec" in names):
            yield call[names.index("mlxspec") + 1 :]


def command_of(words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    """Return the command that these words name, its context and its arguments."""
    from mlxspec.cli.main import main

    command: click.Command = main
    context = click.Context(main, info_name="mlxspec", **main.context_settings)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        below = command.get_command(context, name)
        assert below is not None, f"there is no command {context.command_path} {name}"
        command, context = below, click.Context(below, parent=context, info_name=name)
    return command, context, words


def options_of(command: click.Command) -> set[str]:
    return {"-h", "--help", "--help-all", "--version"}.union(
        *(param.opts + param.secondary_opts for param in command.params)
    )


def every_option(command: click.Command) -> Iterator[str]:
    """Return the options of a command and its subcommands."""
    yield from options_of(command)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below
            yield from every_option(below)


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_in_blocks_are_understood(block: Block) -> None:
    for line in lines_of(block.code):
        for words in commands_in(line):
            command, context, arguments = command_of(words)
            try:
                command.make_context(context.info_name, arguments, parent=context.parent)
            except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
                pass  # a command that showed its help
            except click.UsageError as error:
                pytest.fail(f"{block}: {shlex.join(['mlxspec', *words])}: {error.format_message()}")


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_in_sentences_exist(page: str) -> None:
    """Check those within backticks, with or without the command's name."""
    from mlxspec.cli.main import main

    text = FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    known = {*every_option(main)}
    for code in re.findall(r"`([^`]+)`", text):
        words = " ".join(code.split()).replace("'", " ").replace('"', " ").split()
        if len(words) > 1 and code.startswith("mlxspec"):
            command, _, words = command_of(words[1:])
            own = options_of(command) if command.name != "run" else set()
            if not own:
                continue  # the rest belongs to the program
        elif code.startswith("--"):
            own = known
        else:
            continue
        for word in words:
            name = word.partition("=")[0]
            assert not re.match(r"--?[a-z]", name) or name in own, f"{page}: `{code}`: no {name}"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with ``FILES`` and ``mlx_model``."""
    (tmp_path / "mlx_model").symlink_to(DEMO_DIRECTORY)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PYTHON = [page for page in PAGES if any(b.language == "python" for b in blocks(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON)
def test_programs_run(page: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = given_costs(FLAT)
    monkeypatch.setattr("mlxspec.generation.decoder.costs_for", lambda *_, **__: costs)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            lines = "\n" * (block.line - 1)  # so that tracebacks show the page's line numbers
            program = compile(lines + block.code, str(ROOT / page), "exec")
            if not block.needs:
                exec(program, names)
    logging.getLogger("mlxspec").setLevel(logging.NOTSET)  # a program has set it


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "json"], ids=str)
def test_json_is_json(block: Block) -> None:
    json.loads(block.code)


def with_demo(arguments: list[str]) -> list[str]:
    """Replace all model names in arguments by the bundled model."""
    return [
        "demo"
        if arg == "MODEL" or (re.fullmatch(r"[\w.-]+/[\w.-]+", arg) and not os.path.exists(arg))
        else arg
        for arg in arguments
    ]


STAND_IN = f"""\
import os, re, sys
{inspect.getsource(with_demo)}
sys.argv[1:] = with_demo(sys.argv[1:])
from mlxspec.__main__ import main
main()
"""


ADVICE = (
    "If it needs what a test does not have, say so on the line before the block: "
    "<!-- needs: ... -->; or add a file to FILES."
)


@pytest.fixture
def shell(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs a shell line with the tested ``mlxspec``."""
    keep_costs()
    programs = directory / "bin"
    programs.mkdir()
    (programs / "stand_in.py").write_text(STAND_IN)
    command = programs / "mlxspec"
    stand_in = shlex.join([sys.executable, f"{programs}/stand_in.py"])
    command.write_text(f'#!/bin/sh\nexec {stand_in} "$@"\n')
    command.chmod(0o755)
    for what in ("init -q", "add -N report.txt"):  # which "git diff" shows
        subprocess.run(["git", *what.split()], check=True)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for kind in ("DATA", "CONFIG"):
        monkeypatch.setenv(f"MLXSPEC_{kind}_DIR", str(directory / kind.lower()))

    def run(line: str) -> None:
        try:
            subprocess.run(
                ["bash", "-o", "pipefail", "-c", line],
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=120,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.fail(f"{line}\n{error}\n{error.stderr or ''}\n{ADVICE}")

    return run


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in SHELL if b.page in TRIED and not b.needs], ids=str)
def test_commands_run(block: Block, shell: Callable[[str], None]) -> None:
    """They run in this process, unless they need a shell."""
    for line in lines_of(block.code):
        words = words_of(line)
        if words[:1] == ["mlxspec"] and not OPERATORS & {*words}:
            result = command_line.run(*with_demo(words[1:]))
            assert result.exit_code == 0, f"{line}\n{result.output}\n{ADVICE}"
        elif [*commands_in(line)]:
            shell(line)
