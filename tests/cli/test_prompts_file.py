"""Files of prompts: valid lines, and errors for invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from mlxspec.cli.prompt_files import read_line
from mlxspec.errors import PromptError

USER = {"role": "user", "content": "a"}


def test_a_line_is_a_text_ids_or_messages() -> None:
    assert read_line("a b") == read_line({"prompt": "a b"}) == {"prompt": "a b"}
    assert read_line({"prompt": [1, 2]}) == {"prompt": [1, 2]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert read_line({"messages": [USER]}) == read_line({"messages": [parts]})
    assert read_line({"messages": [USER]}) == {"messages": [USER]}


def test_a_line_may_say_how_to_generate() -> None:
    sampling = {"temp": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 2}
    sampling |= {"min_tokens_to_keep": 2, "presence_context_size": 9}
    biases = {"logit_bias": {"4": -5}}
    ends = {"stop": "x", "stop_tokens": [2, "</s>"]}
    asked = read_line({"prompt": "a", "max_tokens": 9, **sampling, **biases, **ends})
    biases = {"logit_bias": {4: -5}}
    assert asked == {"prompt": "a", "max_tokens": 9, **sampling, **biases, **ends}


def test_what_is_null_is_not_given() -> None:
    assert read_line({"prompt": "a", "temp": None, "stop": None}) == {"prompt": "a"}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, "not JSON with a prompt: write"),
        (3, "not JSON with a prompt: write"),
        ({}, 'needs "prompt" or "messages", not both'),
        ({"prompt": "a", "messages": [USER]}, 'needs "prompt" or "messages", not both'),
        ("", 'needs "prompt" or "messages", not both'),
        ({"prompt": []}, 'needs "prompt" or "messages", not both'),
        ({"prompt": None}, 'needs "prompt" or "messages", not both'),
        ({"prompt": 3}, 'needs "prompt" or "messages", not both'),
        ({"messages": []}, 'needs "prompt" or "messages", not both'),
        ({"messages": "a"}, 'it must have "messages"'),
        ({"messages": [{"content": "a"}]}, 'each with a "role"'),
        ({"prompt": "a", "temperature": 1}, '"temperature": leave it out'),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "invalid literal for int"),
        ({"prompt": "a", "logit_bias": [1]}, '"logit_bias" cannot be read'),
    ],
)
def test_what_is_wrong_with_a_line_is_a_one_line_error(value: Any, named: str) -> None:
    with pytest.raises(PromptError) as error:
        read_line(value)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
