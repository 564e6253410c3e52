"""``mlxspec replay`` as a user calls it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlxspec.bench.policies import POLICIES
from mlxspec.cli.replay import replay_command
from mlxspec.drafting.chips import chip_names

TOKENIZER = Path(__file__).parents[2] / "mlxspec" / "demo_model"
FIGURES = ("speedup", "worst", "share_slow", "tokens_per_step", "rows_per_step")
HOSTILE = "<script>alert(1)</script>"


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(replay_command, list(map(str, arguments)))


def chat(question: str, answer: str, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **fields}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    text = "The judge Oscar lives in Denver and is 55 years old. " * 3
    path = tmp_path / "secret_project.jsonl"
    lines = [
        chat(f"Copy: {text}", text, category="copy"),
        chat("Name a colour.", "It is blue.", category="free"),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_curve(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def curve_of(*points: tuple[int, float]) -> object:
    return {"times": [{"rows": rows, "cost": cost} for rows, cost in points]}


@pytest.mark.parametrize("flat", [True, False])
def test_speed_follows_from_the_curve_file(traces: Path, tmp_path: Path, flat: bool) -> None:
    """If all steps cost the same, speed is tokens per step; if a row costs a step, 1 / …"""
    curve = write_curve(tmp_path / "curve.json", curve_of((1, 1), (64, 1 if flat else 64)))
    result = replay(
        *(traces, "--tokenizer", TOKENIZER, "--json", "--curve", curve),
        *("--decoder", "prompt-lookup"),
    )
    assert result.exit_code == 0, result.stderr
    for figures in json.loads(result.stdout)["sets"].values():
        modelled = 1.0 if flat else 1 / figures["rows_per_step"]
        assert figures["speedup"] == pytest.approx(figures["tokens_per_step"] * modelled)


def test_json_has_the_figures_over_all_and_per_set(traces: Path) -> None:
    result = replay(traces, "--tokenizer", TOKENIZER, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["chip"], report["decoder"]) == ("M4 Pro", "auto")
    assert set(report["sets"]) == {"copy", "free"}
    assert set(FIGURES) <= set(report)
    for one in report["sets"].values():
        assert set(FIGURES) - {"worst"} <= set(one)
    assert report["sets"]["copy"]["speedup"] > 1.5 > report["sets"]["free"]["speedup"]
    assert report["worst"] == report["sets"]["free"]["speedup"]
    assert "secret_project" not in result.stdout


def test_several_decoders_and_chips_are_compared_in_their_order(traces: Path) -> None:
    result = replay(
        *(traces, "--tokenizer", TOKENIZER, "--json", "--decoder", "prompt-lookup,auto"),
        *("--chip", "linear", "--chip", "M5 Max"),
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    order = [(entry["chip"], entry["decoder"]) for entry in report["comparison"]]
    assert order == [(c, d) for c in ("linear", "M5 Max") for d in ("prompt-lookup", "auto")]
    assert all(report[key] == value for key, value in report["comparison"][0].items())


def test_the_table_has_sets_decoders_and_the_worst(traces: Path) -> None:
    result = replay(traces, "--tokenizer", TOKENIZER, "--decoder", "auto,prompt-lookup")
    assert result.exit_code == 0, result.stderr
    for text in ("M4 Pro", "copy", "free", "prompt-lookup", "auto wins on M4 Pro", "share slow"):
        assert text in result.stdout
    assert "Modelled on: M4 Pro (≈ estimated at 12, 15, 16, 32 rows)" in result.stdout


def test_a_chip_s_name_is_taken_however_it_is_written(traces: Path) -> None:
    result = replay(traces, "--tokenizer", TOKENIZER, "--chip", "apple m3max", "--chip", "M3 Max")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("Modelled on: ") == result.stdout.count("Modelled on: M3 Max\n") == 1


def test_estimated_rows_are_in_json(traces: Path) -> None:
    report = json.loads(replay(traces, "--tokenizer", TOKENIZER, "--chip", "all", "--json").stdout)
    estimated = {entry["chip"]: entry["estimated_rows"] for entry in report["comparison"]}
    assert list(estimated) == chip_names()
    assert (estimated["M3 Max"], estimated["M5 Max"]) == ([], [16, 32])


def test_a_curve_of_calibrate_is_read(traces: Path, tmp_path: Path) -> None:
    times = [{"rows": 1, "cost": 1.0, "seconds": 0.02}, {"rows": 8, "cost": 1.5, "seconds": 0.03}]
    curve = write_curve(tmp_path / "curve.json", {"times": times, "longer_contexts": []})
    result = replay(traces, "--tokenizer", TOKENIZER, "--json", "--curve", curve)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["chip"] == "own curve"


class Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_terminal_and_stands_alone(tmp_path: Path) -> None:
    traces = tmp_path / "t.jsonl"
    traces.write_text(json.dumps(chat("one two", "one two", category=HOSTILE)) + "\n")
    asked = (traces, "--tokenizer", TOKENIZER, "--decoder", "all", "--chip", "all")
    result = replay(*asked, "--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.stderr
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    for name in (*chip_names(), *POLICIES, HOSTILE):
        assert name in page.text
        assert name in result.stdout
    assert {"script", "img", "link", "iframe"}.isdisjoint(page.tags)
    assert {"src", "href"}.isdisjoint(page.names)


def test_several_outputs_at_once_are_set_against_batching_and_drafting(traces: Path) -> None:
    asked = ("--decoder", "all", "--chip", "linear", "--chip", "M5 Max", "--concurrency", 2)
    result = replay(traces, "--tokenizer", TOKENIZER, "--json", *asked)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    order = [(one["chip"], one["decoder"]) for one in report["comparison"]]
    assert order == [(c, d) for c in ("linear", "M5 Max") for d in ("auto", "prompt-lookup")]
    assert all(report[key] == value for key, value in report["comparison"][0].items())
    assert report["completions"] == 2
    assert report["plain_batching"] == pytest.approx(1)
    fast = report["comparison"][2]
    assert fast["speedup"] > max(fast["plain_batching"], fast["one_at_a_time"])


def test_the_joint_table_has_batching_drafting_and_both(traces: Path) -> None:
    asked = ("--chip", "linear", "--chip", "M5 Max", "--concurrency", 2)
    result = replay(traces, "--tokenizer", TOKENIZER, *asked)
    assert result.exit_code == 0, result.stderr
    for text in (
        *("M5 Max, 2 outputs at once", "plain batching", "one at a time", "not modelled"),
        *("On M5 Max, auto has ", "On linear, auto has 1.00 times the speed of plain batching."),
    ):
        assert text in result.stdout


def test_one_output_at_a_time_is_the_default(traces: Path) -> None:
    results = [
        replay(traces, "--tokenizer", TOKENIZER, "--decoder", "all", "--json", *more)
        for more in ((), ("--concurrency", 1))
    ]
    assert results[0].stdout == results[1].stdout != ""


ANSWER = "The judge Oscar lives in Denver and is 55 years old."


@pytest.fixture
def repeating(tmp_path: Path) -> tuple[Path, Path]:
    """Write two logs with the same answer."""
    paths = tmp_path / "monday.jsonl", tmp_path / "tuesday.jsonl"
    for path in paths:
        path.write_text(json.dumps(chat("Who is the judge?", ANSWER)))
    return paths


def test_memories_of_several_sizes_are_compared_in_json(repeating: tuple[Path, Path]) -> None:
    asked = ("--remember", "16k,all", "--chip", "linear", "--chip", "M5 Max")
    result = replay(*repeating, "--tokenizer", TOKENIZER, "--json", *asked)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    order = [(one["chip"], one["decoder"]) for one in report["comparison"]]
    names = "auto", "memory 16k", "memory all"
    assert order == [(chip, name) for chip in ("linear", "M5 Max") for name in names]
    assert all(report[key] == value for key, value in report["comparison"][0].items())
    without, small, unbounded = report["comparison"][3:]
    assert {key: small[key] for key in FIGURES} == {key: unbounded[key] for key in FIGURES}
    assert small["sets"]["tuesday"]["speedup"] > without["sets"]["tuesday"]["speedup"]
    assert small["sets"]["monday"] == without["sets"]["monday"]


def test_a_memory_goes_through_the_files_in_their_order(repeating: tuple[Path, Path]) -> None:
    result = replay(*repeating[::-1], "--tokenizer", TOKENIZER, "--json", "--remember", "1k")
    without, with_it = json.loads(result.stdout)["comparison"]
    assert list(with_it["sets"]) == ["tuesday", "monday"]
    assert with_it["sets"]["monday"]["speedup"] > without["sets"]["monday"]["speedup"]
    assert with_it["sets"]["tuesday"] == without["sets"]["tuesday"]


def test_the_table_has_a_column_for_each_size(repeating: tuple[Path, Path]) -> None:
    result = replay(*repeating, "--tokenizer", TOKENIZER, "--remember", "16k,1M")
    assert result.exit_code == 0, result.stderr
    for text in ("auto", "memory 16k", "memory 1M", " wins on M4 Pro"):
        assert text in result.stdout


@pytest.mark.slow
def test_memories_are_compared_with_several_outputs_at_once(repeating: tuple[Path, Path]) -> None:
    asked = ("--remember", "1k,all", "--concurrency", 2)
    logs = repeating * 2
    result = replay(*logs, "--tokenizer", TOKENIZER, "--json", *asked)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [one["decoder"] for one in report["comparison"]] == ["auto", "memory 1k", "memory all"]
    without, with_it, _ = report["comparison"]
    assert with_it["speedup"] > without["speedup"]
    table = replay(*logs, "--tokenizer", TOKENIZER, *asked).stdout
    assert "memory 1k" in table
    assert "memory 1k wins on M4 Pro" in table


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--decoder", "warp"), "'warp': choose from auto"),
        (("--chip", "Z80"), "'Z80': choose one of M2 Pro"),
        (("--chip", "M4 Max"), "'M4 Max': the nearest known chips are M4 Pro and M3 Max"),
        (("--curve", "missing.json"), "missing.json: not a cost curve"),
        (("--html", "missing/page.html"), "missing/page.html"),
        (("--remember", ""), "--remember: '' is not a size: give tokens, such as 4096, 16k or 1M"),
        (("--remember", "x"), "--remember: 'x' is not a size"),
        (("--remember", "-5"), "--remember: '-5' is not a size"),
    ],
)
def test_a_bad_option_is_one_line(traces: Path, arguments: tuple[str, ...], complaint: str) -> None:
    result = replay(traces, "--tokenizer", TOKENIZER, *arguments)
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "{}", "3", '{"times": []}', '{"times": [{"rows": 1}]}', "[" * 200_000),
        '{"times": [{"rows": 1, "cost": 1}, {"rows": 1e999, "cost": 2}]}',
    ],
)
def test_a_file_without_a_curve_is_refused(traces: Path, tmp_path: Path, content: str) -> None:
    curve = tmp_path / "curve.json"
    curve.write_text(content)
    result = replay(traces, "--tokenizer", TOKENIZER, "--curve", curve)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {curve}: not a cost curve")


def test_a_curve_can_be_compared_with_chips(traces: Path, tmp_path: Path) -> None:
    curve = write_curve(tmp_path / "curve.json", curve_of((1, 1), (8, 2)))
    asked = ("--json", "--chip", "M5 Max", "--curve", curve)
    report = json.loads(replay(traces, "--tokenizer", TOKENIZER, *asked).stdout)
    assert [one["chip"] for one in report["comparison"]] == ["M5 Max", "own curve"]


def test_a_place_without_a_tokenizer_is_refused(traces: Path, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing"):
        result = replay(traces, "--tokenizer", place)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {place}: ")
        assert result.stderr.count("\n") == 1


def test_the_demo_s_tokenizer_goes_by_its_name(traces: Path) -> None:
    results = [replay(traces, "--json", "--tokenizer", name) for name in ("demo", TOKENIZER)]
    assert results[0].stdout == results[1].stdout != ""


def test_directory_and_tokenizer_model_give_the_same(traces: Path) -> None:
    first, second = (
        replay(traces, "--tokenizer", path, "--json").stdout
        for path in (TOKENIZER, TOKENIZER / "tokenizer.model")
    )
    assert first == second


def test_a_drafter_of_ones_own_is_replayed_alone_and_with_auto(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(chat("a b c d", "a b c d a b c d")))
    own = ("--drafter", "mlxspec:PromptLookupDrafter", "--decoder", "prompt-lookup")
    result = replay(log, "--tokenizer", TOKENIZER, *own, "--json")
    assert result.exit_code == 0, result.stderr
    figures = {one["decoder"]: one["speedup"] for one in json.loads(result.stdout)["comparison"]}
    assert list(figures) == ["prompt-lookup", "PromptLookupDrafter", "auto+PromptLookupDrafter"]
