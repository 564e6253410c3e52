"""The figures of an answer, as JSON and as rows of a panel."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .output import ratio

if TYPE_CHECKING:
    from ...generation.response import GenerationResult, SpeculationStats


def result_report(result: GenerationResult, model: str) -> dict[str, Any]:
    """The fields of the result, the derived figures, and the model's name."""
    report = {"model": model, **asdict(result), "generation_tokens": len(result.tokens)}
    del report["segments"]
    report["stats"] |= {
        "tokens_per_step": result.stats.tokens_per_step,
        "acceptance_rate": result.stats.acceptance_rate,
    }
    return report


def acceptance_row(stats: SpeculationStats) -> tuple[str, ...]:
    """The acceptance rate as a row of figures."""
    if not stats.drafted:
        return "acceptance rate", "–", "no drafts"
    return "acceptance rate", f"{stats.acceptance_rate:.0%}", f"{stats.accepted}/{stats.drafted}"


def speedup_rows(stats: SpeculationStats, predicted_cost: float) -> list[tuple[str, ...]]:
    """The speed against plain decoding as a row of figures; none where that is not known.

    Args:
        stats: what was generated.
        predicted_cost: what its steps take by the measured costs of rows, in plain steps, so
            that what else the machine did meanwhile does not count; 0 where it is not known.
    """
    return against_plain(stats.emitted, predicted_cost)


def against_plain(plain: float, taken: float) -> list[tuple[str, ...]]:
    """The speed against plain decoding as a row of figures; none where that is not known.

    Args:
        plain: the time that plain decoding would take, 0 where it is not known.
        taken: the time that it took, in the same unit; 0 where it is not known.
    """
    return [("against plain", ratio(plain / taken), "estimated")] if plain and taken else []


def rate(tokens_per_second: float) -> str:
    """A speed as a remark on a number of tokens; empty where it is 0, and so not known."""
    if not tokens_per_second:
        return ""
    return f"{tokens_per_second:,.{0 if tokens_per_second >= 100 else 1}f}/s"
