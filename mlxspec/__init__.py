"""Lossless speculative decoding for LLMs on Apple MLX, without a second model."""

from ._blas import prefer_openblas

prefer_openblas()  # before anything imports mlx.core

from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    from .decoders import AutoDecoder, Decoder, PromptLookupDecoder
    from .decoding import SamplingParams
    from .drafting import Drafter, DraftTree, VerifiedStep
    from .errors import MlxspecError
    from .generation import stream_generate
    from .models.loading import load
    from .response import GenerationResponse, GenerationResult, SpeculationStats

__version__ = "0.1.0"
__all__ = [
    "AutoDecoder",
    "Decoder",
    "DraftTree",
    "Drafter",
    "GenerationResponse",
    "GenerationResult",
    "MlxspecError",
    "PromptLookupDecoder",
    "SamplingParams",
    "SpeculationStats",
    "VerifiedStep",
    "load",
    "stream_generate",
]

_HOMES = {
    "AutoDecoder": ".decoders",
    "Decoder": ".decoders",
    "PromptLookupDecoder": ".decoders",
    "SamplingParams": ".decoding",
    "DraftTree": ".drafting",
    "Drafter": ".drafting",
    "VerifiedStep": ".drafting",
    "MlxspecError": ".errors",
    "load": ".models.loading",
    "stream_generate": ".generation",
    "GenerationResponse": ".response",
    "GenerationResult": ".response",
    "SpeculationStats": ".response",
}


def __getattr__(name: str) -> object:
    """Import public names on first use: MLX takes seconds to load, ``--help`` should not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
