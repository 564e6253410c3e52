"""Reading recorded conversations: traces and OpenAI-style chat logs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..chat_log import Conversation, conversation_of
from ..errors import PromptError
from ..json_text import load_json

# MT-bench's own categories; Spec-Bench counts its 80 conversations as one.
_MT_BENCH = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"
}  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """A recorded conversation, and where it belongs.

    Attributes:
        category: the set that it is counted in.
        model: who answered, if known.
        conversation: what was said.
    """

    category: str
    model: str
    conversation: Conversation


def read_traces(path: Path) -> list[Trace]:
    """Read conversations from a file, one JSON object a line.

    An object is as :func:`mlxspec.chat_log.conversation_of` reads it, and may have a
    "category" and a "model". The messages that a model wrote are to be replayed.

    Raises:
        PromptError: the file cannot be read, a line has another form, or nothing is to replay.
    """
    try:
        # Not splitlines(): U+2028 and its like may stand within a JSON string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise PromptError(f"{path}: cannot be read ({error.strerror}); name a file") from None
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path}: is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from None
    traces = list(_traces(path, lines))
    if not any(trace.conversation.completions for trace in traces):
        raise PromptError(f"{path}: holds no assistant message to replay")
    return traces


def _traces(path: Path, lines: list[str]) -> Iterator[Trace]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _trace(load_json(line), default_category=path.stem)
        except (ValueError, RecursionError):
            raise PromptError(
                f'{path}, line {number}: expected a JSON object with "messages", each with '
                '"role" and "content"'
            ) from None


def _trace(record: Any, default_category: str) -> Trace:
    conversation = conversation_of(record)
    category = str(record.get("category", default_category))
    if str(record.get("id", "")).startswith("specbench-") and category in _MT_BENCH:
        category = "mt_bench"
    return Trace(category, str(record.get("model", "")), conversation)
