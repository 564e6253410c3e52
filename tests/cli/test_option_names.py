"""The API's names in errors, as the command line spells them."""

from __future__ import annotations

import pytest

from mlxspec.cli.generate import generate_command
from mlxspec.cli.option_names import in_option_names


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("temp is nan: choose", "--temp is nan: choose"),
        ("the seed is nan", "the seed is nan"),
        ("window_size is -1", "--window-size is -1"),
        ("stop_tokens is x", "--stop-token is x"),
        ("kv_bits 7 with kv_group_size 5", "--kv-bits 7 with --kv-group-size 5"),
        ("1 <= ngram_min <= ngram_max", "1 <= --ngram-min <= --ngram-max"),
        ("repetition_context_size is -1", "--repetition-context-size is -1"),
        ("/tmp/top_k/x is no model", "/tmp/top_k/x is no model"),
    ],
)
def test_names_of_the_api_become_those_of_options(message: str, told: str) -> None:
    with generate_command.make_context("generate", ["--prompt", "a"]):
        assert in_option_names(message) == told


def test_without_a_command_a_message_stays_as_it_is() -> None:
    assert in_option_names("top_k is -1") == "top_k is -1"
