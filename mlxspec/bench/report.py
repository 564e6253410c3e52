"""A measurement as one JSON object, from which the table and the page are made too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import geometric_mean
from typing import Any

from .contestants import PLAIN
from .figures import MLX_LM, Figures, figures, trusted_names
from .measurement import MeasuredPrompt
from .rouge import rouge
from .roughness import roughness

Report = dict[str, Any]


def bench_report(
    prompts: Sequence[MeasuredPrompt],
    *,
    facts: Report,
    with_references: bool = False,
    include_text: bool = False,
) -> Report:
    """Sum up a measurement.

    Args:
        prompts: what was measured, at least one.
        facts: what the report says about model, machine and settings.
        with_references: compare the outputs with the references too.
        include_text: show prompts and outputs. Otherwise the report has none of them.

    Returns:
        ``decoders``, ``categories`` and ``prompts`` hold the figures: of each contestant over
        all, over each category, and on each prompt. A speed-up over all is the geometric mean
        of the categories'. Without the same output there is no speed-up, but an entry in
        ``differences``. ``rough`` is a sentence that says why the figures are rough, or None.
    """
    names = list(prompts[0].turns)
    trusted = trusted_names(prompts)
    grouped: dict[str, list[MeasuredPrompt]] = {}
    for prompt in prompts:
        grouped.setdefault(prompt.category, []).append(prompt)
    categories = {
        category: {name: figures(members, name, trusted) for name in names}
        for category, members in grouped.items()
    }
    report = {
        **facts,
        "rough": roughness(prompts),
        "baseline": MLX_LM if MLX_LM in trusted and PLAIN in trusted else PLAIN,
        "decoders": {
            name: _over_all(
                name,
                figures(prompts, name, trusted),
                {category: of[name] for category, of in categories.items()},
            )
            for name in names
        },
        "categories": {
            category: {
                "prompts": len(grouped[category]),
                "decoders": {name: _as_dict(figures) for name, figures in of.items()},
            }
            for category, of in categories.items()
        },
        "differences": _differences(prompts),
        "prompts": [_prompt(prompt, trusted, include_text) for prompt in prompts],
    }
    if with_references:
        for category, members in grouped.items():
            report["categories"][category]["rouge"] = _rouge(members, names)
    return report


def _as_dict(figures: Figures) -> Report:
    return {**asdict(figures), "prediction_error": figures.prediction_error}


def _over_all(name: str, all_prompts: Figures, by_category: dict[str, Figures]) -> Report:
    """Figures over all prompts, in which each category has the same weight in a ratio."""
    entry = _as_dict(all_prompts)
    for ratio in ("speedup", "vs_mlx_lm", "predicted_speed"):
        values = [getattr(figures, ratio) for figures in by_category.values()]
        entry[ratio] = None if None in values else geometric_mean(values)
    if entry["speedup"] and entry["predicted_speed"]:
        entry["prediction_error"] = entry["predicted_speed"] / entry["speedup"] - 1
    speedups = {
        category: figures.speedup
        for category, figures in by_category.items()
        if figures.speedup and name != PLAIN
    }
    worst = min(speedups, key=lambda category: speedups[category], default=None)
    entry["worst_category"] = worst
    entry["worst"] = None if worst is None else speedups[worst]
    return entry


def _differences(prompts: Sequence[MeasuredPrompt]) -> list[Report]:
    """Every difference between an output and plain decoding's."""
    return [
        {
            "category": prompt.category,
            "prompt": number,
            "decoder": name,
            "token": difference.index,
            "margin": _finite(difference.margin),
            "bound": difference.bound,
            "near_tie": difference.near_tie,
        }
        for number, prompt in enumerate(prompts, start=1)
        for name, differences in prompt.differences.items()
        for difference in differences or ()
    ]


def _finite(margin: float) -> float | None:
    """JSON has no infinity; None stands for an output that ended early."""
    return margin if margin < float("inf") else None


def _prompt(prompt: MeasuredPrompt, trusted: set[str], include_text: bool) -> Report:
    first = {name: turns[0] for name, turns in prompt.turns.items()}
    entry: Report = {
        "category": prompt.category,
        "prompt_tokens": prompt.prompt_tokens,
        "generated_tokens": {name: len(turn.tokens) for name, turn in first.items()},
        "decoders": {name: _as_dict(figures([prompt], name, trusted)) for name in first},
    }
    if include_text:
        entry["messages"] = prompt.messages
        entry["outputs"] = {name: turn.text for name, turn in first.items()}
    return entry


def _rouge(prompts: Sequence[MeasuredPrompt], names: Sequence[str]) -> Report | None:
    """Mean scores of each contestant, None where no prompt has a reference."""
    known = [(prompt.reference, prompt.turns) for prompt in prompts if prompt.reference]
    if not known:
        return None
    return {
        name: rouge((reference, turns[name][0].text) for reference, turns in known)
        for name in names
    }
