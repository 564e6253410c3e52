"""The decoders that users know by name. They differ only in what they draft from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..corpus.memory import MAX_TOKENS, Memory
from ..corpus.store import open_store
from ..corpus.tokenizer_identity import identify
from ..drafting.drafter import Drafter, checked_drafter
from ..drafting.sources import parse_lookup_config
from ..errors import OptionError, StoreError
from .decoder import Decoder
from .drafting import Auto, Lookahead, PromptLookup, drafter_maker
from .options import FurtherOptions, GenerationOptions, MakeDrafter, Prompt
from .request import responses
from .response import GenerationResponse, GenerationResult

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AutoDecoder(Decoder):
    """Chooses each draft by what it costs and what it will probably gain; nothing to tune.

    What a step costs is measured at first use, kept in the user's cache directory and
    corrected by every step. Which drafts are right is learned from every output and kept there
    too, without any text, unless ``MLXSPEC_MEMORY=off``. Outputs are remembered, and later outputs
    are drafted from them: in the process alone, unless a ``memory`` is passed that is kept on disk.

    Args:
        model, tokenizer, on_measuring: as for :class:`Decoder`.
        memory_tokens: how many tokens of outputs the decoder remembers in a memory of its own,
            :data:`mlxspec.corpus.MAX_TOKENS` by default. With 0 there is no memory, and nothing
            that one generation teaches is known in the next.
        memory: remembers the outputs instead. Several decoders of one tokenizer may share it.
        store: a file of ``mlxspec store build`` to draft from.
        extra_drafter: drafts as well, wherever that pays: a :class:`mlxspec.Drafter`, which
            serves one generation at a time, or a class or function that makes one for each
            generation. How likely its tokens are right is learned from the output.

    Raises:
        LoadError, OptionError, DrafterError: as :class:`Decoder`; OptionError as well where both
            ``memory`` and ``memory_tokens`` are given.
        StoreError: the store cannot be read, or it or what ``memory`` keeps is another
            tokenizer's.
    """

    drafting: Auto = Auto()

    def __init__(
        self,
        model: str | Path | nn.Module = "mlx_model",
        tokenizer: TokenizerWrapper | None = None,
        *,
        memory_tokens: int | None = None,
        memory: Memory | None = None,
        store: str | os.PathLike[str] | None = None,
        extra_drafter: Drafter | Callable[[], Drafter] | None = None,
        on_measuring: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(model, tokenizer, on_measuring=on_measuring)
        if memory is None:
            most = MAX_TOKENS if memory_tokens is None else memory_tokens
            memory = Memory(most) if most else None
        elif memory_tokens is not None:
            raise OptionError("memory and memory_tokens are given together: choose one")
        elif memory.kept:
            kept, own = memory.kept.identity, identify(self.tokenizer)
            if kept.fingerprint != own.fingerprint:
                raise StoreError(
                    f"memory keeps tokens of {kept}, the model's tokenizer is {own}: open one for "
                    "it"
                )
        self.drafting = replace(
            self.drafting,
            memory=memory,
            store=None if store is None else open_store(store, self.tokenizer),
            extra=None if extra_drafter is None else drafter_maker(extra_drafter),
        )

    @property
    def memory(self) -> Memory | None:
        """Of the outputs."""
        return self.drafting.memory

    def drafting_with(self, *, prediction: Sequence[int] = ()) -> MakeDrafter:
        """What makes the drafter of one generation.

        Args:
            prediction: token ids that the output is expected to follow, to draft from too.
        """
        return partial(replace(self.drafting, prediction=prediction).make, self)


class FurtherLookupOptions(FurtherOptions, total=False):
    """The options of :meth:`PromptLookupDecoder.stream` that ``prompt_lookup`` does not name."""

    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    prompt_lookup_config: str | Sequence[object] | None


class PromptLookupDecoder(Decoder):
    """Speculates on text that repeats: code edits, summaries, quotations, structured output.

    The draft is what followed the context's last n-gram earlier in prompt or output; see
    :class:`mlxspec.PromptLookupDrafter`.
    """

    drafting = PromptLookup()

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
            prompt: text, token ids, or messages, as for :meth:`Decoder.decode`.
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
        if prompt_lookup_config is not None:
            n_draft, ngram_max, note = parse_lookup_config(prompt_lookup_config)
            if note:
                warnings.warn(note, stacklevel=2)
        make_drafter = self.drafting_with(n_draft, ngram_max, ngram_min)
        return responses(self.new_request(prompt, max_tokens, options, make_drafter))

    def drafting_with(
        self, n_draft: int = 10, ngram_max: int = 3, ngram_min: int = 1
    ) -> MakeDrafter:
        """What makes the drafter of one generation.

        Args:
            n_draft, ngram_max, ngram_min: as in :meth:`stream`.

        Raises:
            OptionError: one of them is out of range.
        """
        return partial(PromptLookup(n_draft, ngram_max, ngram_min).make, self)

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
        **options: Unpack[FurtherLookupOptions],
    ) -> GenerationResult:
        """Generate, write the text to standard output as it comes, and return the result.

        Args:
            prompt, max_tokens, n_draft, ngram_max, ngram_min, temp, seed: as in :meth:`stream`.
            color: colour accepted draft tokens and the model's own, at a terminal.
            options: :meth:`stream`'s other options.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        stream = self.stream(
            prompt, max_tokens, n_draft, ngram_max, ngram_min, temp=temp, seed=seed, **options
        )
        return self.written(stream, color)


class LookaheadDecoder(Decoder):
    """Speculates on the model's own guesses of the tokens ahead, so it needs no text to copy.

    In rows of each step, a window runs Jacobi iterations over the next positions. The n-grams
    that it passes through go into a pool, from which drafts are taken. (Fu et al., ICML 2024,
    arXiv 2402.02057.) Its parameters in the paper and in the reference implementation:

    | paper | reference | here |
    |---|---|---|
    | W | WINDOW_SIZE | ``window_size``, columns of the window |
    | N | LEVEL | ``ngram_size``, tokens of an n-gram; the window has N - 1 levels |
    | G | GUESS_SET_SIZE | ``guess_set_size``, n-grams kept for one token and verified at once |
    | | POOL_FROM_PROMPT | ``pool_from_prompt``, whether the pool starts with the prompt's n-grams |

    A step has up to (N - 1)(W + G) rows, which only pays where rows are cheap. With
    ``window_size="auto"`` there is no window: the drafts are look-ups in the context, as many
    as pay by the measured cost of rows, down to plain decoding.
    """

    drafting = Lookahead()

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
            prompt: text, token ids, or messages, as for :meth:`Decoder.decode`.
            max_tokens: how many tokens to generate at most.
            window_size: W, the reference's WINDOW_SIZE; 0 and "auto" run no window.
            ngram_size: N, the reference's LEVEL; with "auto", the largest N.
            guess_set_size: G, the reference's GUESS_SET_SIZE. By default it is W, and 16 with
                "auto"; -1, the reference's "no limit", is 64, since more would take longer
                than they save.
            pool_from_prompt: the reference's POOL_FROM_PROMPT.
            options: how to sample and where to end, as in :meth:`Decoder.decode`: ``temp``,
                ``top_p``, ``seed``, ``stop`` and so on.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        make_drafter = self.drafting_with(window_size, ngram_size, guess_set_size, pool_from_prompt)
        return responses(self.new_request(prompt, max_tokens, options, make_drafter))

    def drafting_with(
        self,
        window_size: int | Literal["auto"] = "auto",
        ngram_size: int = 5,
        guess_set_size: int | None = None,
        pool_from_prompt: bool = True,
    ) -> MakeDrafter:
        """What makes the drafter of one generation.

        Args:
            window_size, ngram_size, guess_set_size, pool_from_prompt: as in :meth:`stream`.

        Raises:
            OptionError: a size is out of range.
        """
        sizes = window_size, ngram_size, guess_set_size, pool_from_prompt
        return partial(Lookahead(*sizes).make, self)

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
        **options: Unpack[FurtherOptions],
    ) -> GenerationResult:
        """Generate, write the text to standard output as it comes, and return the result.

        Args:
            prompt, max_tokens, temp, seed: as in :meth:`stream`.
            window_size, ngram_size, guess_set_size, pool_from_prompt: as in :meth:`stream`.
            color: colour accepted draft tokens and the model's own, at a terminal.
            options: :meth:`stream`'s other options.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        sizes = window_size, ngram_size, guess_set_size, pool_from_prompt
        stream = self.stream(prompt, max_tokens, *sizes, temp=temp, seed=seed, **options)
        return self.written(stream, color)


class CombinedDecoder(AutoDecoder):
    """Speculates on text that repeats and, in the rows that are left, by lookahead.

    Its arguments are those of :class:`AutoDecoder`; what lookahead earns is known in the next
    generation even with ``memory_tokens=0``. To combine other drafters, pass a
    :class:`mlxspec.CombinedDrafter` to :meth:`Decoder.decode`.
    """

    drafting = Auto(lookahead=Lookahead())

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
            prompt: text, token ids, or messages, as for :meth:`Decoder.decode`.
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
        sizes = window_size, ngram_size, guess_set_size, pool_from_prompt
        make_drafter = self.drafting_with(*sizes, drafter)
        return responses(self.new_request(prompt, max_tokens, options, make_drafter))

    def drafting_with(
        self,
        window_size: int | Literal["auto"] = "auto",
        ngram_size: int = 5,
        guess_set_size: int | None = None,
        pool_from_prompt: bool = True,
        drafter: Drafter | None = None,
        *,
        prediction: Sequence[int] = (),
    ) -> MakeDrafter:
        """What makes the drafter of one generation.

        Args:
            window_size, ngram_size, guess_set_size, pool_from_prompt, drafter: as in
                :meth:`stream`.
            prediction: as for :meth:`AutoDecoder.drafting_with`; ``drafter`` takes its place.

        Raises:
            OptionError: a size is out of range.
        """
        sizes = window_size, ngram_size, guess_set_size, pool_from_prompt
        first = None if drafter is None else partial(checked_drafter, drafter)
        lookahead = Lookahead(*sizes, first=first)
        drafting = replace(self.drafting, lookahead=lookahead, prediction=prediction)
        return partial(drafting.make, self)
