"""Prompt lookup's drafter from its parameters, in TensorRT-LLM's form too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeGuard

from ..errors import OptionError
from .drafter import Drafter, NoDraft
from .prompt_lookup import PromptLookupDrafter


def lookup_drafter(
    n_draft: int, ngram_max: int, ngram_min: int, config: str | Sequence[object] | None = None
) -> tuple[Drafter, str | None]:
    """The drafter for these parameters: none if ``n_draft`` is 0.

    Args:
        n_draft, ngram_max, ngram_min: see :class:`mlxspec.drafting.PromptLookupDrafter`.
        config: TensorRT-LLM's ``prompt_lookup_config``, in place of the first two.

    Returns:
        the drafter, and a note for the user where a part of ``config`` is ignored.

    Raises:
        OptionError: a parameter makes no sense.
    """
    note = None
    if config is not None:
        n_draft, ngram_max, note = parse_lookup_config(config)
    if n_draft < 0:
        raise OptionError(f"n_draft is {n_draft}: draft 1 token or more, or 0 for none")
    if n_draft == 0:
        return NoDraft(), note
    return PromptLookupDrafter(n_draft, ngram_max, ngram_min), note


def parse_lookup_config(config: str | Sequence[object]) -> tuple[int, int, str | None]:
    """Understand TensorRT-LLM's ``prompt_lookup_config``, ``"[10,2,[0]]"`` or the list itself.

    Args:
        config: draft tokens, longest n-gram, and optionally a list of devices.

    Returns:
        the number of draft tokens, the longest n-gram, and a note for the user when a device
        list was ignored.

    Raises:
        OptionError: it has another form.
    """
    try:
        values = json.loads(config) if isinstance(config, str) else list(config)
        n_draft, ngram_max, *devices = values
        if not _is_count(n_draft) or not _is_count(ngram_max) or len(devices) > 1:
            raise ValueError
    except (TypeError, ValueError, RecursionError):
        raise OptionError(
            f"prompt_lookup_config is {config!r}: write it as [draft tokens, longest n-gram], "
            "for example [10,2]"
        ) from None
    note = None
    if devices:
        note = f"prompt_lookup_config: the device list {devices[0]} is ignored, MLX has one device"
    return n_draft, ngram_max, note


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
