"""T(rows) of a loaded model on this machine, from steps of the decoding loop itself."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from ..drafting import DraftTree, VerifiedStep
from ..errors import OptionError
from ..models.loading import context_length
from ..models.target import Progress, Target, vocabulary_size
from ..models.tiers import Tier, chain_tier
from ..planning.measurement import Effort, RowsTime, ShareDone, measure
from .loop import decode
from .sampling import Chooser, SamplingParams

_UNENDING = 1 << 30  # tokens


def calibrate(
    model: nn.Module,
    effort: Effort,
    *,
    context: int | None = None,
    on_prefill: Progress | None = None,
    on_progress: ShareDone | None = None,
) -> list[RowsTime]:
    """Measure how long plain and drafted steps of a model take.

    Args:
        model: an mlx-lm model.
        effort: which steps, and for how long; see :data:`mlxspec.planning.measurement.QUICK`.
        context: tokens of context, in place of the effort's own number. That one becomes smaller
            where the widest steps would not fit behind it, into the model's context or its
            sliding window.
        on_prefill: called with context tokens done and context tokens in all.
        on_progress: called with the share of the steps that is done.

    Returns:
        one entry per number of rows, fewest first. A model that cannot verify drafts has one.

    Raises:
        OptionError: ``context`` is no length that the model can have.
    """
    started = time.perf_counter()
    longest = (context_length(model) or _UNENDING) - effort.tokens
    if context is None:
        target = _target(model)
        drafts = target.tier is not Tier.PLAIN
        room = min(longest, target.max_rows - effort.tokens) if drafts else longest
        context = max(1, min(effort.context, room - max(effort.rows)))
    elif not 1 <= context <= longest:
        raise OptionError(
            f"a context of {context} tokens: choose 1 to {longest} for this model"
            if longest > 0
            else "the model's context is too short for a measurement"
        )
    with wired_limit(model, [generation_stream]):
        steps = ModelSteps(model, context, on_prefill)
        # The context grows by a token a step, and the widest step must fit in at the end.
        room = min(steps.target.max_rows - effort.tokens, longest - context)
        return measure(steps, effort, max(1, room), started, time.perf_counter, on_progress)


def _target(model: nn.Module) -> Target:
    """An empty target that verifies chains, if any drafts."""
    tier = chain_tier(model)
    return Target(model, tier, vocabulary_size(model))


class ModelSteps:
    """Runs steps of the decoding loop on a model, for their time.

    Tokens are random: in a mixture of experts, a token repeated would meet the same experts
    and make wide steps look cheap.

    Args:
        model: an mlx-lm model.
        context: tokens before the first step.
        on_prefill: called with tokens done and tokens in all.
    """

    def __init__(self, model: nn.Module, context: int, on_prefill: Progress | None = None) -> None:
        self.target = _target(model)
        self._drafter = _RandomChains(self.target.vocab_size)
        self._last_step = (0, 0.0, False)
        self._steps = decode(
            self.target,
            self._drafter.tokens(context),
            self._drafter,
            Chooser(SamplingParams()),
            max_tokens=_UNENDING,
            ends=lambda token: False,
            record_time=self._record,
            on_progress=on_prefill,
        )
        next(self._steps)

    def plain(self, tokens: int) -> list[float]:
        """Seconds of each of so many pipelined plain steps."""
        self._drafter.pipelined, self._drafter.rows = True, 1
        times: list[float] = []
        while len(times) < tokens:
            _, seconds, pipelined = self._step()
            if pipelined:
                times.append(seconds)
        return times

    def drafted(self, rows: int) -> float:
        """Seconds of one whole drafted step: proposal, forward, reading, acceptance, commit."""
        self._drafter.pipelined, self._drafter.rows = False, rows
        while True:  # a plain step that is on its way ends first
            taken, seconds, _ = self._step()
            if taken == rows:
                return seconds

    def _step(self) -> tuple[int, float, bool]:
        next(self._steps)
        return self._last_step

    def _record(self, rows: int, seconds: float, pipelined: bool) -> None:
        self._last_step = rows, seconds, pipelined


class _RandomChains:
    """Drafts chains of random tokens, as many as it is told to."""

    branching = False

    def __init__(self, vocab_size: int) -> None:
        self.pipelined = False
        self.rows = 1
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._last = 0

    def tokens(self, count: int) -> list[int]:
        """So many random tokens."""
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]

    def propose(self, budget: int) -> DraftTree:
        return DraftTree.chain(self._last, self.tokens(self.rows - 1))

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]

    def end(self) -> None:
        pass
