"""``mlxspec memory`` as a user runs it; saving answers and drafting from them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

import mlxspec
from mlxspec.cli.main import main
from mlxspec.cli.memory import Memories
from mlxspec.corpus import answers as answers_module
from mlxspec.corpus.answer_index import AnswerIndex
from mlxspec.corpus.answers import (
    KeptAnswers,
    Settings,
    identify,
    kept_answers,
    memory_directory,
    save_settings,
)
from mlxspec.errors import FileError, OptionError
from mlxspec.models.tokenizer import load_tokenizer_of
from mlxspec.terminal import TokenPrinter
from tests.cli.test_serve import serving
from tests.support.at_terminal import at_terminal
from tests.support.demo import FLAT, demo, given_costs, keep_costs, stand_in_decoder
from tests.support.findings import share_findings
from tests.support.tokenizers import FIRST

ROOT = Path(mlxspec.__file__).parents[1]
START = "from mlxspec.__main__ import main; main()"
PROMPT = '[INST] Repeat the following phrase 2 times: "The red fox sees the river.". [/INST]'
HINT = "mlxspec can remember answers between runs"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This test's directory for answers; the hint about it has not been shown yet."""
    monkeypatch.setenv("MLXSPEC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    share_findings(tmp_path / "cache")
    monkeypatch.setattr("mlxspec.generation.decoder.costs_for", lambda *_, **__: given_costs(FLAT))
    return tmp_path / "data" / "memory"


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], input=stdin)


def memory(*arguments: object) -> Result:
    return run("memory", *arguments)


def said(*arguments: object, status: int = 0) -> str:
    """Run a command of ``mlxspec memory``; return its standard output."""
    result = memory(*arguments)
    assert result.exit_code == status, result.stderr
    return result.stdout


def generate(*arguments: object) -> dict:
    result = run("generate", "--max-tokens", 40, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def answers() -> list[list[int]]:
    return [one[1].tolist() for kept in kept_answers(memory_directory()) for one in kept.read()]


def earned(name: str) -> int:
    kept = kept_answers(memory_directory())
    return sum(day[name] for one in kept for day in one.earned_by_day().values())


def learn(texts: list[str], ages: list[timedelta] | None = None) -> list[list[int]]:
    """Save answers of the bundled tokenizer with these ages."""
    tokenizer, now = demo().tokenizer, time.time()
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    with pytest.MonkeyPatch.context() as patched:
        kept = KeptAnswers(memory_directory(), identify(tokenizer), "demo")
        held = AnswerIndex(kept=kept)
        for tokens, age in zip(ids, ages or [timedelta()] * len(ids), strict=True):
            learned = int(now - age.total_seconds())
            patched.setattr(answers_module, "time", _Clock(learned))
            held.add(tokens, {"steps": 2, "tokens": len(tokens), "context": 1})
            held.settle()
        held.close()
    return ids


class _Clock:
    """A replacement for ``time`` that stands still."""

    def __init__(self, now: float) -> None:
        self.time = lambda: now


# Saving answers.


def test_nothing_is_kept_and_nothing_said_unless_it_is_on(finite: Path, home: Path):
    result = run("generate", "--model", finite, "--prompt", "a")
    assert result.exit_code == 0
    assert HINT not in result.output
    assert not home.exists()


@pytest.mark.slow
def test_the_second_time_drafts_come_from_memory_and_the_text_is_the_same():
    assert said("on").splitlines()[0].startswith("Answers are kept from now on, up to 50,000,000 ")
    options = ("--model", "demo", "--prompt", PROMPT)
    first = generate(*options)
    assert earned("memory") == 0
    second = generate(*options)
    plain = generate(*options, "--no-saved-answers")
    assert first["tokens"] == second["tokens"] == plain["tokens"]
    assert answers() == [first["tokens"]]
    assert earned("memory") > 10
    assert second["stats"]["steps"] < first["stats"]["steps"] == plain["stats"]["steps"]
    assert (earned("tokens"), earned("answers")) == (2 * len(first["tokens"]), 1)


@pytest.mark.parametrize("decoder", ["prompt-lookup", "lookahead", "plain"])
def test_other_decoders_leave_it_alone(finite: Path, decoder: str):
    memory("on")
    generate("--model", finite, "--prompt", "a", "--decoder", decoder)
    assert answers() == []


@pytest.mark.slow
def test_files_of_prompts_keep_their_answers_too(finite: Path, tmp_path: Path):
    memory("on")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a"\n"a b"\n')
    assert run("generate", "--model", finite, "--prompts", prompts).exit_code == 0
    assert [len(tokens) for tokens in answers()] == [6]  # the same answer twice, with its end
    assert earned("tokens") == 12
    generate("--model", finite, "--prompt", "a", "--decoder", "auto")
    assert earned("tokens") == 18


def test_a_chat_keeps_its_answers(endless: Path):
    memory("on")
    options = ("--model", endless, "--max-tokens", 7)
    result = CliRunner().invoke(main, [*map(str, ("chat", *options))], input="hi\n")
    assert result.exit_code == 0, result.stderr
    assert [len(tokens) for tokens in answers()] == [7]


def test_an_explained_generation_drafts_from_memory(finite: Path):
    memory("on")
    for _ in range(2):
        shown = run("explain", "--model", finite, "--prompt", "a", "--skip", 0, "--steps", 9)
        assert shown.exit_code == 0, shown.stderr
    assert "memory" in shown.stdout
    assert earned("memory") > 0


def test_ctrl_c_keeps_what_was_written(endless: Path, monkeypatch: pytest.MonkeyPatch):
    memory("on")
    write, written = TokenPrinter.write, []

    def interrupted(self: TokenPrinter, text: str, from_draft: bool) -> None:
        write(self, text, from_draft)
        written.append(text)
        if len(written) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(TokenPrinter, "write", interrupted)
    assert run("generate", "--model", endless, "--prompt", "a").exit_code == 130
    (tokens,) = answers()
    text = load_tokenizer_of(endless).decode(tokens)
    assert text.startswith("".join(written))


def test_an_error_keeps_what_came_before_it(finite: Path, tmp_path: Path):
    memory("on")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one"\n{"no": "prompt"}\n')
    assert run("generate", "--model", finite, "--prompts", prompts).exit_code == 1
    assert len(answers()) == 1


@pytest.mark.slow
def test_programs_that_mlxspec_runs_keep_their_answers(finite: Path, tmp_path: Path):
    memory("on")
    script = tmp_path / "script.py"
    script.write_text(
        "import mlx_lm\n"
        f"model, tokenizer = mlx_lm.load({str(finite)!r})\n"
        "print(mlx_lm.generate(model, tokenizer, 'a'))\n"
    )
    expected = run("run", "--no-saved-answers", script).stdout
    assert answers() == []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", sys.argv)
        patched.setattr(sys, "path", [*sys.path])
        for _ in range(2):
            assert run("run", script).stdout == expected == "one two three four\n\n"
    assert len(answers()) == 1
    assert earned("memory") > 0


def test_an_answer_comes_even_if_it_cannot_be_kept(finite: Path, home: Path):
    memory("on")
    database = home / "answers.sqlite"
    database.mkdir()
    result = run("generate", "--model", finite, "--prompt", "a")
    assert result.exit_code == 0
    assert result.stdout == "one two three four\n"
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Note: ")]
    assert line.startswith(f"Note: {database}: cannot be used")
    assert line.endswith("; answers are remembered only until this command ends")


# The environment variable.


@pytest.mark.slow
def test_the_variable_overrides_the_settings(
    finite: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = ("--model", finite, "--prompt", "a")
    monkeypatch.setenv("MLXSPEC_MEMORY", "on")
    generate(*options)
    assert earned("tokens") == 6
    monkeypatch.setenv("MLXSPEC_MEMORY", "off")
    memory("on")
    generate(*options)
    assert earned("tokens") == 6
    assert said("show").startswith("memory     off\n")
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("MLXSPEC_MEMORY", str(elsewhere))
    generate(*options)
    assert earned("tokens") == 6
    assert (elsewhere / "answers.sqlite").exists()
    monkeypatch.setenv("MLXSPEC_MEMORY", "")
    generate(*options)
    assert earned("tokens") == 12
    assert (home / "answers.sqlite").exists()


@pytest.mark.parametrize("value", ["yes", "1", "Off", "memory"])
def test_another_value_of_the_variable_is_one_line(
    finite: Path, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLXSPEC_MEMORY", value)
    for command in (("generate", "--model", finite, "--prompt", "a"), ("memory", "show")):
        result = run(*command)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr == (
            f"Error: MLXSPEC_MEMORY is '{value}': set it to on, off, or a directory with a / in "
            "its name\n"
        )


def test_on_and_off_note_that_the_variable_overrides_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLXSPEC_MEMORY", "off")
    for command in ("on", "off"):
        assert memory(command).stderr == ("Note: MLXSPEC_MEMORY is 'off' here and overrides this\n")


# The first run.


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("mlxspec.cli.memory.sys", streams)


@pytest.mark.slow
@pytest.mark.usefixtures("terminal")
def test_that_there_is_a_memory_is_said_once(finite: Path):
    options = ("generate", "--model", finite, "--prompt", "a")
    assert HINT not in run(*options, "--json").stderr
    assert HINT not in run(*options, "--no-saved-answers").stderr
    first = run(*options)
    assert first.stdout == "one two three four\n"
    assert first.stderr.splitlines()[-1] == (
        f"Note: {HINT} and draft from them: mlxspec memory on (shown once)"
    )
    assert HINT not in run(*options).stderr


@pytest.mark.usefixtures("terminal")
def test_there_is_no_hint_once_the_memory_is_known(finite: Path):
    memory("off")
    assert HINT not in run("generate", "--model", finite, "--prompt", "a").stderr


@pytest.mark.usefixtures("terminal")
def test_there_is_no_hint_if_it_cannot_be_recorded(finite: Path, home: Path):
    home.parent.touch()  # a file in place of the directory
    result = run("generate", "--model", finite, "--prompt", "a")
    assert result.exit_code == 0
    assert HINT not in result.stderr


# on and off


@pytest.mark.slow
def test_off_stops_what_on_began(finite: Path):
    def keeps() -> bool:
        before = earned("tokens")
        generate("--model", finite, "--prompt", "a")
        return earned("tokens") > before

    assert said("on", "--max-tokens", 1000).startswith(
        "Answers are kept from now on, up to 1,000 tokens per tokenizer.\n"
    )
    assert keeps()
    stops, stay = said("off").splitlines()
    assert stops == "No answers are kept from now on."
    assert stay.startswith("Kept answers stay in ")
    assert not keeps()
    assert "up to 1,000 tokens per tokenizer" in said("on")  # the limit stays
    assert keeps()


def test_a_model_that_is_not_named_is_not_this_directory(tmp_path: Path):
    """As in mlxspec run, which learns only the tokenizer."""
    save_settings(Settings(True, 100))
    with Memories() as memories:
        memory = memories.of(FIRST)
        memory.add([1, 2, 3])
    (kept,) = kept_answers(memory_directory())
    assert kept.model == str(getattr(FIRST, "name_or_path", ""))


def test_no_more_is_kept_than_set():
    save_settings(Settings(True, 100))
    with Memories() as memories:
        memory = memories.of(FIRST)
        for first in range(60):
            memory.add([first, *range(20)])
    (kept,) = kept_answers(memory_directory())
    assert 0 < kept.count()["tokens"] <= 100


def test_broken_settings_are_one_line(home: Path):
    home.mkdir(parents=True)
    (home / "settings.json").write_text("[")
    for command in ("on", "show"):
        result = memory(command)
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"Error: {home / 'settings.json'}: cannot be read; remove it")


def test_settings_that_cannot_be_written_are_one_line(home: Path):
    home.parent.touch()
    for command in ("on", "off"):
        result = memory(command)
        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1].startswith(f"Error: {home}")


@pytest.mark.parametrize("command", ["show", "export", "forget --all"])
def test_a_model_that_is_not_there_is_one_line(command: str, tmp_path: Path):
    result = memory(*command.split(), "--model", tmp_path / "gone")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {tmp_path / 'gone'}: no such directory")
    assert result.stderr.count("\n") == 1


# show


def test_show_says_what_is_kept_and_what_it_earned(home: Path):
    assert said("show").splitlines()[:3] == [
        "memory     off",
        "keeps      50,000,000 tokens at most",
        f"in         {home}",
    ]
    first, second = learn(["The quick brown fox.", "A lazy dog"], [timedelta(days=3), timedelta()])
    (kept,) = kept_answers(home)
    report = json.loads(said("show", "--json"))
    held = report["tokenizers"][0]
    assert abs(held["newest"] - time.time()) < 60
    days = [datetime.fromtimestamp(held[end]).date() for end in ("oldest", "newest")]
    assert report["on"] is False
    assert (held["texts"], held["tokens"]) == (2, len(first) + len(second))
    indexed = sum(file.stat().st_size for file in home.glob("*.index"))
    assert held["bytes"] == 4 * held["tokens"] + indexed
    assert held["newest"] - held["oldest"] == 3 * 24 * 60 * 60
    assert list(held["earned"]) == [day.isoformat() for day in days]
    assert held["earned"][days[0].isoformat()] == {
        **{"answers": 1, "steps": 2, "tokens": len(first), "context": 1, "memory": 0},
        **{"prediction": 0, "other": 0},
    }
    lines = said("show", "--model", "demo").splitlines()
    assert f"tokenizer  {kept.identity}" in lines
    assert f"oldest     {datetime.fromtimestamp(held['oldest']):%Y-%m-%d %H:%M}" in lines
    tokens = len(first) + len(second)
    expected = f"earned     {tokens / 4:.2f} tokens per step, {2 / tokens:.0%} from context"
    assert expected in lines


def test_show_of_another_tokenizer_shows_none(finite: Path):
    learn(["The quick brown fox."])
    assert "demo_model" not in said("show", "--model", finite)


# add


FOX = ROOT / "examples" / "rename.txt"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    directory = tmp_path / "texts"
    directory.mkdir()
    (directory / "one.txt").write_text("The quick brown fox jumps over the lazy dog.")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    (directory / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\nbroken\n")
    (directory / "picture").write_bytes(b"\x89PNG\0")
    return directory


def test_texts_are_added_beside_answers(texts: Path):
    ids = learn(["A lazy dog"])
    result = memory("add", texts, texts / "one.txt", texts / "one.txt", "--model", "demo")
    assert result.exit_code == 0, result.stderr
    encode = load_tokenizer_of("demo").encode
    chat, fox = (
        encode(text, add_special_tokens=False)
        for text in ("hello there", "The quick brown fox jumps over the lazy dog.")
    )
    assert answers() == [*ids, chat, fox, fox]
    assert result.stdout.startswith(f"Added {len(chat) + 2 * len(fox)} tokens of 3 files in ")
    assert result.stderr.splitlines() == [
        "Note: 1 file skipped: not readable as UTF-8 text",
        "Note: 1 chat log line skipped: not a chat record",
        "Note: nothing is drafted from them until the memory is on: mlxspec memory on",
    ]
    (held,) = json.loads(said("show", "--json"))["tokenizers"]
    assert (held["texts"], held["tokens"]) == (1, len(ids[0]))
    assert {path: one["tokens"] for path, one in held["added"].items()} == {
        str(texts): len(chat) + len(fox),
        str(texts / "one.txt"): len(fox),
    }
    assert f"added      {texts}, {len(chat) + len(fox)} tokens" in said("show").splitlines()


def test_a_path_is_added_again_and_forgotten(texts: Path, monkeypatch: pytest.MonkeyPatch):
    memory("on")
    monkeypatch.chdir(texts)
    for content in ("one two three", "four five six"):
        (texts / "one.txt").write_text(content)
        assert memory("add", "one.txt", "-m", "demo").stderr == ""
    said("add", FOX, "-m", "demo")
    tokens = load_tokenizer_of("demo").encode("four five six", add_special_tokens=False)
    assert tokens in answers()
    assert len(answers()) == 2
    (texts / "one.txt").unlink()
    shown = said("forget", "./one.txt", "--yes").splitlines()
    assert ": 1 added text, 20" in shown[0]
    assert shown[1:] == ["Forgot 1 added text."]
    assert tokens not in answers()
    learn(["A lazy dog"])
    assert said("forget", "--all", "--yes").endswith("Forgot 1 answer and 1 added text.\n")
    assert answers() == []


@pytest.mark.slow
def test_added_texts_are_drafted_from_and_the_output_is_the_same(tmp_path: Path):
    options = ("--model", "demo", "--prompt", PROMPT)
    first = generate(*options)
    memory("on")
    (tmp_path / "text").write_text(first["text"])
    said("add", tmp_path / "text", "--model", "demo")
    second = generate(*options)
    assert second["tokens"] == first["tokens"]
    assert second["stats"]["steps"] < first["stats"]["steps"]
    assert earned("memory") > 10


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("nowhere", "--model", "demo"), "nowhere: cannot be read"),
        (("texts", "texts/picture", "--model", "demo"), "texts/picture: nothing to add"),
        (("texts", "--model", "no/such/model"), "no such directory"),
        (("texts", "--model", "demo"), "the added texts would have "),
    ],
)
def test_what_cannot_be_added_is_one_line_and_adds_nothing(
    texts: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
):
    monkeypatch.chdir(texts.parent)
    monkeypatch.setattr(answers_module, "ADDED_TOKENS", 5)
    result = memory("add", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    error = result.stderr.splitlines()[-1]
    assert error.startswith("Error: ")
    assert problem in error
    assert answers() == []


@pytest.mark.slow
def test_a_bar_shows_at_a_terminal(texts: Path):
    ended, shown = at_terminal(b"", "memory", "add", str(texts), "--model", "demo")
    assert ended == 0
    assert "Reading" in shown


# forget


HOURS = [timedelta(hours=5), timedelta(hours=3), timedelta(hours=1)]
TEXTS = ["The oldest text of all", "What Jane said", "The newest text of all"]


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (("--since", "2h"), [2]),
        (("--since", "4h"), [1, 2]),
        (("--since", "2020-01-01"), [0, 1, 2]),
        (("--since", "2120-01-01T12:00"), []),
        (("--matching", "jane SAID"), [1]),
        (("--matching", "text of", "--since", "2h"), [2]),
        (("--matching", "text of", "--model", "demo"), [0, 2]),
        (("--all",), [0, 1, 2]),
    ],
)
def test_what_is_chosen_is_forgotten(options: tuple[str, ...], gone: list[int]):
    ids = learn(TEXTS, HOURS)
    shown = said("forget", *options, "--yes").splitlines()
    assert sorted(answers()) == sorted(ids[number] for number in {0, 1, 2} - {*gone})
    if gone:
        number = "1 answer" if len(gone) == 1 else f"{len(gone)} answers"
        assert f": {number}, 20" in shown[0]
        assert shown[1:] == [f"Forgot {number}."]
    else:
        assert shown == ["Forgot nothing."]
    assert ("earned     nothing yet" in said("show")) == (len(gone) == len(ids))


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "status", "left"), [(b"y\n", 0, 0), (b"n\n", 1, 3), (b"\n", 1, 3)]
)
def test_at_a_terminal_one_is_asked(typed: bytes, status: int, left: int):
    learn(TEXTS)
    ended, shown = at_terminal(typed, "memory", "forget", "--all")
    assert ended == status
    assert "3 answers" in shown
    assert "Forget them? [y/N]:" in shown
    assert len(answers()) == left


@pytest.mark.slow
def test_what_is_forgotten_is_not_drafted_from():
    memory("on")
    options = ("--model", "demo", "--prompt", PROMPT)
    first = generate(*options)
    said("forget", "--matching", "red fox", "--yes")
    assert answers() == []
    again = generate(*options)
    assert earned("memory") == 0
    assert again["tokens"] == first["tokens"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "choose what to forget: give --all, or paths that were added, --since or --matching"),
        (("--yes",), "choose what to forget: give --all, or paths"),
        (("--all", "--since", "2h"), "choose what to forget: give --all, or paths"),
        (("--all", "here"), "choose what to forget: give --all, or paths"),
        (("/not/there",), "/not/there: was not added; mlxspec memory show lists what was"),
        (("--since", "2y"), "--since is '2y': write it as 30m, 2h, 3d, 2026-11-23 or"),
        (("--since", "9" * 30 + "w"), "--since is '99"),
        (("--since", ""), "--since is '': write it as"),
        (("--since", "2026-13-01"), "--since is '2026-13-01': write it as"),
        (("--matching", " "), "--matching is empty: give a text, or use --all"),
        (("--all",), "forget asks for confirmation, which needs a terminal: add --yes"),
    ],
)
def test_a_bad_choice_is_one_line_and_nothing_is_forgotten(options: tuple[str, ...], named: str):
    ids = learn(TEXTS)
    result = memory("forget", *options)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {named}")
    assert result.stderr.count("\n") == 1
    assert len(answers()) == len(ids)


def test_a_tokenizer_that_is_gone_is_one_line_that_says_what_helps(finite: Path, tmp_path: Path):
    gone = tmp_path / "gone"
    gone.symlink_to(finite)
    memory("on")
    generate("--model", gone, "--prompt", "a")
    gone.unlink()
    for command in (("export",), ("forget", "--matching", "one", "--yes")):
        result = memory(*command)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {gone}: no such directory")
        assert "name a copy of this tokenizer with --model" in result.stderr
        assert result.stderr.count("\n") == 1
    assert json.loads(said("export", "--model", finite))["messages"][0]["content"].split()
    assert said("forget", "--matching", "one", "--yes", "--model", finite).endswith("1 answer.\n")


# export


def test_what_is_exported_is_added_elsewhere_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ids = learn(TEXTS, HOURS)
    file = tmp_path / "answers.jsonl"
    file.write_text(said("export"))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["messages"] for record in records] == [
        [{"role": "assistant", "content": text}] for text in TEXTS
    ]
    assert [records[2]["created"] - record["created"] for record in records] == [14400, 7200, 0]
    said("add", FOX, "--model", "demo")
    assert said("export") == file.read_text()
    monkeypatch.setenv("MLXSPEC_MEMORY", f"{tmp_path}/elsewhere")
    said("add", file, "--model", "demo")
    assert answers() == ids
    replayed = run("replay", file, "--tokenizer", "demo", "--json")
    assert replayed.exit_code == 0, replayed.stderr


def test_there_must_be_something_to_export():
    result = memory("export")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no answers are kept: ")


# Memories of commands, and of decoders.


def test_models_of_one_tokenizer_share_a_memory():
    tokenizer = demo().tokenizer
    with Memories() as memories:
        assert memories.of(tokenizer) is None
    save_settings(Settings(True))
    with Memories(keeps=False) as memories:
        assert memories.of(tokenizer) is None
    with Memories() as memories:
        one = memories.of(tokenizer, "demo")
        assert one is not None
        assert one.kept is not None
        assert one.kept.directory == memory_directory()
        assert one is memories.of(load_tokenizer_of("demo"), "other")
        assert one is not memories.of(FIRST)


def test_the_oldest_answers_go_beyond_the_tokens_that_on_allows():
    said("on", "--max-tokens", 40)
    with Memories() as memories:
        one = memories.of(demo().tokenizer, "demo")
        assert one is not None
        for first in range(100, 130):
            one.add([first] * 8)
            one.settle()
    assert sum(map(len, answers())) <= 40
    assert [129] * 8 in answers()


def test_after_an_error_the_exit_does_not_wait_for_sorting(monkeypatch: pytest.MonkeyPatch):
    save_settings(Settings(True))
    close, patiences = AnswerIndex.close, []

    def watched(self: AnswerIndex, patience: float | None = None) -> None:
        patiences.append(patience)
        close(self, patience)

    monkeypatch.setattr(AnswerIndex, "close", watched)
    with pytest.raises(ZeroDivisionError):
        _remember_and_fail()
    assert patiences == [0]
    assert answers() == [[1, 2, 3]]


def _remember_and_fail() -> None:
    with Memories() as memories:
        one = memories.of(demo().tokenizer, "demo")
        assert one is not None
        one.add([1, 2, 3])
        _ = 1 / 0


def test_decoders_of_one_tokenizer_share_what_is_kept(tmp_path: Path):
    prompt = "The history of the"
    with pytest.raises(OptionError, match="memory and memory_tokens are given together"):
        stand_in_decoder(mlxspec.AutoDecoder, memory=AnswerIndex(), memory_tokens=5)
    other = AnswerIndex.kept_in(tmp_path / "kept", FIRST)
    with pytest.raises(FileError, match=r"memory keeps tokens of first \(100 tokens"):
        stand_in_decoder(mlxspec.AutoDecoder, memory=other)
    other.close()

    def generated(shared: mlxspec.AnswerIndex) -> list:
        decoder = stand_in_decoder(mlxspec.AutoDecoder, memory=shared)
        decoder.costs = given_costs(FLAT)
        responses = [*decoder.stream(prompt, 40)]
        shared.settle()
        return responses

    one = mlxspec.AnswerIndex.kept_in(tmp_path / "kept", demo().tokenizer)
    first, second = (generated(one) for _ in range(2))
    one.close()
    again = mlxspec.AnswerIndex.kept_in(tmp_path / "kept", demo().tokenizer)
    third = generated(again)
    again.close()
    tokens = [[response.token for response in one] for one in (first, second, third)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert second[-1].stats.steps < first[-1].stats.steps
    assert third[-1].stats.steps < first[-1].stats.steps


def test_what_another_process_has_learned_is_seen_when_a_generation_begins(tmp_path: Path):
    def opened() -> AnswerIndex:
        return AnswerIndex.kept_in(tmp_path / "kept", demo().tokenizer)

    ours, theirs = opened(), opened()
    decoder = stand_in_decoder(mlxspec.AutoDecoder, memory=ours)
    decoder.costs = given_costs(FLAT)
    assert ours.kept
    theirs.add([token % 4000 for token in range(20_000)])  # more than stays unsorted
    theirs.close()
    assert not ours.look_up([100, 101, 102])[1]
    list(decoder.stream("a", 2))
    ours.settle()
    assert ours.look_up([100, 101, 102])[0][:3] == [103, 104, 105]
    ours.close()


# Processes.


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes_learn_at_once_and_one_forgets(endless: Path):
    memory("on")
    options = ("--model", str(endless), "--prompt", "a", "--max-tokens", "25")
    command = [sys.executable, "-c", START, "generate", *options]
    chat = [sys.executable, "-c", START, "chat", "--model", str(endless), "--max-tokens", "9"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(chat, cwd=ROOT, text=True, **streams) as talking:
        assert talking.stdin
        talking.stdin.write("hi\n")
        talking.stdin.flush()
        _wait_until(lambda: [len(tokens) for tokens in answers()] == [9])
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        two = [subprocess.Popen(command, cwd=ROOT, **streams) for _ in range(2)]
        assert len({one.communicate(timeout=60)[0] for one in two}) == 1
        assert sorted(map(len, answers())) == [9, 25]
        assert "Forgot 2 answers." in said("forget", "--all", "--yes")
        assert answers() == []
        talking.stdin.write("hi\n")
        talking.communicate(timeout=60)
    assert [len(tokens) for tokens in answers()] == [9]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_keeps_answers_and_drafts_from_them_after_a_restart():
    memory("on")
    keep_costs()
    body = {"model": "demo", "prompt": "The history of the", "max_tokens": 40}
    texts = []
    for _ in range(2):
        with serving("--model", "demo") as server:
            texts.append(server.ask("/v1/completions", **body)["choices"][0]["text"])
            server.end()
    assert texts[0] == texts[1]
    assert earned("tokens") == 80
    assert len(answers()) == 1


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("keys", ["one", "one\none", "one\ntwo"], ids=repr)
def test_a_server_with_several_keys_keeps_no_answers(keys: str, tmp_path: Path):
    memory("on")
    keep_costs()
    file = tmp_path / "keys"
    file.write_text(keys)
    with serving("--model", "demo", "--api-key-file", file) as server:
        server.key = "one"
        server.ask("/v1/completions", model="demo", prompt="The history of the", max_tokens=40)
        server.end()
    assert len(answers()) == (0 if "two" in keys else 1)


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_damaged_answers_are_one_line(home: Path):
    learn([f"number {number} of the answers that are kept" for number in range(400)])
    database = home / "answers.sqlite"
    data = bytearray(database.read_bytes())
    data[4096:] = b"\xfe" * (len(data) - 4096)
    database.write_bytes(data)
    exported = memory("export")
    assert exported.exit_code == 1
    assert exported.stderr.count("\n") == 1
    assert f"{database}: cannot be used (database disk image is malformed)" in exported.stderr


@pytest.mark.slow
def test_what_drafts_taught_is_shown_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(mlxspec.Decoder, "keeps_experience", True)
    asks = ["generate", "-m", "demo", "--max-tokens", "16", "Copy the text. one two one two"]
    kept = tmp_path / "experience"
    monkeypatch.setenv("MLXSPEC_MEMORY", "off")
    assert CliRunner().invoke(main, asks).exit_code == 0
    monkeypatch.delenv("MLXSPEC_MEMORY")
    assert CliRunner().invoke(main, [*asks, "--no-saved-answers"]).exit_code == 0
    script = tmp_path / "script.py"
    script.write_text(
        "import mlx_lm\nmodel, tokenizer = mlx_lm.load('demo')\n"
        "mlx_lm.generate(model, tokenizer, 'Copy the text. one two one two', max_tokens=16)\n"
    )
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run("run", "--no-saved-answers", script).exit_code == 0
    assert not kept.exists()
    assert CliRunner().invoke(main, asks).exit_code == 0
    assert len([*kept.iterdir()]) == 1
    shown = CliRunner().invoke(main, ["memory", "show"]).stdout
    assert "which drafts are right for 1 model; no text" in shown
    report = json.loads(CliRunner().invoke(main, ["memory", "show", "--json"]).stdout)
    assert report["experience"] == {"models": 1, "directory": str(kept)}
    refused = CliRunner().invoke(main, ["memory", "forget", "--all"])
    assert (refused.exit_code, len([*kept.iterdir()])) == (1, 1)
    assert "Which drafts were right for 1 model" in refused.stdout
    forgotten = CliRunner().invoke(main, ["memory", "forget", "--all", "--yes"])
    assert forgotten.stdout.endswith("Forgot which drafts were right for 1 model.\n")
    assert not [*kept.iterdir()]


def test_a_command_keeps_as_many_tokens_as_the_settings_say() -> None:
    save_settings(Settings(True, max_tokens=5000))
    with Memories() as memories:
        one = memories.of(demo().tokenizer, "demo")
        assert one is not None
        assert one._worker._max_tokens == 5000
