"""Files of prompts: what a line may say, and what is told of one that says something else."""

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
    biases = {"logit_bias": {"4": -5}}
    ends = {"stop": "x", "stop_tokens": [2, "</s>"]}
    asked = read_line({"prompt": "a", "max_tokens": 9, **sampling, **biases, **ends})
    biases = {"logit_bias": {4: -5.0}}
    assert asked == {"prompt": "a", "max_tokens": 9, **sampling, **biases, **ends}


def test_what_is_null_is_not_given() -> None:
    assert read_line({"prompt": "a", "temp": None, "stop": None}) == {"prompt": "a"}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, "not JSON with a prompt: write"),
        (3, "not JSON with a prompt: write"),
        ({}, 'needs either a "prompt" or "messages"'),
        ({"prompt": "a", "messages": [USER]}, 'needs either a "prompt" or "messages"'),
        ("", 'needs either a "prompt" or "messages"'),
        ({"prompt": []}, 'needs either a "prompt" or "messages"'),
        ({"prompt": None}, 'needs either a "prompt" or "messages"'),
        ({"prompt": [1, True]}, '"prompt" is [1, True]: give a text, or a list of token ids'),
        ({"messages": []}, 'needs either a "prompt" or "messages"'),
        ({"messages": "a"}, '"messages" is a: Value error, it must have "messages"'),
        ({"messages": [{"content": "a"}]}, 'each with a "role"'),
        ({"prompt": "a", "temperature": 1}, '"temperature" is 1: leave it out'),
        ({"prompt": "a", "max_tokens": 0}, '"max_tokens" is 0: Input should be greater than or'),
        (
            {"prompt": "a", "max_tokens": 2.0},
            '"max_tokens" is 2.0: Input should be a valid integer',
        ),
        ({"prompt": "a", "temp": "hot"}, '"temp" is hot: Input should be a valid number'),
        ({"prompt": "a", "temp": True}, '"temp" is True: Input should be a valid number'),
        ({"prompt": "a", "temp": 10**400}, '"temp" is 1000'),
        ({"prompt": "a", "seed": 0.5}, '"seed" is 0.5: Input should be a valid integer'),
        ({"prompt": "a", "stop": [1]}, '"stop" is [1]: Input should be a valid string'),
        ({"prompt": "a", "stop_tokens": 0.5}, '"stop_tokens" is 0.5: Input should be'),
        ({"prompt": "a", "logit_bias": {"x": 1}}, '"logit_bias" is x: Input should be'),
        (
            {"prompt": "a", "logit_bias": [1]},
            '"logit_bias" is [1]: Input should be a valid dictionary',
        ),
    ],
)
def test_what_is_wrong_with_a_line_is_told_in_one_line(value: Any, named: str) -> None:
    with pytest.raises(PromptError) as error:
        read_line(value)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
