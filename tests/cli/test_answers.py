"""``mlxspec generate --prompts`` as a user calls it: one result per line, in order."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console

from mlxspec.cli.common.output import Figures
from mlxspec.engine.step import Batch
from mlxspec.generation.response import GenerationResponse, GenerationResult, SpeculationStats
from tests.cli.test_generate import LINE, assert_one_line_error, generate, report

IDS: list[Any] = [{"prompt": [last]} for last in (3, 4, 5, 6, 7)]
"""One-token prompts, each followed by another token."""


def write(path: Path, lines: Sequence[Any]) -> Path:
    """Write a file of prompts; bytes are written unchanged as a line."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


def test_the_form_is_read_once(endless: Path, prompts: Path) -> None:
    """So it may come from a pipe, and may change while the lines are answered."""
    write(prompts, IDS)
    schema = '{"enum": ["one", "two"]}'
    asked = ("--model", endless, "--prompts", prompts, "--json-schema", "-", "--max-tokens", 9)
    found = results(generate(*asked, stdin=schema))
    assert {one["text"] for one in found} <= {'"one"', '"two"'}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def results(result: Result) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["index"] for one in found] == [*range(len(found))]
    return found


@pytest.mark.nightly(keep=4)
@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize(
    "how",
    [
        ("--decoder", "auto"),
        ("--decoder", "plain"),
        ("--n-draft", 3, "--ngram-max", 2),
        ("--decoder", "lookahead", "-W", 3, "-N", 3, "-G", 2),
        ("--decoder", "plain", "--temp", 2, "--seed", 5),
        ("--decoder", "plain", "--max-kv-size", 16),
    ],
    ids=lambda how: " ".join(map(str, how)),
)
def test_each_answer_is_that_of_its_prompt_alone(
    endless: Path, prompts: Path, how: tuple[object, ...], concurrency: int
) -> None:
    lengths = [30, 5, 1, 12, 7]
    lines = [{**one, "max_tokens": n} for one, n in zip(IDS, lengths, strict=True)]
    options = ("--model", endless, *how)
    found = generate(*options, "--prompts", write(prompts, lines), "--concurrency", concurrency)
    assert found.exit_code == 0, found.stderr
    for one, asked, length in zip(results(found), IDS, lengths, strict=True):
        (last,) = asked["prompt"]
        alone = report(*options, "--prompt-ids", last, "--max-tokens", length)
        assert one.keys() - alone.keys() == {"index", "id"}
        assert alone.keys() <= one.keys()
        same = ("model", "text", "tokens", "finish_reason", "prompt_tokens", "generation_tokens")
        assert {key: one[key] for key in same} == {key: alone[key] for key in same}


@pytest.mark.slow
def test_drafts_are_accepted_and_plain_decoding_has_none(endless: Path, prompts: Path) -> None:
    options = ("--model", endless, "--prompts", write(prompts, IDS[:2]), "--max-tokens", 40)
    for how, drafts in ((("--n-draft", 4), True), (("--decoder", "plain"), False)):
        for one in results(generate(*options, *how)):
            assert (one["stats"]["accepted"] > 0) is drafts
            assert (one["stats"]["tokens_per_step"] > 1) is drafts


@pytest.mark.slow
def test_texts_and_messages_go_into_the_chat_template(endless: Path, prompts: Path) -> None:
    message = {"role": "user", "content": "a b"}
    lines = ["a b", {"prompt": "a b"}, {"messages": [message]}, {"prompt": [1, 3]}]
    options = ("--model", endless, "--prompts", write(prompts, lines), "--max-tokens", 1)
    found = [one["prompt_tokens"] for one in results(generate(*options))]
    assert found == [4, 4, 4, 2]  # [INST] a b [/INST]
    write(prompts, lines[:2])
    assert [one["prompt_tokens"] for one in results(generate(*options, "--raw"))] == [3, 3]


def test_a_line_s_options_come_before_the_command_s(endless: Path, prompts: Path) -> None:
    lines = [
        {"prompt": "a", "id": {"any": ["thing"]}},
        {"prompt": "a", "max_tokens": 2, "id": "x"},
        {"prompt": "a", "stop": "two"},
        {"prompt": "a", "stop_tokens": " two"},
        {"prompt": "a", "temp": 3.0, "seed": 7, "stop": []},
        {"prompt": "a", "logit_bias": {"3": -1000}},
    ]
    options = ("--model", endless, "--max-tokens", 9, "--decoder", "plain")
    stop = ("--stop", "four")
    found = results(generate(*options, *stop, "--prompts", write(prompts, lines)))
    assert [one["text"] for one in found[:4]] == ["one two three ", "one two", "one ", "one"]
    assert [one["finish_reason"] for one in found[:4]] == ["stop", "length", "stop", "stop"]
    assert [one["id"] for one in found[:3]] == [{"any": ["thing"]}, "x", None]
    sampled = report(*options, "--prompt", "a", "--temp", 3.0, "--seed", 7)
    assert found[4]["tokens"] == sampled["tokens"]
    assert 3 not in found[5]["tokens"]


def test_a_broken_line_costs_no_other(endless: Path, prompts: Path) -> None:
    lines = [
        {"prompt": [3], "id": 1},
        b"{",
        b"",
        {"prompt": "", "id": 2},
        {"prompt": [99]},
        {"prompt": "a", "top_p": 7},
        {"prompt": "a", "stop_tokens": "nothing like it"},
        b'"\xff"',
        {"prompt": [4], "id": 3},
    ]
    options = ("--max-tokens", 6, "--concurrency", 2)
    result = generate("--model", endless, "--prompts", write(prompts, lines), *options)
    assert result.exit_code == 1
    found = results(result)
    assert [one["id"] for one in found] == [1, None, 2, None, None, None, None, 3]
    errors = [one["error"] for one in found[1:-1]]
    expected = [
        "line 2: not JSON with a prompt: write",
        'line 4: it needs "prompt" or "messages", not both, and not empty: write',
        "line 5: the prompt contains the id 99: pass ids from 0 to 63",
        "line 6: top_p is 7: choose a value between 0 and 1",
        "line 7: the stop token 'nothing like it' is not a token of the model: give",
        "line 8: not JSON with a prompt: write",
    ]
    assert [error[: len(start)] for error, start in zip(errors, expected, strict=True)] == expected
    assert re.search(r"prompts failed +6\b", result.stderr)
    assert len(found[0]["tokens"]) == len(found[-1]["tokens"]) == 6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [{"content": "a"}]}, "prompt"),
        ({"prompt": [99999999999]}, "the prompt contains the id 99999999999"),
        ({"prompt": "a", "logit_bias": {"1": 10**400}}, "logit_bias of token 1 is 1000"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "max_tokens": 2.0}, "max_tokens is 2.0"),
        ({"prompt": "a", "temp": "hot"}, "temp is 'hot'"),
        ({"prompt": "a", "seed": 0.5}, "seed is 0.5"),
        ({"prompt": "a", "stop": [1]}, "stop is [1]"),
        ({"prompt": "a", "stop_tokens": 0.5}, "stop token 0.5"),
        ({"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias of token 1 is x"),
    ],
    ids=str,
)
def test_a_wrong_option_of_a_line_is_named(
    endless: Path, prompts: Path, line: dict[str, Any], message: str
) -> None:
    result = generate("--model", endless, "--prompts", write(prompts, [line]))
    (found,) = results(result)
    assert found["error"].startswith("line 1: ")
    assert message in found["error"]
    assert "Error: 1 prompt could not be answered" in result.stderr


@pytest.mark.slow
def test_what_a_template_does_not_take_is_an_error(
    endless: Path, finite: Path, prompts: Path
) -> None:
    lines = [{"messages": [{"role": "user", "content": "a"}]}, {"prompt": [3]}]

    def errors(model: Path, *how: str) -> list[str | None]:
        found = generate(
            "--model", model, "--prompts", write(prompts, lines), "--max-tokens", 1, *how
        )
        return [one.get("error") for one in results(found)]

    assert errors(endless) == [None, None]
    for found in (errors(endless, "--raw"), errors(finite)):
        assert str(found[0]).startswith('line 1: "messages"')
        assert found[1] is None


def test_a_prompt_longer_than_the_context_costs_no_other(
    finite: Path, prompts: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(finite, tmp_path / "short")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    lines = [{"prompt": [3] * 9}, {"prompt": [5] * 7}]
    found = results(generate("--model", model, "--prompts", write(prompts, lines)))
    assert found[0]["error"] == (
        "line 1: the prompt has 9 tokens, but the model's context is 8: shorten the prompt"
    )
    assert (found[1]["generation_tokens"], found[1]["finish_reason"]) == (1, "length")


def test_standard_input_is_a_file_too(endless: Path) -> None:
    result = generate(
        *("--model", endless, "--prompts", "-", "--max-tokens", 5), stdin='"a"\n{"prompt": "b"}\n'
    )
    assert result.exit_code == 0
    assert [one["text"] for one in results(result)] == [LINE, LINE]


@pytest.mark.slow
def test_results_wait_for_earlier_ones(endless: Path, prompts: Path) -> None:
    lines = [{"prompt": [3], "max_tokens": n} for n in (40, 1, 2, 1, 2, 1, 3)]
    result = generate(*("--model", endless, "--prompts", write(prompts, lines), "--concurrency", 2))
    assert [one["generation_tokens"] for one in results(result)] == [40, 1, 2, 1, 2, 1, 3]


@pytest.mark.slow
def test_log_probabilities_stand_in_the_results(endless: Path, prompts: Path) -> None:
    options = ("--model", endless, "--prompts", write(prompts, IDS[:2]), "--max-tokens", 4)
    for one in results(generate(*options, "--logprobs", 2)):
        assert [entry["top"][0][0] for entry in one["logprobs"]] == one["tokens"]
    assert results(generate(*options))[0]["logprobs"] is None


def test_ctrl_c_writes_what_there_is(
    endless: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = GenerationResult.add

    def add_some(self: GenerationResult, response: GenerationResponse, likeliest: int) -> None:
        if response.generation_tokens > 8:
            raise KeyboardInterrupt
        add(self, response, likeliest)

    monkeypatch.setattr(GenerationResult, "add", add_some)
    lines = [{"prompt": [7], "max_tokens": n} for n in (30, 5, 30, 5, 5)]
    options = ("--concurrency", 3, "--decoder", "plain")
    result = generate("--model", endless, "--prompts", write(prompts, lines), *options)
    assert result.exit_code == 130
    found = results(result)
    assert [one["finish_reason"] for one in found[:3]] == ["interrupted", "length", "interrupted"]
    assert found[0]["text"] == "one two three four\none two three"
    assert found[0]["prompt_tokens"] == 1
    assert found[1]["text"] == LINE
    assert "interrupted" in result.stderr
    assert len(found) == 4  # the last line was not started


def test_a_fault_in_one_generation_costs_no_other(
    endless: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = GenerationResult.add

    def fail(self: GenerationResult, response: GenerationResponse, likeliest: int) -> None:
        if response.token == 5:
            raise RuntimeError("no luck")
        add(self, response, likeliest)

    monkeypatch.setattr(GenerationResult, "add", fail)
    lines = [{"prompt": [5], "max_tokens": 2}, {"prompt": [4], "max_tokens": 2}]
    result = generate("--model", endless, "--prompts", write(prompts, lines))
    assert result.exit_code == 1
    assert results(result)[0]["generation_tokens"] == 2
    assert results(result)[1]["error"] == "line 2: RuntimeError: no luck"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prompts", "FILE", "--prompt", "a"), "--prompts and --prompt are given together"),
        (("--prompts", "FILE", "--prompt-file", "a"), "--prompts and --prompt-file"),
        (("--prompts", "FILE", "--prompt-ids", "1"), "--prompts and --prompt-ids"),
        (("--prompts", "FILE", "--prompt-cache-file", "a"), "--prompts and --prompt-cache-file"),
        (("--prompts", "FILE", "--concurrency", "0"), "'--concurrency': 0 is not in the range"),
        (("--prompts", "FILE", "--logprobs", "-1"), "'--logprobs': -1 is not in the range"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("--prompts", "."), ".: Is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_use_is_one_line_before_any_model_is_loaded(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
) -> None:
    monkeypatch.setattr("mlxspec.models.model.load", lambda *_, **__: 1 / 0)
    file = str(write(prompts, IDS))
    given = [file if argument == "FILE" else argument for argument in arguments]
    assert_one_line_error(generate("--model", "any", *given, stdin=""), named)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--chat",), "needs a chat template"),
        (("--stop-token", "nothing like it"), "nothing like it"),
    ],
)
def test_an_option_that_fits_no_line_is_reported_once(
    finite: Path, prompts: Path, options: tuple[str, ...], named: str
) -> None:
    assert_one_line_error(
        generate("--model", finite, "--prompts", write(prompts, IDS), *options), named
    )


def test_the_panel_sums_up(endless: Path, prompts: Path) -> None:
    result = generate(
        "--model", endless, "--prompts", write(prompts, [*IDS, b"no"]), "--max-tokens", 4
    )
    assert "\x1b" not in result.output
    figures = [" ".join(line.strip("│ ").split()) for line in result.stderr.splitlines()]
    assert {"prompts answered 5", "prompts failed 1"} < {*figures}
    assert any(line.startswith("prompt tokens 5 ") for line in figures)
    assert any(line.startswith("generated tokens 20 ") for line in figures)


@pytest.mark.parametrize("width", [40, 80])
def test_the_panel_fits_a_terminal(width: int) -> None:
    stats = SpeculationStats(100000, 300000, 200000, 150000, 250000, cost=250000 / 1.75)
    figures = Figures(1_000_000, 0, 250_000, 61.5, 1234.5, stats)
    stream = io.StringIO()
    first = ("prompts answered", "1,000"), ("prompts failed", "20")
    Console(file=stream, width=width).print(figures.panel(*first, subtitle="interrupted"))
    shown = stream.getvalue().splitlines()
    assert {len(line) for line in shown} == {len(shown[0])}
    assert "2.50" in stream.getvalue()
    assert "75%" in stream.getvalue()
    assert "1.75×" in stream.getvalue()
    assert "interrupted" in shown[-1]


@pytest.mark.slow
def test_the_time_without_drafts_follows_from_each_step_s_time_and_cost(
    endless: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Batch, "cost", lambda self, sequence, step: 2 * len(step.tokens))
    written: list[Figures] = []
    monkeypatch.setattr(Figures, "panel", lambda figures, *_, **__: written.append(figures) or "")
    options = ("--model", endless, "--max-tokens", 12, "--decoder", "prompt-lookup")
    for concurrency in (1, 4):
        write(prompts, IDS[:4])
        result = generate(*options, "--prompts", prompts, "--concurrency", concurrency)
        assert result.exit_code == 0, result.stderr
    for figures in written:
        assert figures.stats
        assert figures.stats.gain == pytest.approx(1 / 2)
