"""Drafting: guessing the next tokens from text. Knows no MLX and no model."""

from .combined import CombinedDrafter
from .drafter import Drafter, NoDraft, VerifiedStep
from .lookahead import LookaheadDrafter
from .prompt_lookup import PromptLookupDrafter
from .tree import DraftTree

__all__ = [
    "CombinedDrafter",
    "DraftTree",
    "Drafter",
    "LookaheadDrafter",
    "NoDraft",
    "PromptLookupDrafter",
    "VerifiedStep",
]
