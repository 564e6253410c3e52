"""What a generation has done, for the eye: the panel of figures and the table of step times."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..generation.response import GenerationResult, StepTime
from ..terminal import colored

_NOTICEABLY_SLOW = 1.3


def figures_panel(result: GenerationResult, legend: bool) -> Panel:
    """The figures of a generation, and the meaning of the two colours.

    Args:
        result: what was generated.
        legend: whether the text was in colour.
    """
    stats = result.stats
    figures = Table.grid(padding=(0, 2))
    figures.add_column()
    figures.add_column(justify="right")
    figures.add_column()
    figures.add_row("prompt tokens", str(result.prompt_tokens), _rate(result.prompt_tps))
    if result.reused_tokens:
        figures.add_row("of them cached", str(result.reused_tokens))
    figures.add_row("generated tokens", str(len(result.tokens)), _rate(result.generation_tps))
    figures.add_row("steps", str(stats.steps))
    figures.add_row("tokens per step", f"{stats.tokens_per_step:.2f}")
    if stats.drafted:
        share = f"{stats.accepted}/{stats.drafted}"
        figures.add_row("acceptance rate", f"{stats.acceptance_rate:.0%}", share)
    else:
        figures.add_row("acceptance rate", "–", "no drafts")
    parts: list[RenderableType] = [figures]
    if legend:
        meaning = f"{colored('■ accepted draft', True)}  {colored('■ target’s own', False)}"
        parts += ["", Text.from_ansi(meaning)]
    interrupted = "interrupted" if result.finish_reason == "interrupted" else None
    return Panel(Group(*parts), expand=False, border_style="dim", subtitle=interrupted)


def step_times_table(step_times: list[StepTime]) -> Table:
    """T(rows): medians of the wall time of steps by their rows, and the verify cost."""
    table = Table(box=SIMPLE)
    for heading in ("rows", "steps", "ms", "cost"):
        table.add_column(heading, justify="right")
    for time in step_times:
        cost = "–" if time.cost is None else f"{time.cost:.2f}"
        rows = f"{time.rows} pipelined" if time.pipelined else str(time.rows)
        table.add_row(rows, str(time.steps), f"{time.seconds * 1000:.2f}", cost)
    return table


def _rate(tokens_per_second: float) -> str:
    if not tokens_per_second:
        return ""
    return f"{tokens_per_second:,.{0 if tokens_per_second >= 100 else 1}f}/s"


def machine_line(slowdown: float) -> str:
    """How the machine's speed compares with that of its measurement.

    Args:
        slowdown: time of a plain step now over the measured one.
    """
    cause = ": it is hot or busy" if slowdown > _NOTICEABLY_SLOW else ""
    return f"A plain step takes {slowdown:.2f} times as long as when it was measured{cause}."
