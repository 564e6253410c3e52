"""A target's caches compared with a list of tokens, with a model that only writes caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.caches import parts
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.params import CacheOptions
from mlxspec.engine.target import Capability, Target
from tests.support.examples import examples

KINDS: dict[str, tuple[Any, bool]] = {
    "attention": (lambda: [KVCache(), KVCache()], False),
    "replayed attention": (lambda: [KVCache(), KVCache()], True),
    "states": (lambda: [ArraysCache(1), ArraysCache(1)], True),
    "both": (lambda: [CacheList(KVCache(), ArraysCache(1)), KVCache()], True),
}
TOKENS = st.integers(0, 99)
STEPS = st.tuples(st.just("step"), st.lists(st.tuples(TOKENS, st.integers(0, 9)), max_size=6))
LENGTHS = st.integers(0, 40)
ACTIONS = st.lists(
    st.one_of(
        STEPS,
        STEPS,
        st.tuples(st.sampled_from(["truncate", "rewind", "copy", "interrupt"]), LENGTHS),
        st.tuples(st.just("prefill"), st.lists(TOKENS, min_size=1, max_size=30)),
    ),
    max_size=14,
)


def write(caches: list[Any], rows: mx.array) -> None:
    """Append rows to caches, like a model's layers."""
    for cache in parts(caches):
        if isinstance(cache, ArraysCache):
            cache[0] = rows if cache[0] is None else mx.concatenate([cache[0], rows])
        else:
            keys = mx.broadcast_to(rows[None, None, :, None], (1, 1, len(rows), 32))
            cache.update_and_fetch(keys.astype(mx.float32), keys.astype(mx.float32))


def held(cache: Any) -> list[int]:
    if isinstance(cache, ArraysCache):
        return [] if cache[0] is None else cache[0].tolist()
    return [] if cache.keys is None else cache.keys_and_values()[0][0, 0, :, 0].tolist()


class Writer(nn.Module):
    """A model that only writes its input to the caches."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> None:
        write(cache, tokens[0])


class Checked:
    """A target and the tokens that it should hold."""

    def __init__(self, kind: str) -> None:
        make, replays = KINDS[kind]
        capability = Capability.PLAIN if replays else Capability.TREE
        self.cache = Target(LoadedModel(Writer()), capability, cache=make(), marks=2)
        self.kind, self.replays = kind, replays
        self.tokens: list[int] = []
        self.prefill([1, 2, 3])

    def check(self) -> None:
        cache = self.cache
        assert cache.length == len(self.tokens)
        for part in parts(cache.cache):
            assert held(part) == self.tokens

    def prefill(self, tokens: list[int]) -> None:
        write(self.cache.cache, mx.array(tokens))
        self.tokens += tokens
        self.cache.begin_at(len(self.tokens))

    def step(self, nodes: list[tuple[int, int]]) -> None:
        """Run a tree, or a chain if states replay; keep a path chosen by the nodes."""
        parents = [-1, *(n if self.replays else p % (n + 1) for n, (_, p) in enumerate(nodes))]
        tree = DraftTree((50, *(token for token, _ in nodes)), tuple(parents))
        self.cache.begin_forward(tree)
        write(self.cache.cache, mx.array(tree.tokens))
        node, path = (nodes[0][1] if nodes else 0) % len(tree), []
        while node >= 0:
            path.insert(0, node)
            node = tree.parents[node]
        self.cache.commit(path)
        self.tokens += [tree.tokens[row] for row in path]

    def interrupt(self, layers: int) -> None:
        """Interrupt a forward before some of the layers."""
        tree = DraftTree.chain(60, [61, 62])
        self.cache.begin_forward(tree)
        write(parts(self.cache.cache)[: layers % 3], mx.array(tree.tokens))
        self.cache.truncate(self.cache.length)

    def truncate(self, length: int) -> None:
        length = min(length, len(self.tokens))
        try:
            self.cache.truncate(length)
        except ValueError:  # more forwards than can be undone
            assert self.replays
        else:
            assert self.cache.length <= length
            assert self.replays or self.cache.length == length
        del self.tokens[self.cache.length :]

    def rewind(self, length: int) -> None:
        length = min(length, len(self.tokens))
        try:
            self.cache.rewind(length)
        except ValueError:
            assert self.replays
            self.__init__(self.kind)  # type: ignore[misc]
            return
        assert self.cache.length == length or (self.replays and self.cache.length < length)
        del self.tokens[self.cache.length :]

    def copy(self, length: int) -> None:
        reach = self.cache.reusable_prefix(length)
        assert reach <= length
        if self.kind == "replayed attention":
            assert reach == min(length, len(self.tokens))
        if reach:
            for part in parts(self.cache.copied(reach, room=0)):
                kept = held(part) if isinstance(part, ArraysCache) else copied(part)
                assert kept == self.tokens[:reach]


def copied(cache: Any) -> list[int]:
    return [] if cache.keys is None else cache.keys[0, 0, : cache.offset, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_the_caches_hold_the_context(kind: str) -> None:
    @settings(max_examples=examples(60, long=1000))
    @given(ACTIONS)
    def check(actions: list[tuple[str, Any]]) -> None:
        checked = Checked(kind)
        for name, argument in actions:
            getattr(checked, name)(argument)
            checked.check()

    check()


def test_caches_are_quantised_once_they_are_long_enough_and_not_rewound_to_before() -> None:
    options = CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=5)
    cache = Target(LoadedModel(Writer()), Capability.TREE, options, [KVCache()])
    for length in range(1, 7):
        tree = DraftTree.chain(length)
        cache.begin_forward(tree)
        write(cache.cache, mx.array([length]))
        cache.commit((0,))
        assert isinstance(cache.cache[0], QuantizedKVCache) == (length >= 5)
        assert cache.quantized
    assert cache.reusable_prefix(5) == 5
    assert cache.reusable_prefix(4) == 0
    with pytest.raises(ValueError, match="quantised"):
        cache.rewind(4)


def test_states_return_to_marks_until_these_are_cut_off() -> None:
    checked = Checked("states")
    checked.prefill([4, 5])
    for _ in range(3):
        checked.step([])
    assert [checked.cache.reusable_prefix(length) for length in (2, 3, 4, 5, 8)] == [0, 3, 3, 5, 5]
    checked.copy(4)
    checked.copy(8)
    checked.rewind(5)  # three forwards; two can be undone
    checked.check()
    assert len(checked.tokens) == 5
    with pytest.raises(ValueError, match="no state was kept"):
        checked.cache.truncate(4)
    checked.rewind(4)
    checked.check()
    assert len(checked.tokens) == 3
    for _ in range(3):
        checked.step([])
    assert checked.cache.reusable_prefix(6) == 3


def test_a_mark_is_forgotten_with_what_it_stands_in() -> None:
    checked = Checked("states")
    checked.step([])
    checked.cache.mark()
    checked.truncate(3)
    checked.step([])
    checked.step([])
    assert checked.cache.reusable_prefix(5) == 3
