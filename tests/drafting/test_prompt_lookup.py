"""Prompt lookup compared with a scan of the whole context."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.drafting.tree import DraftTree
from mlxspec.errors import OptionError

contexts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def scan(context: Sequence[int], n_draft: int, ngram_max: int, ngram_min: int) -> list[int]:
    """Find the draft by definition: the longest n, then the earliest match with a continuation."""
    for n in range(ngram_max, ngram_min - 1, -1):
        for start in range(len(context) - n):
            if context[start : start + n] == context[len(context) - n :]:
                return list(context[start + n : start + n + n_draft])
    return []


@given(contexts, contexts, st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
def test_drafts_equal_a_scan_after_every_step(
    prompt: list[int], output: list[int], n_draft: int, ngram_min: int, longer: int
) -> None:
    drafter = PromptLookupDrafter(n_draft, ngram_min + longer, ngram_min)
    drafter.begin(prompt)
    context = prompt.copy()
    while True:
        draft = scan(context, n_draft, ngram_min + longer, ngram_min)
        assert drafter.propose(100) == DraftTree.chain(context[-1], draft)
        assert drafter.propose(2) == DraftTree.chain(context[-1], draft[:2])
        if not output:
            break
        emitted, output = tuple(output[:3]), output[3:]
        drafter.observe(VerifiedStep(DraftTree.chain(context[-1]), (), (), (), emitted))
        context += emitted


@pytest.mark.parametrize(
    ("n_draft", "ngram_max", "ngram_min"),
    [(0, 3, 1), (-1, 3, 1), (10, 1, 2), (10, 0, 0), (10, 10**6, 1)],
)
def test_impossible_parameters_are_refused(n_draft: int, ngram_max: int, ngram_min: int) -> None:
    with pytest.raises(OptionError):
        PromptLookupDrafter(n_draft, ngram_max, ngram_min)
