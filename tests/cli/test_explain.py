"""``mlxspec explain`` as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from mlxspec.cli.explain import explain_command
from mlxspec.cli.generate import generate_command
from tests.support.scripted_model import write_scripted_model

DECODERS = next(
    param.type.choices
    for param in generate_command.params
    if param.name == "decoder" and isinstance(param.type, click.Choice)
)
PROMPT = ("--prompt", "one two three four")


def explain(model: Path, *arguments: object, columns: int = 80, **options: object) -> Result:
    runner = CliRunner(env={"COLUMNS": str(columns)})
    return runner.invoke(explain_command, ["--model", str(model), *map(str, arguments)], **options)


def emitted(shown: str) -> list[int]:
    return list(map(int, re.findall(r"(\d+) emitted", shown)))


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("temp", [0, 0.7])
def test_the_steps_of_every_decoder_are_those_of_generate(endless: Path, decoder: str, temp: float):
    arguments = (*PROMPT, "--decoder", decoder, "--max-tokens", 40, "--temp", temp)
    result = explain(endless, *arguments, "--skip", 0, "--steps", 100)
    assert result.exit_code == 0, result.stderr
    assert sum(emitted(result.stdout)) == 40
    if decoder in ("plain", "prompt-lookup"):  # other decoders' steps depend on measured times
        generated = CliRunner().invoke(
            generate_command, ["--model", str(endless), "--json", *map(str, arguments)]
        )
        stats = json.loads(generated.stdout)["stats"]
        assert len(emitted(result.stdout)) == stats["steps"]
        accepted = re.findall(r"(\d+) of (\d+) draft tokens", result.stdout)
        assert sum(int(count) for count, _ in accepted) == stats["accepted"]
        assert sum(int(count) for _, count in accepted) == stats["drafted"]


@pytest.mark.slow
def test_a_window_runs_up_to_the_output_s_end_and_not_beyond(endless: Path):
    options = ("--decoder", "lookahead", "--raw", "--prompt", "a", "--max-tokens", 40)
    # A window begins with W + N - 2 tokens, including the current one.
    for width, fits in ((37, True), (38, False)):
        result = explain(endless, *options, "-W", width, "-N", 5, "--skip", 0, "--steps", 100)
        rows = list(map(int, re.findall(r"^(\d+) rows: ", result.stdout, re.MULTILINE)))
        assert (max(rows) >= 38) is (40 in rows) is fits


@pytest.mark.slow
def test_what_a_head_drafts_is_marked(headed: Path, heads_pay: None, nothing_set: Path):
    options = ("--raw", "--prompt", "x y")
    shown = explain(headed, *options, "--skip", 0, "--steps", 9).stdout
    assert re.search(r"^accepted drafts: .*head \d of \d", shown, re.MULTILINE)
    assert re.search(r"[├└]── ✓ .*·two.* \(head\)$", shown, re.MULTILINE)
    shown = explain(headed, *options, "--no-head").stdout
    assert "accepted drafts: context" in shown
    assert re.search(r"^planning: [\d.]+% of the steps' time$", shown, re.MULTILINE)
    assert not re.search(r"\bhead\b", shown)


def test_the_page_has_a_heading_and_shows_steps_with_accepted_drafts(endless: Path, tmp_path: Path):
    page = tmp_path / "steps.html"
    arguments = ("--prompt", "xx", "--decoder", "prompt-lookup", "--max-tokens", 20)
    whole = explain(endless, *arguments, "--skip", 0, "--steps", 99).stdout
    accepted = re.findall(r"^Step (\d+) of .*\n\d+ rows: [1-9]\d* of", whole, re.MULTILINE)
    assert "1" not in accepted  # nothing is repeated yet
    shown = explain(endless, *arguments, "--html", page).stdout
    assert re.findall(r"^Step (\d+) of", shown, re.MULTILINE) == accepted[:3]
    text = re.sub(r"<[^>]+>", "", page.read_text())
    assert re.search(r"^ *Steps of speculative decoding *$", text, re.MULTILINE)
    assert re.findall(r"^Step (\d+) of", text, re.MULTILINE) == accepted[:3]


def test_a_draft_is_drawn_with_its_walk(endless: Path):
    result = explain(
        endless, *PROMPT, "--n-draft", 3, "--max-tokens", 30, "--skip", 7, "--steps", 1
    )
    assert result.exit_code == 0, result.stderr
    assert "Step 8 of " in result.stdout
    assert "4 rows: 3 of 3 draft tokens accepted, 4 emitted" in result.stdout
    tree = re.search(r"● (\S+)\n└── ✓ (\S+) (\S+) (\S+) .*\n    └── ★ (\S+) *\n", result.stdout)
    assert tree is not None
    script = ["one", "·two", "·three", "·four", "↵"]
    start = script.index(tree[1])
    assert list(tree.groups()) == [script[(start + place) % 5] for place in range(5)]


def test_k_steps_are_shown_from_where_the_user_says(endless: Path):
    plain = (*PROMPT, "--decoder", "plain", "--max-tokens", 9)
    result = explain(endless, *plain, "--skip", 4, "--steps", 3)
    assert re.findall(r"Step (\d of \d)", result.stdout) == ["5 of 9", "6 of 9", "7 of 9"]
    result = explain(endless, *plain, "--skip", 8, "--steps", 3)
    assert re.findall(r"Step (\d of \d)", result.stdout) == ["9 of 9"]


def test_the_text_before_each_step_is_what_the_steps_before_it_emitted(endless: Path):
    result = explain(
        endless, *PROMPT, "--decoder", "plain", "--skip", 0, "--steps", 6, "--max-tokens", 9
    )
    before = re.findall(r"after (.*)", result.stdout)
    for earlier, later, piece in zip(
        before, before[1:], ["one", " two", " three", " four", "↵"], strict=False
    ):
        assert later == earlier + piece


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_no_line_is_wider_than_the_terminal(endless: Path, columns: int):
    result = explain(endless, *PROMPT, "--n-draft", 30, columns=columns)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_a_pipe_gets_no_colours_unless_requested(endless: Path):
    arguments = (*PROMPT, "--n-draft", 3, "--max-tokens", 20)
    plain = explain(endless, *arguments)
    assert "\x1b" not in plain.stdout
    colored = explain(endless, *arguments, "--color", color=True)
    assert "\x1b[1;38;5;32m" in colored.stdout
    without = re.sub(r"\x1b\[[\d;]*m", "", colored.stdout)

    def lines(text: str) -> list[str]:  # without the share of planning, which a clock shows
        return [line.rstrip() for line in text.splitlines() if not line.startswith("planning")]

    assert lines(without) == lines(plain.stdout)


@pytest.mark.parametrize("option", ["--color", "--no-color"])
def test_control_characters_of_the_model_are_never_printed(
    hostile: Path, option: str, tmp_path: Path
):
    page = tmp_path / "page.html"
    result = explain(
        *(hostile, "--prompt", "a", "--n-draft", 3, "--skip", 0, "--steps", 99, option),
        *("--html", page),
        color=True,
    )
    assert result.exit_code == 0, result.stderr
    for text in (re.sub(r"\x1b\[[\d;]*m", "", result.stdout), page.read_text(encoding="utf-8")):
        for piece in ("␛", "[2J", "␛]0;", "owned␇", "␍", "␡"):
            assert piece in text
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_markup_of_the_model_is_text_in_the_terminal(tmp_path: Path):
    pieces = ("[bold]", "[/bold]", ":smile:", "[link=x]")
    model = write_scripted_model(tmp_path / "model", pieces, ends=True)
    result = explain(model, "--prompt", "a", "--decoder", "plain", "--skip", 0, "--steps", 9)
    assert result.exit_code == 0, result.stderr
    for piece in pieces:
        assert re.search(f"★ {re.escape(piece)} *\n", result.stdout)


def test_an_answer_of_one_token_is_explained(tmp_path: Path):
    model = write_scripted_model(tmp_path / "model", ("word",), ends=True)
    result = explain(model, "--prompt", "a", "--max-tokens", 1)
    assert result.exit_code == 0, result.stderr
    assert emitted(result.stdout) == [1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ("--skip", 50, "--max-tokens", 10, "--decoder", "plain"),
            "--skip is 50: the output has 10",
        ),
        (("--html", "missing/page.html"), "missing/page.html: cannot be written"),
        (("--decoder", "plain", "--n-draft", 3), "--n-draft is for"),
        (("--temp", -1), "temp"),
        (("--prompt-file", "missing"), "missing: No such file"),
        (("--prompt-ids", "1"), "together"),
        (("another",), "together"),
    ],
)
def test_a_bad_option_is_one_line(endless: Path, arguments: tuple[object, ...], complaint: str):
    result = explain(endless, *PROMPT, *arguments)
    assert result.exit_code == 1
    *notes, error = result.stderr.splitlines()
    assert complaint in error
    assert notes in ([], ["Note: generating at most 10 tokens …"])
    assert result.stdout == ""


def test_a_model_that_is_missing_leaves_no_page(tmp_path: Path):
    result = explain(tmp_path / "model", *PROMPT, "--html", tmp_path / "page.html")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_all_options_that_say_what_is_generated_are_those_of_generate():
    names = [
        {param.name for param in command.params} for command in (generate_command, explain_command)
    ]
    own = {
        "prompts",
        "concurrency",
        "prompt_cache_file",
        "as_json",
        "compare",
        "logprobs",
        "quiet",
    }
    assert names[0] - names[1] == own
    assert names[1] - names[0] == {"steps", "skip", "html"}
