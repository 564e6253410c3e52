"""A chat frees a model before it loads another."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

from mlxspec.cli.chat import COMMANDS, Chat, LocalModel
from mlxspec.cli.common.generation import DraftingOptions, GenerationSettings
from mlxspec.cli.common.output import error_console
from mlxspec.cli.memory import Memories
from mlxspec.engine.params import CacheOptions, SamplingParams
from mlxspec.errors import MlxspecError
from mlxspec.generation.drafter_factories import Auto
from tests.support.scripted_model import write_scripted_model

pytestmark = pytest.mark.slow


def generation(model: str, **drafting: str | bool) -> GenerationSettings:
    drafts = DraftingOptions(**drafting)
    return GenerationSettings(model, 9, drafts, SamplingParams(), CacheOptions())


def chat_with(generation: GenerationSettings, memories: Memories) -> Chat:
    model = LocalModel(generation, lambda one: one.load(error_console(), memories), {})
    return Chat(model, generation, error_console())


def ask(conversation: Chat) -> str:
    conversation.answer("Say hello.")
    return conversation.messages[-1]["content"]


def loaded(conversation: Chat) -> weakref.ref:
    return weakref.ref(conversation.model.decoder.model)


def test_the_first_is_gone_before_the_second_is_loaded_and_comes_back_if_that_fails(
    finite: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = write_scripted_model(tmp_path / "other", ("ah", " oh"), ends=True)
    with Memories(keeps=False) as memories:
        conversation = chat_with(generation("demo"), memories)
        answer = ask(conversation)
        first = loaded(conversation)
        gone = []
        load = GenerationSettings.load

        def watched(*arguments: object) -> object:
            gone.append(first() is None)
            return load(*arguments)

        monkeypatch.setattr(GenerationSettings, "load", watched)
        with pytest.raises(MlxspecError, match="no such directory"):
            conversation.model.switch(str(tmp_path / "missing"))
        assert first() is not None
        with pytest.raises(MlxspecError, match="no chat template"):
            conversation.model.switch(str(finite))
        assert gone == []  # before weights are read
        (other / "model.safetensors").rename(other / "weights")
        COMMANDS["/model [NAME]"][1](conversation, "demo")
        with pytest.raises(MlxspecError, match="other"):
            COMMANDS["/model [NAME]"][1](conversation, str(other))
        assert gone == [True, True]  # the second time, the first model is loaded again
        assert "Still chatting with demo.\n" in capsys.readouterr().err
        (other / "weights").rename(other / "model.safetensors")
        assert conversation.model.name == "demo"
        conversation.undo()
        assert ask(conversation) == answer
        conversation.model.switch(str(other))
        assert ask(conversation) == "ah oh"


def test_ctrl_c_while_a_model_loads_keeps_the_one_before_and_twice_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = str(write_scripted_model(tmp_path / "other", ("ah", " oh"), ends=True))
    with Memories(keeps=False) as memories:
        conversation = chat_with(generation("demo"), memories)
        answer = ask(conversation)
        load, presses = GenerationSettings.load, iter([True, False, True, True])

        def pressed(*arguments: object) -> object:
            if next(presses):
                raise KeyboardInterrupt
            return load(*arguments)

        monkeypatch.setattr(GenerationSettings, "load", pressed)
        with pytest.raises(KeyboardInterrupt):
            conversation.model.switch(other)
        conversation.undo()
        assert ask(conversation) == answer
        with pytest.raises(EOFError):
            conversation.model.switch(other)


def test_after_ctrl_c_a_chat_says_which_model_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    with Memories(keeps=False) as memories:
        conversation = chat_with(generation("demo"), memories)
        monkeypatch.setattr(LocalModel, "switch", pressed)
        with pytest.raises(KeyboardInterrupt):
            COMMANDS["/model [NAME]"][1](conversation, "other")
    assert capsys.readouterr().err == "Still chatting with demo.\n"


def test_a_head_that_is_named_is_for_the_first_model_only_and_comes_back_with_it(
    headed: Path, tmp_path: Path
) -> None:
    first, other = (
        str(write_scripted_model(tmp_path / name, (name, " oh"), ends=True))
        for name in ("ah", "eh")
    )
    with Memories(keeps=False) as memories:
        conversation = chat_with(generation(first, head=str(headed)), memories)
        assert ask(conversation) == "ah oh"
        model = loaded(conversation)
        for name in (other, first):
            conversation.model.switch(name)
            assert model() is None
            model = loaded(conversation)
            factory = conversation.model.decoder.drafter_factory
            assert isinstance(factory, Auto)
            assert bool(factory.head) == (name == first)
