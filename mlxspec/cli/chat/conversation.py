"""A conversation with a model: its messages, and the session that answers them."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.target import Progress
from ...errors import ChatFileError, OptionError, PromptError
from ...files import replaced
from ...generation.response import GenerationResponse
from ...generation.session import Session
from ...jsonl import conversation_of, load_json
from ...models.chat_template import Messages
from ..common.generation import room_for

if TYPE_CHECKING:
    from ...models.chat_template import Messages
    from .models import LocalModel, RemoteModel

_ANSWERS_SHARE = 4  # of the context a quarter is left for an answer, unless it may have less


class ChatConversation:
    """Keeps the messages within the model's context.

    Once they leave no room for an answer, the oldest turns are dropped until half of the context
    is free. So the next turns continue where this one ends, and need not process everything
    again each time.

    Args:
        model: which answers.
        max_tokens: per answer.
        system_prompt: comes before all turns.

    Attributes:
        messages: the turns so far, without the system prompt.
        unanswered: a message that got no answer, as the last thing said; it is in no turn.
        dropped: how many turns had to be left out for the last answer.

    Raises:
        OptionError: the model's chat template takes no system prompt.
    """

    def __init__(
        self, model: LocalModel | RemoteModel, max_tokens: int, system_prompt: str | None = None
    ) -> None:
        _check_template(model, system_prompt)
        self.model = model
        self.max_tokens = max_tokens
        self._system_prompt = system_prompt or None
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages: Messages = []
        self.unanswered: str | None = None
        self.session = Session()
        self.dropped = 0

    @property
    def system_prompt(self) -> str | None:
        """The system prompt, if there is one."""
        return self._system_prompt

    @system_prompt.setter
    def system_prompt(self, text: str | None) -> None:
        _check_template(self.model, text)
        self._system_prompt = text

    @property
    def n_turns(self) -> int:
        """How many messages have an answer."""
        return len(self._turns())

    @property
    def saved(self) -> SavedChat:
        """The conversation as a file has it."""
        asked = [] if self.unanswered is None else [_said("user", self.unanswered)]
        return SavedChat(self.model.name, self.system_prompt, [*self.messages, *asked])

    def restore(self, chat: SavedChat) -> None:
        """Go on with a conversation of a file, in this one's place.

        A message at its end that has no answer is :attr:`unanswered`.

        Raises:
            OptionError: the model's chat template takes no system prompt.
        """
        self.system_prompt = chat.system_prompt
        messages, self.unanswered, self.dropped = list(chat.messages), None, 0
        if messages and messages[-1]["role"] == "user":
            self.unanswered = messages.pop()["content"]
        self.messages = messages

    def switch(self, name: str) -> None:
        """Go on with another model.

        Raises:
            MlxspecError: there is none, or it cannot go on; the model stays what it is.
        """
        self.model.find(name)
        self.session = Session()  # it would hold the old model
        other = self.model.switched(name)
        try:
            _check_template(other, self.system_prompt)
        except OptionError:
            other.close()
            raise
        self.model = other

    def answer(
        self, message: str, on_progress: Progress | None = None, **sampling: Any
    ) -> Generator[GenerationResponse, None, None]:
        """Answer a message; what has been said is kept when the generator is closed early.

        A message that got no answer at all is :attr:`unanswered`.

        Args:
            message: the user's.
            on_progress: called with how much of the prompt has run.
            sampling: how to sample this answer, where not as always.

        Raises:
            PromptError: the message alone is longer than the model's context.
        """
        self.unanswered = None
        self.messages.append(_said("user", message))
        said = ""
        try:
            tokens = self._fitting_prompt()
            responses = self.model.stream(
                tokens,
                room_for(self.model.context_length, len(tokens), self.max_tokens),
                session=self.session,
                on_progress=on_progress,
                **sampling,
            )
            try:
                for response in responses:
                    said += response.text
                    yield response
            finally:
                responses.close()
        finally:
            if said:
                self.messages.append(_said("assistant", said))
            else:
                self.messages.pop()
                self.unanswered = message

    def retry(
        self, on_progress: Progress | None = None, **sampling: Any
    ) -> Generator[GenerationResponse, None, None]:
        """Answer the last message again; arguments as for :meth:`answer`.

        The earlier answer stays if there is no other.

        Raises:
            PromptError: there is no message.
        """
        before = list(self.messages)
        had_answer = self.unanswered is None
        message = self.undo()
        try:
            yield from self.answer(message, on_progress, **sampling)
        finally:
            if had_answer and self.unanswered is not None:
                self.messages, self.unanswered = before, None

    def undo(self) -> str:
        """Take the last message back, and its answer.

        Returns:
            the message.

        Raises:
            PromptError: there is none.
        """
        if self.unanswered is not None:
            message, self.unanswered = self.unanswered, None
            return message
        begin = self._turns()[-1:]
        if not begin:
            raise PromptError("nothing has been said yet: write a message")
        message = str(self.messages[begin[0]]["content"])
        del self.messages[begin[0] :]
        return message

    def _turns(self) -> list[int]:
        """Where the turns begin: with the user's messages."""
        return [at for at, message in enumerate(self.messages) if message["role"] == "user"]

    def _fitting_prompt(self) -> list[int]:
        """The conversation's tokens, without the oldest turns once they leave no room."""
        tokens, length = self._tokens(), self.model.context_length
        self.dropped = 0
        if length is None or len(tokens) + min(self.max_tokens, length // _ANSWERS_SHARE) <= length:
            return tokens
        while len(tokens) > length // 2 and len(turns := self._turns()) > 1:
            del self.messages[: turns[1]]
            self.dropped += 1
            tokens = self._tokens()
        return tokens

    def _tokens(self) -> list[int]:
        system = [_said("system", self.system_prompt)] if self.system_prompt else []
        return self.model.tokenize([*system, *self.messages])


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _check_template(model: LocalModel | RemoteModel, system_prompt: str | None) -> None:
    """Find out before the first turn that a template does not know system prompts.

    Raises:
        OptionError: it does not.
    """
    if system_prompt:
        try:
            model.tokenize([_said("system", system_prompt), _said("user", "?")])
        except (OptionError, PromptError) as error:
            raise OptionError(
                "this model's chat template takes no system prompt; write it into the first message"
            ) from error


_MOST_BYTES = 100_000_000
_OURS = {"model", "created", "messages"}
_SYSTEM = ("system", "developer")  # OpenAI's newer name for it


@dataclass(frozen=True)
class SavedChat:
    """A conversation in a file.

    Attributes:
        model: which model answered; "" where the file does not say.
        system_prompt: the system prompt, if there is one.
        messages: the turns of "user" and "assistant".
    """

    model: str
    system_prompt: str | None
    messages: Messages

    def write(self, path: Path) -> None:
        """Write the conversation, whole or not at all; only a saved chat is replaced.

        Raises:
            ChatFileError: something else is there, or it cannot be written.
        """
        if os.path.lexists(path) and not _is_ours(path):
            raise ChatFileError(
                f"{path}: there is a file that is not a saved chat; choose another name"
            )
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        record = {
            "model": self.model,
            "created": int(time.time()),
            "messages": [*system, *self.messages],
        }
        text = json.dumps(record, ensure_ascii=False, indent=1)
        with replaced(path, ChatFileError) as file:
            file.write(text.encode(errors="replace") + b"\n")


def read_chat(path: Path) -> SavedChat:
    """Read a saved chat, or a request of OpenAI's API.

    Raises:
        ChatFileError: it cannot be read, or cannot be continued.
    """
    try:
        return _chat_of(_json_at(path))
    except OSError as error:
        raise ChatFileError(
            f"{path}: cannot be read ({error.strerror or error}); name a saved chat"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ChatFileError(f"{path}: is not a saved chat ({error})") from error


def _is_ours(path: Path) -> bool:
    """Whether a file holds a saved chat and nothing else."""
    try:
        record = _json_at(path)
        _chat_of(record)
    except (OSError, ValueError, RecursionError):
        return False
    return set(record) == _OURS


def _json_at(path: Path) -> Any:
    """Raises OSError, ValueError or RecursionError."""
    # Opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    try:
        return load_json(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None


def _chat_of(record: Any) -> SavedChat:
    """Raises ValueError."""
    turns = [*conversation_of(record).messages]
    system_prompt = turns.pop(0).content if turns and turns[0].role in _SYSTEM else None
    for turn in turns:
        if turn.role not in ("user", "assistant"):
            raise ValueError(f"a message of {turn.role!r} is not for a chat")
    if turns and turns[0].role != "user":
        raise ValueError("the first turn is not the user's")
    model = record.get("model")
    return SavedChat(
        model if isinstance(model, str) else "",
        system_prompt or None,
        [{"role": turn.role, "content": turn.content} for turn in turns],
    )
