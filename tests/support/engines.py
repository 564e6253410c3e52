"""Submit requests to an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxspec import GenerationResponse
from mlxspec.generation.drafting import Drafting
from mlxspec.generation.engine import Engine
from mlxspec.generation.options import Prompt
from mlxspec.generation.request import Request


def submit(
    engine: Engine,
    prompt: Prompt,
    receive: Callable[[GenerationResponse], object],
    max_tokens: int = 250,
    drafting: Drafting | None = None,
    **options: Any,
) -> Request:
    """Add a new request to an engine; return it."""
    new_request = engine._decoder.new_request
    request = new_request(prompt, max_tokens, options, drafting, receive)  # type: ignore[arg-type]
    engine.add(request)
    return request
