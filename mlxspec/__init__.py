"""Lossless speculative decoding for LLMs on Apple MLX, without a second model."""

from ._blas import prefer_openblas

prefer_openblas()  # before anything imports mlx.core

from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    from .augmentation import Augmentation, augment
    from .batch import batch_generate
    from .decoders import (
        AutoDecoder,
        CombinedDecoder,
        Decoder,
        LookaheadDecoder,
        PromptLookupDecoder,
        Session,
    )
    from .decoding import SamplingParams, pure
    from .decoding.draft_model import DraftModelDrafter
    from .drafting import (
        CombinedDrafter,
        Drafter,
        DraftTree,
        LookaheadDrafter,
        PromptLookupDrafter,
        VerifiedStep,
    )
    from .errors import MlxspecError
    from .generation import generate, stream_generate
    from .models.loading import load
    from .models.prompt_cache_file import load_prompt_cache, save_prompt_cache
    from .response import GenerationResponse, GenerationResult, SpeculationStats, TokenLogprobs

__version__ = "0.1.0"
__all__ = [
    "Augmentation",
    "AutoDecoder",
    "CombinedDecoder",
    "CombinedDrafter",
    "Decoder",
    "DraftModelDrafter",
    "DraftTree",
    "Drafter",
    "GenerationResponse",
    "GenerationResult",
    "LookaheadDecoder",
    "LookaheadDrafter",
    "MlxspecError",
    "PromptLookupDecoder",
    "PromptLookupDrafter",
    "SamplingParams",
    "Session",
    "SpeculationStats",
    "TokenLogprobs",
    "VerifiedStep",
    "augment",
    "batch_generate",
    "generate",
    "load",
    "load_prompt_cache",
    "pure",
    "save_prompt_cache",
    "stream_generate",
]

_HOMES = {
    "AutoDecoder": ".decoders",
    "CombinedDecoder": ".decoders",
    "Decoder": ".decoders",
    "LookaheadDecoder": ".decoders",
    "PromptLookupDecoder": ".decoders",
    "Session": ".decoders",
    "SamplingParams": ".decoding",
    "pure": ".decoding",
    "DraftModelDrafter": ".decoding.draft_model",
    "DraftTree": ".drafting",
    "CombinedDrafter": ".drafting",
    "Drafter": ".drafting",
    "LookaheadDrafter": ".drafting",
    "PromptLookupDrafter": ".drafting",
    "VerifiedStep": ".drafting",
    "MlxspecError": ".errors",
    "load": ".models.loading",
    "load_prompt_cache": ".models.prompt_cache_file",
    "save_prompt_cache": ".models.prompt_cache_file",
    "Augmentation": ".augmentation",
    "augment": ".augmentation",
    "batch_generate": ".batch",
    "generate": ".generation",
    "stream_generate": ".generation",
    "GenerationResponse": ".response",
    "GenerationResult": ".response",
    "SpeculationStats": ".response",
    "TokenLogprobs": ".response",
}


def __getattr__(name: str) -> object:
    """Import public names on first use: MLX takes seconds to load, ``--help`` should not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
