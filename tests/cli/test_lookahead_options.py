"""Lookahead decoding on the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlxspec.cli.generate import generate_command


def generate(*arguments: object) -> Result:
    return CliRunner().invoke(generate_command, list(map(str, arguments)))


def report(*arguments: object) -> dict:
    result = generate(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_lookahead_changes_the_steps_and_not_the_text(endless: Path) -> None:
    options = ("--model", endless, "--prompt", "a", "--max-tokens", 40)
    plain = report(*options, "--decoder", "plain")
    for decoder in ("lookahead", "combined"):
        drafted = report(*options, "--decoder", decoder, "--window-size", 4)
        assert drafted["tokens"] == plain["tokens"]
        assert drafted["stats"]["steps"] < 20
    assert report(*options, "--decoder", "lookahead")["tokens"] == plain["tokens"]


def test_the_names_of_paper_and_reference_mean_the_same(endless: Path) -> None:
    options = ("--model", endless, "--prompt", "one two three four", "--max-tokens", 30)

    def stats(*names: object) -> dict:
        return report(*options, *names)["stats"]

    ours = stats(
        *("--window-size", 4, "--ngram-size", 4, "--guess-set-size", 2, "--no-pool-from-prompt")
    )
    assert stats("-W", 4, "-N", 4, "-G", 2, "--no-pool-from-prompt") == ours
    reference = ("--WINDOW_SIZE", 4, "--LEVEL", 4, "--GUESS_SET_SIZE", 2)
    assert stats(*reference, "--NO_POOL_FROM_PROMPT") == ours
    assert stats(*reference, "--POOL_FROM_PROMPT") == stats(*reference) != ours


def test_a_window_that_never_runs_is_told(endless: Path) -> None:
    options = ("--model", endless, "--prompt", "a", "--max-tokens", 40, "-N", 5, "-G", 5)
    widest = generate(*options, "-W", 37)
    assert "Note" not in widest.stderr
    # It ran: a window begins with W + N - 2 tokens, the current one included.
    assert 40 in (time["rows"] for time in report(*options, "-W", 37)["step_times"])
    wider = generate(*options, "-W", 38)
    assert wider.exit_code == 0
    assert "choose 37 at most" in wider.stderr
    assert all(time["rows"] < 38 for time in report(*options, "-W", 38)["step_times"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-W", "wide"), "--window-size is 'wide'"),
        (("-W", "-1"), "--window-size is -1"),
        (("-N", "1"), "--ngram-size is 1"),
        (("-G", "0"), "--guess-set-size is 0"),
        (("--decoder", "auto", "-G", "3"), "--guess-set-size is for --decoder lookahead"),
        (("--decoder", "plain", "--no-pool-from-prompt"), "--pool-from-prompt is for"),
        (("--decoder", "lookahead", "--n-draft", "3"), "--n-draft is for --decoder prompt-lookup"),
        (("--decoder", "lookahead", "--store", "x"), "--store is for --decoder auto and combined"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_one_line_before_a_model_is_loaded(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.generation.decoder.load", lambda name: 1 / 0)
    result = generate("--model", "none", "--prompt", "a", *options)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
