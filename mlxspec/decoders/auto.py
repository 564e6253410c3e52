"""The default decoder: speculates as far as it pays on this machine, and plainly otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafting.output_memory import OutputMemory
from ..models.tier import Tier
from ..planning.branching import trees_pay
from ..planning.guard import Guard
from ..planning.planned_drafter import PlannedDrafter
from ..planning.token_classes import token_classes
from ..response import GenerationResponse, GenerationResult
from ..store import open_store
from .base import Prompt
from .measured import MeasuredDecoder
from .options import GenerationOptions
from .session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AutoDecoder(MeasuredDecoder):
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
        super().__init__(model, tokenizer, on_measuring=on_measuring)
        self.memory = OutputMemory(memory_tokens)
        self._store = open_store(store, self.tokenizer) if store is not None else None

    @cached_property
    def _token_classes(self) -> bytes:
        pieces = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        return token_classes([piece or "" for piece in pieces], set(self.tokenizer.all_special_ids))

    @property
    def _branching(self) -> bool:
        """Whether drafts may be trees."""
        return trees_pay(self.costs.curve) and self.tier is Tier.TREE

    def drafter(self, session: Session | None = None) -> PlannedDrafter:
        """A planner for one generation, with the index of its session."""
        return PlannedDrafter(
            self.costs.curve,
            waiting_cost=self.costs.waiting_cost,
            branching=self._branching,
            replays=self.chain_tier is Tier.REPLAY,
            guard=Guard(),
            memory=self.memory,
            store=self._store,
            token_classes=self._token_classes,
            index=session.index if session else None,
        )

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one response per token.

        Args:
            prompt: text, or token ids.
            max_tokens: how many tokens to generate at most.
            options: how to sample and where to end, as in :meth:`Decoder.decode`: ``temp``,
                ``top_p``, ``seed``, ``stop`` and so on.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        make_drafter = partial(self.drafter, options.get("session"))
        return self._decode_with(make_drafter, prompt, max_tokens, **options)

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
