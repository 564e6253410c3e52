"""Prompt lookup decoding for users: as a generator, and straight to standard output."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from ..drafting.lookup_names import lookup_drafter
from ..response import GenerationResponse, GenerationResult
from .base import Decoder, Prompt
from .options import GenerationOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PromptLookupDecoder(Decoder):
    """Speculates on text that repeats: code edits, summaries, quotations, structured output.

    The draft is what followed the context's last n-gram earlier in prompt or output; see
    :class:`mlxspec.drafting.PromptLookupDrafter`.
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
