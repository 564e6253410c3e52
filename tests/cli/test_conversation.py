"""Each answer of a conversation is what mlx-lm answers to the whole of it."""

from __future__ import annotations

from contextlib import closing
from itertools import islice

import mlx_lm
import pytest

from mlxspec import PromptLookupDecoder
from mlxspec.cli.conversation import Conversation, template_of
from mlxspec.errors import OptionError, PromptError
from mlxspec.loading.detokenizer import detokenizer_of

pytestmark = pytest.mark.slow

QUESTIONS = [
    'Repeat the following phrase 2 times: "The red fox sees the river.".',
    "And once more.",
    'Repeat the following phrase 2 times: "A small boat is on the lake.".',
]


@pytest.fixture(scope="module")
def decoder() -> PromptLookupDecoder:
    return PromptLookupDecoder("demo")


def conversation_with(decoder: PromptLookupDecoder, **options: object) -> Conversation:
    options = {"context_length": 1024, "max_tokens": 40, **options}
    trims = detokenizer_of(decoder.tokenizer).prefix_space
    tokenize = template_of(decoder.tokenizer)
    return Conversation(tokenize, decoder.stream, trims_first_space=trims, **options)


def ask(conversation: Conversation, question: str, taken: int | None = None) -> str:
    with closing(conversation.answer(question)) as responses:
        return "".join(response.text for response in islice(responses, taken))


def answered_by_mlx_lm(
    decoder: PromptLookupDecoder, messages: list[dict[str, str]], max_tokens: int = 40
) -> str:
    prompt = decoder.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    answer = mlx_lm.generate(decoder.model, decoder.tokenizer, prompt, max_tokens=max_tokens)
    return answer.removeprefix(" ")


@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
def test_answers_are_those_of_the_whole_conversation(
    decoder: PromptLookupDecoder, system_prompt: str | None
) -> None:
    conversation = conversation_with(decoder, system_prompt=system_prompt)
    told = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for question in QUESTIONS:
        told.append({"role": "user", "content": question})
        assert ask(conversation, question) == answered_by_mlx_lm(decoder, told)
        told.append(conversation.messages[-1])
    assert len(conversation.session.tokens) > 60


def test_a_full_context_loses_its_oldest_turns(decoder: PromptLookupDecoder) -> None:
    conversation = conversation_with(
        decoder, context_length=110, max_tokens=20, system_prompt="Be brief."
    )
    dropped = 0
    for turn in range(5):
        question = f"Say this two times: number {turn}."
        answer = ask(conversation, question)
        dropped += conversation.dropped
        kept = [{"role": "system", "content": "Be brief."}, *conversation.messages[:-1]]
        assert kept[1]["role"] == "user"
        if conversation.dropped:
            assert answer == answered_by_mlx_lm(decoder, kept, 20)
        assert len(conversation.session.tokens) < 110
    assert dropped == 5 - len(conversation.messages) // 2 > 0


def test_a_message_longer_than_the_context_is_refused_and_forgotten(
    decoder: PromptLookupDecoder,
) -> None:
    conversation = conversation_with(decoder)
    first = ask(conversation, QUESTIONS[0])
    with pytest.raises(PromptError, match="the model's context 1024"):
        ask(conversation, "word " * 2000)
    assert first == ask(conversation, QUESTIONS[0])


def test_what_was_said_before_an_interrupt_stays(decoder: PromptLookupDecoder) -> None:
    conversation = conversation_with(decoder)
    said = ask(conversation, QUESTIONS[0], taken=6)
    assert [message["content"] for message in conversation.messages] == [QUESTIONS[0], said]
    told = [*conversation.messages, {"role": "user", "content": "And once more."}]
    assert ask(conversation, "And once more.") == answered_by_mlx_lm(decoder, told)


def test_a_message_that_nothing_was_said_to_is_forgotten(decoder: PromptLookupDecoder) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    conversation = Conversation(template_of(decoder.tokenizer), interrupted, 1024, 40)
    with pytest.raises(KeyboardInterrupt):
        ask(conversation, "Anyone?")
    assert conversation.messages == []


def test_a_template_that_takes_no_system_prompt_is_told_before_the_first_turn(
    decoder: PromptLookupDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(messages: list, **_: object) -> list[int]:
        raise ValueError("no system role")

    monkeypatch.setattr(decoder.tokenizer, "apply_chat_template", refuse)
    with pytest.raises(OptionError, match="--system-prompt"):
        conversation_with(decoder, system_prompt="Be brief.")


def test_a_reset_forgets_everything(decoder: PromptLookupDecoder) -> None:
    conversation = conversation_with(decoder)
    first = ask(conversation, QUESTIONS[1])
    ask(conversation, QUESTIONS[0])
    conversation.reset()
    assert conversation.session.tokens == []
    assert ask(conversation, QUESTIONS[1]) == first
