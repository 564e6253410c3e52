"""Chat templates, which are programs of whoever made the model."""

from __future__ import annotations

import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.errors import PromptError
from mlxspec.models import chat_template
from mlxspec.models.chat_template import apply_template
from mlxspec.models.model_files import DEMO_DIRECTORY
from mlxspec.models.tokenizer import load_tokenizer
from tests.support.examples import examples
from tests.support.hostile import harmless

MESSAGES = [{"role": "user", "content": "a question"}]
ENDLESS = "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(DEMO_DIRECTORY, None)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "_BYTES", 50_000_000)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        "{{ lipsum(n=10000000) }}",
        "{% set n = namespace(i=3) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
    ],
)
def test_one_that_does_not_end_is_stopped_in_every_thread(tokenizer: Any, template: str) -> None:
    assert "does not end" in refused(tokenizer, template)
    with ThreadPoolExecutor(1) as thread:
        assert "does not end" in thread.submit(refused, tokenizer, template).result()


def test_one_that_takes_ever_more_memory_is_stopped(tokenizer: Any) -> None:
    doubled = "{% set n.s = n.s ~ n.s %}"
    start = "{% set n = namespace(s='aaaaaaaa') %}"
    told = refused(tokenizer, f"{start}{{% for i in range(99) %}}{doubled}{{% endfor %}}")
    assert "too much memory" in told


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system bounds no memory")
def test_where_others_take_memory_only_the_time_is_bounded(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_BYTES", -(1 << 40))  # as if others had taken it all
    tokenizer.chat_template = "{% for a in range(100) %}{{ a }}{% endfor %}"
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert apply_template(tokenizer, MESSAGES, bound_memory=False)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    tokenizer.chat_template = ENDLESS
    with pytest.raises(PromptError, match="does not end"):
        apply_template(tokenizer, MESSAGES, bound_memory=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 9999999999 }}",
        "{{ messages|tojson(indent=999999999) }}",
        "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
        "{{ 'a'|center(9999999999) }}",
        "{{ '%9999999999d'|format(1) }}",
        "{{ 'x'|indent(9999999999, true) }}",
    ],
)
def test_one_operation_that_takes_gigabytes_is_refused(tokenizer: Any, template: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert "too much memory" in refused(tokenizer, template)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_powers_are_refused_and_named_arguments_are_not(tokenizer: Any) -> None:
    assert "power" in refused(tokenizer, "{{ 9**9**9**9 }}")
    tokenizer._tokenizer.chat_template = "{{ dict(**{'a': 2})['a'] }}** {{ dict(b=3, **{})['b'] }}"
    assert apply_template(tokenizer, MESSAGES, tokenize=False) == "2** 3"


@pytest.mark.parametrize(
    "template",
    [
        *("{{", "{% for %}", "{{ 1 / 0 }}", "{{ messages.a.b }}", "{{ raise_exception('no') }}"),
        *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ (1).__class__.__mro__[1]() }}"),
    ],
)
def test_one_that_fails_is_told(tokenizer: Any, template: str) -> None:
    refused(tokenizer, template)


def test_a_debugger_is_as_before(tokenizer: Any) -> None:
    def debug(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(debug)
    try:
        apply_template(tokenizer, MESSAGES)
        after = sys.gettrace()
        refused(tokenizer, ENDLESS)
        assert (after, sys.gettrace()) == (debug, debug)
    finally:
        sys.settrace(before)


FRAGMENTS = [
    *(
        "{{ ",
        " }}",
        "{% ",
        " %}",
        "{# ",
        " #}",
        "for x in ",
        "range(99999)",
        "endfor",
        "if ",
        "endif",
    ),
    *("messages", "message", "bos_token", "x", "'a'", "[0]", "['content']", ".content", "(", ")"),
    *(" * ", " ** ", " ~ ", " + ", " / ", " % ", " in ", " is defined", "9999999", "1", "-1", ", "),
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
        st.sampled_from(FRAGMENTS) | st.sampled_from([LOOP, ENDLESS]) | st.text(max_size=3),
        max_size=12,
    )
)
def test_any_template_gives_tokens_or_is_refused(fragments: list[str]) -> None:
    tokenizer = load_tokenizer_once()
    tokenizer._tokenizer.chat_template = "".join(fragments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "_SECONDS", 0.2)
        tokens = harmless(lambda: apply_template(tokenizer, MESSAGES))
    assert isinstance(tokens, PromptError) or all(type(token) is int for token in tokens)
