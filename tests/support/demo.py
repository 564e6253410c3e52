"""The bundled model, loaded once and tried once for what drafts it verifies."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from mlxspec import Decoder

AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)


@cache
def demo() -> Decoder:
    """A decoder of it; the model and its tokenizer are the same for all tests."""
    return Decoder("demo")


def demo_decoder(kind: type[AnyDecoder], **options: object) -> AnyDecoder:
    """A new decoder of this kind, without the 200 rows that it takes to find the capabilities."""
    decoder = kind(demo().model, demo().tokenizer, **options)
    decoder.capability, decoder.chain_capability = demo().capability, demo().chain_capability
    return decoder
