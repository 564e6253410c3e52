"""Lossless speculative decoding for LLMs on Apple MLX, without a second model."""

from .process import prefer_openblas

prefer_openblas()  # before anything imports mlx.core

import logging  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

_PUBLIC = {
    ".compat.augmentation": "Augmentation augment",
    ".compat.generation": "batch_generate generate stream_generate",
    ".corpus.memory": "Memory",
    ".drafting.combined": "CombinedDrafter",
    ".drafting.drafter": "DraftTree Drafter VerifiedStep",
    ".drafting.lookahead": "LookaheadDrafter",
    ".drafting.sources": "PromptLookupDrafter",
    ".engine.draft_model": "DraftModelDrafter",
    ".engine.params": "Constraint SamplingParams pure",
    ".engine.prompt_cache_file": "load_prompt_cache save_prompt_cache",
    ".errors": "ConversionError DistributedError DrafterError LoadError MlxspecError "
    "OptionError PromptCacheError PromptError StoreError",
    ".generation.decoder": "AutoDecoder CombinedDecoder Decoder LookaheadDecoder "
    "PromptLookupDecoder",
    ".generation.options": "GenerationOptions",
    ".generation.response": "GenerationResponse GenerationResult SpeculationStats TokenLogprobs",
    ".generation.session": "Session",
    ".models.model": "load",
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names.split()}

if TYPE_CHECKING:  # for type checkers and editors; _PUBLIC lists the same names for run time
    from .compat.augmentation import Augmentation as Augmentation
    from .compat.augmentation import augment as augment
    from .compat.generation import batch_generate as batch_generate
    from .compat.generation import generate as generate
    from .compat.generation import stream_generate as stream_generate
    from .corpus.memory import Memory as Memory
    from .drafting.combined import CombinedDrafter as CombinedDrafter
    from .drafting.drafter import Drafter as Drafter
    from .drafting.drafter import DraftTree as DraftTree
    from .drafting.drafter import VerifiedStep as VerifiedStep
    from .drafting.lookahead import LookaheadDrafter as LookaheadDrafter
    from .drafting.sources import PromptLookupDrafter as PromptLookupDrafter
    from .engine.draft_model import DraftModelDrafter as DraftModelDrafter
    from .engine.params import Constraint as Constraint
    from .engine.params import SamplingParams as SamplingParams
    from .engine.params import pure as pure
    from .engine.prompt_cache_file import load_prompt_cache as load_prompt_cache
    from .engine.prompt_cache_file import save_prompt_cache as save_prompt_cache
    from .errors import ConversionError as ConversionError
    from .errors import DistributedError as DistributedError
    from .errors import DrafterError as DrafterError
    from .errors import LoadError as LoadError
    from .errors import MlxspecError as MlxspecError
    from .errors import OptionError as OptionError
    from .errors import PromptCacheError as PromptCacheError
    from .errors import PromptError as PromptError
    from .errors import StoreError as StoreError
    from .generation.decoder import AutoDecoder as AutoDecoder
    from .generation.decoder import CombinedDecoder as CombinedDecoder
    from .generation.decoder import Decoder as Decoder
    from .generation.decoder import LookaheadDecoder as LookaheadDecoder
    from .generation.decoder import PromptLookupDecoder as PromptLookupDecoder
    from .generation.options import GenerationOptions as GenerationOptions
    from .generation.response import GenerationResponse as GenerationResponse
    from .generation.response import GenerationResult as GenerationResult
    from .generation.response import SpeculationStats as SpeculationStats
    from .generation.response import TokenLogprobs as TokenLogprobs
    from .generation.session import Session as Session
    from .models.model import load as load

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import public names on first use, since ``--help`` should not wait seconds for MLX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
