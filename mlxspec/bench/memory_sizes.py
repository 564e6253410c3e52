"""What a memory of earlier outputs gains, by its size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..drafting.chips import Chip
from ..errors import OptionError
from .comparison import Comparison, JointComparison, replay_page
from .page import Line, LineChart
from .policies import AUTO, POLICIES, Policy

_ALL = "all"
_LETTERS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_SIZE = re.compile(r"([0-9]{1,15})([km]?)", re.ASCII | re.IGNORECASE)

ENOUGH = 1.01
"""A memory is large enough if no larger one is faster by more than this."""


def memories(sizes: str) -> dict[str, Policy]:
    """The default decoder with memories of the sizes that a comma-separated list names.

    Args:
        sizes: numbers of tokens, with k for 1,024 and M for 1,048,576, or "all" for a memory
            without bound.

    Returns:
        by name, the smallest memory first. Before them, for comparison, stands the decoder without
        one, whether 0 is in the list or not.

    Raises:
        OptionError: a size has another form, or one is named twice.
    """
    found: list[int | None] = []
    for text in sizes.split(","):
        size = _size(text.strip())
        if size in found:
            raise OptionError(f"--memory names {_name(size)} twice: name each size once")
        found.append(size)
    bounded = sorted({0, *(size for size in found if size is not None)})
    unbounded = [None] if None in found else []
    names = {
        "no memory" if size == 0 else f"memory {_name(size)}": size
        for size in [*bounded, *unbounded]
    }
    return {
        name: replace(POLICIES[AUTO], label=name, memory_tokens=size)
        for name, size in names.items()
    }


def _size(text: str) -> int | None:
    if text == _ALL:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise OptionError(
            f"--memory: {text!r} is no size: give tokens as 4096, 16k or 1M, 0 for nothing, or all"
        )
    return int(match[1]) * _LETTERS[match[2].lower()]


def _name(size: int | None) -> str:
    """A size in short: "0", "1,000", "16k", "1M", "all"."""
    if size is None:
        return _ALL
    for letter in ("m", "k"):
        if size and size % _LETTERS[letter] == 0:
            return f"{size // _LETTERS[letter]:,}{'M' if letter == 'm' else letter}"
    return f"{size:,}"


def _enough(speeds: Sequence[float]) -> int:
    """The index of the first that no later one exceeds by more than 1 %."""
    return next(
        index for index, speed in enumerate(speeds) if max(speeds[index:]) <= ENOUGH * speed
    )


def memory_verdict(
    policies: Mapping[str, Policy], comparison: Comparison | JointComparison
) -> list[str]:
    """What remembering gains: a line for each size that is enough, with the chips where it is.

    Args:
        policies: from :func:`memories`.
        comparison: of these, by chip and name.
    """
    sizes = [policy.memory_tokens for policy in policies.values()]
    found: dict[int, list[str]] = {}
    for chip, reports in comparison.items():
        speeds = [report.speedup for report in reports.values()]
        enough = _enough(speeds)
        without, with_it = speeds[0], speeds[enough or -1]
        change = f"{chip} ({without:.2f}× to {with_it:.2f}×)"
        if len(sizes) == 1:
            change = f"{without:.2f}× on {chip}"
        elif enough:
            change = f"{100 * (with_it / without - 1):.1f} % on {change}"
        found.setdefault(enough, []).append(change)
    return [_sentence(sizes, enough, ", ".join(found[enough])) for enough in sorted(found)]


def _sentence(sizes: Sequence[int | None], enough: int, changes: str) -> str:
    if len(sizes) == 1:
        return f"Without a memory the speed is {changes}."
    if enough == 0:
        return f"Remembering gains at most 1 % on {changes}."
    size = sizes[enough]
    what = "everything" if size is None else f"{_name(size)} tokens"
    others = "; no larger memory is more than 1 % faster"
    if enough == len(sizes) - 1:
        others = "; every smaller memory is more than 1 % slower" if enough > 1 else ""
    return f"Remembering {what} gains {changes}{others}."


def memory_page(
    comparison: Comparison, policies: Mapping[str, Policy], chips: Mapping[str, Chip]
) -> str:
    """The HTML page: one look tells which size is enough on which chip.

    Args:
        comparison: by chip and name.
        policies: from :func:`memories`.
        chips: by name, the chips of the comparison.
    """
    lines = {}
    for chip, reports in comparison.items():
        speeds = [report.speedup for report in reports.values()]
        lines[chip] = Line(speeds, marked=_enough(speeds))
    labels = [_name(policy.memory_tokens) for policy in policies.values()]
    return replay_page(
        comparison,
        policies,
        chips,
        "memory.html",
        verdict=memory_verdict(policies, comparison),
        sizes=LineChart(labels, lines),
    )
