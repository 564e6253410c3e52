"""Prompts as users pass them: texts and token ids, and what is neither."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.errors import PromptError
from mlxspec.generation.options import prompt_ids
from tests.support.demo import demo


def ids(prompt: Any) -> list[int]:
    return prompt_ids(prompt, demo().tokenizer, vocab_size=4096, longest=None)


@pytest.mark.parametrize(
    "prompt",
    [[5, 6], (5, 6), range(5, 7), mx.array([5, 6]), np.array([5, 6]), [np.int64(5), mx.array(6)]],
    ids=str,
)
def test_rows_of_integers_are_token_ids(prompt: Any) -> None:
    tokens = ids(prompt)
    assert tokens == [5, 6]
    assert {type(token) for token in tokens} == {int}


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        [1.5, 2],
        ["a", "b"],
        {"input_ids": [1, 2]},
        [[1, 2]],
        mx.array([[1, 2]]),
        mx.array(3),
    ],
    ids=str,
)
def test_what_is_neither_text_nor_token_ids_is_refused_in_one_line(prompt: Any) -> None:
    with pytest.raises(PromptError, match=r"no row of token ids .*: pass a text") as caught:
        ids(prompt)
    assert "\n" not in str(caught.value)
