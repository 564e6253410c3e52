"""Saved chats: JSON in the form of OpenAI's API, so that other programs read them."""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ChatFileError
from ...files import replaced
from ...jsonl import conversation_of, load_json

if TYPE_CHECKING:
    from ...models.chat_template import Messages

_MOST_BYTES = 100_000_000
_OURS = {"model", "created", "messages"}
_SYSTEM = ("system", "developer")  # OpenAI's newer name for it


@dataclass(frozen=True)
class SavedChat:
    """A conversation in a file.

    Attributes:
        model: which model answered; "" where the file does not say.
        system_prompt: what the model was told before all turns, if anything.
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
                f"{path}: there is a file that is no saved chat; choose another name"
            )
        told = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        record = {
            "model": self.model,
            "created": int(time.time()),
            "messages": [*told, *self.messages],
        }
        text = json.dumps(record, ensure_ascii=False, indent=1)
        with replaced(path, ChatFileError) as file:
            file.write(text.encode(errors="replace") + b"\n")


def read_chat(path: Path) -> SavedChat:
    """Read a saved chat, or a request of OpenAI's API.

    Raises:
        ChatFileError: it cannot be read, or is none that can be gone on with.
    """
    try:
        return _chat_of(_json_at(path))
    except OSError as error:
        raise ChatFileError(
            f"{path}: cannot be read ({error.strerror or error}); name a saved chat"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ChatFileError(f"{path}: is no saved chat ({error})") from error


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
            raise ValueError("it is no regular file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    try:
        return load_json(data)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None


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
