"""The decoders that users call."""

from .auto import AutoDecoder
from .base import Decoder, Prompt
from .combined import CombinedDecoder
from .lookahead import LookaheadDecoder
from .prompt_lookup import PromptLookupDecoder
from .session import Session

__all__ = [
    "AutoDecoder",
    "CombinedDecoder",
    "Decoder",
    "LookaheadDecoder",
    "Prompt",
    "PromptLookupDecoder",
    "Session",
]
