"""The decoders that users call."""

from .base import Decoder, Prompt
from .prompt_lookup import PromptLookupDecoder

__all__ = ["Decoder", "Prompt", "PromptLookupDecoder"]
