"""ROUGE: how much of a reference text an output has. Needs the library ``rouge-score``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean, mean, median
from typing import Any

from ..errors import OptionError
from .backends import PLAIN
from .bench import MeasuredPrompt

_KINDS = ("rouge1", "rouge2", "rougeL")


def require_rouge() -> None:
    """Raise OptionError unless the library is installed."""
    try:
        import rouge_score  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "--references needs the library rouge-score: pip install 'mlxspec[rouge]'"
        ) from error


def rouge(pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L, 0 to 1, over pairs of reference and output.

    (Chin-Yew Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004; no stemming.)
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(_KINDS)
    scores = [scorer.score(reference, output) for reference, output in pairs]
    return {kind: mean(score[kind].fmeasure for score in scores) for kind in _KINDS}


MLX_LM = "mlx-lm"


@dataclass(frozen=True)
class Outputs:
    """How a contestant's outputs compare with plain decoding's.

    Attributes:
        equal: on how many prompts all outputs were equal.
        near_ties: on how many they differ first at near ties.
        different: on how many they differ otherwise.
        not_compared: on how many the contestant draws other random numbers.
        largest_margin: of the near ties.
    """

    equal: int
    near_ties: int
    different: int
    not_compared: int
    largest_margin: float | None


@dataclass(frozen=True)
class Figures:
    """One contestant on some prompts.

    Attributes:
        tokens_per_second: median over all turns, the prefill not counted.
        prefill_seconds: median over all turns.
        speedup: rate against plain decoding: the median of each prompt's ratios, taken turn by
            turn, and of those the geometric mean. None where outputs differ.
        vs_mlx_lm: the same against mlx-lm.
        predicted_speed: what planning promised, against plain decoding; averaged alike.
        tokens_per_step, rows_per_step, acceptance_rate: over all steps; None without
            speculation.
        outputs: whether they were right.
    """

    tokens_per_second: float
    prefill_seconds: float
    speedup: float | None
    vs_mlx_lm: float | None
    predicted_speed: float | None
    tokens_per_step: float | None
    rows_per_step: float | None
    acceptance_rate: float | None
    outputs: Outputs

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured speed, less 1."""
        if self.predicted_speed is None or self.speedup is None:
            return None
        return self.predicted_speed / self.speedup - 1


def figures(prompts: Sequence[MeasuredPrompt], name: str, trusted: set[str]) -> Figures:
    """Sum up a contestant's turns.

    Args:
        prompts: at least one.
        name: the contestant.
        trusted: whose outputs are plain decoding's, see :func:`trusted_names`. There is no
            ratio between two contestants of which one is not trusted.
    """
    turns = [turn for prompt in prompts for turn in prompt.turns[name]]
    stats = [turn.stats for turn in turns if turn.stats]
    steps = sum(s.steps for s in stats)
    drafted = sum(s.drafted for s in stats)
    predicted = [_median_prediction(prompt, name) for prompt in prompts]
    known = [speed for speed in predicted if speed is not None]
    return Figures(
        tokens_per_second=median(turn.rate for turn in turns),
        prefill_seconds=median(turn.prefill_seconds for turn in turns),
        speedup=_ratio(prompts, name, PLAIN, trusted),
        vs_mlx_lm=_ratio(prompts, name, MLX_LM, trusted),
        predicted_speed=geometric_mean(known) if len(known) == len(predicted) else None,
        tokens_per_step=sum(s.emitted for s in stats) / steps if steps else None,
        rows_per_step=sum(s.rows for s in stats) / steps if steps else None,
        acceptance_rate=sum(s.accepted for s in stats) / drafted if drafted else None,
        outputs=_outputs(prompts, name),
    )


def trusted_names(prompts: Sequence[MeasuredPrompt]) -> set[str]:
    """The contestants all of whose outputs are plain decoding's, or differ at near ties.

    One that draws other random numbers is not among them: its outputs are other texts.
    """
    return {name for name in prompts[0].turns if all(_is_right(prompt, name) for prompt in prompts)}


def _is_right(prompt: MeasuredPrompt, name: str) -> bool:
    differences = prompt.differences[name]
    return differences is not None and all(difference.near_tie for difference in differences)


def _ratio(
    prompts: Sequence[MeasuredPrompt], name: str, base: str, trusted: set[str]
) -> float | None:
    if not {name, base} <= trusted:
        return None
    return geometric_mean(
        # A slow moment of the machine hits neighbours alike, so ratios are taken turn by turn.
        median(
            own.rate / other.rate
            for own, other in zip(prompt.turns[name], prompt.turns[base], strict=True)
        )
        for prompt in prompts
    )


def _median_prediction(prompt: MeasuredPrompt, name: str) -> float | None:
    known = [t.predicted_speed for t in prompt.turns[name] if t.predicted_speed is not None]
    return median(known) if known else None


def _outputs(prompts: Sequence[MeasuredPrompt], name: str) -> Outputs:
    compared = [prompt.differences[name] for prompt in prompts]
    lists = [differences for differences in compared if differences is not None]
    right = [differences for differences in lists if all(d.near_tie for d in differences)]
    margins = [d.margin for differences in right for d in differences]
    return Outputs(
        equal=sum(not differences for differences in right),
        near_ties=sum(bool(differences) for differences in right),
        different=len(lists) - len(right),
        not_compared=len(compared) - len(lists),
        largest_margin=max(margins, default=None),
    )


_SHORT = 30  # tokens of an answer
_WIDE = 0.25  # from the lowest to the highest ratio of a prompt's turns, as a share of the median


def roughness(prompts: Sequence[MeasuredPrompt]) -> str | None:
    """Why the figures are rough, in one sentence; None where they are not."""
    tokens = median(len(prompt.turns[PLAIN][0].tokens) for prompt in prompts)
    scatter = {
        name: median(_scatter(prompt, name) for prompt in prompts) for name in prompts[0].turns
    }
    widest = max(scatter, key=lambda name: scatter[name])
    reasons = []
    if tokens < _SHORT:
        reasons.append(f"half of the answers have no more than {tokens:.0f} tokens")
    if scatter[widest] > _WIDE:
        reasons.append(f"the turns of {widest} on a prompt differ by {scatter[widest]:.0%}")
    return f"The figures are rough: {' and '.join(reasons)}." if reasons else None


def _scatter(prompt: MeasuredPrompt, name: str) -> float:
    """How far the ratios to plain decoding, taken turn by turn, lie apart."""
    pairs = zip(prompt.turns[name], prompt.turns[PLAIN], strict=True)
    ratios = [own.rate / plain.rate for own, plain in pairs]
    return (max(ratios) - min(ratios)) / median(ratios)


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
