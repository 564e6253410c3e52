"""Structured output on the command line: a schema, a regular expression, a grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from mlxspec.cli.generate import generate_command
from tests.support.chains import CHAINS

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [20, 30]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WHO = ("--model", "demo", "--decoder", "prompt-lookup", "--prompt", "Who is it?")


def generate(*arguments: object) -> Result:
    return CliRunner().invoke(generate_command, list(map(str, arguments)))


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "person.json"
    path.write_text(json.dumps(PERSON), encoding="utf-8-sig")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("template", ["--chat", "--raw"])
def test_the_output_is_valid_under_the_schema(schema: Path, template: str) -> None:
    result = generate(*WHO, template, "--json-schema", schema)
    assert result.exit_code == 0, result.stderr
    jsonschema.validate(json.loads(result.stdout), PERSON)


@pytest.mark.slow
def test_the_output_matches_the_regex() -> None:
    result = generate(*WHO, "--regex", "the answer is (yes|no), and nothing else", "--json")
    report = json.loads(result.stdout)
    assert report["text"] in (f"the answer is {word}, and nothing else" for word in ("yes", "no"))
    assert report["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize(
    "grammar", ['start: "a" x "."\nx: /[bc]/ x?', 'root ::= "a" [bc]+ "."'], ids=["Lark", "GBNF"]
)
def test_the_output_is_of_the_grammar(tmp_path: Path, grammar: str) -> None:
    (tmp_path / "grammar").write_text(grammar)
    result = generate(*WHO, "--grammar", tmp_path / "grammar")
    assert result.stdout.startswith("a")
    assert set(result.stdout.strip(".\n")[1:]) <= {"b", "c"}


@pytest.mark.slow
def test_prompts_of_a_file_have_the_form_too(schema: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text('"Who is it?"\n"And you?"\n')
    result = generate(
        *("--model", "demo", "--prompts", tmp_path / "prompts", "--json-schema", schema)
    )
    assert result.exit_code == 0, result.stderr
    for line in result.stdout.splitlines():
        jsonschema.validate(json.loads(json.loads(line)["text"]), PERSON)


@pytest.mark.parametrize(
    ("arguments", "content", "named"),
    [
        (("--json-schema", "FILE"), None, "FILE: No such file"),
        (("--json-schema", "FILE"), b"{", "the JSON schema is not valid JSON"),
        (("--json-schema", "FILE"), b"[]", "the JSON schema must be an object"),
        (("--json-schema", "FILE"), b"\xff", "FILE is not UTF-8"),
        (("--grammar", "FILE"), None, "FILE: No such file"),
        (("--regex", "a", "--grammar", "FILE"), b"", "--regex and --grammar are given together"),
    ],
)
def test_an_invalid_form_is_one_line_before_any_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    content: bytes | None,
    named: str,
) -> None:
    monkeypatch.setattr("mlxspec.models.model.load", lambda *_, **__: 1 / 0)
    file = tmp_path / "form"
    if content is not None:
        file.write_bytes(content)
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    assert_one_line(generate("--prompt", "a", *given), named.replace("FILE", str(file)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "named"),
    [('{"not": {}}', "not"), ('{"type": "object", "patternProperties": 5}', "patternProperties")],
)
def test_a_schema_that_cannot_be_kept_is_named(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "form").write_text(content)
    assert_one_line(generate(*WHO, "--json-schema", tmp_path / "form"), named)
    (tmp_path / "prompts").write_text('"Who is it?"\n')
    files = ("--prompts", tmp_path / "prompts", "--json-schema", tmp_path / "form")
    assert_one_line(generate("--model", "demo", *files), named)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["objects", "rules", "GBNF"])
def test_a_chain_of_references_that_is_too_long_is_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "form").write_text(CHAINS[kind](12_000).text)
    option = "--json-schema" if kind == "objects" else "--grammar"
    assert_one_line(generate(*WHO, option, tmp_path / "form"), "cannot be used")


def assert_one_line(result: Result, named: str) -> None:
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert named in result.stderr
