"""Whether a measurement is too short or too restless for its second decimal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .contestants import PLAIN
from .measurement import MeasuredPrompt

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
