"""Conversations and texts become the tokens of the model's own template and tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.models.tokenizer import load_tokenizer_of
from mlxspec.server.api_body import ApiBody
from mlxspec.server.body import ApiError, parse
from mlxspec.server.messages import MessagesBody
from mlxspec.server.openai import ChatBody, CompletionBody
from mlxspec.server.output_parser import OutputParser, Part
from mlxspec.server.prompts import Prompt, chat_prompt, completion_prompts
from mlxspec.server.responses import parse_responses
from tests.support import system_templates
from tests.support.chat_tokenizer import CHATML, chat_tokenizer, harmony_tokenizer
from tests.support.demo import demo
from tests.support.hostile import json_values

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}


def chat(tokenizer: TokenizerWrapper | None = None, **fields: Any) -> Prompt:
    return chat_prompt(
        parse(ChatBody, {"messages": HELLO, **fields}), tokenizer or chat_tokenizer()
    )


def text_of(prompt: Prompt, tokenizer: TokenizerWrapper | None = None) -> str:
    return str((tokenizer or chat_tokenizer()).decode(prompt.tokens))


def completions(tokenizer: TokenizerWrapper | None = None, **fields: Any) -> list[Prompt]:
    request = parse(CompletionBody, {"prompt": "Once", **fields})
    return completion_prompts(request, tokenizer or chat_tokenizer())


@pytest.fixture(scope="module")
def mistral(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    """Mistral's published tokenizer, version 3."""
    path = shared / "tokenizers/mistral/mistral_instruct_tokenizer_240323.model.v3"
    directory = tmp_path_factory.mktemp("mistral")
    shutil.copyfile(path, directory / "tokenizer.model")
    return load_tokenizer_of(directory)


def refused(**fields: Any) -> str | None:
    """Return the field that the error names."""
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value.param


# --- chat ---


def test_a_conversation_is_in_the_template() -> None:
    assert text_of(chat()) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    expected = chat_tokenizer().apply_chat_template(HELLO, add_generation_prompt=True)
    assert chat().tokens == expected


def test_the_bundled_model_is_asked_as_in_the_command_line() -> None:
    tokenizer = demo().tokenizer
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    prompt = chat(tokenizer, messages=messages)
    assert prompt.tokens == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt.format.trims_space


def as_chat(messages: list[dict[str, Any]]) -> ApiBody:
    return parse(ChatBody, {"messages": messages})


def as_responses(messages: list[dict[str, Any]]) -> ApiBody:
    return parse_responses({"instructions": messages[0]["content"], "input": messages[1:]})


def as_messages(messages: list[dict[str, Any]]) -> ApiBody:
    turns = [one | {"role": one["role"].replace("developer", "system")} for one in messages[1:]]
    return parse(MessagesBody, {"system": messages[0]["content"], "messages": turns})


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_without_content_is_left_out(role: str) -> None:
    empty, hello = {"role": role, "content": None}, {"role": "user", "content": "Hello"}
    expected = chat().tokens
    for messages in ([empty, hello], [{"role": role}, hello], [hello, empty]):
        turns = [one | {"role": one["role"].replace("developer", "system")} for one in messages]
        items = [{"type": "message", **one} for one in messages]
        for body in (
            parse(ChatBody, {"messages": messages}),
            parse_responses({"instructions": None, "input": messages}),
            parse_responses({"input": items}),
            parse(MessagesBody, {"system": None, "messages": turns}),
        ):
            assert chat_prompt(body, chat_tokenizer()).tokens == expected
    with pytest.raises(ApiError, match="no text"):
        parse(ChatBody, {"messages": [empty]})


PARAMS = [
    pytest.param(kind, template, id=name)
    for kind in ("STAYS", "FIRST", "NONE")
    for name, template in getattr(system_templates, kind).items()
]


@pytest.mark.parametrize(("kind", "template"), PARAMS)
def test_a_system_message_has_one_place_in_all_three_apis(kind: str, template: str) -> None:
    tokenizer = chat_tokenizer(template=template)
    messages = [
        *({"role": "system", "content": "a"}, {"role": "developer", "content": "b"}),
        *({"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}),
        *({"role": "developer", "content": "e"}, {"role": "user", "content": "f"}),
    ]
    later = "<user><system-reminder>\ne\n</system-reminder>\n\nf"
    expected = {
        "STAYS": "<system>a<system>b<user>c<assistant>d<system>e<user>f",
        "FIRST": f"<system>a\n\nb<user>c<assistant>d{later}",
        "NONE": f"<user>a\n\nb\n\nc<assistant>d{later}",
    }
    for read in (as_chat, as_responses, as_messages):
        prompt = chat_prompt(read(messages), tokenizer)
        assert text_of(prompt, tokenizer) == expected[kind]


def test_a_published_tokenizer_gives_the_tokens_of_its_template(mistral: TokenizerWrapper) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO]
    prompt = chat(mistral, messages=messages)
    assert prompt.tokens == mistral.apply_chat_template(messages, add_generation_prompt=True)


def test_a_prefill_is_gone_on_with() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    assert text_of(chat(messages=messages)).endswith("<|im_start|>assistant\nWell, ")
    reasoning = [*HELLO, {"role": "assistant", "content": "<think>\nHm"}]
    assert chat(messages=reasoning).format.initial == "reasoning"
    assert chat(messages=messages).format.initial == "normal"


def test_the_prompt_decides_where_the_output_begins() -> None:
    assert chat().format.initial == "normal"
    thinking = chat(chat_template_kwargs={"force_thinking": True})
    assert thinking.format.initial == "reasoning"
    parser = OutputParser(thinking.format)
    deltas = parser.feed("Hm.\n</think>\n\nHi") + parser.finish()
    assert deltas == [Part("reasoning", "Hm."), Part("text", "Hi")]
    quiet = chat(enable_thinking=False)
    assert quiet.format.initial == "normal"
    assert text_of(quiet).endswith("<think>\n\n</think>\n\n")
    # The user's text is not taken for a marker of the answer.
    said = chat(messages=[{"role": "user", "content": "<think>"}])
    assert said.format.initial == "normal"


def test_tools_are_shown_unless_none_may_be_called() -> None:
    assert '"name": "f"' in text_of(chat(tools=[TOOL]))
    hidden = chat(tools=[TOOL], tool_choice="none")
    assert hidden.tokens == chat().tokens
    assert hidden.format
    assert not hidden.format.tools


def test_calls_and_results_are_in_the_template() -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    text = text_of(chat(messages=messages, tools=[TOOL]))
    assert '{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\n2<|im_end|>" in text


def test_gpt_oss_has_tools_and_answers_with_headers() -> None:
    tokenizer = harmony_tokenizer()
    prompt = chat(tokenizer, tools=[TOOL])
    assert prompt.format.initial == "header"
    parser = OutputParser(prompt.format)
    output = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f"
    parts = parser.feed(output + "<|channel|>commentary json<|message|>{}") + parser.finish()
    assert [part.kind for part in parts] == ["reasoning", "call", "arguments"]
    assert refused(tokenizer=tokenizer, tools=[TOOL], tool_choice="required") == "tool_choice"
    answer = chat(tokenizer, response_format={"type": "json_object"})
    assert text_of(answer, tokenizer).endswith("<|channel|>final<|message|>")
    assert answer.format.initial == "normal"


def test_mistrals_reasoning_is_known() -> None:
    tokenizer = chat_tokenizer(None, markers=("<s>", "</s>", "[THINK]", "[/THINK]"))
    opens, closes = tokenizer.convert_tokens_to_ids(["[THINK]", "[/THINK]"])
    begun = chat(tokenizer, messages=[*HELLO, {"role": "assistant", "content": "[THINK]Hm"}])
    assert begun.format.initial == "reasoning"
    first, reasoning, *_ = chat(tokenizer, response_format={"type": "json_object"}).constraint
    assert {*first.exits} == {opens}
    assert {*reasoning.exits} == {closes}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be_is_begun_for_the_model(choice: Any) -> None:
    prompt = chat(tools=[TOOL], tool_choice=choice)
    assert text_of(prompt) == text_of(chat(tools=[TOOL])) + "<tool_call>"
    parser = OutputParser(prompt.format)
    deltas = parser.feed('\n{"name": "f", "arguments": {}}\n</tool_call>') + parser.finish()
    (call, arguments) = deltas
    assert call.kind == "call"
    assert call.name == "f"
    assert arguments == Part("arguments", "{}", 0)


def test_a_call_that_must_be_ends_the_reasoning() -> None:
    thinking = {"force_thinking": True}
    prompt = chat(tools=[TOOL], tool_choice="required", chat_template_kwargs=thinking)
    assert text_of(prompt).endswith("<think>\n\n</think>\n\n<tool_call>")
    assert prompt.format.initial == "tool"


def test_what_the_template_or_the_model_does_not_know_is_refused() -> None:
    assert refused(tokenizer=chat_tokenizer(None), tools=[TOOL]) == "tools"
    pythonic = chat_tokenizer("pythonic")
    assert refused(tokenizer=pythonic, tools=[TOOL], tool_choice=NAMED) == "tool_choice"
    tool = {"role": "tool", "content": "x"}
    assert refused(tokenizer=demo().tokenizer, messages=[*HELLO, tool]) == "messages"
    for name in ("chat_template", "messages", "tokenizer", "tools", "self", "tokenize"):
        kwargs = {"chat_template_kwargs": {name: "x"}}
        assert refused(**kwargs) == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].content }}", "has no place for them"),
        (CHATML, "writes calls in a format that mlxspec does not know"),
    ],
)
def test_a_model_without_tools_says_what_its_template_lacks(template: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        chat(chat_tokenizer(None, template), tools=[TOOL])


@pytest.mark.slow
@given(
    st.dictionaries(st.text(max_size=8) | st.sampled_from(["bos_token", "thinking"]), json_values)
)
def test_any_arguments_of_the_template_give_a_prompt_or_a_400(kwargs: dict[str, Any]) -> None:
    try:
        assert chat(chat_template_kwargs=kwargs).tokens
    except ApiError as refused:
        error = refused
    else:
        return
    assert error.status == 400


def test_a_model_without_a_template_refuses_chats() -> None:
    assert refused(tokenizer=chat_tokenizer(template=None)) == "model"


# --- completions ---


def test_texts_and_ids_become_prompts() -> None:
    once, ids = completions(prompt=["Once", [1, 2]])
    assert once.tokens == chat_tokenizer().encode("Once")
    assert ids == Prompt([1, 2])
    tokenizer = demo().tokenizer
    assert completions(tokenizer, prompt="")[0].tokens == [tokenizer.bos_token_id]
    (prompt,) = completions(tokenizer, prompt="Once")
    assert prompt.tokens == tokenizer.encode("Once")


@pytest.mark.parametrize(
    ("markers", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "{0}ab{1}cd{2}"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "{0}ab{1}cd{2}"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "{0}ab{1}cd{2}"),
        (("[PREFIX]", "[SUFFIX]"), "{1}cd{0}ab"),
    ],
)
def test_fill_in_the_middle_uses_the_model_s_tokens(
    markers: tuple[str, ...], expected: str
) -> None:
    tokenizer = chat_tokenizer(markers=("<s>", "</s>", "<|endoftext|>", *markers))
    (prompt,) = completions(tokenizer, prompt="ab", suffix="cd")
    assert text_of(prompt, tokenizer) == expected.format(*markers)
    vocabulary = tokenizer.get_vocab()
    assert set(prompt.stop_tokens) == {vocabulary[name] for name in ("<|endoftext|>", *markers)}
    (ids,) = completions(tokenizer, prompt=tokenizer.encode("ab"), suffix="cd")
    assert ids == prompt


def test_a_model_that_fills_in_nothing_says_so() -> None:
    with pytest.raises(ApiError) as caught:
        completions(suffix="x")
    assert caught.value.param == "suffix"


def test_codestrals_tokens_are_found_in_a_published_tokenizer(mistral: TokenizerWrapper) -> None:
    names = ("[PREFIX]", "[SUFFIX]")
    (prompt,) = completions(mistral, prompt="a", suffix="b")
    assert prompt.stop_tokens[:2] == tuple(mistral.get_vocab()[name] for name in names)
    # Mistral's own library puts a space before the prefix, and none before the suffix.
    assert mistral.convert_ids_to_tokens(prompt.tokens) == [
        "<s>",
        "[SUFFIX]",
        "b",
        "[PREFIX]",
        "▁a",
    ]
