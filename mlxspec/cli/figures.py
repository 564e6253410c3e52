"""The figures of an answer, as JSON and as rows of a panel."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..generation.response import GenerationResult, SpeculationStats


def result_report(result: GenerationResult, model: str) -> dict[str, Any]:
    """The fields of the result, the derived figures, and the model's name."""
    report = {"model": model, **asdict(result), "generation_tokens": len(result.tokens)}
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


def rate(tokens_per_second: float) -> str:
    """A speed as a remark on a number of tokens; empty where it is 0, and so not known."""
    if not tokens_per_second:
        return ""
    return f"{tokens_per_second:,.{0 if tokens_per_second >= 100 else 1}f}/s"
