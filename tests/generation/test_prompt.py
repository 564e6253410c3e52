"""Prompts as users pass them: texts, token ids and invalid types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlxspec
from mlxspec import OptionError, PromptError
from mlxspec.generation.options import prompt_ids
from mlxspec.generation.scheduler import Scheduler
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.demo import FLAT, demo, given_costs, stand_in, stand_in_decoder
from tests.support.drafters import drafted
from tests.support.schedulers import submit

HELLO = {"role": "user", "content": "Say hello."}
BEGUN = {"role": "assistant", "content": "Well, hel"}


def ids(prompt: Any, **template: Any) -> list[int]:
    options = template or None
    return prompt_ids(prompt, demo().tokenizer, 4096, None, chat_template_kwargs=options)


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
    with pytest.raises(
        PromptError, match=r"must be a text, token ids or messages .*: pass a text"
    ) as caught:
        ids(prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "prompt",
    [[HELLO], (HELLO,), [{"role": "system", "content": "Be brief."}, HELLO]],
    ids=["one", "a tuple", "with a system prompt"],
)
def test_messages_become_what_the_tokenizers_template_makes_of_them(prompt: Any) -> None:
    template = demo().tokenizer.apply_chat_template
    assert ids(prompt) == template([*prompt], add_generation_prompt=True)


def test_a_turn_of_the_assistants_is_gone_on_with() -> None:
    template = demo().tokenizer.apply_chat_template
    expected = template([HELLO, BEGUN], continue_final_message=True)
    assert ids([HELLO, BEGUN]) == expected
    assert demo().tokenizer.decode(expected).endswith("Well, hel")


def test_the_template_is_given_what_else_it_knows() -> None:
    tokenizer = chat_tokenizer()

    def text(**template: Any) -> str:
        how = template or None
        return str(tokenizer.decode(prompt_ids([HELLO], tokenizer, 300, None, how)))

    closed = "<think>\n\n</think>"
    assert closed not in text()
    assert closed in text(enable_thinking=False)
    assert "weather" in text(tools=[{"name": "weather"}])


CALL = {"function": {"name": "f", "arguments": {}}}


def test_a_call_of_a_tool_is_a_message_without_content() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "5"}
    conversation = [HELLO, called, result]
    tokenizer = chat_tokenizer()
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    assert prompt_ids(conversation, tokenizer, 300, None) == expected


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([HELLO, 5], r"message 2 must have a role and a content: write {\"role\""),
        ([HELLO, "hi"], "message 2 must have a role"),
        ([{"content": "hi"}], "message 1 must have a role"),
        ([{"role": 3, "content": "hi"}], "message 1 must have a role"),
        ([HELLO, {"role": "user"}], "message 2 must have a role and a content"),
        ([{"role": "user", "content": None}], "message 1 must have a role and a content"),
        ([{"role": "user", "content": 5}], "message 1 must have a role and a content"),
        ([{"role": "pirate", "content": "Ahoy"}], "the chat template failed .*: pass"),
        ([{}], "message 1 must have a role"),
        ([5, HELLO], "the prompt must be a text, token ids or messages"),
        (HELLO, "the prompt must be a text, token ids or messages .*, or a list of messages"),
        ([], "the prompt has no tokens: .* or a message"),
    ],
    ids=str,
)
def test_an_invalid_conversation_is_refused_in_one_line(messages: Any, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint) as caught:
        ids(messages)
    assert "\n" not in str(caught.value)


def test_messages_need_a_chat_template() -> None:
    with pytest.raises(PromptError, match="no chat template: pass a text"):
        prompt_ids([HELLO], chat_tokenizer(template=None), 300, None)


@pytest.mark.parametrize("name", ["tokenize", "return_tensors", "messages"])
def test_arguments_of_the_template_that_make_no_prompt_are_refused(name: str) -> None:
    with pytest.raises(
        OptionError, match=f"chat_template_kwargs must not set {name}: leave it out"
    ):
        ids([HELLO], **{name: True})


@pytest.mark.parametrize("prompt", ["a text", [5]], ids=str)
def test_arguments_of_the_template_need_messages(prompt: Any) -> None:
    with pytest.raises(OptionError, match="chat_template_kwargs work only with messages"):
        ids(prompt, enable_thinking=False)


Answer = list[int]


def _scheduled(decoder: mlxspec.AutoDecoder, prompt: Any, options: Mapping[str, Any]) -> Answer:
    tokens: Answer = []
    scheduler = Scheduler(decoder)
    submit(scheduler, prompt, lambda response: tokens.append(response.token), 6, **options)
    scheduler.run()
    return tokens


@pytest.mark.slow
def test_messages_are_taken_wherever_a_prompt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = stand_in_decoder(mlxspec.AutoDecoder)
    decoder.costs = given_costs(FLAT)
    monkeypatch.setattr("mlxspec.generation.decoder.costs_for", lambda *_, **__: decoder.costs)
    model, tokenizer = stand_in().model, stand_in().tokenizer
    lookup = stand_in_decoder(mlxspec.PromptLookupDecoder)
    messages = [{"role": "system", "content": "Repeat what I say."}, HELLO]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    drafter = mlxspec.PromptLookupDrafter()

    def written(answers: Any) -> list[int]:
        return [response.token for response in answers]

    def ways(prompt: Any) -> list[Any]:
        session = mlxspec.Session()
        batch = mlxspec.batch_generate(
            model, tokenizer, [prompt], max_tokens=6, return_token_ids=True
        )
        return [
            written(decoder.stream(prompt, 6)),
            written(decoder.stream(prompt, 6, session=session)),
            written(drafted(decoder, prompt, drafter, max_tokens=6)),
            lookup.prompt_lookup(prompt, 6).tokens,
            _scheduled(decoder, prompt, {}),
            written(mlxspec.stream_generate(model, tokenizer, prompt, 6)),
            mlxspec.generate(model, tokenizer, prompt, max_tokens=6),
            batch.token_ids,
        ]

    assert ways(messages) == ways(prompt)


def test_a_text_with_a_token_that_the_model_lacks_names_it() -> None:
    """Some tokenizers know more tokens than the model has embeddings."""
    tokenizer = chat_tokenizer()
    for prompt in ("a<|im_start|>b", [{"role": "user", "content": "a"}]):
        with pytest.raises(PromptError) as error:
            prompt_ids(prompt, tokenizer, 256, None)
        text = r"the prompt contains the token <\|im_start\|> \(id 25\d\), which the model lacks"
        assert re.match(text, str(error.value))
    with pytest.raises(PromptError, match="contains the id 256: pass ids from 0 to 255"):
        prompt_ids([5, 256], tokenizer, 256, None)
