"""The options that the generating commands share."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mlxspec import PromptLookupDecoder, load
from mlxspec.cli.chat import chat_command
from mlxspec.cli.common.generation import GenerationSettings, generation_options
from mlxspec.cli.common.output import error_console
from mlxspec.cli.explain import explain_command
from mlxspec.cli.memory import Memories
from mlxspec.engine.params import CacheOptions, SamplingParams
from mlxspec.errors import OptionError
from tests.cli.test_generate import assert_one_line_error, generate, report
from tests.support.head_files import write_head
from tests.support.scripted_model import EOS


def taken(*arguments: object) -> GenerationSettings:
    """Return the settings that a command with these options makes of its arguments."""
    results = []

    @click.command()
    @generation_options()
    def command(generation: GenerationSettings) -> None:
        results.append(generation)

    given = ("--model", "any", "--max-tokens", "9", *map(str, arguments))
    for name, kind in (("--model", str), ("--max-tokens", int)):
        command = click.option(name, type=kind)(command)
    outcome = CliRunner().invoke(command, given, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return results[0]


def test_without_options_it_is_greedy_with_seed_0() -> None:
    generation = taken()
    assert generation.sampling == SamplingParams(logit_bias={})
    assert (generation.sampling.temp, generation.sampling.seed) == (0.0, 0)
    assert (generation.stop, generation.stop_tokens) == ((), ())
    assert generation.caches == CacheOptions()


def test_each_option_sets_its_field() -> None:
    values: dict[str, Any] = {
        "temp": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "repetition_penalty": 1.1,
        "repetition_context_size": 30,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 9,
    }
    arguments = [part for name, value in values.items() for part in (_option(name), value)]
    biases = ("--logit-bias", "5=-1.5", "--logit-bias", "7=-inf")
    assert taken(*arguments, *biases).sampling == SamplingParams(
        **values, logit_bias={5: -1.5, 7: -math.inf}
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_stop_tokens_are_ids_or_texts() -> None:
    asked = taken("--stop-token", "17", "--stop-token", "<|end|>", "--stop", "x")
    assert (asked.stop, asked.stop_tokens) == (("x",), (17, "<|end|>"))


def test_xtc_spares_line_breaks_and_end_tokens(endless: Path) -> None:
    decoder = PromptLookupDecoder(endless)
    options = taken("--xtc-probability", 0.5, "--decoder", "plain").options(decoder)
    assert {EOS, *decoder.tokenizer.encode("\n")} == set(options["sampling"].xtc_special_tokens)


@pytest.mark.parametrize("token", ["two", "id"])
def test_a_stop_token_ends_the_output(endless: Path, token: str) -> None:
    _, tokenizer = load(endless)
    piece = " two"
    (number,) = tokenizer.convert_tokens_to_ids([piece])
    stop = number if token == "id" else piece
    data = report("--model", endless, "--prompt", "a", "--stop-token", stop)
    assert data["text"] == "one"
    assert data["finish_reason"] == "stop"


def test_a_forbidden_token_does_not_appear(endless: Path) -> None:
    _, tokenizer = load(endless)
    (number,) = tokenizer.convert_tokens_to_ids([" two"])
    options = ("--model", endless, "--prompt", "a", "--max-tokens", 9)
    assert number in report(*options)["tokens"]
    assert number not in report(*options, "--logit-bias", f"{number}=-inf")["tokens"]


def test_log_probabilities_stand_in_the_json(endless: Path) -> None:
    options = ("--model", endless, "--prompt", "a", "--max-tokens", 6)
    assert report(*options)["logprobs"] is None
    data = report(*options, "--logprobs", 2)
    assert len(data["logprobs"]) == 6
    for token, entry in zip(data["tokens"], data["logprobs"], strict=True):
        best, _ = entry["top"]
        assert best == [token, entry["logprob"]]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--xtc-probability", "0.5", "--xtc-threshold", "0.9"), "xtc_threshold is 0.9"),
        (("--repetition-penalty", "-1"), "repetition_penalty is -1.0"),
        (
            ("--repetition-penalty", "1", "--repetition-context-size", "-2"),
            "repetition_context_size is -2",
        ),
        (("--logit-bias", "five=1"), "'five=1': write it as ID=VALUE"),
        (("--logit-bias", "5"), "'--logit-bias': '5'"),
        (("--logit-bias", "5=nan"), "logit_bias of token 5 is nan"),
        (("--logprobs", "-3", "--json"), "'--logprobs': -3 is not in the range"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_option_is_one_line_before_any_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
) -> None:
    monkeypatch.setattr("mlxspec.models.model.load", lambda *_, **__: 1 / 0)
    assert_one_line_error(generate("--model", "any", "--prompt", "a", *arguments), named)


@pytest.mark.parametrize(
    "arguments", [("--stop-token", "nothing like it"), ("--logit-bias", "64=1")], ids=str
)
def test_a_token_that_the_model_lacks_is_one_line(endless: Path, arguments: tuple) -> None:
    result = generate("--model", endless, "--prompt", "a", *arguments)
    assert_one_line_error(result, "64" if "64=1" in arguments else "nothing like it")


def test_json_stays_json_where_tokens_are_forbidden(endless: Path) -> None:
    options = ("--max-tokens", 3, "--logprobs", 64, "--logit-bias", "5=-inf", "--json")
    result = generate("--model", endless, "--prompt", "a", *options)
    assert "Infinity" not in result.stdout
    assert len(json.loads(result.stdout)["logprobs"][0]["top"]) == 63


@pytest.mark.slow
def test_lookahead_changes_the_steps_and_not_the_text(endless: Path) -> None:
    options = ("--model", endless, "--prompt", "a", "--max-tokens", 40)
    plain = report(*options, "--decoder", "plain")
    drafted = report(*options, "--decoder", "lookahead", "--window-size", 4)
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["stats"]["steps"] < 20
    default = report(*options, "--decoder", "lookahead")
    assert default["tokens"] == plain["tokens"]
    # A full step has 55 drafts: (N - 1)(W + G), with one row for the current token.
    assert default["stats"] == report(*options, "-W", 7, "-N", 5, "-G", 7)["stats"]
    assert default["stats"]["rows"] > 7 * default["stats"]["steps"]


@pytest.mark.slow
def test_the_paper_s_letters_mean_the_same(endless: Path) -> None:
    options = ("--model", endless, "--prompt", "one two three four", "--max-tokens", 30)

    def stats(*names: object) -> dict:
        return report(*options, *names)["stats"]

    ours = stats(
        *("--window-size", 4, "--ngram-size", 4, "--guess-set-size", 2, "--no-pool-from-prompt")
    )
    assert stats("-W", 4, "-N", 4, "-G", 2, "--no-pool-from-prompt") == ours
    assert stats("-W", 4, "-N", 4, "-G", 2) != ours


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-W", "auto"), "'auto' is not a valid integer"),
        (("-W", "-1"), "window_size is -1"),
        (("-N", "1"), "ngram_size is 1"),
        (("-G", "0"), "guess_set_size is 0"),
        (("--decoder", "auto", "-G", "3"), "guess-set-size is for --decoder lookahead"),
        (("--decoder", "plain", "--no-pool-from-prompt"), "--pool-from-prompt is for"),
        (("--decoder", "lookahead", "--n-draft", "3"), "--n-draft is for --decoder prompt-lookup"),
        (("--decoder", "lookahead", "--head", "x"), "--head is for --decoder auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_one_line_before_a_model_is_loaded(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.models.model.load", lambda *_, **__: 1 / 0)
    result = generate("--model", "none", "--prompt", "a", *options)
    assert_one_line_error(result, message)


OWN = """
from mlxspec import PromptLookupDrafter

class {name}(PromptLookupDrafter):
    def begin(self, prompt):
        print("own drafter", file=__import__("sys").stderr)
        super().begin(prompt)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's drafter class in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_drafter", raising=False)
    (tmp_path / "own_drafter.py").write_text(OWN.format(name="Mine"))
    return "own_drafter:Mine"


@pytest.mark.slow
def test_a_drafter_of_ones_own_drafts_and_changes_no_token(endless: Path, own: str) -> None:
    options = ("--model", endless, "--prompt", "a", "--max-tokens", 40)
    plain = report(*options, "--decoder", "plain")
    result = generate(*options, "--drafter", own, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["tokens"] == plain["tokens"]
    assert "own drafter" in result.stderr
    for command in (chat_command, explain_command):
        given = ["--model", str(endless), "--max-tokens", "9", "--drafter", own]
        given += ["--prompt", "a"] if command is explain_command else []
        result = CliRunner().invoke(command, given, input="a\n")
        assert result.exit_code == 0, result.stderr
        assert "own drafter" in result.stderr


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("own_drafter", "write it as module:Class"),
        ("nowhere_at_all:Mine", "No module named 'nowhere_at_all'"),
        ("own_drafter:Nothing", "has no attribute 'Nothing'"),
        ("json:JSONDecoder", "not derived from mlxspec.Drafter"),
    ],
)
def test_an_invalid_drafter_is_one_line_before_a_model_is_loaded(
    own: str, drafter: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.models.model.load", lambda *_, **__: 1 / 0)
    result = generate("--model", "none", "--prompt", "a", "--drafter", drafter)
    assert_one_line_error(result, message)


@pytest.mark.parametrize("others", [("--decoder", "plain"), ("--n-draft", 3), ("-W", 4)])
def test_a_drafter_of_ones_own_goes_with_auto(own: str, others: tuple) -> None:
    result = generate("--model", "none", "--prompt", "a", "--drafter", own, *others)
    assert result.exit_code == 1
    assert "is for --decoder" in result.stderr


def test_a_draft_model_drafts_where_no_text_repeats(
    finite: Path, endless: Path, heads_pay: None
) -> None:
    prompt = ("--model", finite, "--raw", "--prompt", "x y", "--decoder", "auto")
    plain = report(*prompt)
    drafted = report(*prompt, "--draft-model", finite, "--num-draft-tokens", 3)
    assert drafted["text"] == plain["text"]
    assert drafted["stats"]["steps"] < plain["stats"]["steps"]
    for wrong, message in (
        (("--draft-model", "nowhere"), "nowhere"),
        (("--draft-model", endless, "--num-draft-tokens", 0), "0 is not in the range"),
    ):
        assert_one_line_error(generate(*prompt, *wrong), message)


@pytest.mark.slow
def test_a_head_that_comes_with_the_model_drafts_unless_it_is_left_out(
    headed: Path, finite: Path, heads_pay: None
) -> None:
    prompt = ("--raw", "--prompt", "x y")
    plain = report("--model", finite, *prompt)
    assert plain["stats"]["accepted"] == 0
    without = report("--model", headed, *prompt, "--no-head")["stats"]
    assert (without["accepted"], without["steps"]) == (0, plain["stats"]["steps"])
    for arguments in (
        ("--model", headed),
        ("--model", finite, "--head", headed / "head"),
        ("--model", finite, "--head", headed),
    ):
        drafted = report(*arguments, *prompt)
        assert drafted["text"] == plain["text"]
        assert drafted["stats"]["accepted"] >= 4
        assert drafted["stats"]["steps"] < plain["stats"]["steps"] - 2


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("mlxspec.engine.heads.HiddenStates", "the model's hidden states cannot be read"),
        ("mlxspec.engine.heads.TrainedHead._timed", "no such kernel"),
    ],
)
def test_a_head_that_cannot_draft_is_an_error_only_if_it_is_named(
    place: str, reason: str, headed: Path, finite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(place, fails)
    prompt = ("--raw", "--prompt", "x y")
    result = generate("--model", headed, *prompt)
    assert result.exit_code == 0, result.stderr
    message = f"the head that comes with the model is not used: {reason}"
    assert result.stderr.count(message) == 1
    named = generate("--model", finite, "--head", headed, *prompt)
    message = f"the head, DSpark, cannot draft for this model ({reason}); leave it out"
    assert_one_line_error(named, message)


@pytest.mark.parametrize(
    "options", [("--draft-model", "finite"), ("--decoder", "prompt-lookup"), ("--n-draft", "3")]
)
def test_other_drafts_leave_out_the_head_that_comes_with_the_model(
    options: tuple[str, ...], headed: Path, finite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.engine.heads.TrainedHead.__init__", lambda *_: 1 / 0)
    options = tuple(str(finite) if option == "finite" else option for option in options)
    result = generate("--model", headed, "--raw", "--prompt", "x y", *options)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--head", "a", "--no-head"), "--head and --no-head are given together: choose one"),
        (("--head", "a", "--draft-model", "b"), "--head and --draft-model are given together"),
        (("--head", "a", "--decoder", "plain"), "--head is for --decoder auto, not"),
        (("--head", "a", "--n-draft", "3"), "--n-draft is for --decoder prompt-lookup, not"),
        (("--head", "nowhere"), "nowhere: no such directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_head_that_makes_no_sense_is_one_line_before_a_model_is_loaded(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.models.heads.loading.load_parts", lambda *_, **__: 1 / 0)
    result = generate("--model", "demo", "--prompt", "a", *options)
    assert message in result.stderr
    assert result.exit_code == (2 if "" in options else 1)


def test_a_model_that_is_split_takes_no_head() -> None:
    leader: Any = object()
    with (
        Memories(keeps=False) as memories,
        pytest.raises(OptionError, match="--head do not work with a model that is split"),
    ):
        taken("--head", "a").load(error_console(), memories, leader)


def test_a_head_that_does_not_fit_is_one_line_or_a_note(
    headed: Path, finite: Path, tmp_path: Path
) -> None:
    prompt = ("--raw", "--prompt", "x y")
    for name, message in (("EAGLE-3", "hidden_size"), ("Qwen MTP", "another architecture")):
        other = write_head(tmp_path / name, name)
        result = generate("--model", finite, *prompt, "--head", other)
        assert_one_line_error(result, str(other))
        assert message in result.stderr
    assert_one_line_error(generate("--model", finite, *prompt, "--head", finite), "neither")
    model = tmp_path / "model"
    shutil.copytree(headed, model)
    (model / "head" / "model.safetensors").write_bytes(b"damaged")
    result = generate("--model", model, *prompt)
    assert result.exit_code == 0
    assert "Note: the head that comes with the model is not used: " in result.stderr
