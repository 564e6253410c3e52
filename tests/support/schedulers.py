"""Submit requests to a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxspec import GenerationResponse
from mlxspec.generation.drafter_factories import DrafterFactory
from mlxspec.generation.options import Prompt
from mlxspec.generation.request import Request
from mlxspec.generation.scheduler import Scheduler


def submit(
    scheduler: Scheduler,
    prompt: Prompt,
    receive: Callable[[GenerationResponse], object],
    max_tokens: int = 250,
    factory: DrafterFactory | None = None,
    **options: Any,
) -> Request:
    """Add a new request to a scheduler; return it."""
    new_request = scheduler._decoder.new_request
    request = new_request(prompt, max_tokens, options, factory, receive)  # type: ignore[arg-type]
    scheduler.add(request)
    return request
