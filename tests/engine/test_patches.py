"""What our patches of mlx-lm's layers rely on, and that they do not affect other code.

The messages of the first tests say what changed in a new version of mlx-lm and what that breaks.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, llama, rope_utils
from mlx_lm.models.cache import KVCache, make_prompt_cache

import mlxspec
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine import patches
from mlxspec.engine.joint import Joint, JointMode
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.patches import forward_at, install
from mlxspec.engine.target import Capability, Target
from tests.support.architectures import ARCHITECTURES
from tests.support.harness import joint_mode
from tests.support.random_models import random_model

PROMPT = mx.array([[5, 9, 2, 6, 1]])
RECURRENT = ["mamba2", "qwen3_next", "recurrent_gemma", "rwkv7"]
ROPES: dict[str, Callable[[], nn.Module]] = {
    "default": lambda: rope_utils.initialize_rope(8, 10000.0, False),
    "llama3": lambda: rope_utils.initialize_rope(
        8,
        10000.0,
        False,
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    ),
    "yarn": lambda: rope_utils.initialize_rope(
        8,
        10000.0,
        False,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "longrope": lambda: rope_utils.SuScaledRoPE(8, short_factor=1.0, long_factor=[2.0] * 4),
}


# --- assumptions about mlx-lm ---


@pytest.mark.parametrize("name", ROPES)
def test_rope_takes_an_offset_for_each_entry_of_a_batch(name: str) -> None:
    rope, offsets = ROPES[name](), [7, 3, 11]
    x = mx.random.normal((3, 2, 1, 8), key=mx.random.key(1))
    at_once = rope(x, offset=mx.array(offsets))
    one_by_one = [rope(x[n : n + 1], offset=offset) for n, offset in enumerate(offsets)]
    assert mx.allclose(at_once, mx.concatenate(one_by_one), atol=1e-6), (
        f"{type(rope).__name__} no longer rotates each entry of a batch by its own offset: "
        "draft trees and joint steps would have wrong positions (patches._rotating)"
    )


def test_models_take_their_rope_from_a_child_that_has_rope_in_its_name() -> None:
    calls: list[str] = []

    class Watched(nn.RoPE):
        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            calls.append(type(self).__name__)
            return super().__call__(x, offset)

    model = random_model("llama")
    for layer in model.layers:
        layer.self_attn.rope = Watched(8)
    assert Watched in patches._rope_classes(model), "patches._rope_classes no longer finds RoPE"
    model(PROMPT, cache=make_prompt_cache(model))
    assert len(calls) == 2 * len(model.layers), (
        "llama no longer calls the module `rope` for queries and keys: "
        "draft trees would have wrong positions (patches._rotating)"
    )


def test_the_attention_function_has_the_arguments_that_joint_attention_passes_on() -> None:
    names = [*inspect.signature(base.scaled_dot_product_attention).parameters]
    assert names == ["queries", "keys", "values", "cache", "scale", "mask", "sinks"], (
        "scaled_dot_product_attention takes other arguments: pass them on in JointCache.attend"
    )


def test_layers_look_up_the_attention_function_in_their_own_module() -> None:
    found = inspect.unwrap(llama.scaled_dot_product_attention)
    assert found is base.scaled_dot_product_attention, (
        "llama no longer imports scaled_dot_product_attention by name (patches.install)"
    )
    asked: list[tuple[Any, ...]] = []

    class Keys(KVCache):
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            super().update_and_fetch(keys, values)
            return self, self

        def attend(
            self,
            attention: Any,
            queries: mx.array,
            values: Any,
            cache: Any,
            scale: float,
            mask: Any,
        ) -> mx.array:
            asked.append((cache, mask))
            held = slice(self.offset)
            return attention(
                queries,
                self.keys[..., held, :],
                self.values[..., held, :],
                cache=None,
                scale=scale,
                mask=mask,
            )

    model = random_model("llama")
    install(model)
    caches = [Keys() for _ in model.layers]
    logits = forward_at(model, PROMPT, caches, mx.arange(PROMPT.size))
    assert [cache for cache, _ in asked] == caches, (
        "llama no longer hands a cache's keys to scaled_dot_product_attention as they are: "
        "sequences could not share a forward (patches._attending)"
    )
    expected = model(PROMPT, cache=make_prompt_cache(model))
    assert mx.max(mx.abs(logits - expected)).item() < 1e-5


def test_caches_make_the_masks() -> None:
    asked: list[tuple[Any, ...]] = []

    class Cache:
        def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> str:
            asked.append((N, return_array, window_size))
            return "own"

    found = base.create_attention_mask(mx.zeros((1, 3, 4)), Cache(), window_size=8)
    assert (found, asked) == ("own", [(3, False, 8)]), (
        "create_attention_mask no longer asks the cache: the masks of draft trees would have no "
        "effect (TreeSteps.make_mask, WindowKVCache.make_mask, JointCache.make_mask)"
    )


@pytest.mark.parametrize("name", RECURRENT)
def test_blocks_read_a_state_that_they_get_as_an_argument_called_cache(name: str) -> None:
    model = ARCHITECTURES[name].model()
    rows = [mx.array([3, 1]), mx.array([4])]
    trees = [DraftTree.chain(3, [1]), DraftTree.chain(4)]
    targets = [Target(LoadedModel(model), Capability.REPLAY) for _ in trees]
    for target in targets:
        target.begin_at(0)
    joint = Joint(LoadedModel(model), JointMode.SPLIT)
    logits, _ = joint.forward([*zip(targets, rows, trees, strict=True)])
    expected = [model(own[None], cache=make_prompt_cache(model))[0] for own in rows]
    assert mx.max(mx.abs(logits - mx.concatenate(expected))).item() < 1e-4, (
        f"{name}'s recurrent blocks no longer read their state from an ArraysCache that they get "
        "as `cache`: sequences could not share a forward (patches._running)"
    )


# --- no effect on other code ---


def test_functions_are_wrapped_once_and_stay_wrapped() -> None:
    model = random_model("llama")
    install(model)
    rope, attention = nn.RoPE.__call__, llama.scaled_dot_product_attention
    install(model)
    install(random_model("llama"))
    assert nn.RoPE.__call__ is rope
    assert llama.scaled_dot_product_attention is attention
    assert inspect.unwrap(rope).__module__ == nn.RoPE.__module__
    assert base.scaled_dot_product_attention not in patches._wrappers


def test_a_model_that_comes_from_a_file_of_its_own_is_patched_too() -> None:
    """mlx-lm runs the ``model_file`` of a checkpoint without registering it as a module."""
    spec = importlib.util.spec_from_file_location("mlx_lm.models.own_file", llama.__file__)
    assert spec
    assert spec.loader
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    model = file.Model(file.ModelArgs(**vars(random_model("llama").args)))
    assert joint_mode(model) is JointMode.SPLIT
    assert file.scaled_dot_product_attention in patches._wrappers


def test_forwards_in_other_threads_and_later_ones_have_consecutive_positions() -> None:
    model = random_model("llama")
    install(model)
    expected = model(PROMPT, cache=make_prompt_cache(model))
    mx.eval(expected)
    found = []

    def plain() -> None:
        found.append(model(PROMPT, cache=make_prompt_cache(model)))
        mx.eval(found)

    def meanwhile(tokens: mx.array, cache: list[Any]) -> mx.array:
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()
        return model(tokens, cache=cache)

    others = mx.zeros(PROMPT.size, dtype=mx.int32)
    moved = forward_at(meanwhile, PROMPT, make_prompt_cache(model), others)
    plain()
    assert mx.max(mx.abs(moved - expected)).item() > 1e-4
    assert [mx.array_equal(each, expected).item() for each in found] == [True, True]


def test_a_forward_that_fails_leaves_no_positions_behind() -> None:
    model = random_model("llama")
    install(model)
    expected = model(PROMPT, cache=make_prompt_cache(model))
    with pytest.raises(ValueError, match="offset"):
        forward_at(model, PROMPT, make_prompt_cache(model), mx.arange(2))
    assert mx.array_equal(model(PROMPT, cache=make_prompt_cache(model)), expected)


def test_only_one_module_patches_mlx_lm() -> None:
    """The exception is ``augment``, which replaces mlx-lm's functions until users undo it."""
    patching = re.compile(
        r"(?<!mx\.fast\.)scaled_dot_product_attention|_getframe|f_locals|setattr\(.*__call__"
    )
    found = [
        path.name
        for path in Path(mlxspec.__file__).parent.rglob("*.py")
        if patching.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["patches.py"]
