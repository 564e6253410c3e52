"""From conversations to tokens: the context of each completion, and the completion itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..chat_log import Message
from .traces import Trace

Encode = Callable[[str], list[int]]
"""Encodes a text without adding special tokens."""

# The template of the Vicuna models that answered Spec-Bench (lm-sys/FastChat, version 1.1).
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class Completion:
    """One output to replay: what stood before it and what the model wrote, as token ids."""

    category: str
    prompt: list[int]
    output: list[int]


def render(trace: Trace, encode: Encode, bos_id: int, eos_id: int) -> Iterator[Completion]:
    """The completions of a trace, each after everything that was said before it.

    Vicuna's conversations are rendered in Vicuna's template, others with a header line per
    turn. Each part is stripped and encoded on its own; the end token counts as output.
    """
    conversation = trace.conversation
    vicuna = trace.model.startswith("vicuna")
    context = [bos_id, *(encode(_VICUNA_SYSTEM) if vicuna else ())]
    for index, message in enumerate(conversation.messages):
        context += encode(_vicuna_header(message) if vicuna else _header(message))
        body = encode(message.content.strip())
        if index in conversation.completions:
            yield Completion(trace.category, list(context), [*body, eos_id])
        context += body
        if message.role == "assistant":
            context.append(eos_id)


def _vicuna_header(message: Message) -> str:
    return "ASSISTANT:" if message.role == "assistant" else "USER:"


def _header(message: Message) -> str:
    return f"\n### {message.role.capitalize()}:\n"
