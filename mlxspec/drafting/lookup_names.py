"""The names that users of transformers and TensorRT-LLM know for prompt lookup's parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..errors import OptionError


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
    except (TypeError, ValueError):
        raise OptionError(
            f"prompt_lookup_config is {config!r}: write it as [draft tokens, longest n-gram], "
            "for example [10,2]"
        ) from None
    note = None
    if devices:
        note = f"prompt_lookup_config: the device list {devices[0]} is ignored, MLX has one device"
    return n_draft, ngram_max, note


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
