"""The default decoder: speculates as far as it pays on this machine, and plainly otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding import SamplingParams
from ..decoding.measured_costs import KeptCosts, costs_for
from ..drafting import NoDraft
from ..drafting.output_memory import OutputMemory
from ..models.target import Progress
from ..models.tiers import Tier, cache_tier
from ..planning.branching import trees_pay
from ..planning.guard import Guard
from ..planning.planned_drafter import PlannedDrafter
from ..planning.token_classes import token_classes
from ..response import GenerationResponse, GenerationResult
from ..store import open_store
from .base import Decoder, Prompt


class AutoDecoder(Decoder):
    """Chooses each draft by what it costs and what it will probably earn; nothing to tune.

    What a step costs is measured at first use, kept in the user's cache directory and
    corrected by every step. Outputs are remembered, and later ones are drafted from them too.

    Args:
        model, tokenizer: as for :class:`Decoder`.
        memory_tokens: how many tokens of earlier outputs are remembered, first in, first out.
        store: a file of ``mlxspec store build`` to draft from.
        on_measuring: called with the share that is done while step times are first measured.

    Raises:
        LoadError, OptionError: as :class:`Decoder`.
        StoreError: the store cannot be read, or is another tokenizer's.
    """

    def __init__(
        self,
        model: str | Path | nn.Module = "mlx_model",
        tokenizer: TokenizerWrapper | None = None,
        *,
        memory_tokens: int = 16384,
        store: str | os.PathLike[str] | None = None,
        on_measuring: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(model, tokenizer)
        self.memory = OutputMemory(memory_tokens)
        self._store = open_store(store, self.tokenizer) if store is not None else None
        self._on_measuring = on_measuring
        self.foreseen_cost = 0.0
        """What the steps of the last generation should have taken, in plain tokens' times."""

    @cached_property
    def costs(self) -> KeptCosts:
        """What steps cost, from the cache or measured now, which takes a few seconds."""
        return costs_for(self.model, on_progress=self._on_measuring)

    @cached_property
    def _token_classes(self) -> bytes:
        pieces = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        return token_classes([piece or "" for piece in pieces], set(self.tokenizer.all_special_ids))

    @property
    def _branching(self) -> bool:
        """Whether drafts may be trees."""
        return trees_pay(self.costs.curve) and self.tier is Tier.TREE

    def drafter(self) -> PlannedDrafter:
        """A planner for one generation."""
        return PlannedDrafter(
            self.costs.curve,
            waiting_cost=self.costs.waiting_cost,
            branching=self._branching,
            guard=Guard(),
            memory=self.memory,
            store=self._store,
            token_classes=self._token_classes,
        )

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        *,
        temp: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        on_progress: Progress | None = None,
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one response per token.

        Args:
            prompt: text, or token ids.
            max_tokens: how many tokens to generate at most.
            temp, top_p, top_k, min_p, seed: see :class:`mlxspec.SamplingParams`.
            stop: texts that end the output before them.
            on_progress: called with prompt tokens done and prompt tokens in all.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        sampling = SamplingParams(temp, top_p, top_k, min_p, seed)
        self.foreseen_cost = 0.0
        if cache_tier(self.model) is Tier.PLAIN:
            return self.decode(
                prompt,
                NoDraft(),
                max_tokens=max_tokens,
                sampling=sampling,
                stop=stop,
                on_progress=on_progress,
            )
        tokens, costs = self._prompt_tokens(prompt), self.costs
        costs.move_to(len(tokens))
        drafter = self.drafter()
        drafter.seeks_plain_steps = costs.wants_plain_steps

        def record(rows: int, seconds: float, pipelined: bool) -> None:
            waiting = costs.waiting_cost if rows == 1 and not pipelined else 0.0
            self.foreseen_cost += costs.cost(rows) + waiting
            costs.record(rows, seconds, pipelined)
            drafter.curve, drafter.waiting_cost = costs.curve, costs.waiting_cost
            drafter.seeks_plain_steps = costs.wants_plain_steps

        responses = self.decode(
            tokens,
            drafter,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            on_progress=on_progress,
            record_time=record,
        )
        return self._kept(responses)

    def _kept(
        self, responses: Generator[GenerationResponse, None, None]
    ) -> Generator[GenerationResponse, None, None]:
        """Tell the costs how long the context has become, and keep them at the end."""
        try:
            for response in responses:
                self.costs.move_to(response.prompt_tokens + response.generation_tokens)
                yield response
        finally:
            responses.close()
            self.costs.save()

    def generate(
        self, prompt: Prompt, max_tokens: int = 250, color: bool = True, **options: Any
    ) -> GenerationResult:
        """Generate, write the text to standard output as it comes, and return the result.

        Args:
            prompt, max_tokens: as in :meth:`stream`.
            color: colour accepted draft tokens and the model's own, at a terminal.
            options: :meth:`stream`'s other options.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        return self.written(self.stream(prompt, max_tokens, **options), color)
