"""The figures of a chat: a line after each answer, and a panel of them all."""

from __future__ import annotations

from rich.panel import Panel
from rich.table import Table

from ..generation.response import GenerationResponse, SpeculationStats


class ChatFigures:
    """Adds up what the answers of a conversation took."""

    def __init__(self) -> None:
        self.answers = 0
        self._prompt_tokens = self._reused_tokens = self._context = 0
        self._stats = SpeculationStats()
        self._seconds = 0.0

    def add(self, last: GenerationResponse) -> None:
        """Count an answer by its last response."""
        total, stats = self._stats, last.stats
        self.answers += 1
        self._prompt_tokens += last.prompt_tokens
        self._reused_tokens += last.reused_tokens
        self._context = last.prompt_tokens + last.generation_tokens
        self._seconds += last.generation_tokens / last.generation_tps
        self._stats = SpeculationStats(
            **{name: value + getattr(total, name) for name, value in vars(stats).items()}
        )

    def panel(self, context_length: int | None) -> Panel:
        """All figures.

        Args:
            context_length: the model's, in tokens, where it is known.
        """
        stats, table = self._stats, Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(justify="right")
        table.add_column()
        limit = f"of {context_length:,}" if context_length else ""
        table.add_row("answers", str(self.answers))
        table.add_row("context", f"{self._context:,}", limit)
        table.add_row("prompt tokens", f"{self._prompt_tokens:,}")
        table.add_row("of them reused", f"{self._reused_tokens:,}")
        rate = f"{stats.emitted / self._seconds:,.1f}/s" if self._seconds else ""
        table.add_row("generated tokens", f"{stats.emitted:,}", rate)
        table.add_row("tokens per step", f"{stats.tokens_per_step:.2f}")
        share = f"{stats.accepted:,}/{stats.drafted:,}" if stats.drafted else "no drafts"
        rate = f"{stats.acceptance_rate:.0%}" if stats.drafted else "–"
        table.add_row("acceptance rate", rate, share)
        return Panel(table, expand=False, border_style="dim")


def figures_line(last: GenerationResponse, ending: str) -> str:
    """The figures of one answer.

    Args:
        last: its last response.
        ending: why it ended, where that is not for the model's own reasons.
    """
    figures = [
        f"{last.generation_tokens:,} tokens",
        f"{last.generation_tps:,.1f}/s",
        f"{last.stats.tokens_per_step:.2f} per step",
        f"{last.reused_tokens:,} of {last.prompt_tokens:,} prompt tokens reused",
    ]
    return " · ".join([*figures, ending] if ending else figures)
