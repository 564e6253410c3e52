"""Lossless speculative decoding for LLMs on Apple MLX, without a second model."""

from .process import prefer_openblas

prefer_openblas()  # before anything imports mlx.core

import logging  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    from .compat.augmentation import Augmentation, augment
    from .compat.batch import batch_generate
    from .compat.generation import generate, stream_generate
    from .corpus.memory import Memory
    from .drafting.combined import CombinedDrafter
    from .drafting.drafter import Drafter, DraftTree, VerifiedStep
    from .drafting.lookahead import LookaheadDrafter
    from .drafting.sources import PromptLookupDrafter
    from .engine.constraint import Constraint
    from .engine.draft_model import DraftModelDrafter
    from .engine.params import SamplingParams, pure
    from .engine.prompt_cache_file import load_prompt_cache, save_prompt_cache
    from .errors import (
        ConversionError,
        DistributedError,
        DrafterError,
        LoadError,
        MlxspecError,
        OptionError,
        PromptCacheError,
        PromptError,
        StoreError,
    )
    from .generation.decoder import Decoder
    from .generation.decoders import (
        AutoDecoder,
        CombinedDecoder,
        LookaheadDecoder,
        PromptLookupDecoder,
    )
    from .generation.options import GenerationOptions
    from .generation.response import (
        GenerationResponse,
        GenerationResult,
        SpeculationStats,
        TokenLogprobs,
    )
    from .generation.session import Session
    from .models.model import load

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"
__all__ = [
    "Augmentation",
    "AutoDecoder",
    "CombinedDecoder",
    "CombinedDrafter",
    "Constraint",
    "ConversionError",
    "Decoder",
    "DistributedError",
    "DraftModelDrafter",
    "DraftTree",
    "Drafter",
    "DrafterError",
    "GenerationOptions",
    "GenerationResponse",
    "GenerationResult",
    "LoadError",
    "LookaheadDecoder",
    "LookaheadDrafter",
    "Memory",
    "MlxspecError",
    "OptionError",
    "PromptCacheError",
    "PromptError",
    "PromptLookupDecoder",
    "PromptLookupDrafter",
    "SamplingParams",
    "Session",
    "SpeculationStats",
    "StoreError",
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
    "Augmentation": ".compat.augmentation",
    "augment": ".compat.augmentation",
    "batch_generate": ".compat.batch",
    "generate": ".compat.generation",
    "stream_generate": ".compat.generation",
    "CombinedDrafter": ".drafting.combined",
    "Constraint": ".engine.constraint",
    "Drafter": ".drafting.drafter",
    "VerifiedStep": ".drafting.drafter",
    "LookaheadDrafter": ".drafting.lookahead",
    "PromptLookupDrafter": ".drafting.sources",
    "DraftTree": ".drafting.drafter",
    "DraftModelDrafter": ".engine.draft_model",
    "load_prompt_cache": ".engine.prompt_cache_file",
    "save_prompt_cache": ".engine.prompt_cache_file",
    "SamplingParams": ".engine.params",
    "pure": ".engine.params",
    "ConversionError": ".errors",
    "DistributedError": ".errors",
    "DrafterError": ".errors",
    "LoadError": ".errors",
    "MlxspecError": ".errors",
    "OptionError": ".errors",
    "PromptCacheError": ".errors",
    "PromptError": ".errors",
    "StoreError": ".errors",
    "Decoder": ".generation.decoder",
    "AutoDecoder": ".generation.decoders",
    "CombinedDecoder": ".generation.decoders",
    "LookaheadDecoder": ".generation.decoders",
    "PromptLookupDecoder": ".generation.decoders",
    "GenerationOptions": ".generation.options",
    "GenerationResponse": ".generation.response",
    "GenerationResult": ".generation.response",
    "SpeculationStats": ".generation.response",
    "TokenLogprobs": ".generation.response",
    "Session": ".generation.session",
    "load": ".models.model",
    "Memory": ".corpus.memory",
}


def __getattr__(name: str) -> object:
    """Import public names on first use: MLX takes seconds to load, ``--help`` should not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
