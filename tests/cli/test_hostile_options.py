"""For any option value, a command does its work or gives a one-line error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mlxspec.cli.connect import CLIENTS, connect_command
from mlxspec.cli.convert import convert_command
from mlxspec.cli.explain import explain_command
from mlxspec.cli.generate import generate_command
from mlxspec.cli.inspect import inspect_command
from mlxspec.cli.replay import replay_command
from tests.support.examples import examples
from tests.support.hostile import harmless

pytestmark = pytest.mark.slow

_NUMBERS = ["0", "1", "-1", "2", "4", "8", "64", "99999999999", "1" + "0" * 25, "-" + "9" * 25]
_FLOATS = ["nan", "inf", "-inf", "0.5", "1e-300", "1e400", "1e38", "٣", "²"]
_TEXTS = [
    *("", " ", "-", "--", "~nobody/x", "../x", "[red]x", "[/x]", "\x1b[2J", "\u202e", "a" * 10_000),
    *("auto", "all", "auto,vllm", "1,2", "1 " * 3000, "5=1", "5=nan", "=", "[10,2]", "[1,2,[0]]"),
    *("[" * 5000, '{"a":1}', "one", " two", "</s>", "demo", "owner\n/name", "M4 Pro"),
]
VALUES = st.one_of(
    st.sampled_from([*_NUMBERS, *_FLOATS]),
    st.sampled_from([*_TEXTS, os.fsdecode(b"\xff\xfe")]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
)


def arguments_of(command: click.Command) -> st.SearchStrategy[list[str]]:
    """Generate up to three options of a command, with any values."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    spelled = [
        st.tuples(st.sampled_from(option.opts), VALUES).map(list)
        if not option.is_flag
        else st.sampled_from([*option.opts, *option.secondary_opts]).map(lambda name: [name])
        for option in options
        if option.name not in ("help", "version", "model", "html")  # the model is given
    ]
    return st.lists(st.one_of(spelled), max_size=3).map(lambda parts: [*chain(*parts)])


def ends_well(command: click.Command, arguments: Sequence[str]) -> None:
    def run() -> Result:
        return CliRunner().invoke(command, list(arguments), standalone_mode=True)

    result = harmless(run)
    assert isinstance(result, Result)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2)
    if result.exit_code == 1:
        *_, last = result.stderr.splitlines()
        assert last.startswith("Error: ")
        assert len(last) < 1200


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


few = settings(
    max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@few
@given(arguments=arguments_of(generate_command))
def test_generate(finite: Path, arguments: list[str]) -> None:
    prompt = () if any(part.startswith("--prompt") for part in arguments) else ("--prompt", "a")
    ends_well(generate_command, ["--model", str(finite), *prompt, *arguments])


@few
@given(arguments=arguments_of(explain_command))
def test_explain(finite: Path, arguments: list[str]) -> None:
    prompt = () if any(part.startswith("--prompt") for part in arguments) else ("--prompt", "a")
    ends_well(explain_command, ["--model", str(finite), *prompt, *arguments])


@few
@given(arguments=arguments_of(replay_command))
def test_replay(tmp_path: Path, arguments: list[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"messages": [{"role": "assistant", "content": "a b a b"}]}')
    ends_well(replay_command, [str(log), "--tokenizer", "demo", *arguments])


@few
@given(arguments=arguments_of(convert_command))
def test_convert(finite: Path, arguments: list[str]) -> None:
    ends_well(convert_command, ["--hf-path", str(finite), "--force", *arguments])


@few
@given(client=st.sampled_from([*CLIENTS]), arguments=arguments_of(connect_command))
def test_connect(
    client: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # any server may answer at the default address
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    ends_well(connect_command, [client, *arguments])


@few
@given(name=VALUES)
def test_a_model_of_any_name(name: str) -> None:
    assume(name != "demo")  # a model, which is slow to probe
    # Names that could be repositories would ask the Hub.
    ends_well(inspect_command, ["--", name.replace("/", "//")])
