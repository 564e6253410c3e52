"""The demo model with costs that are given, and comparison with mlx-lm's own output."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import save_model

import mlxspec
from mlxspec import AutoDecoder
from mlxspec.compat.generation import decoder_of
from mlxspec.loading.model import DEMO_DIRECTORY
from mlxspec.plan.cost_file import CostCache, CostKey, KnownRange
from mlxspec.plan.live_curve import KnownTime
from tests.generation.test_auto import FixedCosts

CHAINS = {1: 1.0, 16: 2.5, 64: 8.0}
"""Rows that are cheap enough for drafts, and too dear for branches."""
REPEAT = '[INST] Repeat the following phrase 8 times: "The red fox sees the river.". [/INST]'
FREE = "The history of the"
FIELDS = ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason")

# mlx-lm's own, whatever is done to its modules.
stream_generate, batch_generate = mlx_lm.stream_generate, mlx_lm.batch_generate


def give_costs(model: nn.Module, tokenizer: Any, curve: dict[int, float] = CHAINS) -> AutoDecoder:
    """The decoder that drop-in generation uses, with costs that are neither measured nor kept."""
    decoder = decoder_of(model, tokenizer)
    times = [KnownTime(rows, 0.01 * cost, 0.001) for rows, cost in curve.items()]
    ranges = {1024: KnownRange.now(times, "test")}
    decoder.costs = FixedCosts(CostCache(Path("nowhere")), CostKey({}, {}), ranges)
    return decoder


def demo_with_costs(curve: dict[int, float] = CHAINS) -> tuple[nn.Module, Any]:
    """The bundled model and its tokenizer, the same for all tests."""
    model, tokenizer = _demo()
    give_costs(model, tokenizer, curve)
    return model, tokenizer


@cache
def _demo() -> tuple[nn.Module, Any]:
    return mlxspec.load("demo")


def write_float32_demo(directory: Path) -> str:
    """The bundled model as a directory that mlx-lm loads in float32, too."""
    for path in DEMO_DIRECTORY.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            (directory / path.name).symlink_to(path)
    save_model(directory, _demo()[0])
    return str(directory)


def fields(responses: Iterable[Any]) -> list[tuple]:
    """What is the same in two runs of one generation."""
    return [tuple(getattr(response, name) for name in FIELDS) for response in responses]
