"""The output of a generation: text, a response per token, and the result."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from ..errors import OptionError

if TYPE_CHECKING:
    MlxLmResponse = object  # mlx-lm has no types: a class with an unknown base has any attribute
else:
    from mlx_lm.generate import GenerationResponse as MlxLmResponse


@dataclass(frozen=True)
class SpeculationStats:
    """Figures of speculation in a generation so far.

    Attributes:
        steps: target forwards after the prefill.
        rows: positions computed by those forwards: in each step, the current token and its draft.
        drafted: draft tokens proposed.
        accepted: draft tokens accepted and emitted.
        emitted: tokens emitted, including bonus tokens.
        cost: the time of the steps according to the measured costs of rows, in units of a step
            without a draft. Other load on the machine does not change it. NaN if a cost is unknown.
    """

    steps: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    cost: float = field(default=0.0, compare=False)  # its value depends on clocks

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        """The sum of each figure."""
        return SpeculationStats(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per target forward, which papers call MAT; 1 for plain decoding."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The share of draft tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def gain(self) -> float | None:
        """The speed of the steps relative to steps without drafts; None if unknown."""
        return self.emitted / self.cost if self.cost > 0 else None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at the position of one output token.

    They are the model's after penalties and processors, before filters and temperature.

    Attributes:
        logprob: the chosen token's log-probability.
        top: the likeliest tokens with their log-probabilities, best first; impossible tokens are
            left out.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass
class GenerationResponse(MlxLmResponse):
    """One generated token: mlx-lm's response, with figures of speculation.

    Attributes:
        text: the next segment of text; empty while a character or a possible stop string is
            incomplete.
        token: the token id.
        logprobs: lazy log-probabilities of all tokens at this position, (vocabulary,), after
            penalties and processors, before filters and temperature.
        from_draft: whether the token was an accepted draft token.
        prompt_tokens: tokens in the prompt.
        prompt_tps: prompt tokens per second, without cached ones.
        generation_tokens: tokens generated so far.
        generation_tps: generated tokens per second so far.
        peak_memory: peak memory used so far, in GB.
        finish_reason: "stop" or "length" with the last token, None before.
        stats: figures of the generation so far, including this token's step.
        reused_tokens: prompt tokens that were already in a session's cache.
        stop_string: with the last token, the stop string that ended the output, if one did.
    """

    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    stats: SpeculationStats = SpeculationStats()
    reused_tokens: int = 0
    stop_string: str | None = None

    def token_logprobs(self, count: int = 0) -> TokenLogprobs:
        """The token's log-probability, and the ``count`` likeliest tokens at its position.

        Raises:
            OptionError: ``count`` is below 0.
        """
        if count < 0:
            raise OptionError(f"count is {count}: give 0 or more tokens")
        likeliest = mx.argsort(-self.logprobs)[: min(count, self.logprobs.size)]
        values = cast(list[float], self.logprobs[likeliest].tolist())
        top = zip(cast(list[int], likeliest.tolist()), values, strict=True)
        return TokenLogprobs(
            logprob=cast(float, self.logprobs[self.token].item()),
            top=[(token, value) for token, value in top if value > -math.inf],
        )


@dataclass
class GenerationResult:
    """A finished or interrupted generation, collected from its responses.

    Attributes:
        text: the generated text, without the stop string or stop token that ended it.
        tokens: the generated token ids, including the stop token.
        from_draft: for each token, whether it was an accepted draft token.
        finish_reason: "stop", "length", or "interrupted".
        prompt_tokens: tokens in the prompt.
        prompt_tps: prompt tokens per second.
        generation_tps: generated tokens per second.
        peak_memory: in GB.
        stats: figures of speculation.
        logprobs: the log-probabilities of each token, if requested.
        reused_tokens: prompt tokens that were already in a session's cache.
        segments: for each token, the text that came with it; joined, they are the text.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    finish_reason: str = "interrupted"
    prompt_tokens: int = 0
    prompt_tps: float = 0.0
    generation_tps: float = 0.0
    peak_memory: float = 0.0
    stats: SpeculationStats = SpeculationStats()
    logprobs: list[TokenLogprobs] | None = None
    reused_tokens: int = 0
    segments: list[str] = field(default_factory=list)

    def add(self, response: GenerationResponse, likeliest: int = 0) -> None:
        """Append the next response.

        Args:
            response: the generation's next response.
            likeliest: how many of the likeliest tokens at the response's position to add to
                ``logprobs``, unless that is None.
        """
        if self.logprobs is not None:
            self.logprobs.append(response.token_logprobs(likeliest))
        self.text += response.text
        self.segments.append(response.text)
        self.tokens.append(response.token)
        self.from_draft.append(response.from_draft)
        self.finish_reason = response.finish_reason or "interrupted"
        self.prompt_tokens, self.prompt_tps = response.prompt_tokens, response.prompt_tps
        self.generation_tps, self.peak_memory = response.generation_tps, response.peak_memory
        self.stats, self.reused_tokens = response.stats, response.reused_tokens

    def _repr_html_(self) -> str:
        """The text with accepted drafts marked, and a line of figures, for notebooks."""
        stats = self.stats
        parts = zip(self.from_draft, self.segments, strict=False)
        text = ""
        for drafted, run in groupby(parts, operator.itemgetter(0)):
            segment = "".join(text for _, text in run)
            text += _marked(segment) if drafted else escape(segment)
        figures = (
            f"{len(self.tokens)} tokens in {stats.steps} steps, "
            f"{stats.tokens_per_step:.2f} a step; "
            f"{stats.accepted} of {stats.drafted} {_marked('drafted tokens accepted')}; "
            f"{self.generation_tps:.1f} tokens/s; {escape(self.finish_reason)}"
        )
        return (
            f'<div style="{_OF_TEXT}">{text}</div>'
            f'<div style="margin-top:.5em;font-size:.85em;opacity:.75">{figures}</div>'
        )


# A tint behind the text; the text keeps the notebook's own colour, light or dark.
_TINT = "background:rgba(46,134,255,.28);border-radius:2px"
_OF_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace"


def _marked(text: str) -> str:
    """The text, marked as accepted drafts; an empty text stays empty."""
    return f'<span style="{_TINT}">{escape(text)}</span>' if text else ""
