"""``mlxspec replay``: shows what drafts would gain on recorded outputs, without running a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import RenderableType

from ..terminal import one_line
from .common.model_choice import MODEL
from .common.options import (
    COUNT,
    DRAFTER,
    FILE,
    command,
    names_completed,
    option_field,
    options_of,
)
from .common.output import (
    ProgressBar,
    ReportOptions,
    counted,
    figures_table,
    folding_table,
    ratio,
)

if TYPE_CHECKING:
    from ..bench.policies import ReplayPolicy
    from ..bench.replay import Comparison
    from ..drafting.chips import Chip

_ALL = "all"


def _decoder_names() -> Iterator[str]:
    from ..bench.policies import POLICIES

    yield from (*POLICIES, _ALL)


@dataclass(frozen=True)
class ReplayOptions:
    """What to replay, and for which machine."""

    tokenizer: str = option_field(
        "-m --tokenizer --model MODEL",
        "A directory, a Hub repository, an alias, 'demo', or a tokenizer's file.",
        required=True,
        type=MODEL,
    )
    chips: tuple[str, ...] = option_field(
        "--chip NAME",
        "A chip with a known cost curve, such as 'M3 Max', or 'all'; repeatable.  [default: M4 "
        "Pro, or the --curve]",
        default=(),
    )
    curve: Path | None = option_field(  # noqa: RUF009
        "--curve FILE", "A cost curve written by 'mlxspec calibrate --json'."
    )
    limit: int = option_field(
        "--limit N", "At most N conversations per category, evenly spaced.", default=240, type=COUNT
    )
    drafter: str | None = option_field(
        DRAFTER, "Also replay your own drafter class, alone and with auto."
    )
    decoders: str = option_field(
        "--decoder A,B",
        "The decoders to replay: auto, prompt-lookup, or 'all'.",
        default="auto",
        shell_complete=names_completed(_decoder_names),
    )
    concurrency: int = option_field(
        "--concurrency N",
        "Run N outputs at once in shared steps, with and without drafts.",
        default=1,
        type=COUNT,
    )
    remember: str | None = option_field(
        "--remember N[,N...]",
        "Also replay the default decoder with a memory of earlier outputs, for each of these sizes "
        "in tokens: k stands for 1,024 and M for 1,048,576 (1M is usual); 'all' is no limit. A "
        "memory gets the outputs of all TRACES, one category after another, in the order of the "
        "files, except those that --limit leaves out.",
    )


@command("replay")
@click.argument(
    "traces",
    help="Recorded outputs: chat logs, as JSON lines.",
    metavar="TRACES...",
    nargs=-1,
    required=True,
    type=FILE,
)
@options_of(ReplayOptions, "options", "Work and machine")
@options_of(ReportOptions, "shows", "Output")
def replay_command(traces: tuple[Path, ...], options: ReplayOptions, shows: ReportOptions) -> None:
    """Show what each decoder would gain on recorded outputs.

    The real drafters and the real planner decode the outputs again, without a model. The time of a
    step with M rows is taken from a cost curve, T(M)/T(1).

    \b
    Examples:
      mlxspec replay traces.jsonl --tokenizer my_model --chip "M3 Max"
      mlxspec replay chats.jsonl --tokenizer tokenizer.model --decoder all
      mlxspec replay chats.jsonl --tokenizer my_model --curve curve.json
      mlxspec replay *.jsonl --tokenizer my_model --html replay.html
      mlxspec replay chats.jsonl --tokenizer my_model --chip all --concurrency 4
      mlxspec replay chats.jsonl --tokenizer my_model --remember 16k,1M,all

    A line of TRACES is an object with "messages", as in OpenAI-style chat logs. It may also have a
    "category", a "model", and "completions", the indices of the messages to replay.
    """
    from ..bench.prompts import read_completions
    from ..bench.replay import compare
    from ..models.tokenizer import VocabularyClasses, load_tokenizer_of

    policies = _policies(options)
    chips = _chips(options.chips, options.curve)
    tokenizer = load_tokenizer_of(options.tokenizer)
    completions = read_completions(traces, tokenizer, options.limit)
    curves = {name: chip.curve for name, chip in chips.items()}
    classes, n = VocabularyClasses(tokenizer), options.concurrency
    noted = f"replaying {counted(len(completions), 'output')}"
    with ProgressBar("Replaying", noted=noted) as on_progress:
        comparison = compare(completions, classes, policies, curves, n, on_progress)
    entries = [
        {"chip": chip, "estimated_rows": [*chips[chip].estimated], "decoder": name, **report}
        for chip, reports in comparison.items()
        for name, report in reports.items()
    ]
    tables = _tables(comparison, chips, options.concurrency)
    shows.show_tables({**entries[0], "comparison": entries}, tables)


def _policies(options: ReplayOptions) -> dict[str, ReplayPolicy]:
    """The policies of the requested decoders, drafter and memories."""
    from ..bench.policies import POLICIES, policies_with, policies_with_memory
    from ..bench.prompts import chosen
    from ..drafting.drafter import load_drafter

    policies = chosen(options.decoders, POLICIES)
    if options.drafter is not None:
        policies |= policies_with(load_drafter(options.drafter))
    if options.remember is not None:
        policies |= policies_with_memory(options.remember)
    return policies


def _chips(names: tuple[str, ...], file: Path | None) -> dict[str, Chip]:
    """The requested chips, by name."""
    from ..bench.replay import read_curve
    from ..drafting.chips import Chip, chip_names, known_chip

    chips = [*map(known_chip, chip_names() if _ALL in names else names)]
    if file:
        chips.append(Chip("own curve", read_curve(file), "measured on the user's machine"))
    return {chip.name: chip for chip in chips or [known_chip("M4 Pro")]}


def _tables(
    comparison: Comparison, chips: Mapping[str, Chip], several: int
) -> Iterator[RenderableType]:
    from ..bench.replay import verdict

    for chip, reports in comparison.items():
        at_once = f", {several} outputs at once" if several > 1 else ""
        estimates = f" ({chips[chip].about})" if chips[chip].about else ""
        yield one_line(f"Modelled on: {chip}{at_once}{estimates}")
        first = next(iter(reports.values()))
        if "sets" in first:
            caption = "speed against plain decoding"
            sets = folding_table("set", "outputs", "tokens", *reports, caption=caption)
            for name, figures in first["sets"].items():
                speeds = [ratio(report["sets"][name]["speedup"]) for report in reports.values()]
                counts = str(figures["completions"]), f"{figures['tokens']:,}"
                sets.add_row(one_line(name), *counts, *speeds)
            yield sets
        names = [name for name, value in first.items() if isinstance(value, float)]
        yield figures_table("decoder", reports, names, _TOGETHER if several > 1 else _ALONE)
    yield from map(one_line, verdict(comparison))


_ALONE = (
    "speedup: geometric mean over the sets; worst: speedup of the slowest set; share slow: share "
    "of outputs slower than plain by more than 2 % and two plain steps, mean over the sets"
)
_TOGETHER = (
    "speed of all outputs relative to one plain output; the cost of attending to several contexts "
    "is not modelled"
)
