"""The drafters that a replay can compare, by the names and defaults that users know."""

from __future__ import annotations

from collections.abc import Callable

from ..drafting import Drafter, PromptLookupDrafter
from .full_draft_lookup import FullDraftLookup
from .ngram_simple import NgramSimple
from .suffix_decoding import SuffixDecoding
from .tensorrt_pool import TensorRTPool

POLICIES: dict[str, Callable[[], Drafter]] = {
    # Spec-Bench's PLD, the yardstick of published figures.
    "prompt-lookup": FullDraftLookup,
    # transformers: generate(prompt_lookup_num_tokens=10), max_matching_ngram_size 2.
    "transformers": lambda: PromptLookupDrafter(n_draft=10, ngram_max=2),
    # vLLM: method "ngram", prompt_lookup_min = prompt_lookup_max = 5; the number of tokens
    # has no default there, 5 is that of its documentation.
    "vllm": lambda: PromptLookupDrafter(n_draft=5, ngram_max=5, ngram_min=5),
    # TensorRT-LLM: prompt_lookup_config [10,2], is_keep_all and is_use_oldest.
    "tensorrt-llm": TensorRTPool,
    "llama.cpp": NgramSimple,
    "suffix-path": SuffixDecoding,
    "suffix-tree": lambda: SuffixDecoding(tree=True, max_spec_factor=4.0),
}
"""Makers of fresh drafters. None knows what a step costs on the machine at hand."""
