"""What ``replay`` reads: recorded conversations, and their outputs as tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..errors import LoadError, OptionError, PromptError
from ..jsonl import Conversation, conversation_of
from ..models.tokenizer import load_tokenizer_of, vocabulary_classes
from .prompts import MT_BENCH, limited, parse_json_lines, read_text


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
    "category" and a "model". The messages that a model wrote are replayed.

    Raises:
        PromptError: the file cannot be read, a line has another form, or nothing can be
            replayed.
    """
    form = 'expected a JSON object with "messages", each with "role" and "content"'
    traces = parse_json_lines(read_text(path), path, partial(_trace, path.stem), form)
    if not any(trace.conversation.completions for trace in traces):
        raise PromptError(f"{path}: holds no assistant message to replay")
    return traces


def _trace(default_category: str, record: Any) -> Trace:
    conversation = conversation_of(record)
    category = str(record.get("category", default_category))
    if str(record.get("id", "")).startswith("specbench-") and category in MT_BENCH:
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
    header = cache(lambda role: encode(_header(role, vicuna)))
    context = [bos_id, *(encode(_VICUNA_SYSTEM) if vicuna else ())]
    for index, message in enumerate(conversation.messages):
        context += header(message.role)
        body = encode(message.content.strip())
        if index in completions:
            yield Completion(trace.category, context, len(context), [*body, eos_id])
        context += body
        if message.role == "assistant":
            context.append(eos_id)


def _header(role: str, vicuna: bool) -> str:
    if vicuna:
        return "ASSISTANT:" if role == "assistant" else "USER:"
    return f"\n### {role.capitalize()}:\n"


@dataclass(frozen=True)
class TraceTokenizer:
    """What replaying needs of a tokenizer.

    Attributes:
        encode: a text's ids, without special tokens.
        bos_id: what a context begins with.
        eos_id: what an answer ends with.
        classes: see :func:`mlxspec.drafting.acceptance.token_classes`.
    """

    encode: Encode
    bos_id: int
    eos_id: int
    classes: bytes


def load_trace_tokenizer(source: str | Path) -> TraceTokenizer:
    """A tokenizer for replaying.

    Args:
        source: as for :func:`mlxspec.models.tokenizer.load_tokenizer_of`.

    Raises:
        LoadError: there is none, or it has no end token.
    """
    tokenizer = load_tokenizer_of(source)
    bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos_id is None:
        raise LoadError(f"{source}: the tokenizer has no EOS token, with which answers end")
    return TraceTokenizer(
        encode=partial(tokenizer.encode, add_special_tokens=False),
        # Some models have no BOS; another token in front of everything else changes no draft.
        bos_id=eos_id if bos_id is None else bos_id,
        eos_id=eos_id,
        classes=vocabulary_classes(tokenizer),
    )


def read_completions(
    paths: Iterable[Path], tokenizer: TraceTokenizer, limit: int
) -> list[Completion]:
    """Read traces and encode their outputs, category by category.

    Args:
        paths: files of traces or chat logs.
        tokenizer: gives the tokens.
        limit: how many conversations of a category to take at most, evenly spaced.

    Raises:
        OptionError: ``limit`` is below 1.
        PromptError: as :func:`read_traces`, or the conversations taken have no output.
    """
    if limit < 1:
        raise OptionError(f"--limit is {limit}: take at least 1 conversation of a category")
    traces = limited((trace for path in paths for trace in read_traces(path)), limit)
    completions = [
        completion
        for trace in traces
        for completion in render(trace, tokenizer.encode, tokenizer.bos_id, tokenizer.eos_id)
    ]
    if not completions:
        raise PromptError(
            f"--limit {limit} takes no conversation with an assistant message: raise it"
        )
    return completions
