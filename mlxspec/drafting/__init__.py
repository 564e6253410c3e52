"""Drafting: guessing the next tokens from text. Knows no MLX and no model."""

from .drafter import Drafter, NoDraft, VerifiedStep
from .prompt_lookup import PromptLookupDrafter
from .tree import DraftTree

__all__ = ["DraftTree", "Drafter", "NoDraft", "PromptLookupDrafter", "VerifiedStep"]
