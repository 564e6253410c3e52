"""What is explained: some steps of a generation, and what is needed to read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..draft.recording import RecordedStep
from ..generation.response import SpeculationStats
from ..terminal import one_line
from .explain_pieces import Pieces

_CONTEXT = 60  # tokens before a step that may be shown


@dataclass(frozen=True)
class ShownStep:
    """One of the steps.

    Attributes:
        number: counted from 1.
        before: the end of the text before the step, its last token included.
        recorded: the step.
    """

    number: int
    before: str
    recorded: RecordedStep


@dataclass(frozen=True)
class Explained:
    """Steps of one generation.

    Attributes:
        model, decoder: their names, as the user gave them.
        prompt: the prompt's tokens.
        steps: all steps of the generation.
        first, count: which of them to show; the first has number 0.
        stats: the generation's figures.
        pieces: the tokens' looks.
    """

    model: str
    decoder: str
    prompt: Sequence[int]
    steps: Sequence[RecordedStep]
    first: int
    count: int
    stats: SpeculationStats
    pieces: Pieces

    def shown(self) -> Iterator[ShownStep]:
        """The steps to show."""
        text = list(self.prompt)
        for number, step in enumerate(self.steps[: self.first + self.count], start=1):
            if number > self.first:
                cut = "…" if len(text) > _CONTEXT else ""
                yield ShownStep(number, cut + self.pieces.text(text[-_CONTEXT:]), step)
            text.extend(step.verified.tokens)

    @property
    def summary(self) -> str:
        """One line about the generation."""
        stats = self.stats
        return (
            f"{one_line(self.model)}, decoder {self.decoder}: "
            f"tokens {stats.emitted}, steps {stats.steps}, "
            f"tokens per step {stats.tokens_per_step:.2f}, "
            f"rows per step {stats.rows / stats.steps:.1f}"
        )
