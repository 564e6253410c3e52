"""The decoders that users call."""

from .auto import AutoDecoder
from .base import Decoder, Prompt
from .prompt_lookup import PromptLookupDecoder

__all__ = ["AutoDecoder", "Decoder", "Prompt", "PromptLookupDecoder"]
