"""In a window cache, each row sees the positions that a single-row step sees in mlx-lm's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache

from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.caches import TreeRows, WindowKVCache, cut, move_rows
from tests.drafting.test_drafter import path, trees
from tests.support.examples import examples


def rows_of(positions: list[int]) -> mx.array:
    """Return keys that are their positions, (1, 1, rows, 1)."""
    return mx.array(positions, dtype=mx.float32)[None, None, :, None]


def seen(cache: WindowKVCache, positions: list[int], tree: DraftTree | None = None) -> list[set]:
    """Append rows at these positions; return the positions that each row sees."""
    cache.rows = TreeRows(tree) if tree else None
    mask = cache.make_mask(len(positions))
    cache.rows = None
    keys, values = cache.update_and_fetch(rows_of(positions), rows_of(positions))
    assert mx.array_equal(keys, values)
    entries = np.array(keys[0, 0, :, 0]).astype(int)
    if mask is None:
        return [set(entries)] * len(positions)
    if isinstance(mask, str):
        visible = np.tri(len(positions), len(entries), len(entries) - len(positions), dtype=bool)
    else:
        visible = np.array(mask)
    return [set(entries[row]) for row in visible]


def expected(position: int, size: int, keep: int) -> set[int]:
    """Return the content of mlx-lm's rotating cache after a single-row step at this position."""
    if position < size:
        return set(range(position + 1))
    return {*range(keep), *range(position - (size - keep) + 1, position + 1)}


@pytest.mark.parametrize("keep", [0, 4])
def test_what_a_row_should_see_is_what_mlx_lms_cache_holds(keep: int) -> None:
    rotating = RotatingKVCache(max_size=9, keep=keep)
    for position in range(40):
        keys, _ = rotating.update_and_fetch(rows_of([position]), rows_of([position]))
        assert set(np.array(keys[0, 0, :, 0]).astype(int)) == expected(position, 9, keep)


@pytest.mark.slow
@settings(max_examples=examples(50))
@given(
    data=st.data(),
    size=st.integers(5, 20),
    keep=st.sampled_from([0, 4]),
    prompt=st.lists(st.integers(1, 30), max_size=3),
)
def test_any_steps_and_cuts_show_every_row_its_window(
    data: st.DataObject, size: int, keep: int, prompt: list[int]
) -> None:
    rotating, length = RotatingKVCache(size, keep), 0
    for rows in prompt:
        positions = rows_of(list(range(length, length + rows)))
        rotating.update_and_fetch(positions, positions)
        length += rows
    cache = WindowKVCache.of(rotating)
    for tree in data.draw(st.lists(trees(), max_size=12)):
        visible = seen(cache, [length + depth for depth in tree.depths], tree)
        for node in range(len(tree)):
            ancestors = {length + depth for depth in range(tree.depths[node] + 1)}
            before = expected(length + tree.depths[node], size, keep) - set(range(length, 999))
            window = expected(length + tree.depths[node], size, keep)
            assert visible[node] == before | (ancestors & window)
        kept = path(tree, data.draw(st.integers(0, len(tree) - 1)))
        move_rows([([cache], length, kept)])
        length += len(kept)
        cut([cache], length)
        assert seen(cache, [length]) == [expected(length, size, keep)]
        cut([cache], length)


def test_memory_is_bounded_by_the_window_and_its_slack() -> None:
    cache = WindowKVCache(100)
    length = 0
    for _ in range(500):
        seen(cache, list(range(length, length + 8)))
        length += 3
        cut([cache], length)
        assert cache.keys.shape[2] <= 100 + 8 + 272


def test_a_cut_behind_what_the_window_still_shows_is_refused() -> None:
    cache = WindowKVCache(10)
    for position in range(600):
        seen(cache, [position])
    with pytest.raises(ValueError, match="cut to 3 positions"):
        cut([cache], 3)
