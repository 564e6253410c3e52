"""``mlxspec calibrate``: measures the cost of a step over M rows, for a model on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.console import RenderableType
from rich.text import Text

from ..errors import MlxspecError
from ..terminal import one_line
from .common.model_choice import MODEL, model_argument, model_or_default, note_if_demo
from .common.options import (
    ADAPTERS,
    COUNT,
    HEAD,
    NAME,
    NO_HEAD,
    check_one,
    command,
    option_field,
    options_of,
)
from .common.output import ProgressBar, ReportOptions, folding_table

if TYPE_CHECKING:
    import mlx.nn as nn

    from ..drafting.cost_file import Calibration, CostFile

_DIGEST = 8  # characters, enough to distinguish models of one kind and size
_WIDEST_BAR = 60  # columns


@dataclass(frozen=True)
class CalibrateOptions:
    """What to measure."""

    adapter_path: str | None = option_field(*ADAPTERS, type=NAME)
    contexts: tuple[int, ...] = option_field(
        "--context N",
        "Measure after N tokens of context; repeatable.  [default: 64, 1000 and "
        "8000, as far as the model and the memory allow]",
        type=COUNT,
        multiple=True,
    )
    head: str | None = option_field(
        HEAD[0],
        "Also measure this trained head's drafts.  [default: the head that comes with MODEL, "
        "if it has one]",
        type=MODEL,
    )
    no_head: bool = option_field(*NO_HEAD, default=False)
    show: bool = option_field(
        "--show",
        "Show the stored times of MODEL, or of all models, without measuring.",
        default=False,
    )


@command("calibrate", short_help="Measure the cost of MODEL's steps by their rows.")
@model_argument()
@options_of(CalibrateOptions, "options", "Measurement")
@options_of(ReportOptions, "shows", "Output")
def calibrate_command(model: str | None, options: CalibrateOptions, shows: ReportOptions) -> None:
    """Measure how long MODEL's steps take with different numbers of rows, and keep the times.

    \b
    Examples:
      mlxspec calibrate mlx-community/Mistral-7B-Instruct-v0.3-4bit
      mlxspec calibrate demo --context 100 --context 500 --html curve.html
      mlxspec calibrate --show

    T(M) is the time of a step with M rows. A draft of M - 1 tokens pays if its step emits more than
    T(M)/T(1) tokens. The default decoder begins with typical costs, and corrects them with
    every step. This command measures T carefully; run it while the machine is otherwise idle. It
    measures after short and long contexts, since attention to a long context can make wide drafts
    much more expensive. For lengths between these, it interpolates. On a GPU it also finds out
    whether wide drafts are faster with their attention split. With a trained head, it also shows
    how much time the head's drafts add to a step. Steps that several sequences share are timed
    while they run; --show has their times, too. If the times scatter too much, nothing is kept,
    and the exit status is 1. The times are kept in your cache directory, or in the directory that
    MLXSPEC_CACHE_DIR names.
    """
    check_one(head=options.head, no_head=options.no_head, show=options.show)
    if options.show:
        report: Report = {"curves": _known(model, options)}
    else:
        note_if_demo(model)
        report = _measured(model_or_default(model), options)
    shows.show_tables(report, _tables(report))


# --- the curves: measured, or known from before ---

Report = dict[str, Any]


def _curve(file: CostFile, context: int, known: Calibration) -> Report:
    """The cost curve after a context.

    Each of its times has ``rows``, ``seconds``, the ``cost`` T(rows)/T(1), and the ``error``: half
    the width of the cost's 95 % interval, relative to the cost.
    """
    from ..drafting.measurement import cost_errors

    times = known.times
    return {
        "name": known.name or None,
        "machine": file.machine,
        "model": file.model,
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
            }
            for time, error in zip(times, cost_errors(times), strict=True)
        ],
    }


def _measured(name: str, options: CalibrateOptions) -> Report:
    """Load a model, measure it carefully, and keep the times.

    Returns:
        the curve after the shortest context. It includes the curves after longer contexts, and the
        kind and the times of the head, if there is one.
    """
    from ..engine.heads import attach_head
    from ..models.heads.loading import load_with_head
    from ..models.model_files import given_name

    wanted = False if options.no_head else options.head
    model, _, its_head = load_with_head(name, wanted, options.adapter_path)
    first, *longer = measured_curves(model, given_name(name), options.contexts)
    report = {**first, "longer_contexts": longer, "head": None}
    if its_head and (trained := attach_head(its_head, model)):
        drafts = [(n, trained.experience.seconds(n)) for n in range(1, trained.head.most + 1)]
        plain_step = first["times"][0]["seconds"]
        times = [{"tokens": n, "seconds": of, "cost": of / plain_step} for n, of in drafts]
        report["head"] = {"kind": trained.head.title, "times": times}
    return report


def measured_curves(model: nn.Module, name: str, contexts: Sequence[int] = ()) -> list[Report]:
    """Measure carefully, and keep the times. If interrupted, the kept times stay as they were.

    Args:
        contexts: the context lengths to measure at; by default a short one and longer ones.

    Raises:
        MlxspecError: the times are too noisy; nothing is kept.
    """
    from ..drafting.measurement import CAREFUL, noise
    from ..engine import calibration
    from ..engine.loaded_model import LoadedModel
    from ..engine.patches import split_attention

    for context in contexts:
        calibration.check_context(model, CAREFUL, context)
    file, loaded = calibration.cost_file(model), LoadedModel(model)
    # The split of attention that generation uses; only long contexts measure whether it is faster.
    split_attention(loaded, calibration.split_length(file.read()))
    calibrations = {}
    for context in sorted(set(contexts)) or calibration.measured_contexts(loaded):
        noted = f"measuring step times at a context of {context:,} tokens"
        with ProgressBar("Measuring step times", noted=noted) as measuring:
            calibrations[context] = calibration.calibrate(
                loaded,
                CAREFUL,
                context=context,
                name=name,
                on_progress=measuring,
            )
        if problem := noise(calibrations[context].times):
            raise MlxspecError(
                f"{name}: {problem}; the new times are not stored, earlier ones stay: close other "
                "programs and measure again"
            )
    file.update(calibrations)
    return [_curve(file, context, known) for context, known in calibrations.items()]


def _known(name: str | None, options: CalibrateOptions) -> list[Report]:
    """The curves in the cache, of one model or of all."""
    from ..drafting.cost_file import cost_files
    from ..engine.machine import model_identity
    from ..models.model import load

    digest = None
    if name is not None:
        model, _ = load(name, adapter_path=options.adapter_path, lazy=True)
        digest = model_identity(model)["digest"]
    return [
        _curve(file, context, known)
        for file, calibrations in cost_files()
        if digest in (None, file.model["digest"])
        for context, known in sorted(calibrations.items())
        if not options.contexts or context in options.contexts
    ]


# --- tables ---


def _tables(report: Report) -> Iterator[RenderableType]:
    curves = report["curves"] if "curves" in report else [report, *report["longer_contexts"]]
    if not curves:
        yield "No step times are known yet: mlxspec calibrate MODEL measures them."
        return
    for curve in curves:
        yield from _heading(curve)
        table = folding_table("rows", "ms", "T(M)/T(1)", "±")
        table.add_column(max_width=_WIDEST_BAR)
        highest = max(time["cost"] for time in curve["times"])
        for time in curve["times"]:
            table.add_row(
                str(time["rows"]),
                f"{1000 * time['seconds']:.2f}",
                f"{time['cost']:.2f}",
                f"{time['error']:.0%}" if time["rows"] > 1 else "–",
                Bar(highest, 0, time["cost"], color="blue"),
            )
        yield table
        if len(curve["times"]) == 1:
            yield "Only plain steps were measured; mlxspec inspect says what the model verifies."
    yield "A draft pays when its step emits more than T(M)/T(1) tokens."
    yield Text("± is half the width of a 95 % confidence interval of T(M)/T(1).\n", "dim")
    if head := report.get("head"):
        yield Text(f"Drafts of the trained head, {head['kind']}", "bold")
        table = folding_table("tokens", "ms", "plain steps")
        for draft in head["times"]:
            seconds, cost = f"{1000 * draft['seconds']:.2f}", f"{draft['cost']:.2f}"
            table.add_row(str(draft["tokens"]), seconds, cost)
        yield table
        yield "If the head drafts for a step, this time is added to the step's T(M)/T(1).\n"


def _heading(curve: Report) -> Iterator[RenderableType]:
    """The lines about the model and its measurement."""
    model, machine = curve["model"], curve["machine"]
    yield Text(one_line(curve["name"] or model["type"]), "bold")
    yield one_line(
        f"{model['type']}, {model['parameters'] / 1e6:,.1f} M parameters, "
        f"{model['bits_per_weight']} bits each in memory, digest {model['digest'][:_DIGEST]}"
        + (f", {model['sequences']} sequences" if "sequences" in model else "")
    )
    blas = f", BLAS: {machine['blas']}" if "blas" in machine else ""
    yield one_line(
        f"{machine['chip']}, {machine['device']}{blas}, MLX {machine['mlx']}, after "
        f"{curve['context']:,} tokens, {curve['source']}, {curve['updated'][:10]}"
        + (", attention split" if curve["split_attention"] else "")
    )
