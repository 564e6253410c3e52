"""Models with fixed costs for drop-in generation, to compare it with mlx-lm's own."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import save_model

from mlxspec import AutoDecoder, Decoder
from mlxspec.compat import decoder_of
from mlxspec.models.model_files import DEMO_DIRECTORY
from tests.support.demo import CHAINS, demo, given_costs, stand_in

REPEAT = '[INST] Repeat the following phrase 8 times: "The red fox sees the river.". [/INST]'
FREE = "The history of the"
FIELDS = ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason")

# mlx-lm's own functions, even while its modules are patched.
stream_generate, batch_generate = mlx_lm.stream_generate, mlx_lm.batch_generate


def give_costs(model: nn.Module, tokenizer: Any, curve: dict[int, float] = CHAINS) -> AutoDecoder:
    """Set fixed costs on the decoder that drop-in generation uses; return it."""
    decoder = decoder_of(model, tokenizer)
    decoder.costs = given_costs(curve)
    return decoder


def demo_with_costs(curve: dict[int, float] = CHAINS) -> tuple[nn.Module, Any]:
    """Return the bundled model and its tokenizer, with a new decoder."""
    return _with_costs(demo(), curve)


def stand_in_with_costs(curve: dict[int, float] = CHAINS) -> tuple[nn.Module, Any]:
    """Like :func:`demo_with_costs`, with the small model that repeats itself."""
    return _with_costs(stand_in(), curve)


def _with_costs(decoder: Decoder, curve: dict[int, float]) -> tuple[nn.Module, Any]:
    model = copy.copy(decoder.model)  # a model's decoder is cached with its memory
    own = give_costs(model, decoder.tokenizer, curve)
    for known in ("capability", "chain_capability"):
        setattr(own.loaded, known, getattr(decoder.loaded, known))
    return model, decoder.tokenizer


def write_float32_demo(directory: Path) -> str:
    """Write the bundled model to a directory that mlx-lm, too, loads in float32."""
    for path in DEMO_DIRECTORY.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            (directory / path.name).symlink_to(path)
    save_model(directory, demo().model)
    return str(directory)


def fields(responses: Iterable[Any]) -> list[tuple]:
    """Return the response fields that are the same in two runs of one generation."""
    return [tuple(getattr(response, name) for name in FIELDS) for response in responses]
