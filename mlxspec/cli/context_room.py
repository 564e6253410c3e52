"""An output ends where the model's context does."""

from __future__ import annotations

import mlx.nn as nn

from ..models.loading import context_length
from .outcome import note


def room_behind(tokens: int, model: nn.Module, max_tokens: int) -> int:
    """How many tokens an output behind a prompt of ``tokens`` may have, at least one."""
    longest = context_length(model)
    return max_tokens if longest is None else max(1, min(max_tokens, longest - tokens))


def tell_of_full_context(model: nn.Module) -> None:
    """Say why an output ends before its ``max_tokens``."""
    note(f"the model's context of {context_length(model):,} tokens is full: the output ends there")
