"""Lookahead decoding for users: as a generator, and straight to standard output."""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from ..drafting import LookaheadDrafter
from ..drafting.lookahead import check_sizes
from ..models.tier import Tier
from ..planning.lookahead_planner import LookaheadKnowledge, PlannedLookahead
from ..response import GenerationResponse, GenerationResult
from .base import Prompt
from .measured import MeasuredDecoder
from .options import GenerationOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_AUTO_GUESSES = 16  # that are kept for one first token; how many are verified follows the costs


class LookaheadDecoder(MeasuredDecoder):
    """Speculates without any text to copy: on the model's own guesses of the tokens ahead.

    A window runs Jacobi iterations over the next positions in the rows of each step; the n-grams
    that it passes through go into a pool, from which drafts are taken. (Fu et al., ICML 2024,
    arXiv 2402.02057.) By the names of the paper and of its reference implementation:

    ============ ================== ===================================================
    paper        reference          here
    ============ ================== ===================================================
    W            WINDOW_SIZE        ``window_size``, columns of the window
    N            LEVEL              ``ngram_size``, tokens of an n-gram; the window has
                                    N - 1 levels
    G            GUESS_SET_SIZE     ``guess_set_size``, n-grams kept for one first token
                                    and verified in a step
    (none)       POOL_FROM_PROMPT   ``pool_from_prompt``, whether the pool starts with
                                    the prompt's n-grams
    ============ ================== ===================================================

    A step has up to (N - 1)(W + G) rows, which only pays where rows are cheap. With
    ``window_size="auto"`` all sizes follow the measured cost of rows and what drafts have
    lately earned, down to plain decoding.

    Args:
        model, tokenizer, on_measuring: as for :class:`MeasuredDecoder`.

    Raises:
        LoadError, OptionError: as :class:`Decoder`.
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
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one response per token.

        Args:
            prompt: text, or token ids.
            max_tokens: how many tokens to generate at most.
            window_size: W, the reference's WINDOW_SIZE; 0 is no window, "auto" what pays.
            ngram_size: N, the reference's LEVEL; with "auto", the most.
            guess_set_size: G, the reference's GUESS_SET_SIZE; -1, its "no limit", for 64, since
                more would take longer than they save. By default as large as W, and 16 with
                "auto".
            pool_from_prompt: the reference's POOL_FROM_PROMPT.
            options: how to sample and where to end, as in :meth:`Decoder.decode`: ``temp``,
                ``top_p``, ``seed``, ``stop`` and so on.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        sizes = window_size, ngram_size, guess_set_size, pool_from_prompt
        make_drafter = partial(lookahead_drafter, self, self._knowledge, *sizes)
        return self._decode_with(make_drafter, prompt, max_tokens, **options)

    def lookahead(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        window_size: int | Literal["auto"] = "auto",
        ngram_size: int = 5,
        guess_set_size: int | None = None,
        pool_from_prompt: bool = True,
        temp: float = 0.0,
        seed: int = 0,
        color: bool = True,
        **options: Any,
    ) -> GenerationResult:
        """Generate, write the text to standard output as it comes, and return the result.

        Args:
            prompt, max_tokens, window_size, ngram_size, guess_set_size, pool_from_prompt, temp,
                seed: as in :meth:`stream`.
            color: colour accepted draft tokens and the model's own, at a terminal.
            options: :meth:`stream`'s other options.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        responses = self.stream(
            prompt,
            max_tokens,
            window_size,
            ngram_size,
            guess_set_size,
            pool_from_prompt,
            temp=temp,
            seed=seed,
            **options,
        )
        return self.written(responses, color)


def lookahead_drafter(
    decoder: MeasuredDecoder,
    knowledge: LookaheadKnowledge,
    window_size: int | Literal["auto"],
    ngram_size: int,
    guess_set_size: int | None,
    pool_from_prompt: bool,
) -> LookaheadDrafter | PlannedLookahead:
    """A drafter for one generation, with the parameters of :meth:`LookaheadDecoder.stream`.

    Args:
        decoder: measures costs where the sizes follow them.
        knowledge: what was learned from the decoder's earlier generations.

    Raises:
        OptionError: a size is out of range.
    """
    if window_size != "auto":
        return LookaheadDrafter(window_size, ngram_size, guess_set_size, pool_from_prompt)
    guess_set_size = _AUTO_GUESSES if guess_set_size is None else guess_set_size
    check_sizes(0, ngram_size, guess_set_size)
    return PlannedLookahead(
        decoder.costs.curve,
        ngram_size=ngram_size,
        guess_set_size=guess_set_size,
        pool_from_prompt=pool_from_prompt,
        branching=decoder.tier is Tier.TREE,
        knowledge=knowledge,
    )
