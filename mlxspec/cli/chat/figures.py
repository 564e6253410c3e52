"""The figures of a chat: a line after each answer, and a panel of all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.panel import Panel

from ..common.figures import acceptance_row, speedup_rows
from ..common.output import counted, figures_grid

if TYPE_CHECKING:
    from ...generation.response import GenerationResponse, SpeculationStats


def answer_line(last: GenerationResponse, predicted_cost: float, ending: str) -> str:
    """The figures of one answer.

    Args:
        last: its last response.
        predicted_cost: as for :func:`.common.figures.speedup_rows`.
        ending: why it ended, where that is not for the model's own reasons.
    """
    figures = [counted(last.generation_tokens, "token"), f"{last.generation_tps:,.1f}/s"]
    if predicted_cost:
        figures.append(f"{last.stats.emitted / predicted_cost:.1f}× plain")
    figures += [
        f"{last.stats.tokens_per_step:.2f} per step",
        f"{last.reused_tokens:,} of {last.prompt_tokens:,} prompt tokens reused",
    ]
    return " · ".join([*figures, ending] if ending else figures)


class ChatFigures:
    """Adds up what the answers of a conversation took."""

    def __init__(self) -> None:
        self._answers = self._prompt_tokens = self._reused_tokens = self._context = 0
        self._stats: SpeculationStats | None = None
        self._seconds = self._predicted_cost = 0.0
        self._predicted_tokens = 0

    def add(self, last: GenerationResponse, predicted_cost: float) -> None:
        """Count an answer.

        Args:
            last: its last response.
            predicted_cost: as for :func:`.common.figures.speedup_rows`.
        """
        self._answers += 1
        self._prompt_tokens += last.prompt_tokens
        self._reused_tokens += last.reused_tokens
        self._context = last.prompt_tokens + last.generation_tokens
        self._seconds += last.generation_tokens / last.generation_tps
        earlier = vars(self._stats) if self._stats else {}
        sums = {name: value + earlier.get(name, 0) for name, value in vars(last.stats).items()}
        self._stats = replace(last.stats, **sums)
        if predicted_cost:
            self._predicted_cost += predicted_cost
            self._predicted_tokens += last.stats.emitted

    def panel(self, context_length: int | None) -> Panel:
        """All figures.

        Args:
            context_length: the model's, in tokens, where it is known.
        """
        rows: list[tuple[str, ...]] = [
            ("answers", str(self._answers)),
            ("context", f"{self._context:,}", f"of {context_length:,}" if context_length else ""),
            ("prompt tokens", f"{self._prompt_tokens:,}"),
            ("of them reused", f"{self._reused_tokens:,}"),
        ]
        if self._stats:
            rate = f"{self._stats.emitted / self._seconds:,.1f}/s"
            predicted = replace(self._stats, emitted=self._predicted_tokens)
            rows += [
                ("generated tokens", f"{self._stats.emitted:,}", rate),
                ("tokens per step", f"{self._stats.tokens_per_step:.2f}"),
                acceptance_row(self._stats),
                *speedup_rows(predicted, self._predicted_cost),
            ]
        return Panel(figures_grid(rows), expand=False, border_style="dim")
