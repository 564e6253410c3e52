"""The inputs of ``bench`` and ``replay``: prompts, recorded conversations and decoder names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import LoadError, OptionError, PromptError
from ..jsonl import conversation_of, json_lines

MT_BENCH = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"
}  # fmt: skip
"""The categories of MT-bench's questions in Spec-Bench. Reports count them as one."""


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation to answer.

    Attributes:
        category: the category under which it is reported.
        messages: the messages before the first answer, each with "role" and "content".
        follow_ups: the user's messages, one after each answer.
        raw: whether the only message is a text to continue, not a question.
    """

    category: str
    messages: tuple[dict[str, str], ...]
    follow_ups: tuple[str, ...] = ()
    raw: bool = False


def bundled_prompts() -> list[BenchPrompt]:
    """The package's own prompts: four tasks that repeat their prompt, and two texts to continue."""
    return read_prompts(Path(__file__).with_name("prompts.jsonl"))


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Read a file of prompts.

    A ``.jsonl`` file has one JSON object per line, with one of

    - ``"prompt"``: the user's message, or with ``"raw": true`` a text to continue,
    - ``"messages"``: a conversation; answers at its end are cut off,
    - ``"turns"``: the user's messages, each sent after the answer to the one before,

    and optionally ``"category"``, as in Spec-Bench's ``question.jsonl``. The whole text of any
    other file is one prompt.

    Raises:
        OSError: the file cannot be read.
        PromptError: it is empty or not UTF-8, or a line of it is not a prompt.
    """
    text = read_text(path)
    if not text.strip():
        raise PromptError(f"{path} is empty: write a prompt into it")
    if path.suffix.lower() == ".jsonl":
        return parse_json_lines(text, path, _prompt)
    return [BenchPrompt("text", (message("user", text.removesuffix("\n")),))]


_Item = TypeVar("_Item", BenchPrompt, "Trace")


def limited(items: Iterable[_Item], per_category: int | None) -> list[_Item]:
    """The items, category by category: at most ``per_category`` of each, evenly spaced.

    With None, all items, in their order.
    """
    if per_category is None:
        return list(items)
    by_category: dict[str, list[_Item]] = {}
    for item in items:
        by_category.setdefault(item.category, []).append(item)
    chosen = []
    for members in by_category.values():
        count = min(per_category, len(members))
        chosen += [members[index * len(members) // count] for index in range(count)]
    return chosen


def message(role: str, content: str) -> dict[str, str]:
    """A message in the form that chat templates expect."""
    return {"role": role, "content": content}


def read_text(path: Path) -> str:
    """The text of a user's file, without a byte order mark.

    Raises:
        OSError: the file cannot be read.
        PromptError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text: convert it to UTF-8") from error


def parse_json_lines(text: str, path: Path, parse: Callable[[Any], _Item]) -> list[_Item]:
    """Parse the JSON lines of a file; blank lines are skipped.

    Args:
        path: the file, for errors.
        parse: turns the object of a line into an item, or raises ValueError.

    Raises:
        PromptError: a line has another form.
    """
    items = []
    for number, value in json_lines(text.split("\n")):
        try:
            if not isinstance(value, dict):
                raise ValueError("it is not a JSON object")
            items.append(parse(value))
        except ValueError as error:
            raise PromptError(
                f"{path}, line {number}: {error}; write one JSON object per line"
            ) from error
    return items


def _category(record: dict[str, Any], default: str) -> str:
    """The category of a record. All questions of Spec-Bench that are MT-bench's share one."""
    category = str(record.get("category", default))
    from_spec_bench = "question_id" in record or str(record.get("id")).startswith("specbench-")
    return "mt_bench" if from_spec_bench and category in MT_BENCH else category


def _prompt(record: dict[str, Any]) -> BenchPrompt:
    """The prompt in a record; raises ValueError if the record has another form."""
    category = _category(record, "prompts")
    if "messages" in record:
        messages, _ = conversation_of(record)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not any(message["content"] for message in messages):
            raise ValueError('"messages" contains no question')
        return BenchPrompt(category, tuple(messages))
    turns = record.get("turns", [record.get("prompt")])
    if not (isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns)):
        raise ValueError('"prompt" or "turns" must have a text')
    first, *follow_ups = turns
    raw = record.get("raw") is True
    return BenchPrompt(category, (message("user", first),), tuple(follow_ups), raw)


@dataclass(frozen=True)
class Trace:
    """A recorded conversation.

    Attributes:
        category: the category under which it is reported.
        model: the model that answered; "" if unknown.
        messages: the messages, each with "role" and "content".
        completions: the indices of the messages that the model wrote.
    """

    category: str
    model: str
    messages: list[dict[str, str]]
    completions: list[int]


def read_traces(path: Path) -> list[Trace]:
    """Read recorded conversations from a file with one JSON object per line.

    :func:`mlxspec.jsonl.conversation_of` describes the objects, which may also have a "category"
    and a "model". The messages that a model wrote are replayed.

    Raises:
        OSError: the file cannot be read.
        PromptError: it is not UTF-8, or a line has another form.
    """

    def trace(record: dict[str, Any]) -> Trace:
        messages, completions = conversation_of(record)
        category = _category(record, path.stem)
        return Trace(category, str(record.get("model", "")), messages, completions)

    return parse_json_lines(read_text(path), path, trace)


Encode = Callable[[str], list[int]]
"""Encodes a text without adding special tokens."""

# The template of the Vicuna models that answered Spec-Bench (lm-sys/FastChat, version 1.1).
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class Completion:
    """An output to replay, as token ids.

    Attributes:
        category: the category under which it is reported.
        context: the tokens of the whole conversation; its completions share this list.
        begin: the index in the context at which the output begins.
        output: the output's tokens, including the end token.
    """

    category: str
    context: list[int]
    begin: int
    output: list[int]

    @property
    def prompt(self) -> list[int]:
        """The tokens before the output."""
        return self.context[: self.begin]


def render(trace: Trace, encode: Encode, bos_id: int, eos_id: int) -> Iterator[Completion]:
    """The completions of a trace, each with the conversation before it as its prompt.

    Vicuna's conversations are rendered with Vicuna's template, others with a header line before
    each message. Each part is stripped and encoded separately. The output includes the end token.
    """
    vicuna = trace.model.startswith("vicuna")

    @cache
    def header(role: str) -> list[int]:
        if vicuna:
            return encode("ASSISTANT:" if role == "assistant" else "USER:")
        return encode(f"\n### {role.capitalize()}:\n")

    context = [bos_id, *(encode(_VICUNA_SYSTEM) if vicuna else ())]
    for index, message in enumerate(trace.messages):
        context += header(message["role"])
        body = encode(message["content"].strip())
        if index in trace.completions:
            yield Completion(trace.category, context, len(context), [*body, eos_id])
        context += body
        if message["role"] == "assistant":
            context.append(eos_id)


def read_completions(paths: Iterable[Path], tokenizer: Any, limit: int) -> list[Completion]:
    """Read traces and encode their outputs, category by category.

    Args:
        tokenizer: as :func:`mlxspec.models.tokenizer.load_tokenizer_of` returns it.
        limit: the most conversations of each category, at least 1. They are evenly spaced.

    Raises:
        LoadError: the tokenizer has no EOS token.
        OSError, PromptError: as for :func:`read_traces`; also if there is no output to replay.
    """
    bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos_id is None:
        raise LoadError("the tokenizer has no EOS token to end answers with: name another model")
    # Some models have no BOS token. Which token comes first does not change the drafts.
    bos_id = eos_id if bos_id is None else bos_id
    encode = partial(tokenizer.encode, add_special_tokens=False)
    traces = limited((trace for path in paths for trace in read_traces(path)), limit)
    completions = [
        completion for trace in traces for completion in render(trace, encode, bos_id, eos_id)
    ]
    if not completions:
        raise PromptError(
            f"the conversations that --limit {limit} chooses have no assistant message to replay: "
            "give other files, or raise --limit"
        )
    return completions


_Entry = TypeVar("_Entry")


def chosen(names: str, table: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """The entries that a comma-separated list names, in the list's order; "all" stands for all.

    Raises:
        OptionError: a name is unknown.
    """
    wanted = [*table] if names == "all" else [name.strip() for name in names.split(",")]
    try:
        return {name: table[name] for name in wanted}
    except KeyError as error:
        raise OptionError(
            f"there is no decoder {error.args[0]!r}: choose from {', '.join(table)}"
        ) from None
