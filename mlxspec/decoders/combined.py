"""Text that repeats and lookahead in one draft, for users."""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ..drafting import CombinedDrafter, Drafter
from ..planning.lookahead_planner import LookaheadKnowledge
from ..response import GenerationResponse
from .auto import AutoDecoder
from .base import Prompt
from .lookahead import lookahead_drafter
from .options import GenerationOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CombinedDecoder(AutoDecoder):
    """Speculates on text that repeats and, in the rows that are left, by lookahead.

    Its arguments are those of :class:`AutoDecoder`. To combine other drafters, pass a
    :class:`mlxspec.CombinedDrafter` to :meth:`Decoder.decode`.
    """

    @cached_property
    def _knowledge(self) -> LookaheadKnowledge:
        return LookaheadKnowledge()

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        window_size: int | Literal["auto"] = "auto",
        ngram_size: int = 5,
        guess_set_size: int | None = None,
        pool_from_prompt: bool = True,
        drafter: Drafter | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one response per token.

        Args:
            prompt: text, or token ids.
            max_tokens: how many tokens to generate at most.
            window_size, ngram_size, guess_set_size, pool_from_prompt: lookahead's, as for
                :class:`mlxspec.LookaheadDecoder`.
            drafter: goes first, with lookahead as its fallback; by default the look-ups that
                :class:`mlxspec.AutoDecoder` plans.
            options: how to sample and where to end, as in :meth:`Decoder.decode`: ``temp``,
                ``top_p``, ``seed``, ``stop`` and so on.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """

        def make_drafter() -> CombinedDrafter:
            sizes = window_size, ngram_size, guess_set_size, pool_from_prompt
            second = lookahead_drafter(self, self._knowledge, *sizes)
            return CombinedDrafter(drafter or self.drafter(options.get("session")), second)

        return self._decode_with(make_drafter, prompt, max_tokens, **options)
