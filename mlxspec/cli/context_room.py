"""An output ends where the model's context does."""

from __future__ import annotations

import mlx.nn as nn

from ..engine.positions import context_length
from .outcome import note


def room_behind(tokens: int, longest: int | None, max_tokens: int) -> int:
    """How many tokens an output may have, at least one.

    Args:
        tokens: of its prompt.
        longest: the model's context in tokens, where it is known.
        max_tokens: how many it may have in an empty context.
    """
    return max_tokens if longest is None else max(1, min(max_tokens, longest - tokens))


def tell_of_full_context(model: nn.Module) -> None:
    """Say why an output ends before its ``max_tokens``."""
    note(f"the model's context of {context_length(model):,} tokens is full: the output ends there")
