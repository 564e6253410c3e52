"""Chat templates, which are untrusted programs."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.errors import PromptError
from mlxspec.generation.chat_prompt import conversation_prompt
from mlxspec.models.chat_template import apply_template
from mlxspec.models.model_files import DEMO_DIRECTORY
from mlxspec.models.tokenizer import load_tokenizer
from tests.support import system_templates
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


@pytest.mark.parametrize("how", [{"add_generation_prompt": True}, {}])
def test_the_result_is_that_of_the_tokenizer(tokenizer: Any, how: dict[str, bool]) -> None:
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, **how)
    assert apply_template(tokenizer, MESSAGES, **how) == expected


@pytest.mark.parametrize(
    "template",
    [
        *("{{", "{% for %}", "{{ 1 / 0 }}", "{{ messages.a.b }}", "{{ raise_exception('no') }}"),
        *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ (1).__class__.__mro__[1]() }}"),
    ],
)
def test_a_failing_template_is_an_error(tokenizer: Any, template: str) -> None:
    refused(tokenizer, template)


TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
PARTS = """\
{% for m in messages %}<{{ m.role }}>{% for part in m.content %}\
{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"""
"""Llama Guard's way."""

BOTH = """\
{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}\
{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"""
PARTS_OF_USERS = """\
{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content[0].text }}\
{% else %}{{ m.content + '' }}{% endif %}{% endfor %}"""


def part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("template", "contents", "text"),
    [
        (TEXTS, ["a question", "an answer"], "<user>a question<assistant>an answer"),
        (TEXTS, [part("a ") + part("question"), part("x")], "<user>a question<assistant>x"),
        (PARTS, ["a question", "an answer"], "<user>a question<assistant>an answer"),
        (PARTS, [part("a"), "b"], "<user>a<assistant>b"),
        (BOTH, ["a", part("b")], "<user>a<assistant>[b]"),
        (PARTS_OF_USERS, ["a", part("b")], "<user>a<assistant>b"),
    ],
)
def test_contents_come_in_the_form_that_the_template_takes(
    tokenizer: Any, template: str, contents: list[Any], text: str
) -> None:
    tokenizer._tokenizer.chat_template = template
    roles = ("user", "assistant")
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    before = copy.deepcopy(messages)
    assert apply_template(tokenizer, messages) == text
    assert messages == before


def talk(*turns: str) -> list[dict[str, str]]:
    """A conversation of turns such as "user: a"."""
    return [dict(zip(("role", "content"), turn.split(": "), strict=True)) for turn in turns]


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


TWICE = talk("system: a", "developer: b", "user: c")
LATE = talk("system: a", "user: b", "assistant: c", "system: d", "user: e")
BETWEEN = talk("user: a", "developer: b", "user: c", "assistant: d", "user: e")
LAST = talk("system: a", "user: b", "system: c", "developer: d")
ASKED = talk("system: a", "user: b", "assistant: c", "system: d", "system: e", "assistant: f")
ONLY = talk("system: a", "system: b")
PLACED = {
    "FIRST": [
        (TWICE, "<system>a\n\nb<user>c"),
        (LATE, f"<system>a<user>b<assistant>c<user>{reminder('d')}\n\ne"),
        (BETWEEN, f"<user>a\n\n{reminder('b')}\n\nc<assistant>d<user>e"),
        (LAST, f"<system>a<user>b\n\n{reminder('c')}\n\n{reminder('d')}"),
        (
            ASKED,
            f"<system>a<user>b<assistant>c<user>{reminder('d')}\n\n{reminder('e')}<assistant>f",
        ),
    ],
    "NONE": [
        (TWICE, "<user>a\n\nb\n\nc"),
        (LATE, f"<user>a\n\nb<assistant>c<user>{reminder('d')}\n\ne"),
        (BETWEEN, f"<user>a\n\n{reminder('b')}\n\nc<assistant>d<user>e"),
        (LAST, f"<user>a\n\nb\n\n{reminder('c')}\n\n{reminder('d')}"),
        (
            ASKED,
            f"<user>a\n\nb<assistant>c<user>{reminder('d')}\n\n{reminder('e')}<assistant>f",
        ),
        (ONLY, "<user>a\n\nb"),
    ],
}


def in_parts(messages: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [{**message, "content": part(message["content"])} for message in messages]


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        pytest.param(template, messages, text, id=f"{kind}: {name}, {number}")
        for kind, cases in PLACED.items()
        for name, template in getattr(system_templates, kind).items()
        for number, (messages, text) in enumerate(cases)
    ],
)
def test_system_messages_come_where_the_template_takes_them(
    tokenizer: Any, template: str, messages: list[dict[str, str]], text: str
) -> None:
    tokenizer._tokenizer.chat_template = template
    for sent in (messages, in_parts(messages)):
        before = copy.deepcopy(sent)
        assert apply_template(tokenizer, sent) == text
        assert sent == before


@pytest.mark.parametrize("template", system_templates.STAYS.values(), ids=system_templates.STAYS)
@pytest.mark.parametrize("messages", [TWICE, LATE, BETWEEN, LAST, ASKED, ONLY])
def test_what_the_template_takes_stays(
    tokenizer: Any, template: str, messages: list[dict[str, str]]
) -> None:
    tokenizer._tokenizer.chat_template = template
    renamed = {"developer": "system"} if "raise_exception" in template else {}
    expected = "".join(
        f"<{renamed.get(one['role'], one['role'])}>{one['content']}" for one in messages
    )
    for sent in (messages, in_parts(messages)):
        assert apply_template(tokenizer, sent) == expected


WITHIN_THE_QUESTION = """\
{% if messages[0].role == 'system' %}{% set system, messages = messages[0].content, messages[1:] %}\
{% endif %}{% for m in messages %}\
<{{ m.role }}>{% if loop.first and system %}{{ system }}: {% endif %}{{ m.content }}{% endfor %}"""
"""As Gemma 3's."""


@pytest.mark.parametrize("template", [WITHIN_THE_QUESTION, system_templates.MISTRAL])
def test_a_system_message_alone_is_the_question_where_it_would_get_lost(
    tokenizer: Any, template: str
) -> None:
    tokenizer._tokenizer.chat_template = template
    for alone in (ONLY, talk("system: a\n\nb")):
        expected = tokenizer.apply_chat_template(talk("user: a\n\nb"), tokenize=False)
        assert "a\n\nb" in expected
        assert apply_template(tokenizer, alone) == expected


def test_mistral_s_system_message_comes_before_the_last_question(tokenizer: Any) -> None:
    tokenizer._tokenizer.chat_template = system_templates.MISTRAL
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    assert apply_template(tokenizer, TWICE) == f"{bos}[INST] a\n\nb\n\nc[/INST]"
    assert apply_template(tokenizer, LATE) == (
        f"{bos}[INST] b[/INST] c{eos}[INST] a\n\n{reminder('d')}\n\ne[/INST]"
    )


def test_parts_other_than_texts_stay_beside_a_moved_message(tokenizer: Any) -> None:
    picture = {"type": "image", "url": "x"}
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}"
        "[{{ part.text or part.url }}]{% endfor %}{% endif %}{% endfor %}"
    )
    asked = {"role": "user", "content": [*part("b"), picture]}
    messages = [*talk("system: a"), asked, *talk("system: c", "system: ")]
    assert apply_template(tokenizer, messages) == (
        "[a][\n\n][b][x][\n\n][<system-reminder>\nc\n</system-reminder>]"
    )


@pytest.mark.slow
def test_many_late_system_messages_take_no_longer_than_their_length(tokenizer: Any) -> None:
    tokenizer._tokenizer.chat_template = system_templates.NONE["silent"]
    text = "x" * 1500
    messages = [*MESSAGES, *[{"role": "system", "content": text}] * 20_000]
    rendered = harmless(lambda: apply_template(tokenizer, messages))
    assert rendered.count(text) == 20_000


def left_out(role: str) -> str:
    """Return a template that omits a role's messages."""
    show = f"{{% if m.role != '{role}' %}}{{{{ m.content }}}}{{% endif %}}"
    return f"{{% for m in messages %}}<{{{{ m.role }}}}>{show}{{% endfor %}}"


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
@pytest.mark.parametrize("content", ["a question", part("a question")])
def test_a_content_that_the_template_leaves_out_is_refused(
    tokenizer: Any, role: str, content: Any
) -> None:
    tokenizer._tokenizer.chat_template = left_out(role)
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": content}]
    with pytest.raises(PromptError, match=f"leaves out the content .* of the role {role}$"):
        apply_template(tokenizer, messages)
    tokenizer._tokenizer.chat_template = TEXTS
    assert apply_template(tokenizer, messages) == f"<user>a<{role}>a question"


def test_a_tool_s_result_may_be_written_as_json(tokenizer: Any) -> None:
    """gpt-oss's template does so."""
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    for content in ('say "x"\n', part('say "x"\n')):
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": content},
        ]
        text = apply_template(tokenizer, messages)
        assert text == 'a question"say \\"x\\"\\n"'


def test_tools_and_templates_of_the_call_count(tokenizer: Any) -> None:
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'tool' or tools %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    result = {"role": "tool", "content": "found", "tool_call_id": "call00001"}
    talk = [*MESSAGES, {"role": "assistant", "content": "so"}, result]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert apply_template(tokenizer, talk, tools=tools).endswith("found")
    with pytest.raises(PromptError, match="role tool"):
        apply_template(tokenizer, talk)
    shown = apply_template(tokenizer, talk, chat_template=TEXTS)
    assert shown.endswith("<tool>found")
    empty = [{"role": "tool", "content": ""}]
    assert apply_template(tokenizer, [*MESSAGES, *empty]) == "a question"


def test_tools_that_the_template_fails_on_change_nothing_for_later_ones(tokenizer: Any) -> None:
    tokenizer._tokenizer.chat_template = (
        "{% for tool in tools %}{{ '// ' + tool.function.description }}{% endfor %}" + TEXTS
    )
    talk = [{"role": "system", "content": "be brief"}, *MESSAGES]
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(PromptError, match="the chat template failed"):
        apply_template(tokenizer, talk, tools=tools)
    tools[0]["function"]["description"] = "finds"
    assert (
        apply_template(tokenizer, talk, tools=tools) == "// finds<system>be brief<user>a question"
    )


def test_parts_other_than_texts_are_refused_where_the_template_takes_texts(tokenizer: Any) -> None:
    tokenizer._tokenizer.chat_template = TEXTS
    picture = {"type": "image_url", "image_url": {"url": "http://x"}}
    with pytest.raises(PromptError, match="takes texts only"):
        apply_template(tokenizer, [{"role": "user", "content": [*part("a"), picture]}])


def test_the_form_is_determined_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer._tokenizer.chat_template = PARTS
    rendered: list[Any] = []
    render = type(tokenizer._tokenizer).apply_chat_template

    def noting(self: Any, messages: Any, **how: Any) -> Any:
        rendered.append(messages)
        return render(self, messages, **how)

    monkeypatch.setattr(type(tokenizer._tokenizer), "apply_chat_template", noting)
    for _ in range(3):
        apply_template(tokenizer, MESSAGES)
    assert len(rendered) == 2 + 3


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
    tokens = harmless(lambda: conversation_prompt(tokenizer, MESSAGES, {}).tokens(tokenizer))
    assert isinstance(tokens, PromptError) or all(type(token) is int for token in tokens)
