"""Reading recorded conversations: traces and OpenAI-style chat logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptError
from ..json_text import load_json

# MT-bench's own categories; Spec-Bench counts its 80 conversations as one.
_MT_BENCH = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"
}  # fmt: skip

_UNUSABLE = (
    *(ValueError, TypeError, KeyError, AttributeError),
    *(OverflowError, RecursionError),
)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation: who speaks ("user", "assistant", "tool", …) and what."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """A recorded conversation.

    Attributes:
        category: the set that it is counted in.
        model: who answered, if known.
        messages: all turns.
        completions: the indices of the turns that a model wrote.
    """

    category: str
    model: str
    messages: tuple[Message, ...]
    completions: tuple[int, ...]


def read_traces(path: Path) -> list[Conversation]:
    """Read conversations from a file, one JSON object a line.

    An object has "messages", each with "role" and "content", and optionally "category",
    "model" and "completions", the indices of the messages to replay; without it every
    assistant message is replayed, as in chat logs of OpenAI's format. There, contents may also
    be lists of parts, of which the text counts, and tool calls count as their JSON.

    Raises:
        PromptError: the file cannot be read, a line has another form, or nothing is to replay.
    """
    try:
        # Not splitlines(): U+2028 and its like may stand within a JSON string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: cannot be read as text: {error}") from None
    conversations = list(_conversations(path, lines))
    if not any(conversation.completions for conversation in conversations):
        raise PromptError(f"{path}: holds no assistant message to replay")
    return conversations


def _conversations(path: Path, lines: list[str]) -> Iterator[Conversation]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _conversation(load_json(line), default_category=path.stem)
        except _UNUSABLE:
            raise PromptError(
                f'{path}, line {number}: expected a JSON object with "messages", each with '
                '"role" and "content"'
            ) from None


def _conversation(record: dict[str, Any], default_category: str) -> Conversation:
    messages = tuple(_message(message) for message in record["messages"])
    written = [i for i, message in enumerate(messages) if message.role == "assistant"]
    completions = tuple(int(index) for index in record.get("completions", written))
    if any(not 0 <= index < len(messages) for index in completions):
        raise ValueError("completions point outside the messages")
    category = str(record.get("category", default_category))
    if str(record.get("id", "")).startswith("specbench-") and category in _MT_BENCH:
        category = "mt_bench"
    return Conversation(category, str(record.get("model", "")), messages, completions)


def _message(message: dict[str, Any]) -> Message:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    for call in message.get("tool_calls") or ():
        content += json.dumps(call["function"], ensure_ascii=False)
    if not isinstance(content, str):
        raise TypeError("content is no text")
    return Message(str(message["role"]), content)
