"""From conversations to tokens: the context of each completion, and the completion itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

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
