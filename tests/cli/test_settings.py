"""Settings files of other programs: values are added, everything else stays unchanged."""

from __future__ import annotations

import json
import stat
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.cli.settings import SettingsFile
from mlxspec.errors import FileError
from tests.support.examples import examples
from tests.support.hostile import harmless, mutated

OURS = {"servers": {"ours": {"url": "http://127.0.0.1:8080/v1", "size": 1024}}}
NAMED = {"models": [{"name": "ours", "provider": "openai", "roles": ["chat", "edit"]}]}

# Names and texts in each of the three notations.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]))
SCALARS = st.one_of(TEXTS, st.booleans(), st.integers(-(2**53), 2**53), st.floats(-1e9, 1e9))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(TEXTS.filter(lambda name: name not in ("servers", "models")), VALUES)


def merged(name: str, text: str, **wanted: Any) -> str:
    return SettingsFile(Path(name), wanted or OURS).merged(text)


@given(document=DOCUMENTS, others=st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3))
def test_merging_json_keeps_all_else(document: dict[str, Any], others: dict[str, Any]) -> None:
    whole = {**document, "servers": others}
    found = json.loads(merged("x.json", json.dumps(whole)))
    assert found == {**document, "servers": {**others, **OURS["servers"]}}


@settings(max_examples=examples(30))
@given(document=DOCUMENTS)
def test_merging_yaml_keeps_all_else_or_refuses(document: dict[str, Any]) -> None:
    text = yaml.safe_dump(document, allow_unicode=True)
    result = harmless(lambda: merged("x.yaml", text))
    if isinstance(result, str):
        assert yaml.safe_load(result) == {**document, **OURS}


@pytest.mark.slow
@settings(max_examples=examples(30))
@given(document=DOCUMENTS)
def test_merging_toml_keeps_all_else(document: dict[str, Any]) -> None:
    tomllib = pytest.importorskip("tomllib")
    import tomlkit

    result = merged("x.toml", tomlkit.dumps(document))
    assert tomllib.loads(result) == {**document, **OURS}


CONTINUE = """\
name: Mine
models:
- name: llama
  provider: ollama
- uses: owner/block
rules: []
"""
BY_HAND = """\
# yes is a text to who wrote this
yes: no      # and so is no
mode: 010
when: 2026-08-01
time: 12:30:00
text: |
  kept

models:   # all of them
  # the best
  - "name": 'theirs'
    temperature: 1.50
    folders: [a, b]
  - name: ours  # by hand
    # where
    temperature: .7
    provider: "x"   # ours now
    options: {a: 0x1F}
    roles:
      - edit

# the end of the file
"""
CODEX = """\
# how I like it
approval_policy = "never"   # always

[mcp_servers.files]
command = "x"

[servers.theirs]
url = 'http://theirs'
"""


@pytest.mark.parametrize(("name", "text"), [("x.yaml", CONTINUE), ("x.toml", CODEX)])
def test_what_is_there_stays_to_the_letter(name: str, text: str) -> None:
    wanted = NAMED if name == "x.yaml" else OURS
    new = merged(name, text, **wanted)
    lines = iter(new.splitlines())
    assert all(line in lines for line in text.splitlines()), new  # in the same order
    assert merged(name, new, **wanted) == new


def changed(name: str, old: str, **wanted: Any) -> list[str]:
    """Return the lines that merging removes and adds; check that a second merge changes nothing."""
    new = merged(name, old, **wanted)
    assert merged(name, new, **wanted) == new
    lines = unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def test_yaml_keeps_comments_and_how_values_are_written() -> None:
    ours = {
        "name": "ours",
        "provider": "openai",
        "options": {"a": 31, "contextLength": 1024},
        "nested": {"gone": None, "size": 5},
    }
    settings = {"models": [ours, {"name": "more"}], "when": None}
    assert changed("x.yaml", BY_HAND, **settings) == [
        "-when: 2026-08-01",
        '-    provider: "x"   # ours now',
        "-    options: {a: 0x1F}",
        '+    provider: "openai" # ours now',
        "+    options: {a: 0x1F, contextLength: 1024}",
        "+    nested:",
        "+      size: 5",
        "+  - name: more",
    ]
    crlf = merged("x.yaml", BY_HAND.replace("\n", "\r\n"), **settings)
    assert crlf == merged("x.yaml", BY_HAND, **settings).replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# mine\n", "# mine\na:\n  b: 1\nlist:\n- name: x\n"),
        ("c: 010\r\nd: no", "c: 010\r\nd: no\r\na:\r\n  b: 1\r\nlist:\r\n- name: x\r\n"),
        ("{c: [010]} # mine\n", "{c: [010], a: {b: 1}, list: [name: x]} # mine\n"),
        ("c:\n  - d: 1\n    e: 2\n", "c:\n  - d: 1\n    e: 2\na:\n  b: 1\nlist:\n  - name: x\n"),
        ("list:\n- a\na: {b: 0}", "list:\n- a\n- name: x\na: {b: 1}\n"),
    ],
)
def test_yaml_is_edited_where_the_settings_belong(old: str, new: str) -> None:
    assert merged("x.yaml", old, a={"b": 1}, list=[{"name": "x"}]) == new


@pytest.mark.parametrize(
    ("name", "text"), [("x.yaml", CONTINUE), ("x.toml", CODEX), ("x.json", "{}\n")]
)
def test_a_byte_order_mark_stays(name: str, text: str) -> None:
    wanted = NAMED if name == "x.yaml" else OURS
    new = merged(name, "\ufeff" + text, **wanted)
    assert new == "\ufeff" + merged(name, text, **wanted)
    assert merged(name, new, **wanted) == new


def test_json_keeps_its_indentation_and_its_escapes() -> None:
    assert merged("x.json", '{\n\t"a": "\\u00e9"\n}\n').startswith('{\n\t"a": "\\u00e9",\n\t"')
    assert '"a": "é"' in merged("x.json", '{"a": "é"}')


def test_a_list_is_merged_by_names() -> None:
    text = "models:\n- name: ours\n  provider: x\n  temperature: 1\n- name: theirs\n"
    found = yaml.safe_load(merged("x.yaml", text, **NAMED))
    assert found["models"] == [
        {"name": "ours", "provider": "openai", "temperature": 1, "roles": ["chat", "edit"]},
        {"name": "theirs"},
    ]


def test_an_entry_of_a_list_may_have_nothing_in_it() -> None:
    new = merged("x.yaml", "others:\n-\n", model="a")
    assert yaml.safe_load(new) == {"others": [None], "model": "a"}


def test_none_takes_a_setting_away_and_a_new_file_gets_more() -> None:
    wanted = {"a": {"key": None, "b": 1}}
    file = SettingsFile(Path("x.json"), wanted, {"name": "new", "schema": "v1"})
    found = json.loads(file.merged('{"a": {"key": "k", "c": null}, "name": ""}'))
    assert found == {"a": {"c": None, "b": 1}, "name": ""}
    assert json.loads(file.merged("")) == {"a": {"b": 1}, "name": "new", "schema": "v1"}


@pytest.mark.parametrize("name", ["x.json", "x.toml", "x.yaml"])
def test_a_file_that_has_it_all_is_not_touched(name: str) -> None:
    file = SettingsFile(Path(name), OURS)
    assert file.merged(file.merged("")) == file.merged("")
    assert file.merged("") == file.merged("")
    odd = '{"servers":{"ours":{"size":1024,"url":"http://127.0.0.1:8080/v1","more":1}}}'
    if name != "x.toml":
        assert file.merged(odd) == odd


def test_comments_of_toml_stay() -> None:
    assert merged("x.toml", "# mine\n").startswith("# mine\n")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.json", '// mine\n{"a": 1}', "as JSON without comments"),
        ("x.json", '{"a": 1,}', "as JSON without comments"),
        ("x.json", '{"a": NaN}', "not JSON compliant"),
        ("x.json", '{"a": 1e999}', "not JSON compliant"),
        ("x.json", "[]", "the settings belong in an object"),
        ("x.json", '{"servers": "x"}', "the settings belong in an object"),
        ("x.toml", "a = ", "as TOML"),
        ("x.toml", "a = 1\na = 2", "as TOML"),
        ("x.yaml", "a: [", "as YAML"),
        ("x.yaml", "a: &x {b: 1}\nservers: *x\n", "every place where an alias stands"),
        ("x.yaml", "servers: &x {b: 1}\na: *x\n", "every place where an alias stands"),
        ("x.yaml", "a: 1\n servers: {}", "as YAML"),
        ("x.yaml", "!!map {a: {}}\n...\nb: 1", "as YAML"),
        ("x.yaml", "- a", "the settings belong in an object"),
        ("x.yaml", "--- {a: 1}\n---\n{b: 2}", "as YAML"),
        ("x.yaml", "a: !mine 1", "as YAML"),
        ("x.yaml", "servers:\n  ours:\n    size:\n    - 1\n# mine\n", "a comment would be lost"),
        ("x.yaml", "servers: &x\n  - a\n", "the settings belong in an object"),
        ("x.yaml", "no: 1\nmodels: 'no'\nyes: no\nno: 2\n", "duplicate key"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_name(name: str, text: str, message: str) -> None:
    with pytest.raises(FileError) as error:
        merged(name, text)
    assert str(error.value).startswith(f"{name}: ")
    assert message in str(error.value)
    assert "by hand" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "text"), [("x.yaml", CONTINUE), ("x.toml", CODEX)])
@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_merged(name: str, text: str, data: st.DataObject) -> None:
    damaged = data.draw(mutated(text.encode())).decode(errors="replace")
    result = harmless(lambda: merged(name, damaged))
    assert isinstance(result, (str, FileError))


def test_a_link_is_followed_and_modes_stay(tmp_path: Path) -> None:
    kept, link = tmp_path / "dotfiles" / "x.json", tmp_path / "deep" / "er" / "x.json"
    file = SettingsFile(link, OURS)
    assert file.read() == ""
    kept.parent.mkdir()
    link.parent.mkdir(parents=True)
    kept.write_text("{}")
    kept.chmod(0o600)
    link.symlink_to(kept)
    assert file.read() == "{}"
    file.write(file.merged("{}"))
    assert link.is_symlink()
    assert json.loads(kept.read_text()) == OURS
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_directories_are_made(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path / "a" / "b" / "x.toml", OURS)
    file.write(file.merged(""))
    assert file.read() == file.merged("")


def test_only_text_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        SettingsFile(tmp_path / "x.json", OURS).read()
    (tmp_path / "y.json").write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="not UTF-8"):
        SettingsFile(tmp_path / "y.json", OURS).read()
    (tmp_path / "z.json").symlink_to(tmp_path / "z.json")
    with pytest.raises(OSError, match=r"z\.json"):
        SettingsFile(tmp_path / "z.json", OURS).read()
    with pytest.raises(FileError, match="cannot be edited as JSON"):
        SettingsFile(tmp_path / "deep.json", OURS).merged("[" * 5000 + "]" * 5000)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        FileError,
        match=r"x\.json: cannot be written \((File ex|Not a d)[^)]*\); "
        "make it writable, or change it by hand",
    ):
        SettingsFile(tmp_path / "file" / "x.json", OURS).write("{}")
