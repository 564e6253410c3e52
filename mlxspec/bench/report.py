"""What ``bench`` has measured in figures, and the verdict on it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from math import isfinite
from statistics import geometric_mean, median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import mlxspec

from ..engine.costs import machine_identity, model_identity
from ..models.model_files import given_name
from .measure import MLX_LM, PLAIN, Difference, MeasuredPrompt

Report = dict[str, Any]

_SHORT = 30  # tokens of an answer
_WIDE = 0.25  # from the lowest to the highest ratio of a prompt's runs, as a share of the median
SLOW = 0.95  # a measured ratio above it may as well be 1


def machine_facts() -> Report:
    """The machine and the versions of what ran on it; no name of host or user."""
    return {
        **machine_identity(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "mlxspec": mlxspec.__version__,
        "mlx_lm": version("mlx-lm"),
    }


def model_facts(model: nn.Module, name: str) -> Report:
    """What the model is.

    Args:
        model: the loaded model.
        name: what the user called it; of a directory only the last part is given.
    """
    # The dtype of most floating-point bytes: packed weights are computed in their scales' dtype.
    nbytes: dict[mx.Dtype, int] = {}
    for _, weight in tree_flatten(model.parameters()):
        if mx.issubdtype(weight.dtype, mx.floating):
            nbytes[weight.dtype] = nbytes.get(weight.dtype, 0) + weight.nbytes
    return {
        "name": given_name(name),
        **model_identity(model),
        "dtype": str(max(nbytes, key=nbytes.__getitem__)).removeprefix("mlx.core."),
    }


def bench_report(
    prompts: Sequence[MeasuredPrompt],
    *,
    facts: Report,
    include_text: bool = False,
) -> Report:
    """Sum up a measurement.

    Args:
        prompts: what was measured, at least one.
        facts: what the report says about model, machine and settings.
        include_text: show prompts and outputs. Otherwise the report has none of them.

    Returns:
        ``decoders``, ``categories`` and ``prompts`` hold the figures of each backend over all,
        over each category, and on each prompt, see :func:`figures`. A speed-up over all is the
        geometric mean of the categories'. Without the same output there is no speed-up, but an
        entry in ``differences``. ``rough`` is a sentence that says why the figures are noisy,
        or None.
    """
    names = list(prompts[0].runs)
    trusted = {
        name for name in names if all(_is_right(prompt.differences[name]) for prompt in prompts)
    }
    grouped: dict[str, list[MeasuredPrompt]] = {}
    for prompt in prompts:
        grouped.setdefault(prompt.category, []).append(prompt)
    categories: dict[str, Report] = {
        category: {
            "prompts": len(members),
            "decoders": _by_backend(members, trusted),
        }
        for category, members in grouped.items()
    }
    over_all = _by_backend(prompts, trusted)
    for name, entry in over_all.items():
        _weigh_alike(entry, {c: of["decoders"][name] for c, of in categories.items()}, name)
    return {
        **facts,
        "rough": noise_warning(prompts),
        "baseline": MLX_LM if {MLX_LM, PLAIN} <= trusted else PLAIN,
        "decoders": over_all,
        "categories": categories,
        "differences": list(_differences(prompts)),
        "prompts": [_prompt(prompt, trusted, include_text) for prompt in prompts],
    }


def _by_backend(prompts: Sequence[MeasuredPrompt], trusted: set[str]) -> Report:
    return {name: figures(prompts, name, trusted) for name in prompts[0].runs}


def figures(prompts: Sequence[MeasuredPrompt], name: str, trusted: set[str]) -> Report:
    """Sum up a backend's runs.

    Args:
        prompts: at least one.
        name: the backend.
        trusted: the backends whose outputs are plain decoding's, or differ only at near ties.
            There is no ratio to or from any other: it wrote other texts.

    Returns:
        ``tokens_per_second`` and ``prefill_seconds``: medians over all runs, the prefill not
        counted in the first.
        ``speedup``: the rate against plain decoding: the median of each prompt's ratios, taken
        run by run, and of those the geometric mean. ``vs_mlx_lm``: the same against mlx-lm.
        ``predicted_speed``: what the planner expected, against plain decoding, averaged alike;
        ``prediction_error``: that over the measured speed-up, less 1.
        ``tokens_per_step``, ``rows_per_step``, ``acceptance_rate``: over all steps.
        ``outputs``: on how many prompts all outputs were ``equal``, differ first at
        ``near_ties`` (with the ``largest_margin``), are ``different``, or are ``not_compared``
        because the backend draws other random numbers.
        Each is None where it is not known.
    """
    runs = [run for prompt in prompts for run in prompt.runs[name]]
    stats = [run.stats for run in runs if run.stats]
    steps = sum(s.steps for s in stats)
    drafted = sum(s.drafted for s in stats)
    speedup = _ratio(prompts, name, PLAIN, trusted)
    predicted = [
        [run.predicted_speed for run in prompt.runs[name] if run.predicted_speed is not None]
        for prompt in prompts
    ]
    predicted_speed = geometric_mean(map(median, predicted)) if all(predicted) else None
    return {
        "tokens_per_second": median(run.rate for run in runs),
        "prefill_seconds": median(run.prefill_seconds for run in runs),
        "speedup": speedup,
        "vs_mlx_lm": _ratio(prompts, name, MLX_LM, trusted),
        "predicted_speed": predicted_speed,
        "tokens_per_step": sum(s.emitted for s in stats) / steps if steps else None,
        "rows_per_step": sum(s.rows for s in stats) / steps if steps else None,
        "acceptance_rate": sum(s.accepted for s in stats) / drafted if drafted else None,
        "outputs": _outputs([prompt.differences[name] for prompt in prompts]),
        "prediction_error": _error(predicted_speed, speedup),
    }


def _is_right(differences: list[Difference] | None) -> bool:
    return differences is not None and all(difference.near_tie for difference in differences)


def _ratios(prompt: MeasuredPrompt, name: str, base: str) -> list[float]:
    """Run by run: a slow moment of the machine hits neighbours alike."""
    pairs = zip(prompt.runs[name], prompt.runs[base], strict=True)
    return [own.rate / other.rate for own, other in pairs]


def _ratio(
    prompts: Sequence[MeasuredPrompt], name: str, base: str, trusted: set[str]
) -> float | None:
    if not {name, base} <= trusted:
        return None
    return geometric_mean(median(_ratios(prompt, name, base)) for prompt in prompts)


def _error(predicted: float | None, speedup: float | None) -> float | None:
    return None if predicted is None or speedup is None else predicted / speedup - 1


def _outputs(compared: Sequence[list[Difference] | None]) -> Report:
    """How outputs compare with plain decoding's, given the differences on each prompt."""
    right = [differences or [] for differences in compared if _is_right(differences)]
    not_compared = compared.count(None)
    margins = [difference.margin for differences in right for difference in differences]
    return {
        "equal": right.count([]),
        "near_ties": len(right) - right.count([]),
        "different": len(compared) - not_compared - len(right),
        "not_compared": not_compared,
        "largest_margin": max(margins, default=None),
    }


def _weigh_alike(entry: Report, by_category: dict[str, Report], name: str) -> None:
    """Give each category the same weight in the ratios over all prompts, and name the worst."""
    for ratio in ("speedup", "vs_mlx_lm", "predicted_speed"):
        values = [of[ratio] for of in by_category.values()]
        entry[ratio] = None if None in values else geometric_mean(values)
    entry["prediction_error"] = _error(entry["predicted_speed"], entry["speedup"])
    entry["worst_category"] = entry["worst"] = None
    if entry["speedup"] is not None and name != PLAIN:
        worst = min(by_category, key=lambda category: by_category[category]["speedup"])
        entry["worst_category"], entry["worst"] = worst, by_category[worst]["speedup"]


def noise_warning(prompts: Sequence[MeasuredPrompt]) -> str | None:
    """Why the figures are noisy, in one sentence; None where they are not."""
    tokens = median(len(prompt.runs[PLAIN][0].tokens) for prompt in prompts)
    spread = {
        name: median(_spread(_ratios(prompt, name, PLAIN)) for prompt in prompts)
        for name in prompts[0].runs
    }
    widest = max(spread, key=spread.__getitem__)
    reasons = []
    if tokens < _SHORT:
        reasons.append(f"half of the answers have no more than {tokens:.0f} tokens")
    if spread[widest] > _WIDE:
        reasons.append(f"the turns of {widest} on a prompt differ by {spread[widest]:.0%}")
    return f"The figures are rough: {' and '.join(reasons)}." if reasons else None


def _spread(ratios: list[float]) -> float:
    return (max(ratios) - min(ratios)) / median(ratios)


def _differences(prompts: Sequence[MeasuredPrompt]) -> Iterator[Report]:
    """Every difference between an output and plain decoding's."""
    for number, prompt in enumerate(prompts, start=1):
        for name, differences in prompt.differences.items():
            for difference in differences or ():
                yield {
                    "category": prompt.category,
                    "prompt": number,
                    "decoder": name,
                    "token": difference.index,
                    # JSON has no infinity; None stands for an output that ended early.
                    "margin": difference.margin if isfinite(difference.margin) else None,
                    "bound": difference.bound,
                    "near_tie": difference.near_tie,
                }


def _prompt(prompt: MeasuredPrompt, trusted: set[str], include_text: bool) -> Report:
    first = {name: runs[0] for name, runs in prompt.runs.items()}
    entry: Report = {
        "category": prompt.category,
        "prompt_tokens": prompt.prompt_tokens,
        "generated_tokens": {name: len(run.tokens) for name, run in first.items()},
        "decoders": _by_backend([prompt], trusted),
    }
    if include_text:
        entry["messages"] = prompt.messages
        entry["outputs"] = {name: run.text for name, run in first.items()}
    return entry


def ratio_name(report: Report) -> str:
    """Which of the figures is the speed against the report's baseline."""
    return "vs_mlx_lm" if report["baseline"] == MLX_LM else "speedup"


def verdict(report: Report) -> str:
    """One sentence: which backend is fastest."""
    ratio, baseline = ratio_name(report), report["baseline"]
    speeds = {name: of[ratio] for name, of in report["decoders"].items() if of[ratio] is not None}
    if len(speeds) < 2:
        return "No speed-up is given: there are no two decoders with the same output."
    best = max(speeds, key=speeds.__getitem__)
    if best == baseline:
        return f"{baseline} is fastest: nothing else was worth its cost here."
    lowest = min(entry["decoders"][best][ratio] for entry in report["categories"].values())
    return (
        f"{best} is fastest: {speeds[best]:.2f} times the speed of {baseline}, "
        f"{lowest:.2f} times in its worst category."
    )


def what_differs(report: Report) -> Iterator[str]:
    """A line for each output that is wrong."""
    for difference in report["differences"]:
        if difference["near_tie"]:
            continue
        margin = difference["margin"]
        how = (
            "one output ended before the other"
            if margin is None
            else f"the tokens are {margin:.2g} apart, rounding explains {difference['bound']:.2g}"
        )
        place = f"prompt {difference['prompt']} ({difference['category']})"
        yield (
            f"{difference['decoder']} differs from {PLAIN} decoding on {place} "
            f"at token {difference['token']}: {how}"
        )
