"""``mlxspec generate`` as a user calls it, and its statistics."""

import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console, RenderableType

from mlxspec.cli.common.generation import GenerationSettings
from mlxspec.cli.common.output import PlainDecoding
from mlxspec.cli.generate import (
    figures_panel,
    generate_command,
)
from mlxspec.engine.target import Target
from mlxspec.generation.decoder import Decoder
from mlxspec.generation.drafter_factories import Auto
from mlxspec.generation.response import (
    GenerationResponse,
    GenerationResult,
    SpeculationStats,
)
from tests.cli.conftest import HOSTILE
from tests.support.scripted_model import BOS

LINE = "one two three four\n"


def generate(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(generate_command, list(map(str, arguments)), input=stdin)


def report(*arguments: object, stdin: str | None = None) -> dict:
    result = generate(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_standard_output_is_the_text_and_the_panel_goes_to_standard_error(endless: Path):
    result = generate("--model", endless, "--prompt", "say it", "--max-tokens", 15)
    assert result.exit_code == 0
    assert result.stdout == LINE * 3
    assert "tokens per step" in result.stderr
    assert "\x1b" not in result.output


@pytest.mark.parametrize("n_draft", [1, 10])
@pytest.mark.parametrize("sampling", [(), ("--temp", 2, "--seed", 3)])
def test_drafting_changes_the_steps_and_not_the_text(
    endless: Path, n_draft: int, sampling: tuple[object, ...]
):
    options = ("--model", endless, "--prompt", "a", "--max-tokens", 40, *sampling)
    drafted, plain = report(*options, "--n-draft", n_draft), report(*options, "--n-draft", 0)
    assert drafted["tokens"] == plain["tokens"]
    assert (plain["text"] == LINE * 8) is not bool(sampling)
    assert plain["stats"]["steps"] == plain["generation_tokens"]
    assert plain["stats"]["drafted"] == 0
    if not sampling:
        assert drafted["stats"]["steps"] < 40


def test_json_is_one_object_with_everything(endless: Path):
    options = ("--decoder", "prompt-lookup", "--max-tokens", 20)
    result = generate("--model", endless, "--prompt-ids", BOS, *options, "--json")
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    data = json.loads(result.stdout)
    assert data["text"] == LINE * 4
    assert len(data["tokens"]) == len(data["from_draft"]) == data["generation_tokens"] == 20
    assert data["finish_reason"] == "length"
    assert data["prompt_tokens"] == 1
    stats = data["stats"]
    assert stats["accepted"] == sum(data["from_draft"]) > 0
    assert stats["tokens_per_step"] == 20 / stats["steps"]
    assert stats["acceptance_rate"] == stats["accepted"] / stats["drafted"]


def test_json_gives_hostile_text_back_exactly_and_is_harmless_itself(hostile: Path):
    result = generate("--model", hostile, "--prompt", "a", "--json")
    assert json.loads(result.stdout)["text"] == "".join(HOSTILE)
    assert result.stdout.rstrip("\n").isprintable()
    assert result.stdout.isascii()


@pytest.mark.slow
def test_the_chat_template_is_applied_where_there_is_one(endless: Path, finite: Path):
    def prompt_tokens(model: Path, *mode: str) -> int:
        return report("--model", model, "--prompt", "a b", *mode)["prompt_tokens"]

    assert prompt_tokens(endless) == prompt_tokens(endless, "--chat") == 4  # [INST] a b [/INST]
    assert prompt_tokens(endless, "--raw") == prompt_tokens(finite) == 3  # BOS a b


def test_prompts_come_from_standard_input_and_files_too(endless: Path, tmp_path: Path):
    path = tmp_path / "prompt.txt"
    path.write_text("a b c\n")
    options = ("--model", endless, "--raw", "--max-tokens", 1)
    assert report(*options, "--prompt-file", path)["prompt_tokens"] == 4
    assert report(*options, "--prompt", "-", stdin="a b c\n")["prompt_tokens"] == 4


def test_stop_texts_end_the_output_before_them(endless: Path):
    options = ("--model", endless, "--prompt", "a", "--stop", "zero", "--stop", "two th")
    data = report(*options)
    assert data["text"] == "one "
    assert data["finish_reason"] == "stop"


def test_color_can_be_forced_on_a_pipe(endless: Path):
    options = ("--decoder", "prompt-lookup", "--max-tokens", 20)
    result = generate("--model", endless, "--prompt", "a", "--color", *options)
    assert "\x1b[1;38;5;32m two\x1b[0m" in result.stdout
    assert "accepted draft" in result.stderr


def test_the_default_model_is_mlx_model_where_it_is(
    endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlx_model").symlink_to(endless)
    result = generate("--prompt", "a", "--max-tokens", 5)
    assert result.stdout == LINE
    assert "Note" not in result.stderr


@pytest.mark.slow
def test_without_mlx_model_a_line_says_that_the_demo_model_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    options = ("--prompt", "a", "--max-tokens", 2, "--decoder", "plain", "--json")
    result = generate(*options)
    assert json.loads(result.stdout)["model"] == "demo"
    assert result.stderr.startswith("Note: no model is named, so the demo model answers")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prompt", "a", "--max-tokens", "-1"), "--max-tokens': -1 is not in the range"),
        (("--prompt", "a", "--max-tokens", "0"), "--max-tokens': 0 is not in the range"),
        (("--prompt", ""), "--prompt is empty"),
        ((), "no prompt"),
        (("a", "--prompt", "b"), "PROMPT and --prompt are given together"),
        (("a", "--prompt-ids", "1"), "PROMPT and --prompt-ids are given together"),
        (("a", "--raw", "--system-prompt", "b"), "--system-prompt needs a chat template"),
        (
            ("--prompt-ids", "1", "--system-prompt", "b"),
            "--system-prompt needs a chat template",
        ),
        (("--prompt", "a", "--top-p", "7"), "top_p is 7.0"),
        (("--prompt", "a", "--temp", "nan"), "temp is nan"),
        (("--prompt", "a", "--ngram-min", "4"), "ngram_min is 4, and ngram_max is 3: choose"),
        (
            ("--prompt", "a", "--n-draft", "-2"),
            "n_draft is -2: choose 1 or more (only decoders take 0, for no drafts)",
        ),
    ],
)
def test_a_bad_option_is_one_line_before_any_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
):
    monkeypatch.setattr("mlxspec.models.model.load", lambda *_, **__: 1 / 0)
    assert_one_line_error(generate("--model", "any/model", *arguments), named)


def assert_one_line_error(result: Result, named: str) -> None:
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    *usage, error = result.stderr.splitlines()
    assert error.startswith("Error: ")
    assert not usage or result.exit_code == 2  # the process prints only the last line
    assert named in error


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path):
    missing = tmp_path / "missing"
    assert_one_line_error(generate("--model", missing, "--prompt", "a"), str(missing))


def test_an_error_line_cannot_be_abused_for_escapes_or_more_lines():
    result = generate("--prompt-file", "a\x1b[2J\nError: b")
    assert_one_line_error(result, "a␛[2J Error: b")


def test_a_chat_template_that_is_not_there_is_one_line(finite: Path):
    result = generate("--model", finite, "--prompt", "a", "--chat")
    assert_one_line_error(result, "--chat needs a chat template")


@pytest.mark.parametrize(
    "template", ["{{ 1/0 }}", "{{ messages[0].content + 1 }}", "{{ raise_exception('no') }}"]
)
def test_a_chat_template_that_fails_is_one_line(endless: Path, tmp_path: Path, template: str):
    model = shutil.copytree(endless, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert_one_line_error(generate("--model", model, "--prompt", "a"), "the chat template failed")


def test_token_ids_with_a_chat_template_are_refused(endless: Path):
    result = generate("--model", endless, "--prompt-ids", "1", "--chat")
    assert_one_line_error(result, "token ids")


def test_a_prompt_longer_than_the_context_is_one_line(endless: Path, tmp_path: Path):
    config = json.loads((endless / "config.json").read_text())
    model = tmp_path / "short"
    model.mkdir()
    for file in endless.iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    result = generate("--model", model, "--raw", "--prompt", "a " * 70)
    assert_one_line_error(result, "the prompt has 71 tokens, but the model's context is 64")


def test_an_unknown_option_exits_with_2():
    result = generate("--promt", "a")
    assert result.exit_code == 2
    assert "--promt" in result.stderr


def test_ctrl_c_while_the_model_loads_is_quiet(monkeypatch: pytest.MonkeyPatch):
    def load(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlxspec.models.heads.loading.load_parts", load)
    result = generate("--model", "demo", "--prompt", "a")
    assert result.exit_code == 130
    assert result.stderr.strip() == "Interrupted."


def test_ctrl_c_in_the_prefill_shows_the_panel(endless: Path, monkeypatch: pytest.MonkeyPatch):
    def prefill(self: Target, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    options = ("--model", endless, "--prompt", "a b", "--decoder", "prompt-lookup")
    generate(*options, "--max-tokens", 1)  # the prefills of probing the model are over
    monkeypatch.setattr(Target, "prefill_in_chunks", prefill)
    result = generate(*options)
    assert result.exit_code == 130
    assert result.stdout == ""
    assert "interrupted" in result.stderr
    assert "4" in result.stderr.split("prompt tokens")[1].splitlines()[0]


def test_ctrl_c_with_json_writes_what_there_is(endless: Path, monkeypatch: pytest.MonkeyPatch):
    add = GenerationResult.add

    def add_three(self: GenerationResult, response: GenerationResponse, likeliest: int) -> None:
        if response.generation_tokens > 3:
            raise KeyboardInterrupt
        add(self, response, likeliest)

    monkeypatch.setattr(GenerationResult, "add", add_three)
    result = generate("--model", endless, "--prompt", "a b", "--json")
    assert result.exit_code == 130
    data = json.loads(result.stdout)
    assert data["text"] == "one two three"
    assert data["finish_reason"] == "interrupted"
    assert data["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--head", "x", "--n-draft", "3"), "--n-draft is for --decoder prompt-lookup"),
        (("--head", "x", "--decoder", "plain"), "--decoder auto"),
        (("--decoder", "auto", "--ngram-max", "2"), "--ngram-max"),
        (("--logprobs", "0"), "--logprobs has no effect without --json or --prompts: add it"),
        (("--concurrency", "8"), "--concurrency has no effect without --prompts"),
        (("--num-draft-tokens", "2"), "--num-draft-tokens has no effect without --draft-model"),
        (("--xtc-threshold", "0.2"), "--xtc-threshold has no effect without --xtc-probability"),
        (("--kv-group-size", "32"), "--kv-group-size has no effect without --kv-bits"),
        (
            ("--repetition-context-size", "9"),
            "--repetition-context-size has no effect without --repetition-penalty",
        ),
        (("--quiet", "--compare"), "--compare and --quiet are given together: choose one"),
        (("--json", "--compare"), "--compare and --json are given together: choose one"),
        (("--prompts", "-", "--compare"), "--compare and --prompts are given together: choose one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_contradict_each_other_are_named(endless: Path, options: tuple, named: str):
    assert_one_line_error(generate("--model", endless, "--prompt", "a", *options), named)


def test_the_output_ends_where_the_context_does(finite: Path, tmp_path: Path) -> None:
    directory = tmp_path / "short"
    shutil.copytree(finite, directory)
    config = json.loads((directory / "config.json").read_text())
    prompt = [BOS] * 6
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    options = ("--model", directory, "--prompt-ids", ",".join(map(str, prompt)), "--json")
    options = (*options, "--decoder", "prompt-lookup", "--max-tokens")
    result = generate(*options, 50)
    data = json.loads(result.stdout)
    assert (data["generation_tokens"], data["finish_reason"]) == (2, "length")
    assert (
        result.stderr == "Note: the model's context of 8 tokens is full, so the output ends here\n"
    )
    assert generate(*options, 2).stderr == ""


RESULT = GenerationResult(
    text="",
    tokens=[0] * 3000,
    from_draft=[False] * 3000,
    finish_reason="stop",
    prompt_tokens=12000,
    prompt_tps=1234.56,
    generation_tps=56.78,
    peak_memory=0.0,
    stats=SpeculationStats(steps=1500, rows=3600, drafted=2100, accepted=1500, emitted=3000),
)


def lines(content: RenderableType, width: int, color: bool = False) -> list[str]:
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=color, color_system="256" if color else None
    )
    console.print(content)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_figure_stands_on_one_line_beside_its_name(width: int):
    panel = [line.strip("│ ") for line in lines(figures_panel(RESULT, legend=True), width)]
    figures = [re.sub(" +", " ", line) for line in panel]
    for expected in (
        "prompt tokens 12,000 1,235/s",
        "generated tokens 3,000 56.8/s",
        "steps 1,500",
        "tokens per step 2.00",
        "acceptance rate 71% 1500/2100",
    ):
        assert expected in figures


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_frame_is_straight(width: int):
    lengths = {len(line) for line in lines(figures_panel(RESULT, legend=True), width)}
    assert len(lengths) == 1
    assert max(lengths) <= min(width, 42)


def test_the_legend_has_the_colours_of_the_text():
    shown = "\n".join(lines(figures_panel(RESULT, legend=True), 80, color=True))
    assert "\x1b[1;38;5;32m■ accepted draft\x1b[0m" in shown


def test_without_colours_there_is_no_legend_and_no_escape():
    shown = "\n".join(lines(figures_panel(RESULT, legend=False), 80))
    assert "■" not in shown
    assert "\x1b" not in shown


def test_plain_decoding_has_no_acceptance_rate():
    plain = replace(RESULT, stats=SpeculationStats(steps=5, rows=5, emitted=5))
    assert any("no drafts" in line for line in lines(figures_panel(plain, legend=False), 40))


@pytest.mark.parametrize("width", [40, 80])
def test_the_gain_is_shown_if_steps_were_measured(width: int):
    gained = replace(RESULT, stats=replace(RESULT.stats, cost=2000.0))
    panel = "\n".join(lines(figures_panel(gained, False), width))
    assert re.search(r"against plain +1\.50× +estimated", panel)
    assert "against plain" not in "\n".join(lines(figures_panel(RESULT, False), width))


@pytest.mark.parametrize("width", [40, 80])
def test_a_measured_speed_replaces_the_estimated_one(width: int):
    gained = replace(RESULT, stats=replace(RESULT.stats, cost=2000.0))
    plain = PlainDecoding(RESULT.generation_tps / 2, "same text")
    panel = "\n".join(lines(figures_panel(gained, False, plain), width))
    assert re.search(r"without drafts +same text +[\d.,]+/s", panel)
    assert re.search(r"against plain +2\.00× +measured", panel)
    assert "estimated" not in panel


def test_compare_decodes_again_without_drafts(endless: Path):
    options = ("--model", endless, "--prompt", "a", "--max-tokens", 9, "--compare")
    result = generate(*options, "--temp", 1, "--seed", 3, "--color")
    assert result.stdout.strip()
    assert "\x1b[?25l" not in result.stderr  # no progress bar hides the cursor in a pipe
    assert re.search(r"without drafts +same text +[\d.,]+/s", result.stderr)
    assert re.search(r"against plain +[\d.]+× +measured", result.stderr)


def test_ctrl_c_while_decoding_again_shows_the_panel(
    endless: Path, monkeypatch: pytest.MonkeyPatch
):
    stream = GenerationSettings.stream

    def interrupted(
        self: GenerationSettings, decoder: Decoder, *args: object, **more: object
    ) -> Iterator:
        if not isinstance(decoder.drafter_factory, Auto):
            raise KeyboardInterrupt
        yield from stream(self, decoder, *args, **more)

    monkeypatch.setattr(GenerationSettings, "stream", interrupted)
    result = generate("--model", endless, "--prompt", "a", "--max-tokens", 9, "--compare")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "without drafts" not in result.stderr


def test_an_interrupted_generation_is_marked():
    interrupted = replace(RESULT, finish_reason="interrupted")
    assert "interrupted" in lines(figures_panel(interrupted, legend=False), 40)[-1]
