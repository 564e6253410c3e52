"""The decoders that users know by name; what each drafts is all that tells them apart."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..draft.combined import CombinedDrafter
from ..draft.context_index import OutputMemory
from ..draft.drafter import Drafter
from ..draft.lookahead import LookaheadDrafter, check_sizes
from ..draft.prompt_lookup import lookup_drafter
from ..engine.draft_model import DraftModelDrafter, check_vocabularies
from ..engine.positions import context_length
from ..engine.target import Capability
from ..plan.lookahead_source import LookaheadKnowledge, PlannedLookahead
from ..plan.p_accept import token_classes
from ..plan.planner import PlannedDrafter
from ..plan.policy import Guard, trees_pay
from ..store.store import open_store
from .decoder import Decoder, MeasuredDecoder
from .options import GenerationOptions, Prompt, prompt_ids
from .response import GenerationResponse, GenerationResult
from .responses import on_loan
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
        return trees_pay(self.costs.curve) and self.capability is Capability.TREE

    def drafter(self, session: Session | None = None) -> PlannedDrafter:
        """A planner for one generation, with the index of its session."""
        return PlannedDrafter(
            self.costs.curve,
            waiting_cost=self.costs.waiting_cost,
            branching=self._branching,
            replays=self.chain_capability is Capability.REPLAY,
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


class PromptLookupDecoder(Decoder):
    """Speculates on text that repeats: code edits, summaries, quotations, structured output.

    The draft is what followed the context's last n-gram earlier in prompt or output; see
    :class:`mlxspec.PromptLookupDrafter`.
    """

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        n_draft: int = 10,
        ngram_max: int = 3,
        ngram_min: int = 1,
        *,
        prompt_lookup_num_tokens: int | None = None,
        max_matching_ngram_size: int | None = None,
        prompt_lookup_config: str | Sequence[object] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationResponse, None, None]:
        """Generate one response per token.

        Args:
            prompt: text, or token ids.
            max_tokens: how many tokens to generate at most.
            n_draft: draft tokens per step at most; 0 is plain decoding.
            ngram_max: the longest n-gram looked up.
            ngram_min: the shortest.
            prompt_lookup_num_tokens: transformers' and TensorRT-LLM's name for ``n_draft``
                (TensorRT-LLM's default is 4).
            max_matching_ngram_size: their name for ``ngram_max`` (TensorRT-LLM's default is 2).
            prompt_lookup_config: TensorRT-LLM's form for both, ``"[10,2,[0]]"``; a device list
                is ignored with a warning.
            options: how to sample and where to end, as in :meth:`Decoder.decode`: ``temp``,
                ``top_p``, ``seed``, ``stop`` and so on.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        if prompt_lookup_num_tokens is not None:
            n_draft = prompt_lookup_num_tokens
        if max_matching_ngram_size is not None:
            ngram_max = max_matching_ngram_size
        drafter, note = lookup_drafter(n_draft, ngram_max, ngram_min, prompt_lookup_config)
        if note:
            warnings.warn(note, stacklevel=2)
        return self.decode(prompt, drafter, max_tokens=max_tokens, **options)

    def prompt_lookup(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        n_draft: int = 10,
        ngram_max: int = 3,
        ngram_min: int = 1,
        temp: float = 0.0,
        seed: int = 0,
        color: bool = True,
        **options: Any,
    ) -> GenerationResult:
        """Generate, write the text to standard output as it comes, and return the result.

        Args:
            prompt, max_tokens, n_draft, ngram_max, ngram_min, temp, seed: as in :meth:`stream`.
            color: colour accepted draft tokens and the model's own, at a terminal.
            options: :meth:`stream`'s other options.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        responses = self.stream(
            prompt, max_tokens, n_draft, ngram_max, ngram_min, temp=temp, seed=seed, **options
        )
        return self.written(responses, color)


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
        branching=decoder.capability is Capability.TREE,
        knowledge=knowledge,
    )


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


def stream_with_draft_model(
    decoder: AutoDecoder,
    draft_model: nn.Module,
    prompt: Prompt,
    max_tokens: int,
    num_draft_tokens: int = 2,
    **options: Unpack[GenerationOptions],
) -> Generator[GenerationResponse, None, None]:
    """Draft from text that repeats where that pays, and with a small model elsewhere.

    The steps' times teach the decoder nothing, since the draft model's forwards are in them.

    Args:
        decoder: of the target; plans the look-ups.
        draft_model: an mlx-lm model with the target's tokenizer.
        prompt: text, or token ids.
        max_tokens: how many tokens to generate at most.
        num_draft_tokens: how many tokens the draft model drafts at most.
        options: as in :meth:`mlxspec.Decoder.decode`. In ``prompt_cache`` the draft model's
            caches may follow the target's, as with mlx-lm.

    Raises:
        PromptError, OptionError: as :meth:`mlxspec.Decoder.decode`, or the draft model has
            another vocabulary.
    """
    check_vocabularies(draft_model, decoder.vocab_size, len(decoder.tokenizer))
    both = options.get("prompt_cache") or []
    drafts_cache = both[len(make_prompt_cache(decoder.model)) :] or None
    drafter = DraftModelDrafter(draft_model, num_draft_tokens, drafts_cache)

    drafts = False

    def make_drafter() -> CombinedDrafter:
        nonlocal drafts
        drafts = True
        return CombinedDrafter(decoder.drafter(options.get("session")), drafter)

    longest = context_length(decoder.model)
    tokens = prompt_ids(prompt, decoder.tokenizer, decoder.vocab_size, longest)
    responses = decoder._decode_with(make_drafter, tokens, max_tokens, **options)
    if drafter.loan is None:
        return responses

    def start() -> Generator[GenerationResponse, None, None]:
        if not drafts:  # its caches follow the output all the same
            drafter.begin(tokens)
        return responses

    return on_loan(drafter.loan, tokens, start)
