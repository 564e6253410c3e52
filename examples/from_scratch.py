"""Prompt lookup decoding on a page: load, look up, verify, accept, print."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

from mlxspec import load  # mlx-lm's, which also knows "demo"; before MLX, for OpenBLAS on Linux

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

N_DRAFT, NGRAM_MAX, MAX_TOKENS = 10, 3, 200
PROMPT = '[INST] Repeat the following phrase 4 times: "The red fox sees the river.". [/INST]'


def look_up(text: list[int]) -> list[int]:
    """Draft the tokens after the earliest occurrence of the longest n-gram that ends the text."""
    for n in range(NGRAM_MAX, 0, -1):
        for end in range(n, len(text)):
            if text[end - n : end] == text[-n:]:
                return text[end : end + N_DRAFT]
    return []


def prompt_lookup(model: nn.Module, prompt: list[int]) -> Iterator[tuple[int, bool]]:
    """Yield the model's greedy tokens, endlessly, and for each whether it was drafted."""
    text = [*prompt]
    cache = make_prompt_cache(model)  # before every step, holds the text without its last token
    model(mx.array([text[:-1]]), cache=cache)
    while True:
        # Verify: one forward gives the model's choice after the last token and each draft token.
        draft = look_up(text)
        logits = model(mx.array([[text[-1], *draft]]), cache=cache)  # (1, 1 + drafted, vocabulary)
        choices: list[int] = mx.argmax(logits[0], axis=-1).tolist()  # type: ignore[assignment]
        # Accept: keep the draft while it agrees with the model, and the choice that follows it.
        accepted = 0
        while accepted < len(draft) and draft[accepted] == choices[accepted]:
            accepted += 1
        trim_prompt_cache(cache, len(draft) - accepted)
        for index, token in enumerate(choices[: accepted + 1]):
            text.append(token)
            yield token, index < accepted


model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "demo")
words, output = tokenizer.detokenizer, []
for token, drafted in islice(prompt_lookup(model, tokenizer.encode(PROMPT)), MAX_TOKENS):
    if token in tokenizer.eos_token_ids:
        break
    output.append((token, drafted))
    words.add_token(token)
    print(f"\033[{34 if drafted else 0}m{words.last_segment}", end="", flush=True)
print(f"\033[0m\n{len(output)} tokens, {sum(drafted for _, drafted in output)} of them drafted")
