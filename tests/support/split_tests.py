"""Run pytest at rank 0, with the small model of the server tests split over all ranks.

    mlx.launch -n 3 --backend ring -m tests.support.split_tests tests/server/test_openai.py

Add ``-k "not how_it_fails"``: a forward that fails at rank 0 alone ends all ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import pytest

from mlxspec.distributed import ranks
from mlxspec.distributed.launch import silence_followers
from mlxspec.engine.loaded_model import LoadedModel
from tests.support import demo
from tests.support.llamas import repetitive_llama


def main() -> None:
    silence_followers()
    ranks.load_shard = load_shard
    with ranks.taking_part() as leader:
        assert leader
        demo.repetitive_llama = lambda: leader.load("stand-in")[0]
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))


def load_shard(name: str, group: mx.distributed.Group) -> tuple[LoadedModel, Any]:
    model = repetitive_llama(num_attention_heads=6, num_key_value_heads=6, intermediate_size=96)
    loaded = LoadedModel(model)
    ranks.split(loaded, group, name)
    mx.eval(model.parameters())
    return loaded, None


if __name__ == "__main__":
    main()
