"""Chat templates, which are programs of whoever made the model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.errors import PromptError
from mlxspec.models.chat_template import apply_template
from mlxspec.models.model_files import DEMO_DIRECTORY
from mlxspec.models.tokenizer import load_tokenizer
from tests.support.examples import examples
from tests.support.hostile import harmless

MESSAGES = [{"role": "user", "content": "a question"}]


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(DEMO_DIRECTORY, None)


@cache
def load_tokenizer_once() -> Any:
    return load_tokenizer(DEMO_DIRECTORY, None)


def refused(tokenizer: Any, template: str) -> str:
    tokenizer._tokenizer.chat_template = template
    with pytest.raises(PromptError, match="the chat template failed") as error:
        apply_template(tokenizer, MESSAGES)
    return str(error.value)


@pytest.mark.parametrize("how", [{"add_generation_prompt": True}, {"tokenize": False}])
def test_the_result_is_that_of_the_tokenizer(tokenizer: Any, how: dict[str, bool]) -> None:
    expected = tokenizer.apply_chat_template(MESSAGES, **how)
    assert apply_template(tokenizer, MESSAGES, **how) == expected


@pytest.mark.parametrize(
    "template",
    [
        *("{{", "{% for %}", "{{ 1 / 0 }}", "{{ messages.a.b }}", "{{ raise_exception('no') }}"),
        *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ (1).__class__.__mro__[1]() }}"),
    ],
)
def test_one_that_fails_is_told(tokenizer: Any, template: str) -> None:
    refused(tokenizer, template)


FRAGMENTS = [
    *(
        "{{ ",
        " }}",
        "{% ",
        " %}",
        "{# ",
        " #}",
        "for x in ",
        "range(9)",
        "endfor",
        "if ",
        "endif",
    ),
    *("messages", "message", "bos_token", "x", "'a'", "[0]", "['content']", ".content", "(", ")"),
    *(" * ", " ", "  ~ ", " + ", " / ", " % ", " in ", " is defined", "9", "1", "-1", ", "),
    *(
        "|length",
        "|join",
        "|list",
        "|upper",
        "|tojson",
        "|string",
        "|sum",
        "|trim",
        "|first",
        "|int",
    ),
    *(
        "namespace(",
        "set ",
        "x = ",
        "macro m()",
        "endmacro",
        "m()",
        "raise_exception(",
        "loop.index",
    ),
    *(
        "generation",
        "endgeneration",
        "break",
        "\n",
        "text",
        "\ud800",
        "\x1b[2J",
        "é",
        "<s>",
        "[INST]",
    ),
]
LOOP = "{% for x in messages %}{{ x.role }}{% endfor %}"


@pytest.mark.slow
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fragments=st.lists(
        st.sampled_from(FRAGMENTS) | st.just(LOOP) | st.text(max_size=3),
        max_size=12,
    )
)
def test_any_template_gives_tokens_or_is_refused(fragments: list[str]) -> None:
    tokenizer = load_tokenizer_once()
    tokenizer._tokenizer.chat_template = "".join(fragments)
    tokens = harmless(lambda: apply_template(tokenizer, MESSAGES))
    assert isinstance(tokens, PromptError) or all(type(token) is int for token in tokens)
