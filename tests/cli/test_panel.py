import io
import re
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from mlxspec.cli.panel import figures_panel, machine_line, step_times_table
from mlxspec.generation.response import GenerationResult, SpeculationStats
from mlxspec.plan.live_costs import StepTime

RESULT = GenerationResult(
    text="",
    tokens=[0] * 3000,
    from_draft=[False] * 3000,
    finish_reason="stop",
    prompt_tokens=12000,
    prompt_tps=1234.56,
    generation_tps=56.78,
    peak_memory=0.0,
    stats=SpeculationStats(steps=1500, rows=3600, drafted=2100, accepted=1500, emitted=3000),
    step_times=[],
)


def lines(content: RenderableType, width: int, color: bool = False) -> list[str]:
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=color, color_system="256" if color else None
    )
    console.print(content)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_figure_stands_on_one_line_beside_its_name(width: int):
    panel = [line.strip("│ ") for line in lines(figures_panel(RESULT, legend=True), width)]
    figures = [re.sub(" +", " ", line) for line in panel]
    for expected in (
        "prompt tokens 12000 1,235/s",
        "generated tokens 3000 56.8/s",
        "steps 1500",
        "tokens per step 2.00",
        "acceptance rate 71% 1500/2100",
    ):
        assert expected in figures


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_frame_is_straight(width: int):
    lengths = {len(line) for line in lines(figures_panel(RESULT, legend=True), width)}
    assert len(lengths) == 1
    assert max(lengths) <= min(width, 42)


def test_the_legend_has_the_colours_of_the_text():
    shown = "\n".join(lines(figures_panel(RESULT, legend=True), 80, color=True))
    assert "\x1b[1;38;5;32m■ accepted draft\x1b[0m" in shown


def test_without_colours_there_is_no_legend_and_no_escape():
    shown = "\n".join(lines(figures_panel(RESULT, legend=False), 80))
    assert "■" not in shown
    assert "\x1b" not in shown


def test_plain_decoding_has_no_acceptance_rate():
    plain = replace(RESULT, stats=SpeculationStats(steps=5, rows=5, emitted=5))
    assert any("no drafts" in line for line in lines(figures_panel(plain, legend=False), 40))


def test_an_interrupted_generation_is_marked():
    interrupted = replace(RESULT, finish_reason="interrupted")
    assert "interrupted" in lines(figures_panel(interrupted, legend=False), 40)[-1]


def test_step_times_are_in_milliseconds_with_the_verify_cost():
    table = step_times_table(
        [StepTime(1, True, 30, 0.0125, 1.0), StepTime(11, False, 4, 0.03, None)]
    )
    rows = [line.split() for line in lines(table, 40) if line.strip()]
    assert rows[0] == ["rows", "steps", "ms", "cost"]
    assert rows[2:] == [["1", "pipelined", "30", "12.50", "1.00"], ["11", "4", "30.00", "–"]]


def test_a_hot_or_busy_machine_is_named():
    assert "hot or busy" in machine_line(1.8)
    assert "hot or busy" not in machine_line(1.05)
