"""MLX's tuning variables: the turns, the ratios and intervals by hand, and a real process."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest

from mlxspec.bench.measure import Report
from mlxspec.bench.tune import NONE, SETTINGS, measured, tune, tuning_report
from mlxspec.errors import MlxspecError
from tests.support.scripted_model import write_scripted_model

FAST, *_, ALL = SETTINGS[1:]


def bench(*rates: float, device: str = "gpu", **others: tuple[float, ...]) -> Report:
    """A report on as many prompts as there are rates, of plain and of ``others``."""
    of = {"plain": rates, **others}
    return {
        "model": {"name": "tiny"},
        "machine": {"device": device},
        "settings": {"repeats": 1, "prompts": len(rates)},
        "decoders": dict.fromkeys(of),
        "prompts": [
            {"decoders": {name: {"tokens_per_second": of[name][i]} for name in of}}
            for i in range(len(rates))
        ],
    }


def entry(report: Report, setting: str) -> Report:
    (found,) = (one for one in report["tuning"] if one["mlx_settings"] == setting)
    return found


def test_the_settings_are_none_each_variable_and_all() -> None:
    assert SETTINGS == [
        "",
        "MLX_METAL_FAST_SYNCH=1",
        "MLX_MAX_MB_PER_BUFFER=512",
        "MLX_MAX_OPS_PER_BUFFER=100",
        "MLX_METAL_FAST_SYNCH=1,MLX_MAX_MB_PER_BUFFER=512,MLX_MAX_OPS_PER_BUFFER=100",
    ]


def test_ratio_and_interval_are_those_of_a_paired_t_test() -> None:
    # The second round runs at a third of the speed, which hits both alike.
    rounds = [
        {NONE: bench(10, 20), FAST: bench(11, 22)},
        {NONE: bench(3, 6), FAST: bench(3.6, 7.2)},
        {NONE: bench(10, 20), FAST: bench(13, 26)},
    ]
    fast = entry(tuning_report(rounds), FAST)["decoders"]["plain"]
    gains = [math.log(1.1), math.log(1.2), math.log(1.3)]
    mean = sum(gains) / 3
    deviation = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / 2)
    assert fast["ratio"] == pytest.approx(math.exp(mean))
    assert fast["error"] == pytest.approx(math.exp(4.303 * deviation / math.sqrt(3)) - 1, rel=0.01)
    assert fast["tokens_per_second"] == pytest.approx(12)  # of 3.6, 7.2, 11, 13, 22 and 26
    none = entry(tuning_report(rounds), NONE)["decoders"]["plain"]
    assert (none["ratio"], none["error"]) == (1, 0)


def test_a_setting_helps_if_all_decoders_gain_beyond_the_interval() -> None:
    def rounds(device: str = "gpu") -> list[dict[str, Report]]:
        rates = {
            NONE: ((100, 100, 100), (200, 200, 200)),
            SETTINGS[1]: ((110, 111, 109), (230, 231, 229)),  # both
            SETTINGS[2]: ((110, 111, 109), (220, 180, 240)),  # plain's; the other's may be noise
            SETTINGS[3]: ((90, 91, 89), (230, 231, 229)),  # one at the other's cost
            ALL: ((108, 109, 107), (250, 251, 249)),  # both, but plain less than the first
        }
        return [
            {
                setting: bench(plain[i], device=device, auto=(auto[i],))
                for setting, (plain, auto) in rates.items()
            }
            for i in range(3)
        ]

    report = tuning_report(rounds())
    assert [one["mlx_settings"] for one in report["tuning"] if one["helps"]] == [FAST, ALL]
    assert report["best"] == FAST
    assert tuning_report(rounds("cpu"))["best"] is None
    single = tuning_report(rounds()[:1])
    assert entry(single, FAST)["decoders"]["plain"]["error"] is None
    assert not any(one["helps"] for one in single["tuning"])


def test_every_setting_is_measured_once_a_round_in_changing_order() -> None:
    order: list[str] = []
    shares: list[float] = []

    def measure(setting: str) -> Report:
        order.append(setting)
        return bench(1)

    report = tune(measure, 2, shares.append)
    assert order == [NONE, *SETTINGS, NONE, *SETTINGS[:0:-1]]
    assert shares == pytest.approx([i / 10 for i in range(1, 11)])
    assert report["settings"] == {"repeats": 2, "prompts": 1, "interrupted": False}


def test_without_the_measurement_to_compare_with_nothing_goes_on() -> None:
    def measure(setting: str) -> Report:
        raise MlxspecError("without a setting: it is gone")

    with pytest.raises(MlxspecError, match="without a setting: it is gone"):
        tune(measure, 2)


@pytest.mark.parametrize("after", [3, 8])
def test_an_interrupt_leaves_the_rounds_that_are_complete(after: int) -> None:
    calls: list[str] = []

    def measure(setting: str) -> Report:
        calls.append(setting)
        if len(calls) > after:
            raise KeyboardInterrupt
        return bench(1)

    if after < len(SETTINGS):
        with pytest.raises(KeyboardInterrupt):
            tune(measure, 3)
        return
    settings = tune(measure, 3)["settings"]
    assert (settings["repeats"], settings["interrupted"]) == (1, True)


@pytest.mark.slow
def test_a_process_has_the_setting_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scripted_model(tmp_path / "model", ("one", " two", "\n"))
    (tmp_path / "config.toml").write_text('mlx-settings = "MLX_MAX_MB_PER_BUFFER=7"\n')
    monkeypatch.setenv("MLXSPEC_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "9")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('the working directory is imported')\n")
    arguments = ("--model=model", "--max-tokens=4", "--limit=1", "--decoder=prompt-lookup")
    report = measured(arguments, FAST)
    assert report["machine"]["mlx_settings"] == FAST
    assert list(report["decoders"]) == ["plain", "prompt-lookup"]
    assert report["decoders"]["prompt-lookup"]["outputs"]["different"] == 0
    with pytest.raises(MlxspecError, match=r"^without a setting: .*'warp': choose among plain"):
        measured(("--model=model", "--decoder=warp"), NONE)


@pytest.mark.parametrize(
    ("status", "errors", "told"),
    [
        (1, b"Note: busy\nError: it differs\n", "it differs"),
        (-11, b"", "exit status -11"),
        (1, b"Traceback:\nValueError: \xff\n", "ValueError: \ufffd"),
    ],
)
def test_a_process_that_fails_is_one_line(
    status: int, errors: bytes, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, status, b"", errors)

    monkeypatch.setattr(subprocess, "run", ended)
    with pytest.raises(MlxspecError) as failure:
        measured([], FAST)
    assert str(failure.value) == f"{FAST}: {told}"
