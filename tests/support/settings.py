"""The generations that two ranks and one process must agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxspec.draft.drafter import Drafter, NoDraft
from mlxspec.draft.lookahead import LookaheadDrafter
from mlxspec.draft.prompt_lookup import PromptLookupDrafter

ARCHITECTURE = "qwen3_5"
"""One whose state cannot be cut back: accepted tokens of a rejected draft run again."""
ARCHITECTURE_PROMPT = [5, 9, 3, 5, 9]

PROMPT = [1, *range(300, 320), *range(300, 306)]


@dataclass(frozen=True)
class Settings:
    """One generation: a new drafter, and the options of :meth:`mlxspec.Decoder.decode`."""

    drafter: Callable[[], Drafter]
    options: dict[str, Any]


SETTINGS = {
    "plain": Settings(NoDraft, {"max_tokens": 12}),
    "lookup": Settings(lambda: PromptLookupDrafter(4, 2, 1), {"max_tokens": 18}),
    "lookahead": Settings(lambda: LookaheadDrafter(3, 3, 3), {"max_tokens": 12}),
    "sampled": Settings(
        lambda: PromptLookupDrafter(3, 2, 1),
        {"max_tokens": 14, "temp": 0.2, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.05},
    ),
    "quantised": Settings(
        lambda: PromptLookupDrafter(3, 2, 1),
        {"max_tokens": 12, "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 30},
    ),
}
