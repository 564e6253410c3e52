"""Decoders whose drafters follow what steps cost on this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.draft_model import DraftModelDrafter
from ..decoding.measured_costs import KeptCosts, costs_for
from ..drafting import CombinedDrafter, Drafter, LookaheadDrafter, NoDraft
from ..models.prompt_cache import reclaim
from ..models.step_caches import cached_length
from ..models.tier import Tier
from ..planning.cost_curve import CostCurve
from ..planning.plain_steps import PlainSteps
from ..response import GenerationResponse
from .base import Decoder, Prompt
from .options import GenerationOptions, check_options, sampling_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@runtime_checkable
class Planner(Protocol):
    """What is told the costs between steps: a drafter, or a part of one."""

    curve: CostCurve
    waiting_cost: float
    plain_steps: PlainSteps


class MeasuredDecoder(Decoder):
    """Measures the steps of its model, at first use and whenever one runs.

    Args:
        model, tokenizer: as for :class:`Decoder`.
        on_measuring: called with the share that is done while step times are first measured.

    Raises:
        LoadError, OptionError: as :class:`Decoder`.
    """

    def __init__(
        self,
        model: str | Path | nn.Module = "mlx_model",
        tokenizer: TokenizerWrapper | None = None,
        *,
        on_measuring: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(model, tokenizer)
        self._on_measuring = on_measuring
        self._measuring = threading.Lock()
        self.foreseen_cost = 0.0
        """What the steps of the last generation should have taken, in plain tokens' times."""

    @cached_property
    def costs(self) -> KeptCosts:
        """What steps cost, from the cache or measured now, which takes a few seconds."""
        with self._measuring:  # else threads would disturb each other's measurements
            if "costs" not in vars(self):
                vars(self)["costs"] = costs_for(self.model, on_progress=self._on_measuring)
            return cast(KeptCosts, vars(self)["costs"])

    def _decode_with(
        self,
        make_drafter: Callable[[], Drafter],
        prompt: Prompt,
        max_tokens: int,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """As :meth:`Decoder.decode`, with a drafter that may need the costs.

        Args:
            make_drafter: called once the options are known to be good, since it may measure.
                What can only be decoded plainly gets no drafter.
        """
        tokens = self._prompt_tokens(prompt)
        if "costs" not in vars(self):  # else nothing is measured, and `decode` refuses in time
            check_options(self.model, self.tokenizer, self.vocab_size, max_tokens, options)
        if self.chain_tier is Tier.PLAIN or not sampling_of(options, self.vocab_size).allows_drafts:
            return self.decode(tokens, NoDraft(), max_tokens=max_tokens, **options)
        drafter = make_drafter()
        if not _follows_costs(drafter):
            return self.decode(tokens, drafter, max_tokens=max_tokens, **options)
        return self._decode_planned(tokens, drafter, max_tokens, **options)

    def _decode_planned(
        self,
        prompt: Sequence[int],
        drafter: Drafter,
        max_tokens: int,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """As :meth:`Decoder.decode`, with planners that are told the costs; these learn too."""
        costs = self.costs.for_generation()
        planners = _planners(drafter)
        foreseen = self.foreseen_cost = 0.0

        def tell() -> None:
            for planner in planners:
                planner.curve, planner.waiting_cost = costs.curve, costs.waiting_cost
                planner.plain_steps.sought = costs.wants_plain_steps

        def record(rows: int, seconds: float, pipelined: bool) -> None:
            nonlocal foreseen
            waiting = costs.waiting_cost if rows == 1 and not pipelined else 0.0
            foreseen += costs.cost(rows) + waiting
            self.foreseen_cost = foreseen
            costs.record(rows, seconds, pipelined)
            tell()

        def begin() -> int:
            lent = options.get("prompt_cache") or ()
            reclaim(lent)
            held = cached_length(lent)
            costs.move_to(held + len(prompt))
            tell()
            return held

        responses = self.decode(
            prompt, drafter, max_tokens=max_tokens, record_time=record, **options
        )
        return self._kept(responses, costs, begin)

    def _kept(
        self,
        responses: Generator[GenerationResponse, None, None],
        costs: KeptCosts,
        begin: Callable[[], int],
    ) -> Generator[GenerationResponse, None, None]:
        """Tell the costs how long the context has become, and keep them at the end.

        Args:
            responses: of a generation.
            costs: the generation's own; the decoder's go on from them.
            begin: called before the first step; returns the length of what precedes the prompt.
        """
        try:
            held = begin()
            for response in responses:
                costs.move_to(held + response.prompt_tokens + response.generation_tokens)
                yield response
        finally:
            responses.close()
            costs.save()
            self.costs = costs


def _follows_costs(drafter: Drafter) -> bool:
    """Whether its drafts depend on what steps cost, and its steps show what rows cost."""
    # The sizes of lookahead's are fixed, and a draft model's forwards are in the steps' times.
    return not isinstance(drafter, LookaheadDrafter) and not any(
        isinstance(part, DraftModelDrafter) for part in _parts(drafter)
    )


def _planners(drafter: Drafter) -> list[Planner]:
    """The parts of a drafter that follow the costs."""
    return [part for part in _parts(drafter) if isinstance(part, Planner)]


def _parts(drafter: Drafter) -> list[Drafter]:
    return [drafter.first, drafter.second] if isinstance(drafter, CombinedDrafter) else [drafter]
