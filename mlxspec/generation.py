"""Generation as a function of a loaded model, in the manner of mlx-lm."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .decoders import AutoDecoder, Prompt
from .response import GenerationResponse

_ATTRIBUTE = "_mlxspec_decoder"


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: Prompt,
    max_tokens: int = 256,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """Generate with the default decoder, one response per token.

    What the decoder has measured of the model and remembers of its outputs serves the next
    call with the same model and tokenizer.

    Args:
        model, tokenizer: from :func:`mlxspec.load` or ``mlx_lm.load``.
        prompt: text, or token ids.
        max_tokens: how many tokens to generate at most.
        options: the other options of :meth:`mlxspec.AutoDecoder.stream`.

    Raises:
        PromptError, OptionError: as :meth:`mlxspec.Decoder.decode`.
    """
    # Kept on the model, so that both go together: a table here would keep the model alive.
    decoder = getattr(model, _ATTRIBUTE, None)
    if decoder is None or decoder.tokenizer is not tokenizer:
        decoder = AutoDecoder(model, tokenizer)
        object.__setattr__(model, _ATTRIBUTE, decoder)
    return decoder.stream(prompt, max_tokens, **options)
