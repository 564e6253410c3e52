"""Models with costs that are given, and comparison with mlx-lm's own output."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import save_model

from mlxspec import AutoDecoder
from mlxspec.compat.generation import decoder_of
from mlxspec.loading.model_files import DEMO_DIRECTORY
from tests.support.demo import CHAINS, demo, given_costs, stand_in

REPEAT = '[INST] Repeat the following phrase 8 times: "The red fox sees the river.". [/INST]'
FREE = "The history of the"
FIELDS = ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason")

# mlx-lm's own, whatever is done to its modules.
stream_generate, batch_generate = mlx_lm.stream_generate, mlx_lm.batch_generate


def give_costs(model: nn.Module, tokenizer: Any, curve: dict[int, float] = CHAINS) -> AutoDecoder:
    """The decoder that drop-in generation uses, with costs that are neither measured nor kept."""
    decoder = decoder_of(model, tokenizer)
    decoder.costs = given_costs(curve)
    return decoder


def demo_with_costs(curve: dict[int, float] = CHAINS) -> tuple[nn.Module, Any]:
    """The bundled model and its tokenizer, the same for all tests."""
    model, tokenizer = demo().model, demo().tokenizer
    give_costs(model, tokenizer, curve)
    return model, tokenizer


def stand_in_with_costs(curve: dict[int, float] = CHAINS) -> tuple[nn.Module, Any]:
    """The small model that repeats itself and the bundled tokenizer, the same for all tests."""
    model, tokenizer = stand_in().model, stand_in().tokenizer
    give_costs(model, tokenizer, curve)
    return model, tokenizer


def write_float32_demo(directory: Path) -> str:
    """The bundled model as a directory that mlx-lm loads in float32, too."""
    for path in DEMO_DIRECTORY.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            (directory / path.name).symlink_to(path)
    save_model(directory, demo().model)
    return str(directory)


def fields(responses: Iterable[Any]) -> list[tuple]:
    """What is the same in two runs of one generation."""
    return [tuple(getattr(response, name) for name in FIELDS) for response in responses]
