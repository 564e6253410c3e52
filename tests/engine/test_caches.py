"""The caches of a step: commits and snapshots."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlxspec.engine.caches import (
    SlotKVCache,
    Slots,
    Snapshot,
    TreeKVCache,
    WindowKVCache,
    cut,
    for_steps,
    held_arrays,
    is_trimmable,
    move_rows,
    parts,
)
from mlxspec.engine.joint import JointCache, JointMode

CONTEXT = 20_000


def attention(queries: Any, keys: Any, values: Any, cache: Any, **kwargs: Any) -> mx.array:
    """Call MLX's attention like mlx-lm."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, **kwargs)


def filled(cache: KVCache, length: int) -> KVCache:
    rows = mx.random.normal((1, 2, length, 64), key=mx.random.key(0))
    cache.update_and_fetch(rows, -rows)
    mx.eval(cache.state[:2])
    return cache


@pytest.mark.parametrize("bits", [None, 8])
def test_a_commit_moves_rows_without_copying_the_context(bits: int | None) -> None:
    cache = for_steps(filled(KVCache(), CONTEXT + 8))
    if bits:
        cache = cache.to_quantized(64, bits)
        mx.eval(cache.state[:2])
    expected = [array[..., CONTEXT + 3, :].tolist() for array in held_arrays([cache])]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    move_rows([([cache], CONTEXT, (0, 3, 5))])
    mx.eval(cache.state[:2])
    assert mx.get_peak_memory() - before < cache.nbytes / 10
    for array, row in zip(held_arrays([cache]), expected, strict=True):
        assert array[..., CONTEXT + 1, :].tolist() == row


def test_rows_of_several_sequences_are_moved_with_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    caches = [for_steps(filled(KVCache(), 20)) for _ in range(3)]
    expected = [cache.keys[..., [10, 12], :].tolist() for cache in caches]
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: waits.append(evaluate(*arrays)))
    move_rows(([cache], 10, (0, 2)) for cache in caches)
    assert len(waits) == 1
    assert [cache.keys[..., [10, 11], :].tolist() for cache in caches] == expected


@pytest.mark.slow
def test_drafts_of_several_sequences_are_written_without_copying_the_context() -> None:
    slots, sizes = Slots(for_steps(filled(KVCache(), 1))), (8, 1, 8)
    for slot in range(len(sizes)):
        slots.put(slot, for_steps(filled(KVCache(), CONTEXT + slot)))
    mx.eval(slots.keys, slots.values)
    members = [SlotKVCache(slots, slot, CONTEXT - 8 + slot) for slot in range(len(sizes))]
    spans = [slice(0, 8), slice(8, 9), slice(9, 17)]
    rows = mx.random.normal((1, 2, 17, 64))
    held = slots.keys.nbytes + slots.values.nbytes
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    joint = JointCache(members, spans, JointMode.SPLIT)
    joint.update_and_fetch(rows, -rows)
    masks = [
        mx.ones((size, member.offset), mx.bool_)
        for size, member in zip(sizes, members, strict=True)
    ]
    mx.eval(joint.attend(attention, rows, joint, joint, 1.0, masks), slots.keys, slots.values)
    assert mx.get_peak_memory() - before < held / 4
    for slot, (size, member, span) in enumerate(zip(sizes, members, spans, strict=True)):
        assert member.offset == CONTEXT - 8 + slot + size
        own = member.keys_and_values()[0][..., -size:, :]
        assert mx.array_equal(own, rows[:, :, span])


def test_rows_that_are_already_consecutive_are_not_moved() -> None:
    cache = for_steps(filled(KVCache(), 20))
    keys = cache.keys
    move_rows([([cache], 12, (0, 1, 2))])
    assert cache.keys is keys


def test_caches_in_lists_are_made_for_steps_too() -> None:
    inner = filled(KVCache(), 5)
    listed = for_steps(CacheList(ArraysCache(2), inner, RotatingKVCache(8)))
    state, full, window = parts([listed])
    assert isinstance(full, TreeKVCache)
    assert isinstance(window, WindowKVCache)
    assert full.offset == 5
    assert mx.array_equal(full.keys, inner.keys)
    assert not is_trimmable(state)
    assert is_trimmable(full)
    assert is_trimmable(window)


def test_each_cache_is_cut_by_itself() -> None:
    caches = [for_steps(filled(KVCache(), 9)), filled(KVCache(), 7), filled(KVCache(), 4)]
    cut(caches, 5)
    assert [cache.offset for cache in caches] == [5, 5, 4]


class Counter:
    """State of an unknown kind that changes in place."""

    def __init__(self) -> None:
        self.sums = mx.zeros((3,))
        self.seen: list[int] = []

    def add(self, token: int) -> None:
        self.sums[token] += 1
        self.seen.append(token)


def test_a_snapshot_gives_back_whatever_changed_as_often_as_needed() -> None:
    known, unknown = ArraysCache(2), Counter()
    known[0] = mx.array([1.0])
    unknown.add(2)
    snapshot = Snapshot([known, unknown])
    for token in (0, 1):
        known[0] = known[0] + 1
        unknown.add(token)
        snapshot.restore()
        assert known[0].tolist() == [1.0]
        assert unknown.sums.tolist() == [0.0, 0.0, 1.0]
        assert unknown.seen == [2]
