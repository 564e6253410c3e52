"""The report that users send: what it says, what it never says, and what is no report."""

from __future__ import annotations

import json
import platform
from copy import deepcopy
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.bench.measure import Report, machine_facts
from mlxspec.bench.submission import BenchReport, filed_reports, issue_url, read
from mlxspec.errors import OptionError
from tests.bench.test_report import measured
from tests.bench.test_report import report as report_on

MACHINE = {
    **{"chip": "Apple M9 Max", "device": "gpu", "memory": 64 * 2**30},
    **{"system": "macOS 15.5 arm64", "python": "3.12.4", "mlxspec": "0.1.0"},
    **{"mlx": "0.32.4", "mlx_lm": "0.32.2"},
}
MODEL = {
    **{"name": "mlx-community/Tiny-4bit", "type": "llama", "parameters": 7_000_000_000},
    **{"bits_per_weight": 4.5012, "dtype": "float16", "digest": "0123456789abcdef" * 2},
}


def curve(*costs: float, context: int = 64) -> Report:
    """As ``mlxspec calibrate`` reports it, of 1, 2, … rows; 20 ms for one."""
    times = [
        {"rows": rows, "seconds": 0.02 * cost, "cost": cost, "error": 0.05}
        for rows, cost in enumerate(costs, start=1)
    ]
    return {"name": "somebody's", "context": context, "times": times, "split_attention": None}


def bench(**machine: object) -> Report:
    """What bench reports of two categories, and the curve."""
    rates = {"plain": [30.0, 30.0], "mlx-lm": [32.0, 32.0], "auto": [60.0, 75.0]}
    prompts = measured(rates, "code"), measured(rates, "free text")
    facts = {"model": dict(MODEL), "machine": MACHINE | machine}
    return report_on(*prompts) | facts | {"curves": [curve(1, 1.06, 1.24)]} | _SETTINGS


_SETTINGS: Report = {"settings": {"max_tokens": 250, "repeats": 2, "temperature": 0.0}}


def sent(**machine: object) -> BenchReport:
    return BenchReport.of(bench(**machine))


def test_it_has_machine_versions_model_curve_speeds_and_what_the_planner_chose() -> None:
    said = json.loads(sent().text())
    assert said["machine"] == {
        **{name: value for name, value in MACHINE.items() if name != "memory"},
        "memory_gb": 64,
    }
    assert said["model"] == MODEL | {"bits_per_weight": 4.5}
    (only,) = said["curves"]
    assert (only["rows"], only["cost"], only["error"]) == ([1, 2, 3], [1, 1.06, 1.24], [0.05] * 3)
    assert only["plain_ms"] == 20
    assert list(said["categories"]) == ["code", "free text"]
    # Of both runs: 60 and 75 against 30.
    figures = {"tokens_per_second": 67.5, "speedup": 2.25, "rows_per_step": 2.5}
    assert said["categories"]["code"]["auto"] == figures
    assert said["decoders"]["auto"] == figures | {
        **{"tokens_per_step": 2.5, "acceptance_rate": 1.0, "vs_mlx_lm": 2.11}
    }
    assert (said["outputs"], said["differ"], said["rough"]) == (4, 0, False)


def test_nothing_in_it_names_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-rosebud-laptop")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("", ("", "", ""), ""))
    monkeypatch.setattr(platform, "node", lambda: "rosebud.local")
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.4+rosebud")
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "rosebud")
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "512")
    own = {"blas": "librosebud.so.0", "mlx": "0.32.5.dev1+rosebud"}
    report = bench(**machine_facts() | own)
    report["model"]["name"] = "rosebud-finetune"
    report["wrong"] = ["rosebud"]
    report["more"] = {"rosebud": "rosebud"}
    found = BenchReport.of(report)
    assert "rosebud" not in found.text() + issue_url(found)
    assert "somebody" not in found.text()
    said = json.loads(found.text())
    assert "name" not in said["model"]
    assert found.model.label == "llama, 7 B parameters"
    assert said["machine"]["blas"] == "other"
    assert said["machine"]["mlx_settings"] == "MLX_MAX_MB_PER_BUFFER=512"
    assert said["machine"]["system"].split()[1] == "6.8.0"


@pytest.mark.parametrize(
    ("chip", "device", "name"),
    [("Apple M9 Max", "gpu", "M9 Max"), ("Intel(R) Xeon", "cpu", "Intel(R) Xeon CPU")],
)
def test_a_chip_has_the_name_that_replay_takes(chip: str, device: str, name: str) -> None:
    assert sent(chip=chip, device=device).chip == name


def test_the_address_fills_in_the_form_with_the_same_report() -> None:
    report = sent()
    url = issue_url(report)
    assert url.isascii()
    fields = parse_qs(urlsplit(url).query)
    assert fields["template"] == ["bench-report.yml"]
    assert fields["title"] == ["Report: M9 Max, 64 GB, mlx-community/Tiny-4bit"]
    assert read(fields["report"][0]) == report == read(report.text())


def test_a_full_report_fits_into_an_address_and_one_that_does_not_is_left_out() -> None:
    full = bench()
    names = "plain", "mlx-lm", "prompt-lookup", "auto", "lookahead"
    of_auto = full["decoders"]["auto"] | {"vs_mlx_lm": 2.345}
    full["decoders"] = dict.fromkeys(names, of_auto)
    full["categories"] = {
        category: {"decoders": full["decoders"]}
        for category in ("repeat", "rename", "edit JSON", "quote", "free code", "free text")
    }
    costs = [1.0, *(1.23 + 0.2 * rows for rows in range(21))]
    full["curves"] = [curve(*costs, context=context) for context in (64, 1000, 8000)]
    assert "report=" in issue_url(BenchReport.of(full))
    full["curves"] *= 5
    assert "report=" not in issue_url(BenchReport.of(full))


def changed(path: str, value: object) -> dict[str, Any]:
    """A good report, as JSON reads it, with another value at a path such as "curves.0.rows"."""
    said = json.loads(sent().text())
    *parents, last = path.split(".")
    place: Any = said
    for part in parents:
        place = place[int(part) if isinstance(place, list) else part]
    place[int(last) if isinstance(place, list) else last] = value
    return said


HUGE = 10**400
WRONG = [
    ("format", "something else"),
    ("version", 2),
    ("machine", {}),
    ("machine.chip", "../../.github/workflows"),
    ("machine.chip", "M9 <script>alert(1)</script>"),
    ("machine.chip", "M9\n\n# Buy"),
    ("machine.chip", "M9 [Max](https://example.org)"),
    ("machine.chip", "M9 | Max"),
    ("machine.chip", "M９ Max"),
    ("machine.chip", "M9" * 40),
    ("machine.chip", ""),
    ("machine.memory_gb", -1),
    ("machine.memory_gb", 64.5),
    ("machine.memory_gb", HUGE),
    ("machine.mlx", "0.32.4\n"),
    ("machine.mlx", "٣"),
    ("machine.system", "macOS `x` arm64"),
    ("machine.mlx_settings", "PATH=1"),
    ("machine.blas", "<b>"),
    ("model.name", "a/b/c"),
    ("model.name", "../b"),
    ("model.name", "javascript:alert(1)"),
    ("model.name", "owner/<img src=x>"),
    ("model.parameters", "7"),
    ("model.digest", "0" * 33),
    ("rough", 1),
    ("decoders", {}),
    ("decoders.auto", []),
    ("decoders.auto.tokens_per_second", "fast"),
    ("decoders.auto.tokens_per_second", -1),
    ("decoders.auto.speedup", float("nan")),
    ("decoders.auto.speedup", float("inf")),
    ("decoders.auto.speedup", HUGE),
    ("decoders.<b>", {"tokens_per_second": 1}),
    ("categories", {f"c{number}": {} for number in range(1000)}),
    ("categories.code.auto", None),
    ("curves", []),
    ("curves.0.rows", [1, 2]),
    ("curves.0.rows", [1, 3, 2]),
    ("curves.0.rows", [1, 2, 65]),
    ("curves.0.rows", [True, 2, 3]),
    ("curves.0.rows", list(range(1, 100_000))),
    ("curves.0.cost", [2, 3, 4]),
    ("curves.0.cost", [1, 2, 900]),
    ("curves.0.cost", [1, float("nan"), 2]),
]


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_a_wrong_field_is_named_and_not_quoted(path: str, value: object) -> None:
    with pytest.raises(OptionError) as refused:
        read(json.dumps(changed(path, value)))
    message = str(refused.value)
    assert message.startswith("invalid report: ")
    assert message.count("\n") == 0
    assert not any(part in message for part in ("<", "../", "alert", "example.org", "Buy"))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1e999", "[" * 50_000, '{"a":' * 9_000])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="invalid report: the report: "):
        read(text)


def test_fields_of_others_are_dropped() -> None:
    said = changed("machine.host", "<script>") | {"note": {"deep": ["x"]}}
    assert read(json.dumps(said)) == sent()


PLACES = sorted({path for path, _ in WRONG})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)


@given(st.sampled_from(PLACES), JSON)
def test_whatever_a_field_holds_it_is_refused_or_plain(path: str, value: object) -> None:
    try:
        text = read(json.dumps(changed(path, deepcopy(value)))).text()
    except OptionError:
        return
    assert text.isascii()
    assert not set("<>`|&\\\x00;") & set(text)
    json.loads(text, parse_constant=pytest.fail)


def test_what_cannot_be_sent_is_one_line_that_names_it() -> None:
    report = bench()
    report["model"]["type"] = "my model"
    with pytest.raises(OptionError, match=r"^invalid report: model\.type: "):
        BenchReport.of(report)


def test_files_are_read_newest_first(tmp_path: Any) -> None:
    for chip, name in (("m9", "2027-01-02-9"), ("m9", "2027-01-02-10"), ("m8", "2027-01-03-2")):
        (tmp_path / chip).mkdir(exist_ok=True)
        (tmp_path / chip / f"{name}.json").write_text(sent().text())
    assert [issue for _, issue, _ in filed_reports(tmp_path)] == [2, 10, 9]
