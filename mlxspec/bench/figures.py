"""What many turns say together: medians of rates, geometric means of ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from .contestants import PLAIN
from .measurement import MeasuredPrompt

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
