"""Every architecture decodes mlx-lm's output, whatever is drafted and rejected."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.engine.capability import (
    Capability,
    examine_joint,
    finite,
    logits,
)
from mlxspec.engine.joint import JointMode
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.sampling import SamplingParams
from tests.support.architecture_settings import WINDOW
from tests.support.architecture_table import notes, row
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import HostileDrafter, PartlyRightDrafter
from tests.support.examples import LONG, examples
from tests.support.harness import assert_same_output, examined, plain, run
from tests.support.rarer_architectures import NOT_TRIED

SHORT_PROMPT = [7, 3, 9, 3]
LONG_PROMPT = [(7 * i * i + 3 * i) % 64 for i in range(2 * WINDOW + 5)]  # the window has wrapped
MAX_TOKENS = examples(28, long=60)  # the window wraps in the middle of drafts
ODD_TOKEN = 5
ODD_TOKENS = (5, 9, 2)


@cache
def tried(name: str) -> tuple[nn.Module, tuple[Capability, str]]:
    model = ARCHITECTURES[name].model()
    return model, examined(model)


@cache
def published_page() -> list[str]:
    return (Path(__file__).parents[2] / "docs/architectures.md").read_text().splitlines()


def families() -> list[str]:
    """Return one architecture for each kind of caches, drafts and shared forwards."""
    kinds = {}
    for line in published_page():
        published, *cells = line.removeprefix("| ").split(" | ")
        if len(cells) == 4:
            _, caches, drafts, joint = cells
            kinds.setdefault((caches, drafts.partition(":")[0], joint), published)
    # phi3small has a fixed head size, so no model of it is small.
    names = [name for name in ARCHITECTURES if name != "phi3small"]
    return [name for name in names if ARCHITECTURES[name].published in kinds.values()]


# All of them run nightly, and when the engine or model loading changes.
TRIED = list(ARCHITECTURES) if LONG else families()


@pytest.mark.parametrize("name", TRIED)
def test_architecture(name: str) -> None:
    model, (capability, reason) = tried(name)
    assert capability is ARCHITECTURES[name].capability
    assert any(
        line.startswith(row(ARCHITECTURES[name], capability, reason)) for line in published_page()
    )
    options = {"max_tokens": MAX_TOKENS, "capability": capability}
    accepted = rejecting = moved = 0
    for prompt in (LONG_PROMPT, SHORT_PROMPT) if LONG else (LONG_PROMPT,):
        steps = list(generate_step(mx.array(prompt), model, max_tokens=MAX_TOKENS))
        expected = [token for token, _ in steps]
        logprobs = mx.stack([logprobs for _, logprobs in steps])
        for drafter in (
            PartlyRightDrafter(expected, 64, seed=1),
            PromptLookupDrafter(ngram_max=1)
            if prompt is SHORT_PROMPT
            else HostileDrafter(expected, 64, ODD_TOKEN, seed=4),
        ):
            outcome = run(model, prompt, drafter, **options)
            assert_same_output(model, prompt, expected, outcome.tokens)
            if outcome.tokens == expected:
                # A finer check than tokens: the cache is right, whatever steps filled it.
                assert mx.max(mx.abs(finite(outcome.logprobs) - finite(logprobs))).item() < 1e-4
            accepted += outcome.accepted
            rejecting += outcome.rejecting
            moved += outcome.moved
    if capability is Capability.PLAIN:
        assert accepted == rejecting == 0
        return
    assert accepted > MAX_TOKENS / 2
    assert rejecting > MAX_TOKENS / 8
    assert (moved > 1) == (capability is Capability.TREE)

    if not LONG:
        return  # sampling does not depend on the architecture
    options["params"] = params = SamplingParams(temp=0.8, seed=3)
    expected = plain(model, LONG_PROMPT, **options)
    sampled = run(model, LONG_PROMPT, PartlyRightDrafter(expected, 64, seed=3), **options)
    assert_same_output(model, LONG_PROMPT, expected, sampled.tokens, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_the_page_says_how_several_sequences_share_a_forward(name: str) -> None:
    model, (capability, reason) = tried(name)
    assert row(ARCHITECTURES[name], capability, reason, model) in published_page()


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_nothing_passes_where_rows_together_differ_by_more_than_rounding(name: str) -> None:
    model, (capability, _) = tried(name)
    tokens = (3, 1, 4, 1, 5, 2, 6)
    together = logits(model, tokens, make_prompt_cache(model))
    caches = make_prompt_cache(model)
    apart = mx.concatenate([logits(model, (token,), caches) for token in tokens])
    noise, spread = mx.max(mx.abs(together - apart)), mx.max(apart) - mx.min(apart)
    if (noise > 1e-3 * spread).item():
        assert capability is Capability.PLAIN
        assert examine_joint(LoadedModel(model), capability)[0] is JointMode.ALONE


def test_no_page_says_plain_beside_joint() -> None:
    rows = [line.split(" | ") for line in published_page() if line.startswith("| ")]
    plain = {joint for *_, drafts, joint in rows if drafts.startswith("plain")}
    assert plain == {"one at a time |"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_prompts_give_the_same_in_any_chunks_that_are_allowed(name: str) -> None:
    model, _ = tried(name)
    last = len(LONG_PROMPT)

    def after(*cuts: int) -> mx.array:
        caches, places = make_prompt_cache(model), [0, *cuts, last]
        for begin, stop in pairwise(places):
            model(mx.array([LONG_PROMPT[begin:stop]]), cache=caches)
            mx.eval([cache.state for cache in caches])
        return logits(model, ODD_TOKENS, caches)

    if not LoadedModel(model).chunks_matter(last, make_prompt_cache(model)):
        whole = after()
        for cuts in ((last // 4,), (3, last // 2, last - 3)):
            assert mx.max(mx.abs(after(*cuts) - whole)).item() < 1e-4


def test_the_page_names_every_architecture_that_mlx_lm_has() -> None:
    found = {
        path.stem
        for path in Path(mlx_lm.models.__path__[0]).glob("*.py")
        # Read instead of imported: one of them ends the process if a package is missing.
        if re.search(r"^class Model\b|\bimport Model\b", path.read_text(), re.MULTILINE)
    }
    tried = {architecture.model_type for architecture in ARCHITECTURES.values()}
    assert found == tried | NOT_TRIED.keys()
    assert not tried & NOT_TRIED.keys()
    assert published_page()[-len(notes()) :] == notes()


def test_the_page_has_no_other_rows() -> None:
    assert sum(line.startswith("| ") for line in published_page()) == 1 + len(ARCHITECTURES)
