"""``mlxspec calibrate``: what a step over M rows costs, for this model on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import MlxspecError, OptionError
from ..terminal import visible
from .common.model_choice import ABOUT, DEFAULT, MODEL, model_argument, needed_model
from .common.options import (
    ADAPTERS,
    COUNT,
    HEAD,
    NAME,
    NO_HEAD,
    check_one,
    command,
    option,
    options_of,
)
from .common.output import ProgressBar, ReportOptions

if TYPE_CHECKING:
    import mlx.nn as nn

    from ..drafting.kept import CostCache, CostKey, KnownTimes
    from ..engine.heads import TrainedHead

_MOST_SEQUENCES = 64  # whose steps are shown
_DIGEST = 8  # characters, enough to distinguish models of one kind and size

_WIDEST_BAR = 60  # columns
_measurement = partial(option, group="Measurement")


@command("calibrate", short_help="Measure what steps of MODEL cost by their rows.")
@model_argument(ABOUT + DEFAULT)
@_measurement(*ADAPTERS, type=NAME)
@_measurement(
    "--context N",
    "Measure behind N tokens of context; may be given several times.  [default: 64, 1000 and "
    "8000, or as many as the model and the memory allow]",
    type=COUNT,
    multiple=True,
)
@_measurement(
    HEAD[0],
    "Also measure the drafts of this trained head.  [default: the one that comes with MODEL, if it "
    "has one]",
    type=MODEL,
)
@_measurement(*NO_HEAD)
@_measurement("--sequences N", "Measure steps that N sequences share.", default=1, type=COUNT)
@_measurement("--show", "Show what is known of MODEL, or else of all, and measure nothing.")
@options_of(ReportOptions, "shows", "Output")
def calibrate_command(
    *,
    model: str | None,
    adapter_path: str | None,
    context: tuple[int, ...],
    head: str | None,
    no_head: bool,
    sequences: int,
    show: bool,
    shows: ReportOptions,
) -> None:
    """Measure what steps of MODEL cost by their number of rows, and keep it.

    \b
    Examples:
      mlxspec calibrate mlx-community/Mistral-7B-Instruct-v0.3-4bit
      mlxspec calibrate demo --context 100 --context 500 --html curve.html
      mlxspec calibrate demo --sequences 4
      mlxspec calibrate --show

    A draft of M - 1 tokens pays if its step emits more tokens than T(M)/T(1). The default
    decoder measures this quickly at first use and corrects it with every step. This command
    measures it carefully, best on an otherwise idle machine. It measures behind short and long
    contexts, since attention to a long context can make wide drafts much more expensive. Between
    these lengths times follow a straight line. On a GPU it also finds out whether wide drafts
    are faster with their attention split. With a trained head it shows what drafts of the head
    take, which comes on top of the step. If the times scatter too much, nothing is kept, and
    the exit status is 1. The times are kept in the user's cache directory, or in the directory
    that MLXSPEC_CACHE_DIR names.
    """
    from ..drafting.kept import CostCache

    shows.check()
    check_one(head=head, no_head=no_head)
    check_one(head=head, show=show, sequences=sequences > 1)
    if show and adapter_path is not None and model is None:
        raise OptionError("--adapter-path is given without its MODEL: name that, too")
    cache = CostCache()
    if show:
        curves, of_head = _known(cache, model, adapter_path, context), None
        report: dict[str, Any] = {"curves": curves}
    else:
        wanted = False if no_head or sequences > 1 else head
        curves, of_head = _measured(
            cache, needed_model(model), adapter_path, wanted, context, sequences
        )
        report = {**curves[0], "longer_contexts": curves[1:], "head": of_head}
    shows.show_tables(report, lambda: _tables(curves, of_head))


# --- the curves: measured, or known from before ---

Curve = dict[str, Any]
"""What ``--json`` reports of a curve: machine, model and times by rows."""


def _curve(key: CostKey, context: int, known: KnownTimes, name: str) -> Curve:
    """The curve behind a context.

    Its times have by ``rows`` the ``seconds``, ``cost`` T(rows)/T(1), and the ``error``: half of
    the cost's relative 95 % interval.
    """
    from ..drafting.measurement import cost_errors

    times = known.times
    return {
        "name": known.name or name or None,
        "machine": key.machine,
        "model": key.model,
        "context": context,
        "source": known.source,
        "updated": known.updated,
        "split_attention": known.split,
        "times": [
            {
                "rows": time.rows,
                "seconds": time.seconds,
                "cost": time.seconds / times[0].seconds,
                "error": error,
                "seconds_per_row": time.seconds / time.rows,
            }
            for time, error in zip(times, cost_errors(times), strict=True)
        ],
    }


def _measured(
    cache: CostCache,
    name: str,
    adapter_path: str | None,
    head: str | bool | None,
    contexts: Sequence[int],
    sequences: int,
) -> tuple[list[Curve], dict[str, Any] | None]:
    """Load a model, measure it carefully, and keep that; see :func:`measured_curves`.

    Returns:
        the curves, and the times of a head, if any.
    """
    from ..engine.heads import attach_head
    from ..models.heads.loading import load_with_head
    from ..models.model_files import given_name

    model, _, its_head = load_with_head(name, head, adapter_path)
    curves = measured_curves(cache, model, given_name(name), contexts, sequences)
    plain_step = curves[0]["times"][0]["seconds"]
    trained = attach_head(its_head, model) if its_head else None
    return curves, _times_of_head(trained, plain_step) if trained else None


def measured_curves(
    cache: CostCache, model: nn.Module, name: str, contexts: Sequence[int] = (), sequences: int = 1
) -> list[Curve]:
    """Measure carefully, and keep it. An interrupt before the end leaves the cache as it was.

    Args:
        cache: where the times are kept.
        model: an mlx-lm model.
        name: what reports call it.
        contexts: the lengths behind which to measure; by default a short one and longer ones.
        sequences: how many share each step.

    Raises:
        MlxspecError: the times are noise; nothing is kept.
    """
    from ..drafting.measurement import CAREFUL, noise
    from ..engine.costs import (
        calibrate,
        check_context,
        cost_key,
        known_times,
        measured_contexts,
        split_length,
    )
    from ..engine.patches import split_attention

    for asked in contexts:
        check_context(model, CAREFUL, asked)
    # Shared steps are measured with their attention split as it will be.
    split_attention(model, split_length(cache.read(cost_key(model))))
    found = {}
    for context in sorted(set(contexts)) or measured_contexts(model, sequences):
        with ProgressBar("Prefill") as prefill, ProgressBar("Measuring step times") as measuring:
            times, split = calibrate(
                model,
                CAREFUL,
                context=context,
                sequences=sequences,
                on_prefill=prefill,
                on_progress=measuring,
            )
        if problem := noise(times):
            raise MlxspecError(
                f"{name}: {problem}; nothing is kept, and what was known stays: close other "
                "programs and measure again"
            )
        found[context] = known_times(times, split, CAREFUL, "careful", name)
    key = cost_key(model).of_sequences(sequences)
    cache.update(key, found)
    return [_curve(key, context, known, name) for context, known in found.items()]


def _times_of_head(trained: TrainedHead, plain_step: float) -> dict[str, Any]:
    """The head's kind, and by the ``tokens`` of a draft its ``seconds`` and ``cost``.

    Args:
        trained: a head, attached to its target.
        plain_step: the seconds of a plain step, the unit of the cost.
    """

    times = []
    for tokens in range(1, trained.head.most + 1):
        seconds = trained.experience.seconds(tokens)
        times.append({"tokens": tokens, "seconds": seconds, "cost": seconds / plain_step})
    return {"kind": trained.head.title, "times": times}


def _known(
    cache: CostCache, name: str | None, adapter_path: str | None, contexts: Sequence[int]
) -> list[Curve]:
    """The curves in the cache: of one model on this machine, or all."""
    from ..engine.costs import cost_key
    from ..models.model import load
    from ..models.model_files import given_name

    if name is None:
        entries = list(cache.entries())
    else:
        key = cost_key(load(name, adapter_path=adapter_path, lazy=True)[0])
        keys = [key.of_sequences(count) for count in range(1, _MOST_SEQUENCES + 1)]
        entries = [(key, cache.read(key)) for key in keys]
    return [
        # Times that decoding has measured by itself have no name.
        _curve(key, context, known, given_name(name) if name else "")
        for key, times in entries
        for context, known in sorted(times.items())
        if not contexts or context in contexts
    ]


# --- tables ---


def _tables(curves: list[Curve], of_head: dict[str, Any] | None) -> Iterator[RenderableType]:
    if not curves:
        yield "No step times are known yet: mlxspec calibrate MODEL measures them."
    for curve in curves:
        model, times = curve["model"], curve["times"]
        yield Text(visible(curve["name"] or str(model.get("type"))), "bold")
        yield from (visible(", ".join(map(str, facts))) for facts in _about(curve))
        yield _table(times)
        if len(times) == 1:
            yield "Only plain steps were measured; mlxspec inspect says what the model verifies.\n"
            continue
        if (sequences := int(model.get("sequences") or 1)) > 1:
            yield f"T(1) is a plain step of all {sequences} sequences; other rows are of drafts."
        else:
            yield "A draft pays when its step emits more than T(M)/T(1) tokens."
        yield Text("± is half the width of a 95 % confidence interval of T(M)/T(1).\n", "dim")
    if of_head:
        yield Text(f"Drafts of the trained head, {of_head['kind']}", "bold")
        table = _empty_table("tokens", "ms", "plain steps")
        for draft in of_head["times"]:
            seconds, cost = _milliseconds(draft["seconds"]), f"{draft['cost']:.2f}"
            table.add_row(str(draft["tokens"]), seconds, cost)
        yield table
        yield "A step takes this time before its T(M)/T(1) if the head drafts for it.\n"


def _about(curve: Curve) -> tuple[list[object], list[object]]:
    """What is known of the model, and of its measurement."""
    model, machine = curve["model"], curve["machine"]
    about = [
        *(model.get("type"), f"{(model.get('parameters') or 0) / 1e6:,.1f} M parameters"),
        f"{model.get('bits_per_weight')} bits each in memory",
        f"digest {str(model.get('digest'))[:_DIGEST]}",
    ]
    if model.get("sequences"):
        about.append(f"{model['sequences']} sequences")
    measured = [machine.get("chip"), machine.get("device")]
    if machine.get("blas") not in (None, "own"):
        measured.append(machine["blas"])
    measured += [f"MLX {machine.get('mlx')}", f"behind {curve['context']:,} tokens"]
    measured += [curve["source"], curve["updated"][:10]]
    if curve["split_attention"]:
        measured.append("attention split")
    return about, measured


def _table(points: Sequence[dict[str, float]]) -> Table:
    """Rows, milliseconds and costs, the costs as bars, too."""
    table = _empty_table("rows", "ms", "T(M)/T(1)", "ms/row", "±")
    table.add_column(max_width=_WIDEST_BAR)
    highest = max(point["cost"] for point in points)
    for point in points:
        table.add_row(
            str(point["rows"]),
            _milliseconds(point["seconds"]),
            f"{point['cost']:.2f}",
            _milliseconds(point["seconds_per_row"]),
            f"{point['error']:.0%}" if point["rows"] > 1 else "–",
            Bar(highest, 0, point["cost"], color="blue"),
        )
    return table


def _empty_table(*headings: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 1 else f"{1000 * seconds:.0f}"
