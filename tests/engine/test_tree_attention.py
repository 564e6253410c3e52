"""A tree step's logits equal those of its paths, each decoded as a chain."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.drafting.tree import DraftTree
from mlxspec.engine import patches
from mlxspec.engine.caches import TreeRows
from mlxspec.engine.target import Target
from tests.drafting.test_drafter import path, trees
from tests.support.harness import new_target
from tests.support.interrupts import functions_of, interrupted_anywhere
from tests.support.random_models import LLAMA_3_SCALING, YARN_SCALING, random_model

PROMPT = [5, 9, 2, 6, 1]


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, LLAMA_3_SCALING, YARN_SCALING], ids=["", "3", "yarn"])
def test_each_node_sees_the_cache_and_its_ancestors_at_the_right_positions(config: dict) -> None:
    model = random_model("llama", **config)

    @settings(max_examples=15)
    @given(trees())
    def check(tree: DraftTree) -> None:
        tree = DraftTree(tuple(token % 64 for token in tree.tokens), tree.parents)
        target = new_target(model)
        target.prefill(PROMPT)
        logits = target.forward(mx.array(tree.tokens), tree)
        for node in range(len(tree)):
            nodes = path(tree, node)
            in_a_row = [*PROMPT, *(tree.tokens[n] for n in nodes)]
            expected = model(mx.array(in_a_row)[None], cache=make_prompt_cache(model))[0, -1]
            assert mx.max(mx.abs(logits[node] - expected)).item() < 1e-5
        # Whichever path is kept, decoding continues as if the others had not existed.
        target.commit(nodes)
        goes_on = target.forward(mx.array([3]), DraftTree.chain(3))[-1]
        expected = model(mx.array([*in_a_row, 3])[None], cache=make_prompt_cache(model))[0, -1]
        assert mx.max(mx.abs(goes_on - expected)).item() < 1e-5

    check()


def test_the_model_is_as_before_after_a_tree_step() -> None:
    model = random_model("llama")
    modules = dict(model.named_modules())
    target = new_target(model)
    target.prefill(PROMPT)
    tree = DraftTree.from_branches(1, [[2, 3], [4]])
    target.forward(mx.array(tree.tokens), tree)
    assert dict(model.named_modules()).keys() == modules.keys()
    assert all(new is modules[name] for name, new in model.named_modules())


def test_the_model_computes_as_before_wherever_ctrl_c_hits_a_tree_step() -> None:
    patches.install(random_model("llama"))
    tree = DraftTree.from_branches(1, [[2, 3], [4]])

    def prepared() -> Target:
        target = new_target(random_model("llama"))
        target.prefill(PROMPT)
        return target

    expected = logits_of(prepared().model)
    for target in interrupted_anywhere(
        functions_of(patches), prepared, lambda target: target.forward(mx.array(tree.tokens), tree)
    ):
        assert logits_of(target.model) == expected


def logits_of(model: nn.Module) -> bytes:
    """Return the logits of mlx-lm's forward of the prompt."""
    return bytes(np.array(model(mx.array(PROMPT)[None], cache=make_prompt_cache(model))))


def test_a_truncated_cache_has_no_tree_left_that_an_interrupt_left_there() -> None:
    model = random_model("llama")
    target = new_target(model)
    target.prefill(PROMPT)
    for cache in target.cache:
        cache.rows = TreeRows(DraftTree.from_branches(1, [[2, 3], [4]]))
    target.truncate(4)
    goes_on = target.forward(mx.array([1, 8]), DraftTree.chain(1, [8]))
    expected = model(mx.array([[*PROMPT[:4], 1, 8]]), cache=make_prompt_cache(model))[0, -2:]
    assert mx.max(mx.abs(goes_on - expected)).item() < 1e-5


@given(trees(), st.integers(0, 9), st.integers(1, 6))
def test_a_window_counts_positions_and_not_indices(
    tree: DraftTree, offset: int, window_size: int
) -> None:
    expected = np.zeros((len(tree), offset + len(tree)), dtype=bool)
    for node in range(len(tree)):
        seen = [*range(offset), *(offset + n for n in path(tree, node))]
        # Attended positions are in order, so the window is the end of the list.
        expected[node, seen[-window_size:]] = True
    assert (np.array(TreeRows(tree).mask(offset, window_size)) == expected).all()
