"""The options for sampling and for the output's end, as the command line gives them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mlxspec import load
from mlxspec.cli.sampling_options import sampling_options, sparing_line_ends, take_sampling
from mlxspec.engine.sampling import SamplingParams
from tests.cli.test_generate import assert_one_line_error, generate, report
from tests.support.scripted_model import EOS


def taken(*arguments: object) -> tuple[SamplingParams, dict[str, Any]]:
    """What a command with these options makes of its arguments."""
    results = []

    @click.command()
    @sampling_options
    def command(**options: Any) -> None:
        results.append(take_sampling(options))
        assert options == {}

    outcome = CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return results[0]


def test_without_options_it_is_greedy_with_seed_0() -> None:
    sampling, ends = taken()
    assert sampling == SamplingParams(logit_bias={})
    assert (sampling.temp, sampling.seed) == (0.0, 0)
    assert ends == {"stop": (), "stop_tokens": []}


def test_each_option_sets_its_field() -> None:
    values: dict[str, Any] = {
        "temp": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "min_tokens_to_keep": 2,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "repetition_penalty": 1.1,
        "repetition_context_size": 30,
        "presence_penalty": 0.2,
        "presence_context_size": 31,
        "frequency_penalty": -0.3,
        "frequency_context_size": 32,
        "seed": 9,
    }
    arguments = [part for name, value in values.items() for part in (_option(name), value)]
    biases = ("--logit-bias", "5=-1.5", "--logit-bias", "7=-inf")
    sampling, _ = taken(*arguments, *biases)
    assert sampling == SamplingParams(**values, logit_bias={5: -1.5, 7: -math.inf})


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_stop_tokens_are_ids_or_texts_under_either_name() -> None:
    _, ends = taken("--stop-token", "17", "--extra-eos-token", "<|end|>", "--stop", "x")
    assert ends == {"stop": ("x",), "stop_tokens": [17, "<|end|>"]}


def test_xtc_spares_line_breaks_and_end_tokens(endless: Path) -> None:
    _, tokenizer = load(endless)
    spared = sparing_line_ends(SamplingParams(xtc_probability=0.5), tokenizer)
    assert {EOS, *tokenizer.encode("\n")} == set(spared.xtc_special_tokens)


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
        (("--xtc-threshold", "0.9"), "--xtc-threshold is 0.9"),
        (("--repetition-penalty", "-1"), "--repetition-penalty is -1.0"),
        (("--frequency-context-size", "-2"), "--frequency-context-size is -2"),
        (("--logit-bias", "five=1"), "--logit-bias is 'five=1': write it as ID=VALUE"),
        (("--logit-bias", "5"), "--logit-bias is '5'"),
        (("--logit-bias", "5=nan"), "--logit-bias of token 5 is nan"),
        (("--logprobs", "3"), "add --json"),
        (("--logprobs", "-3", "--json"), "--logprobs is -3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_option_is_one_line_before_any_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
) -> None:
    monkeypatch.setattr("mlxspec.generation.decoder.load", lambda name: 1 / 0)
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
