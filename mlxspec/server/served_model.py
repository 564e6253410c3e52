"""A model that is served, with what its generations share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..engine.positions import context_length
from ..generation.decoder import Decoder, MakeDrafter
from ..generation.decoders import AutoDecoder
from ..generation.options import GenerationOptions
from .admission import Memory
from .prefix_cache import PrefixCache


@dataclass
class ServedModel:
    """A model that is served.

    Attributes:
        name: what requests call it.
        decoder: loaded, with its costs known.
        cache: of prefixes.
        memory: what caches take.
        arguments: of the decoder's ``drafting_with``.
        options: defaults of all its generations, which a request's go before.
        template_arguments: what its chat template is given, which a request's go before.
        created: when it was loaded, in seconds since 1970.
    """

    name: str
    decoder: Decoder
    cache: PrefixCache
    memory: Memory
    arguments: dict[str, Any] = field(default_factory=dict)
    options: GenerationOptions = field(default_factory=GenerationOptions)
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def context_length(self) -> int | None:
        """In tokens, where the model states it."""
        return context_length(self.decoder.model)

    @cached_property
    def special_tokens(self) -> list[int]:
        """Those that XTC never drops: line breaks and ends."""
        tokenizer = self.decoder.tokenizer
        return [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]

    @property
    def predicts(self) -> bool:
        """Whether its drafts can come from a text that a client expects."""
        return isinstance(self.decoder, AutoDecoder)

    def make_drafter(self, prediction: Sequence[int]) -> MakeDrafter:
        """What makes the drafter of one generation."""
        expected = {"prediction": prediction} if prediction else {}
        return self.decoder.drafting_with(**self.arguments, **expected)
