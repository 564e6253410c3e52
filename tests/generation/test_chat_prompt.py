"""How a conversation's prompt ends, and so how its answer begins."""

from __future__ import annotations

from typing import Any

import pytest

from mlxspec.generation.chat_prompt import ChatPrompt
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.demo import demo

MESSAGES = [{"role": "user", "content": "a question"}]


@pytest.mark.parametrize(
    ("answer", "is_open"),
    [
        ("The answer", False),
        ("<think>Hm", True),
        ("<think>Hm</think>So", False),
        ("<think>Hm</think><think>", True),
    ],
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_continued_answer_reasons_if_it_has_not_ended_its_reasoning(
    answer: str, is_open: bool, in_parts: bool
) -> None:
    content: Any = [{"type": "text", "text": answer}] if in_parts else answer
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    assert ChatPrompt.of(chat_tokenizer(), messages, {}).reasons is is_open
    assert ChatPrompt.of(demo().tokenizer, messages, {}).reasons is False


def test_an_answer_reasons_if_the_template_begins_its_reasoning() -> None:
    for how, reasons in (({}, False), ({"force_thinking": True}, True)):
        assert ChatPrompt.of(chat_tokenizer(), MESSAGES, how).reasons is reasons


def test_only_the_beginning_of_an_answer_has_a_space_to_drop() -> None:
    tokenizer = demo().tokenizer
    assert ChatPrompt.of(tokenizer, MESSAGES, {}).trims_space
    continued = [*MESSAGES, {"role": "assistant", "content": "The"}]
    assert not ChatPrompt.of(tokenizer, continued, {}).trims_space
    assert ChatPrompt.of(tokenizer, continued, {"continue_final_message": False}).trims_space
