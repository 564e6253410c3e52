"""``mlxspec bench`` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from mlxspec.bench.measure import BACKENDS, PLAIN, Stream
from mlxspec.cli.bench import bench_command

QUICK = ("--max-tokens", "8", "--repeats", "1")


def bench(model: Path | str, *arguments: object) -> Result:
    return CliRunner().invoke(bench_command, [str(model), *map(str, arguments)])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "my_prompts.jsonl"
    lines = [{"category": "say", "prompt": "one two"}, {"category": "go on", "prompt": "three"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_the_table_names_machine_versions_categories_and_decoders(
    endless: Path, prompts: Path
) -> None:
    result = bench(endless, "--prompts", prompts, *QUICK)
    assert result.exit_code == 0, result.stderr
    for name in (*BACKENDS, "say", "go on", "mlx ", "Python", "float32"):
        assert name in result.stdout
    compared = 2 * (len(BACKENDS) - 1)
    same = f"{compared} of {compared} outputs are identical to plain decoding's, in float32."
    assert same in result.stdout
    assert "endless" in result.stdout
    assert str(endless) not in result.stdout


def test_json_has_the_figures_and_neither_prompts_nor_paths(endless: Path, prompts: Path) -> None:
    result = bench(endless, "--prompts", prompts, *QUICK, "--json", "--decoder", "prompt-lookup")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["model"]["name"] == "endless"
    assert list(report["decoders"]) == ["plain", "prompt-lookup"]
    assert report["decoders"]["prompt-lookup"]["speedup"] > 0
    assert report["exactness"]["outputs"] == 2
    assert report["exactness"]["differ"] == 0
    assert list(report["categories"]) == ["say", "go on"]
    for secret in ("one two", str(prompts), "my_prompts", str(endless)):
        assert secret not in result.stdout


@pytest.mark.slow
def test_html_is_written_beside_the_table(endless: Path, prompts: Path, tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    result = bench(endless, "--prompts", prompts, *QUICK, "--html", page)
    assert result.exit_code == 0, result.stderr
    html = page.read_text(encoding="utf-8")
    assert "outputs are identical to plain decoding's" in html.replace("&#x27;", "'")
    assert str(prompts) not in html


def liar(model: object, tokenizer: object) -> Stream:
    """A backend that ends one token too early."""
    plain = BACKENDS[PLAIN](model, tokenizer)  # type: ignore[arg-type]

    def stream(prompt: list[int], *, max_tokens: int, **options: object) -> Iterator[object]:
        return plain(prompt, max_tokens=max_tokens - 1, **options)

    return stream  # type: ignore[return-value]


def test_a_wrong_output_is_reported_and_gets_no_speedup(
    endless: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "liar", liar)
    result = bench(endless, "--prompts", prompts, *QUICK, "--decoder", "liar,prompt-lookup")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines == [
        "Note: measuring 9 answers …",
        "Error: liar differs from plain decoding on prompt 1 (say) at token 7: "
        "one output ended before the other",
        "Error: liar differs from plain decoding on prompt 2 (go on) at token 7: "
        "one output ended before the other",
    ]
    row = next(line for line in result.stdout.splitlines() if line.startswith(" liar"))
    assert "×" not in row


def test_ctrl_c_shows_what_is_known(
    endless: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(model: object, tokenizer: object) -> Stream:
        plain = BACKENDS[PLAIN](model, tokenizer)  # type: ignore[arg-type]
        answers = iter(range(2))  # one for the warm-up and one for the first prompt

        def stream(prompt: list[int], **options: object) -> Iterator[object]:
            if next(answers, None) is None:
                raise KeyboardInterrupt
            return plain(prompt, **options)

        return stream  # type: ignore[return-value]

    monkeypatch.setitem(BACKENDS, "stopped", stopped)
    result = bench(endless, "--prompts", prompts, *QUICK, "--decoder", "stopped")
    assert result.exit_code == 130
    assert "say" in result.stdout
    assert "go on" not in result.stdout
    assert "interrupted after 1 prompt\n" in result.stdout
    assert "left out" not in result.stdout


def test_at_a_temperature_mlx_lm_is_left_out(endless: Path, prompts: Path) -> None:
    asked = ("--decoder", "mlx-lm,prompt-lookup", "--temp", 0.7, "--json")
    result = bench(endless, "--prompts", prompts, *QUICK, *asked)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert list(report["decoders"]) == ["plain", "prompt-lookup"]
    assert report["exactness"]["differ"] == 0


def test_a_prompt_beyond_the_context_is_counted(
    endless: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.bench.measure.context_length", lambda model: 3)
    result = bench(endless, "--prompts", prompts, *QUICK, "--decoder", "plain")
    assert "1 prompt left out: longer than the model's context" in result.stdout
    monkeypatch.setattr("mlxspec.bench.measure.context_length", lambda model: 1)
    result = bench(endless, "--prompts", prompts, *QUICK)
    assert result.stderr.endswith(
        "…\nError: every prompt is longer than the model's context: use shorter ones\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--decoder", "warp"), "'warp'"),
        (("--head", "a", "--no-head"), "--head and --no-head are given together"),
        (("--head", "a", "--decoder", "plain"), "--head is for --decoder auto"),
        (("--temp", "-1"), "temp is -1.0"),
        (("--prompts", "missing.jsonl"), "missing.jsonl: No such file or directory"),
        (("--html", "missing/page.html"), "missing/page.html"),
    ],
)
def test_a_bad_option_is_one_line_before_a_model_is_loaded(
    arguments: tuple[str, ...], complaint: str
) -> None:
    result = bench("no/such/model/at/all", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_drafter_of_ones_own_takes_part_alone_and_with_auto(endless: Path, prompts: Path) -> None:
    own = ("--decoder", "prompt-lookup", "--drafter", "mlxspec:PromptLookupDrafter")
    result = bench(endless, "--prompts", prompts, *QUICK, *own, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert list(report["decoders"]) == [
        "plain",
        "prompt-lookup",
        "PromptLookupDrafter",
        "auto+PromptLookupDrafter",
    ]
    assert (report["wrong"], report["exactness"]["outputs"]) == ([], 6)


@pytest.mark.slow
def test_a_head_takes_part_with_auto_which_is_measured_without_it_too(
    headed: Path, finite: Path, prompts: Path, heads_pay: None
) -> None:
    options = ("--prompts", prompts, *QUICK, "--json", "--decoder", "auto,prompt-lookup")
    for arguments in ((headed,), (finite, "--head", headed)):
        result = bench(*arguments, *options)
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["model"]["head"] == "DSpark"
        decoders = report["decoders"]
        assert list(decoders) == ["plain", "auto", "prompt-lookup", "auto without head"]
        assert decoders["auto"]["tokens_per_step"] > 1.5
        assert decoders["auto without head"]["tokens_per_step"] == 1
        assert report["exactness"]["differ"] == 0
    report = json.loads(bench(headed, *options, "--no-head").stdout)
    assert "head" not in report["model"]
    assert list(report["decoders"]) == ["plain", "auto", "prompt-lookup"]
    output = bench(headed, "--prompts", prompts, *QUICK, "--decoder", "auto").stdout
    assert "float32, with a trained head, DSpark" in output


def test_help_names_every_decoder():
    (own,) = (one for one in bench_command.params if one.name == "decoders")
    assert isinstance(own, click.Option)
    assert f"of {', '.join(BACKENDS)}." in str(own.help)
