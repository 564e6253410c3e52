"""The prompts of a measurement: bundled, from a user's file, or Spec-Bench's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import PromptError
from ..jsonl import conversation_of, load_json

_JSON_LINES = (".jsonl", ".ndjson")
_SPEC_BENCH_MT = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)
"""Spec-Bench's questions from MT-bench carry its categories; results are given for all as one."""


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation to be answered.

    Attributes:
        category: under which its figures are summed up.
        messages: what stands before the first answer, each with "role" and "content".
        follow_ups: what the user says after each answer.
        raw: the only message is a text to continue, no question.
        references: what good answers look like, one per answer; may be fewer.
    """

    category: str
    messages: tuple[dict[str, str], ...]
    follow_ups: tuple[str, ...] = ()
    raw: bool = False
    references: tuple[str, ...] = field(default=())


def bundled_prompts() -> list[BenchPrompt]:
    """The prompts that come with the package: four grounded tasks and two free texts."""
    text = files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return _parse_json_lines(text, "the bundled prompts")


def read_prompts(path: str | Path) -> list[BenchPrompt]:
    """Read a file of prompts.

    A ``.jsonl`` file has one JSON object a line with one of

    - ``"prompt"``: what the user says, or with ``"raw": true`` a text to continue,
    - ``"messages"``: a conversation; answers at its end are cut off, the first of them is the
      reference where no other is given,
    - ``"turns"``: what the user says, one after the other,

    and optionally ``"category"`` and ``"reference"`` (a text, or a list of one per answer).
    Any other file is one prompt, as it stands.

    Raises:
        PromptError: the file cannot be read, or a line of it is no prompt.
    """
    path = Path(path)
    text = _read_text(path)
    if path.suffix.lower() in _JSON_LINES:
        return _parse_json_lines(text, str(path))
    if not text.strip():
        raise PromptError(f"{path} is empty: write a prompt into it")
    return [BenchPrompt("text", (_user(text.removesuffix("\n")),))]


def read_spec_bench(path: str | Path) -> list[BenchPrompt]:
    """Read Spec-Bench's ``question.jsonl``; the questions of MT-bench become one category.

    Raises:
        PromptError: the file cannot be read, or a line of it is no prompt.
    """
    return [
        replace(prompt, category="mt_bench") if prompt.category in _SPEC_BENCH_MT else prompt
        for prompt in _parse_json_lines(_read_text(Path(path)), str(path))
    ]


def limited(prompts: Sequence[BenchPrompt], per_category: int) -> list[BenchPrompt]:
    """At most so many prompts of each category, spread evenly over it, in their order."""
    chosen: list[BenchPrompt] = []
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        members = [prompt for prompt in prompts if prompt.category == category]
        count = min(per_category, len(members))
        chosen += [members[index * len(members) // count] for index in range(count)]
    return chosen


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"{path} cannot be read ({error.strerror}): name a file") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text: convert it to UTF-8") from error


def _parse_json_lines(text: str, source: str) -> list[BenchPrompt]:
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = load_json(line)
            if not isinstance(record, dict):
                raise ValueError("no JSON object")
            prompts.append(_from_record(record))
        except (ValueError, RecursionError) as error:
            no_json = isinstance(error, (json.JSONDecodeError, RecursionError))
            reason = "no valid JSON" if no_json else error
            raise PromptError(
                f'{source}, line {number}: {reason}; write an object with "prompt", "messages" '
                'or "turns" per line'
            ) from error
    if not prompts:
        raise PromptError(f'{source} is empty: write {{"prompt": "..."}} lines into it')
    return prompts


def _from_record(record: dict[str, Any]) -> BenchPrompt:
    """One line of a file of prompts; ValueError says what is wrong with it."""
    given = [key for key in ("prompt", "messages", "turns") if key in record]
    if len(given) != 1:
        raise ValueError(f"it has {' and '.join(given) or 'no prompt'}")
    references = _references(record.get("reference"))
    follow_ups: tuple[str, ...] = ()
    if given == ["messages"]:
        messages, answers = _split_conversation(record)
        references = references or answers
    else:
        turns = [record["prompt"]] if given == ["prompt"] else record["turns"]
        if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
            raise ValueError(f'"{given[0]}" is empty or no text')
        messages = (_user(turns[0]),)
        follow_ups = tuple(turns[1:])
    raw = record.get("raw", False)
    if raw is not False and (raw is not True or given != ["prompt"]):
        raise ValueError('"raw" is true or false and goes with "prompt"')
    category = str(record.get("category", "prompts"))
    return BenchPrompt(category, messages, follow_ups, raw, references)


def _split_conversation(
    record: dict[str, Any],
) -> tuple[tuple[dict[str, str], ...], tuple[str, ...]]:
    """What comes before the last answer, and that answer where there is one."""
    conversation = list(conversation_of(record).messages)
    answers: list[str] = []
    while conversation and conversation[-1].role == "assistant":
        answers = [conversation.pop().content]
    if not any(message.content for message in conversation):
        raise ValueError('"messages" hold no question')
    messages = ({"role": message.role, "content": message.content} for message in conversation)
    return tuple(messages), tuple(filter(None, answers))


def _references(reference: Any) -> tuple[str, ...]:
    """The texts among the references: Spec-Bench also lists short answers, which are none."""
    listed = reference if isinstance(reference, list) else [reference]
    return tuple(text for text in listed if _is_text(text))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
