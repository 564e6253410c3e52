"""``mlxspec bench --tune``: what MLX's tuning variables bring.

MLX reads them once in a process, so each setting is measured in processes of its own, one a round.
A setting is written as for ``mlxspec config set mlx-settings``: "NAME=1,OTHER=512", "" for none.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory

from ..errors import MlxspecError
from ..process import MLX_VARIABLES, variables_in
from .measure import Report, in_turn

NONE = ""
_EACH = [f"{name}={value}" for name, value in MLX_VARIABLES.items()]
SETTINGS = [NONE, *_EACH, ",".join(_EACH)]
"""What is measured: none, each variable alone, all together."""

# Student's t for a 95 % confidence interval, by degrees of freedom; more of them count as nine.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def measured(arguments: Sequence[str], setting: str) -> Report:
    """Run ``mlxspec bench`` under this setting and no other, and return its report.

    The process sees neither the user's settings nor step times that were measured under others.

    Raises:
        MlxspecError: it failed.
    """
    command = [sys.executable, "-P", "-m", "mlxspec", "bench", "--json", "--repeats=1", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in MLX_VARIABLES}
    with TemporaryDirectory() as empty:
        places = dict.fromkeys(("MLXSPEC_CONFIG_DIR", "MLXSPEC_CACHE_DIR"), empty)
        done = subprocess.run(
            command,
            env=environment | places | variables_in(setting),
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    if done.returncode:
        said = done.stderr.decode(errors="replace").splitlines()
        reason = said[-1].removeprefix("Error: ") if said else f"exit status {done.returncode}"
        raise MlxspecError(f"{setting or 'without a setting'}: {reason}")
    report: Report = json.loads(done.stdout)
    return report


def tune(
    measure: Callable[[str], Report],
    rounds: int,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Report:
    """Measure all settings in turns, until the end or Ctrl-C, and sum up.

    Args:
        measure: called with a setting; as :func:`measured`.
        rounds: how often each setting is measured, after a first measurement that does not count.
        on_progress: called with the share that is done.

    Returns:
        see :func:`tuning_report`.

    Raises:
        MlxspecError: a measurement failed.
        KeyboardInterrupt: before the first round was complete.
    """
    complete: list[dict[str, Report]] = []
    interrupted = True
    with suppress(KeyboardInterrupt):
        measure(NONE)  # does not count: the first process finds a cold machine
        for number in range(rounds):
            reports: dict[str, Report] = {}
            for setting in in_turn(SETTINGS, number):
                reports[setting] = measure(setting)
                on_progress((number + len(reports) / len(SETTINGS)) / rounds)
            complete.append(reports)
        interrupted = False
    if not complete:
        raise KeyboardInterrupt
    return tuning_report(complete, interrupted)


def tuning_report(rounds: Sequence[Mapping[str, Report]], interrupted: bool = False) -> Report:
    """Sum up rounds, each with a report of ``mlxspec bench`` by setting.

    Returns:
        ``tuning`` has an entry for each setting. For each decoder it has the median of
        ``tokens_per_second``, the ``ratio`` to its speed without a setting, taken prompt by prompt
        in each round, and the ``error``: half of the ratio's relative 95 % interval over the
        rounds, None with one round. A setting ``helps`` if every decoder's ratio is above 1 by more
        than its error. ``best`` is the setting that helps most, None without one and on a CPU.
    """
    first_round = rounds[0]
    first = first_round[NONE]
    entries = [_entry(setting, rounds) for setting in first_round]
    # The decoder that gains least counts.
    helpful = {
        min(of["ratio"] for of in entry["decoders"].values()): entry["mlx_settings"]
        for entry in entries
        if entry["helps"] and first["machine"]["device"] != "cpu"
    }
    settings = first["settings"] | {"repeats": len(rounds), "interrupted": interrupted}
    return {
        **{"model": first["model"], "machine": first["machine"], "settings": settings},
        "tuning": entries,
        "best": helpful[max(helpful)] if helpful else None,
    }


def _entry(setting: str, rounds: Sequence[Mapping[str, Report]]) -> Report:
    decoders: Report = {}
    for name in rounds[0][NONE]["decoders"]:
        rates = [
            (_rates(reports[setting], name), _rates(reports[NONE], name)) for reports in rounds
        ]
        gains = [fmean(math.log(own / none) for own, none in zip(*of, strict=True)) for of in rates]
        error = None
        if (n := len(gains)) > 1:
            error = math.expm1(_T[min(n - 1, len(_T)) - 1] * stdev(gains) / math.sqrt(n))
        decoders[name] = {
            "tokens_per_second": median(rate for own, _ in rates for rate in own),
            "ratio": math.exp(fmean(gains)),
            "error": error,
        }
    helps = all(
        of["error"] is not None and of["ratio"] > 1 + of["error"] for of in decoders.values()
    )
    return {"mlx_settings": setting, "decoders": decoders, "helps": helps}


def _rates(report: Report, decoder: str) -> list[float]:
    return [of["decoders"][decoder]["tokens_per_second"] for of in report["prompts"]]
