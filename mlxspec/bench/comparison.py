"""Which policy wins on which chip: every one replayed under every cost curve, and the page."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..corpus.memory import Memory
from ..drafting.acceptance import Experience
from ..drafting.chips import ESTIMATED, Chip
from ..drafting.costs import CostCurve
from ..drafting.drafter import Drafter
from ..drafting.suffix_source import Earlier
from ..errors import OptionError
from ..jsonl import load_json
from .page import Bar, BarChart, render
from .policies import HINDSIGHT, POLICIES, Policy, Task
from .replay import (
    SLOW,
    JointReport,
    Replayed,
    ReplayReport,
    joint_report,
    replay,
    replay_jointly,
    replay_plain_batch,
    replay_report,
)
from .traces import Completion

_WIDEST = 1024  # rows; far more than any draft has
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)

Comparison = Mapping[str, Mapping[str, ReplayReport]]
"""Reports by chip and policy."""

JointComparison = Mapping[str, Mapping[str, JointReport]]
"""Reports of several sequences at once by chip and policy."""


_GUESSES = (
    "it drafts from the model's own guesses, and no model runs here; mlxspec bench measures it"
)
_NOT_REPLAYED = {
    "plain": "all speeds are against plain decoding already; leave it out",
    "lookahead": _GUESSES,
    "combined": _GUESSES,
}
"""Decoders of the other commands, and why none of their figures can be told."""


def chosen_policies(names: str) -> dict[str, Policy]:
    """The policies that a comma-separated list names, in its order; "all" names all.

    Raises:
        OptionError: one of them is unknown.
    """
    wanted = list(POLICIES) if names == "all" else [name.strip() for name in names.split(",")]
    try:
        return {name: POLICIES[name] for name in wanted}
    except KeyError as error:
        name = error.args[0]
        reason = _NOT_REPLAYED.get(name) or f"choose among {', '.join(POLICIES)}"
        raise OptionError(f"no decoder is replayed as {name!r}: {reason}") from None


def read_curve(path: Path) -> CostCurve:
    """Read a curve.

    The file holds the JSON of ``mlxspec calibrate``, or ``{"rows": [1, ...], "cost": [1, ...]}``.

    Raises:
        OptionError: it cannot be read, or holds no curve or several, or one of too many rows.
    """
    try:
        points = _points(load_json(path.read_text(encoding="utf-8-sig")))
    except _UNUSABLE as error:
        raise OptionError(
            f"{path}: no cost curve; write one with mlxspec calibrate MODEL --json"
        ) from error
    widest = max((rows for rows, _ in points), default=0)
    if widest > _WIDEST:
        raise OptionError(
            f"{path}: a cost curve up to {widest} rows; leave out what is beyond {_WIDEST}"
        )
    return CostCurve(points)


def _points(content: Any) -> list[tuple[int, float]]:
    if "curves" in content:
        (content,) = content["curves"]
    if "times" in content:
        return [(int(time["rows"]), float(time["cost"])) for time in content["times"]]
    rows, costs = content["rows"], content["cost"]
    return [(int(row), float(cost)) for row, cost in zip(rows, costs, strict=True)]


def compare(
    completions: Sequence[Completion],
    classes: bytes,
    policies: Mapping[str, Policy],
    curves: Mapping[str, CostCurve],
    on_progress: Callable[[float], None] = lambda share: None,
) -> dict[str, dict[str, ReplayReport]]:
    """Replay outputs with several policies on several chips.

    Args:
        completions: the recorded outputs, at least one.
        classes: of their tokens, see :func:`mlxspec.drafting.acceptance.token_classes`.
        policies: by name.
        curves: T(rows)/T(1) by the chip's name.
        on_progress: called with the share that is done.

    Returns:
        by chip and policy, in the order given.
    """
    replays = sum(len(curves) if policy.follows_costs else 1 for policy in policies.values())
    done, total = itertools.count(1), replays * len(completions)
    reports: dict[str, dict[str, ReplayReport]] = {chip: {} for chip in curves}
    for name, policy in policies.items():
        replayed: list[tuple[str, Replayed]] = []
        for chip, curve in curves.items():
            if policy.follows_costs or not replayed:  # without costs all chips have the same steps
                replayed, make_drafter = [], _drafters(policy, curve, classes)
                for one in completions:
                    outcome = replay(one.prompt, one.output, make_drafter(one))
                    replayed.append((one.category, outcome))
                    on_progress(next(done) / total)
            reports[chip][name] = replay_report(replayed, curve)
    return reports


def _drafters(policy: Policy, curve: CostCurve, classes: bytes) -> Callable[[Completion], Drafter]:
    """What gives each completion its drafter; all of them share one memory."""
    most, experience = policy.memory_tokens, Experience()
    if most == 0:
        return lambda one: policy.make_drafter(
            Task(one.output, curve, classes, experience=experience)
        )
    memory = Memory(sys.maxsize if most is None else most)
    earlier = Earlier("memory", memory, memory.used)

    def remember(output: Sequence[int], earned: Mapping[str, int], prompt: Sequence[int]) -> None:
        memory.add(output, earned, prompt)
        memory.settle(tidy=True)  # the next completion finds the same, however fast this goes

    return lambda one: policy.make_drafter(
        Task(one.output, curve, classes, earlier, remember, experience)
    )


def jointly_chosen(names: str, concurrency: int) -> dict[str, Policy]:
    """As :func:`chosen_policies`, for several sequences at once: "all" leaves out hindsight.

    Raises:
        OptionError: one of them is unknown, or means nothing there.
    """
    if names == "all":
        return {name: policy for name, policy in POLICIES.items() if name != HINDSIGHT}
    policies = chosen_policies(names)
    if HINDSIGHT in policies:
        raise OptionError(
            f"--decoder {HINDSIGHT} with --concurrency {concurrency}: it weighs one sequence "
            "alone; leave one of them out"
        )
    return policies


def compare_jointly(
    completions: Sequence[Completion],
    classes: bytes,
    policies: Mapping[str, Policy],
    curves: Mapping[str, CostCurve],
    concurrency: int,
    on_progress: Callable[[float], None] = lambda share: None,
) -> dict[str, dict[str, JointReport]]:
    """Replay several outputs at once, and set that against batching and drafting alone.

    Args:
        completions, classes, policies, curves, on_progress: as for :func:`compare`.
        concurrency: how many outputs run at once, at least 1.

    Returns:
        by chip and policy, in the order given.
    """
    done = itertools.count(1)
    total = (1 + 2 * len(curves) * len(policies)) * len(completions)

    def count() -> None:
        on_progress(next(done) / total)

    plain = replay_plain_batch(completions, concurrency, count)
    reports: dict[str, dict[str, JointReport]] = {}
    for chip, curve in curves.items():
        reports[chip] = {}
        for name, policy in policies.items():
            alone, joint = (
                replay_jointly(
                    completions, _drafters(policy, curve, classes), curve, at_once, count
                )
                for at_once in (1, concurrency)
            )
            reports[chip][name] = joint_report(joint, plain, alone, curve)
    return reports


def _fastest(reports: Mapping[str, ReplayReport]) -> str | None:
    """The fastest policy that can be reached; None where there is none."""
    reachable = [name for name in reports if name != HINDSIGHT]
    return max(reachable, key=lambda name: reports[name].speedup, default=None)


def _speeds(report: ReplayReport) -> str:
    return f"{report.speedup:.2f}×, worst set {report.worst:.2f}×"


def verdict(policies: Mapping[str, Policy], comparison: Comparison) -> list[str]:
    """Which policy wins where, a line for each winner; plain decoding where nothing gains."""
    won: dict[str, list[str]] = {}
    for chip, reports in comparison.items():
        best = _fastest(reports)
        if best and reports[best].speedup > 1:
            where = f"{chip} ({_speeds(reports[best])})"
            won.setdefault(policies[best].label, []).append(where)
        elif best:
            won.setdefault("plain decoding", []).append(chip)
    return [f"{winner} wins on {', '.join(chips)}." for winner, chips in won.items()]


def brief_verdict(
    policies: Mapping[str, Policy], comparison: Comparison, chips: Mapping[str, Chip]
) -> list[str]:
    """What is fastest on each chip, a line for each, below one on what was compared."""
    sets = next(iter(next(iter(comparison.values())).values())).sets
    outputs = sum(one.completions for one in sets.values())
    tokens = sum(one.tokens for one in sets.values())
    lines = [
        f"Modelled speed against plain decoding; outputs {outputs:,}, tokens {tokens:,}, sets "
        f"{len(sets)}, decoders {len(policies)}; {ESTIMATED}: a curve with estimates"
    ]
    for chip, reports in comparison.items():
        best = _fastest(reports)
        if best and reports[best].speedup > 1:
            label, speeds = policies[best].label, _speeds(reports[best])
            lines.append(f"{chips[chip].label}: {label} {speeds}")
        elif best:
            lines.append(f"{chips[chip].label}: nothing is faster")
    return lines


def joint_verdict(policies: Mapping[str, Policy], comparison: JointComparison) -> list[str]:
    """Whether batching and drafting add up, a line for each chip by its fastest decoder."""
    lines = []
    for chip, reports in comparison.items():
        best = max(reports, key=lambda name: reports[name].speedup)
        report = reports[best]
        finding = "add up" if report.adds_up else "add less than 2 % to the better of the two"
        lines.append(
            f"On {chip} batching and drafting {finding} ({policies[best].label} "
            f"{report.speedup:.2f}×, batching alone {report.plain_batching:.2f}×, one at a time "
            f"{report.one_at_a_time:.2f}×)."
        )
    return lines


def replay_page(
    comparison: Comparison,
    policies: Mapping[str, Policy],
    chips: Mapping[str, Chip],
    template: str = "replay.html",
    **more: Any,
) -> str:
    """The HTML page: one look tells which policy wins on which chip.

    Args:
        comparison: from :func:`compare`.
        policies: what was compared.
        chips: by name, the chips of the comparison.
        template: this one, or one that extends it.
        more: what such a template shows besides, or instead.
    """
    chart = BarChart(
        {
            chips[chip].label: [
                Bar(policies[name].label, report.speedup, unreachable=name == HINDSIGHT)
                for name, report in reports.items()
            ]
            for chip, reports in comparison.items()
        },
        SLOW,
    )
    sets = next(iter(next(iter(comparison.values())).values())).sets.values()
    values: dict[str, Any] = {
        "verdict": verdict(policies, comparison),
        "table": comparison,
        "chips": {chip: chips[chip] for chip in comparison},
        "estimated": ESTIMATED if any(chips[chip].estimated for chip in comparison) else "",
        "decoders": policies,
        "best": {
            chip: chart.best(bars)
            for chip, bars in zip(comparison, chart.groups.values(), strict=True)
        },
        "hindsight": HINDSIGHT,
        "chart": chart,
        "completions": sum(one.completions for one in sets),
        "tokens": sum(one.tokens for one in sets),
    }
    return render(template, **{**values, **more})
