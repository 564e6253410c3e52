"""Joint steps after contexts of 1k to 32k positions, to show that no step copies the caches.

    python benchmarks/joint_context.py [SEQUENCES]

A small random model runs steps of several sequences with caches of random keys and values. It
measures plain joint steps, and steps in which one or every sequence has a draft of 7 tokens and
keeps 2 of them (which move). For each step it also measures the time of its attention alone, and
the bytes that the step allocates. If nothing copies the context, the remaining time and bytes do
not depend on it; a copy would take as many bytes as the caches. The figures are medians of steps in
random order.
"""

from __future__ import annotations

import random
import sys
import time
from statistics import median

import mlxspec  # noqa: F401  (before mlx.core, for OpenBLAS)

# isort: split
import mlx.core as mx
from mlx_lm.models.llama import Model, ModelArgs

from mlxspec.drafting.drafter import DraftTree
from mlxspec.engine.caches import for_steps
from mlxspec.engine.capability import Capability
from mlxspec.engine.joint import Joint, JointMode, JointRows
from mlxspec.engine.target import Target

_CONTEXTS = (1024, 4096, 16384, 32768)
_HEADS, _KV_HEADS, _DIM, _LAYERS = 8, 2, 64, 4
_PLAIN = DraftTree.chain(1)
# Two branches; the kept rows of the second one move.
_DRAFTED = DraftTree((1, 2, 3, 4, 2, 3, 4, 5), (-1, 0, 1, 2, 0, 4, 5, 6))
_ACCEPTED = {_PLAIN: (0,), _DRAFTED: (0, 4, 5)}
_KINDS = "plain", "one drafts", "drafted"
_ROUNDS = 15


def small_model() -> Model:
    """A Llama with random weights; its output does not matter."""
    args = ModelArgs(
        model_type="llama",
        hidden_size=_HEADS * _DIM,
        num_hidden_layers=_LAYERS,
        intermediate_size=1024,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        rms_norm_eps=1e-5,
        vocab_size=1024,
    )
    model = Model(args)
    mx.eval(model.parameters())
    return model


def target_behind(model: Model, context: int) -> Target:
    """A target whose caches hold ``context`` random positions."""
    target = Target(model, Capability.TREE, 1024)
    for cache in target.cache:
        cache.update_and_fetch(
            mx.random.normal((1, _KV_HEADS, context, _DIM)),
            mx.random.normal((1, _KV_HEADS, context, _DIM)),
        )
    target.use([for_steps(cache) for cache in target.cache])
    mx.eval(target.arrays)
    target.length = context
    return target


def trees_of(kind: str, count: int) -> list[DraftTree]:
    """The rows of each of ``count`` sequences."""
    if kind == "one drafts":
        return [_DRAFTED, *[_PLAIN] * (count - 1)]
    return [_DRAFTED if kind == "drafted" else _PLAIN] * count


def step(joint: Joint, targets: list[Target], kind: str) -> tuple[float, int]:
    """Seconds of one step, and its peak of allocated bytes beyond those before it."""
    mx.synchronize()
    mx.reset_peak_memory()
    before, started = mx.get_active_memory(), time.perf_counter()
    trees = trees_of(kind, len(targets))
    logits, _ = joint.forward(
        [
            JointRows(target, mx.array(tree.tokens), tree)
            for target, tree in zip(targets, trees, strict=True)
        ]
    )
    mx.eval(mx.argmax(logits, axis=-1), [target.arrays for target in targets])
    for target, tree in zip(targets, trees, strict=True):
        target.commit(_ACCEPTED[tree])
    mx.eval([target.arrays for target in targets])
    return time.perf_counter() - started, mx.get_peak_memory() - before


def attention(targets: list[Target], kind: str) -> float:
    """Seconds of such a step's attention alone, in all layers."""
    queries, masks = [], []
    for target, tree in zip(targets, trees_of(kind, len(targets)), strict=True):
        queries.append(mx.random.normal((1, _HEADS, len(tree), _DIM)))
        masks.append(mx.ones((len(tree), target.length), mx.bool_))
    mx.eval(queries, masks)
    started = time.perf_counter()
    mx.eval(
        [
            mx.fast.scaled_dot_product_attention(
                rows, *cache.keys_and_values(), scale=0.125, mask=mask
            )
            for rows, mask, target in zip(queries, masks, targets, strict=True)
            for cache in target.cache
        ]
    )
    return time.perf_counter() - started


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    model = small_model()
    heading = f"{'context':>8} {'step':>10} {'caches':>10} {'ms':>8} {'attention':>10} {'rest':>8}"
    print(f"{heading} {'allocated':>10}")
    for context in _CONTEXTS:
        joint = Joint(model, JointMode.SPLIT)
        targets = [target_behind(model, context) for _ in range(count)]
        for target in targets:
            joint.join(target)
        held = sum(cache.nbytes for target in targets for cache in target.cache)
        for kind in _KINDS:
            step(joint, targets, kind)
        times: dict[str, list[tuple[float, int, float]]] = {kind: [] for kind in _KINDS}
        for _ in range(_ROUNDS):
            for kind in random.sample(_KINDS, len(_KINDS)):
                times[kind].append((*step(joint, targets, kind), attention(targets, kind)))
        for kind, found in times.items():
            seconds, allocated, alone = (median(each) for each in zip(*found, strict=True))
            print(
                f"{context:8} {kind:>10} {held / 1e6:7.1f} MB {seconds * 1e3:8.2f} "
                f"{alone * 1e3:10.2f} {(seconds - alone) * 1e3:8.2f} {allocated / 1e6:7.2f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
