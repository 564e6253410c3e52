"""Each answer in a conversation equals mlx-lm's answer to the whole conversation."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step

from mlxspec import PromptLookupDecoder
from mlxspec.cli.chat import Chat, command_in, read_chat, write_chat
from mlxspec.cli.common.generation import DraftingOptions, GenerationSettings, without_first_space
from mlxspec.cli.common.output import error_console
from mlxspec.engine.params import CacheOptions, SamplingParams
from mlxspec.errors import OptionError, PromptError
from mlxspec.generation.chat_prompt import conversation_prompt
from mlxspec.generation.session import Session
from tests.support.architectures import ARCHITECTURES, KINDS_OF_CACHES
from tests.support.demo import demo, demo_decoder, stand_in_decoder

pytestmark = pytest.mark.slow

QUESTIONS = [
    'Repeat the following phrase 2 times: "The red fox sees the river.".',
    "And once more.",
    'Repeat the following phrase 2 times: "A small boat is on the lake.".',
]


class Model:
    """A chat's model made from a decoder."""

    name = "tested"

    def __init__(self, decoder: PromptLookupDecoder, context_length: int | None = 1024) -> None:
        self.decoder = decoder
        self.context_length = context_length
        self.session = Session()
        self.reused: list[int] = []  # cached tokens of each prompt
        self.taken: int | None = None  # responses before Ctrl-C

    def tokenize(self, messages: list[dict[str, Any]]) -> list[int]:
        return conversation_prompt(self.decoder.tokenizer, messages, {}).tokens(
            self.decoder.tokenizer
        )

    def stream(
        self, generation: GenerationSettings, tokens: Sequence[int], on_progress: Any
    ) -> Generator[Any, None, None]:
        sampling = {name: getattr(generation.sampling, name) for name in ("temp", "seed")}
        how = {"session": self.session, "on_progress": on_progress, **sampling}
        with closing(self.decoder.stream(tokens, generation.max_tokens, **how)) as responses:
            for response in map(without_first_space(True), islice(responses, self.taken)):
                self.reused.append(response.reused_tokens)
                yield response
        if self.taken is not None:
            raise KeyboardInterrupt

    def others(self) -> list[str]:
        return []

    def switch(self, name: str) -> None:
        if name == "missing":
            raise OptionError("there is no model missing")
        self.session = Session()
        self.name = name


@pytest.fixture(scope="module")
def decoder() -> PromptLookupDecoder:
    return stand_in_decoder(PromptLookupDecoder)


def conversation_with(
    decoder: PromptLookupDecoder,
    context_length: int | None = 1024,
    max_tokens: int = 20,
    system_prompt: str | None = None,
) -> Chat:
    return chat_with(Model(decoder, context_length), max_tokens, system_prompt)


def chat_with(model: Model, max_tokens: int, system_prompt: str | None = None) -> Chat:
    options = DraftingOptions(), SamplingParams(), CacheOptions()
    generation = GenerationSettings(model.name, max_tokens, *options)
    return Chat(model, generation, error_console(), system_prompt=system_prompt)


def ask(chat: Chat, question: str, taken: int | None = None) -> str:
    chat.model.taken = taken
    chat.answer(question)
    chat.model.taken = None
    return chat.messages[-1]["content"]


def again(chat: Chat, temperature: str = "") -> str:
    run, argument = command_in(f"/retry {temperature}")
    run(chat, argument)
    return chat.messages[-1]["content"]


def answered_by_mlx_lm(
    decoder: PromptLookupDecoder, messages: list[dict[str, str]], max_tokens: int = 20
) -> str:
    prompt = decoder.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    answer = mlx_lm.generate(decoder.model, decoder.tokenizer, prompt, max_tokens=max_tokens)
    return answer.removeprefix(" ")


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
def test_answers_are_those_of_the_whole_conversation(
    decoder: PromptLookupDecoder, system_prompt: str | None
) -> None:
    conversation = conversation_with(decoder, system_prompt=system_prompt)
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        assert ask(conversation, question) == answered_by_mlx_lm(decoder, messages)
        messages.append(conversation.messages[-1])
    assert len(conversation.model.session.tokens) > 60


def test_what_a_full_context_leaves_out_stays_in_the_conversation(
    decoder: PromptLookupDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = conversation_with(
        decoder, context_length=110, max_tokens=20, system_prompt="Be brief."
    )
    system, unseen, full_at = {"role": "system", "content": "Be brief."}, 0, 0
    for turn in range(5):
        answer = ask(conversation, f"Say this two times: number {turn}.")
        if found := re.search(r"no longer sees the first (\d) turn", capsys.readouterr().err):
            assert int(found[1]) > unseen
            before, unseen, full_at = unseen, int(found[1]), len(conversation.messages) - 1
        assert len(conversation.messages) == 2 * turn + 2
        seen = [system, *conversation.messages[2 * unseen : -1]]
        assert answer == answered_by_mlx_lm(decoder, seen, 20)
        assert len(conversation.model.session.tokens) < 110
    assert unseen
    while len(conversation.messages) >= full_at:
        conversation.undo()
    answer = ask(conversation, "And?")
    seen = [system, *conversation.messages[2 * before : -1]]
    assert answer == answered_by_mlx_lm(decoder, seen, 20)


def test_a_message_longer_than_the_context_is_refused_and_forgotten() -> None:
    conversation = conversation_with(demo_decoder(PromptLookupDecoder))
    first = ask(conversation, QUESTIONS[0])
    with pytest.raises(PromptError, match="the model's context is 1024"):
        ask(conversation, "word " * 2000)
    assert [message["content"] for message in conversation.messages[:2]] == [QUESTIONS[0], first]
    ask(conversation, QUESTIONS[1])
    messages = conversation.messages
    assert [message["content"] for message in messages[:3]] == [QUESTIONS[0], first, QUESTIONS[1]]
    prompt = messages[:3]
    assert messages[3]["content"] == answered_by_mlx_lm(conversation.model.decoder, prompt)


def test_what_was_said_before_an_interrupt_stays(decoder: PromptLookupDecoder) -> None:
    conversation = conversation_with(decoder)
    said = ask(conversation, QUESTIONS[0], taken=6)
    assert [message["content"] for message in conversation.messages] == [QUESTIONS[0], said]
    messages = [*conversation.messages, {"role": "user", "content": "And once more."}]
    assert ask(conversation, "And once more.") == answered_by_mlx_lm(decoder, messages)


def test_a_message_that_nothing_was_said_to_has_no_answer(decoder: PromptLookupDecoder) -> None:
    conversation = conversation_with(decoder)
    ask(conversation, "Anyone?", taken=0)
    assert conversation.messages == [{"role": "user", "content": "Anyone?"}]
    assert conversation.unanswered


@pytest.mark.nightly
def test_after_undo_retry_and_load_answers_are_those_of_a_fresh_conversation(
    decoder: PromptLookupDecoder, tmp_path: Path
) -> None:
    conversation = conversation_with(decoder)
    answers = [ask(conversation, question) for question in QUESTIONS]
    assert again(conversation) == answers[2]
    reused = len(conversation.model.session.tokens)
    assert conversation.undo() == QUESTIONS[2]
    assert conversation.undo() == QUESTIONS[1]
    messages = [*conversation.messages, {"role": "user", "content": QUESTIONS[2]}]
    assert [message["content"] for message in messages] == [QUESTIONS[0], answers[0], QUESTIONS[2]]
    assert ask(conversation, QUESTIONS[2]) == answered_by_mlx_lm(decoder, messages)
    conversation.system_prompt = "Be brief."
    messages.insert(0, {"role": "system", "content": "Be brief."})
    assert again(conversation) == answered_by_mlx_lm(decoder, messages)
    conversation.system_prompt = None
    assert again(conversation) == answered_by_mlx_lm(decoder, messages[1:])
    write_chat(tmp_path / "chat", "tested", conversation.conversation)
    conversation.messages = []
    conversation.restore(*read_chat(tmp_path / "chat"))
    messages = [*conversation.messages, {"role": "user", "content": QUESTIONS[1]}]
    assert len(messages) == 5
    assert ask(conversation, QUESTIONS[1]) == answered_by_mlx_lm(decoder, messages)
    assert reused > 60


def test_what_is_common_is_not_processed_again(decoder: PromptLookupDecoder) -> None:
    conversation = conversation_with(decoder)
    for question in QUESTIONS[:2]:
        ask(conversation, question)
    begins = conversation.model.tokenize(conversation.messages[:2])
    conversation.undo()
    ask(conversation, QUESTIONS[2])
    prompt = conversation.model.tokenize(conversation.messages[:-1])
    assert 20 < len(begins) - 8 <= conversation.model.reused[-1] < len(prompt)


def test_each_retry_samples_with_the_next_seed(decoder: PromptLookupDecoder) -> None:
    texts = []
    for _ in range(2):
        conversation = conversation_with(decoder)
        ask(conversation, "Tell me about the sea.")
        texts.append([again(conversation, "1.5") for _ in range(2)])
        assert len(conversation.messages) == 2
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_a_retry_that_is_interrupted_leaves_the_earlier_answer(
    decoder: PromptLookupDecoder,
) -> None:
    conversation = conversation_with(decoder)
    ask(conversation, QUESTIONS[0])
    before = [*conversation.messages]
    conversation.model.taken = 0
    again(conversation)
    assert conversation.messages == before
    assert not conversation.unanswered


def test_a_retry_of_a_message_without_an_answer_leaves_it_if_it_is_interrupted(
    decoder: PromptLookupDecoder,
) -> None:
    conversation = conversation_with(decoder)
    ask(conversation, QUESTIONS[0])
    before = [*conversation.messages, {"role": "user", "content": QUESTIONS[1]}]
    conversation.restore(None, [*before])
    conversation.model.taken = 0
    again(conversation)
    assert conversation.messages == before


def test_a_message_without_an_answer_is_asked_again_saved_and_taken_back(
    decoder: PromptLookupDecoder,
) -> None:
    asked = [{"role": "user", "content": QUESTIONS[0]}]
    conversation = conversation_with(decoder)
    conversation.restore(None, [*asked])
    assert conversation.unanswered
    assert conversation.messages == asked
    assert again(conversation) == answered_by_mlx_lm(decoder, asked)
    assert conversation.messages[0] == asked[0]
    conversation.restore(None, [*asked])
    assert conversation.undo() == QUESTIONS[0]
    for forgotten in (conversation.undo, lambda: again(conversation)):
        with pytest.raises(PromptError, match="nothing has been said"):
            forgotten()


def test_another_model_goes_on_and_a_missing_one_does_not(decoder: PromptLookupDecoder) -> None:
    conversation = conversation_with(decoder)
    ask(conversation, QUESTIONS[0])
    session = conversation.model.session
    with pytest.raises(OptionError, match="missing"):
        conversation.model.switch("missing")
    assert conversation.model.session is session
    conversation.model.switch("other")
    assert conversation.model.name == "other"
    messages = [*conversation.messages, {"role": "user", "content": QUESTIONS[1]}]
    assert ask(conversation, QUESTIONS[1]) == answered_by_mlx_lm(decoder, messages)


class Letters(Model):
    """A random model whose prompts are letters and whose answers are texts of token numbers."""

    def tokenize(self, messages: list[dict[str, Any]]) -> list[int]:
        numbers = {"user": 1, "assistant": 2, "system": 3}
        return [
            token
            for message in messages
            for token in (numbers[message["role"]], *(ord(c) % 64 for c in message["content"]))
        ]

    def stream(
        self, generation: GenerationSettings, tokens: Sequence[int], on_progress: Any
    ) -> Generator[Any, None, None]:
        for response in super().stream(generation, tokens, on_progress):
            response.text = chr(response.token + 64)
            yield response


@pytest.mark.parametrize("kind", KINDS_OF_CACHES)
def test_caches_of_every_kind_return_to_where_the_conversation_did(kind: str) -> None:
    model = ARCHITECTURES[KINDS_OF_CACHES[kind]].model()
    letters = Letters(PromptLookupDecoder(model, demo().tokenizer), 1024)
    conversation = chat_with(letters, 12)

    def fresh() -> str:
        prompt = mx.array(letters.tokenize(conversation.messages[:-1]))
        text = ""
        for token, _ in generate_step(prompt, model, max_tokens=12):
            text += chr(int(token) + 64)
            if int(token) in demo().tokenizer.eos_token_ids:
                break
        return text

    for question in ("first question", "second", "third and last"):
        ask(conversation, question)
    assert conversation.messages[-1]["content"] == fresh()
    assert again(conversation) == fresh()
    conversation.undo()
    assert ask(conversation, "in place of the third") == fresh()
    conversation.undo()
    assert again(conversation) == fresh()
    assert ask(conversation, "go on") == fresh()
