"""Attention split into calls that fit MLX's fused kernel equals a single call."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models.base import create_causal_mask

from mlxspec.drafting.tree import DraftTree
from mlxspec.engine import calibration, patches
from mlxspec.engine.capability import finite
from mlxspec.engine.joint import Joint, JointMode
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.params import CacheOptions
from mlxspec.engine.patches import split_attention
from tests.engine.test_architectures import LONG_PROMPT, ODD_TOKEN, TRIED
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import HostileDrafter, PartlyRightDrafter
from tests.support.harness import assert_same_output, examined, joint_mode, new_target, run
from tests.support.random_models import random_model

MOST_ROWS, MOST_QUERIES = 2, 4


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Set small limits of the fused kernel; record the rows of each attention call."""
    monkeypatch.setattr(patches, "_FUSED_ROWS", MOST_ROWS)
    monkeypatch.setattr(patches, "_FUSED_QUERIES", MOST_QUERIES)
    rows: list[int] = []
    fused = mx.fast.scaled_dot_product_attention

    def watched(queries: mx.array, *args: object, **kwargs: object) -> mx.array:
        rows.append(queries.shape[2])
        return fused(queries, *args, **kwargs)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    return rows


@given(
    rows=st.integers(1, 16),
    cached=st.integers(0, 40),
    kv_heads=st.sampled_from([1, 2, 8]),
    size=st.sampled_from([64, 128]),
    masked=st.sampled_from(["causal", "array", "one row", "none"]),
    with_sinks=st.booleans(),
    least_keys=st.sampled_from([0, 30]),
    seed=st.integers(0, 100),
)
def test_any_split_is_the_whole(
    rows: int,
    cached: int,
    kv_heads: int,
    size: int,
    masked: str,
    with_sinks: bool,
    least_keys: int,
    seed: int,
) -> None:
    mx.random.seed(seed)
    entries = cached + rows
    queries = mx.random.normal((1, 8, rows, size))
    keys, values = (mx.random.normal((1, kv_heads, entries, size)) for _ in range(2))
    mask = {
        "causal": "causal",
        "array": create_causal_mask(rows, cached, window_size=7),
        "one row": mx.arange(entries)[None] % 3 != 1,
        "none": None,
    }[masked]
    sinks = mx.random.normal((8,)) if with_sinks else None
    calls: list[int] = []

    def attention(queries: mx.array, *args: object, **kwargs: object) -> mx.array:
        calls.append(queries.shape[2])
        return base.scaled_dot_product_attention(queries, *args, **kwargs)

    options = {"cache": None, "scale": size**-0.5, "mask": mask, "sinks": sinks}
    whole = base.scaled_dot_product_attention(queries, keys, values, **options)
    split = patches._split(attention, least_keys, queries, keys, values, **options)
    assert mx.allclose(split, whole, atol=1e-5)
    assert sum(calls) == rows
    if entries >= least_keys:
        assert max(calls) <= 8
        assert max(calls) * 8 // kv_heads <= 32
    else:
        assert calls == [rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_drafts_with_split_attention_leave_the_output_as_it_is(
    name: str, narrow: list[int]
) -> None:
    model = ARCHITECTURES[name].model()
    loaded, capability = LoadedModel(model), examined(model)[0]
    expected = [token for token, _ in generate_step(mx.array(LONG_PROMPT), model, max_tokens=28)]
    split_attention(loaded, 0)
    narrow.clear()
    for drafter in (
        PartlyRightDrafter(expected, 64, seed=1),
        HostileDrafter(expected, 64, ODD_TOKEN, seed=4),
    ):
        outcome = run(loaded, LONG_PROMPT, drafter, max_tokens=28, capability=capability)
        assert_same_output(model, LONG_PROMPT, expected, outcome.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("seated", [False, True])
def test_shared_steps_split_the_attention_of_each_sequence(
    name: str, seated: bool, narrow: list[int]
) -> None:
    def logits(least_keys: int | None) -> mx.array:
        loaded = LoadedModel(ARCHITECTURES[name].model())
        split_attention(loaded, least_keys)
        mode = joint_mode(loaded.model)
        assert mode is JointMode.SPLIT
        joint = Joint(loaded, mode)
        capability = ARCHITECTURES[name].capability
        members = []
        for length, tree in ((9, DraftTree.chain(1, range(2, 8))), (30, DraftTree.chain(5))):
            target = new_target(loaded, capability)
            target.prefill(LONG_PROMPT[:length])
            if seated:
                joint.join(target)
            members.append((target, mx.array(tree.tokens), tree))
        narrow.clear()
        found, _ = joint.forward(members)
        mx.eval(found)
        return finite(found)

    whole = logits(None)
    assert max(narrow) >= 7
    split = logits(0)
    assert max(narrow) <= MOST_ROWS
    assert mx.allclose(split, whole, atol=1e-4)


def test_a_tree_s_rows_see_what_they_saw(narrow: list[int]) -> None:
    tree = DraftTree.from_branches(3, [[5, 6, 7], [8, 9], [5, 1]])

    def logits(least_keys: int | None) -> mx.array:
        loaded = LoadedModel(ARCHITECTURES["llama3"].model())
        split_attention(loaded, least_keys)
        target = new_target(loaded)
        target.prefill(LONG_PROMPT)
        narrow.clear()
        return target.forward(mx.array(tree.tokens), tree)

    whole = logits(None)
    assert max(narrow) == len(tree)
    split = logits(0)
    assert max(narrow) <= MOST_ROWS
    assert mx.allclose(split, whole, atol=1e-4)


def test_short_contexts_prompts_and_quantised_keys_are_left_whole(narrow: list[int]) -> None:
    loaded = LoadedModel(random_model("llama", hidden_size=64, head_dim=32, num_attention_heads=2))
    split_attention(loaded, 20)

    def rows_of_a_draft(prompt: int, options: CacheOptions | None = None) -> int:
        target = new_target(loaded, cache=options)
        target.prefill(LONG_PROMPT[:prompt])
        narrow.clear()
        draft = DraftTree.chain(1, range(2, 10))
        mx.eval(target.forward(mx.array(draft.tokens), draft))
        return max(narrow, default=0)

    assert rows_of_a_draft(5) == 9
    assert rows_of_a_draft(30) <= MOST_ROWS
    assert rows_of_a_draft(30, CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=0)) == 0
    narrow.clear()
    new_target(loaded).prefill(LONG_PROMPT)
    assert max(narrow) == len(LONG_PROMPT)
    split_attention(loaded, None)
    assert rows_of_a_draft(30) == 9


@pytest.mark.parametrize(
    ("whole", "split", "pays"), [(0.05, 0.02, True), (0.05, 0.049, False), (0.02, 0.05, False)]
)
def test_what_is_faster_is_kept(
    whole: float, split: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = LoadedModel(random_model("llama"))
    steps = calibration.ModelSteps(loaded, context=8)
    seconds = {None: itertools.chain([9.0], itertools.repeat(whole)), 0: itertools.repeat(split)}
    monkeypatch.setattr(steps, "drafted", lambda rows: next(seconds[loaded.split_from]))
    assert steps.splits_attention(end=1e18) is pays
    assert loaded.split_from == (0 if pays else None)
    assert steps.splits_attention(end=0) is None  # no time to measure
    assert loaded.split_from is None
