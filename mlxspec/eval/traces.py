"""Reading recorded conversations: traces and OpenAI-style chat logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import PromptError
from ..jsonl import Conversation, conversation_of, load_json

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

    An object is as :func:`mlxspec.jsonl.conversation_of` reads it, and may have a
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


Encode = Callable[[str], list[int]]
"""Encodes a text without adding special tokens."""

# The template of the Vicuna models that answered Spec-Bench (lm-sys/FastChat, version 1.1).
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class Completion:
    """One output to replay, as token ids.

    Attributes:
        category: the set that it is counted in.
        context: of the whole conversation, which its completions share.
        begin: where in it the output begins.
        output: what the model wrote.
    """

    category: str
    context: list[int]
    begin: int
    output: list[int]

    @property
    def prompt(self) -> list[int]:
        """What stood before the output."""
        return self.context[: self.begin]


def render(trace: Trace, encode: Encode, bos_id: int, eos_id: int) -> Iterator[Completion]:
    """The completions of a trace, each after everything that was said before it.

    Vicuna's conversations are rendered in Vicuna's template, others with a header line per
    turn. Each part is stripped and encoded on its own; the end token counts as output.
    """
    conversation = trace.conversation
    completions = set(conversation.completions)
    vicuna = trace.model.startswith("vicuna")
    header = cache(lambda role: encode(_vicuna_header(role) if vicuna else _header(role)))
    context = [bos_id, *(encode(_VICUNA_SYSTEM) if vicuna else ())]
    for index, message in enumerate(conversation.messages):
        context += header(message.role)
        body = encode(message.content.strip())
        if index in completions:
            yield Completion(trace.category, context, len(context), [*body, eos_id])
        context += body
        if message.role == "assistant":
            context.append(eos_id)


def _vicuna_header(role: str) -> str:
    return "ASSISTANT:" if role == "assistant" else "USER:"


def _header(role: str) -> str:
    return f"\n### {role.capitalize()}:\n"
