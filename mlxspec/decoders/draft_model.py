"""Look-ups and a draft model together."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..decoding.draft_model import DraftModelDrafter, check_vocabularies
from ..drafting import CombinedDrafter
from ..models.positions import context_length
from ..models.prompt_cache import fitting_caches
from ..response import GenerationResponse
from .auto import AutoDecoder
from .options import GenerationOptions
from .prompt import Prompt, prompt_ids
from .responses import on_loan

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    if drafts_cache is not None:
        fitting_caches(drafts_cache, draft_model)
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
