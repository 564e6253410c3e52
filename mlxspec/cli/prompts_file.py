"""A file of prompts, one a line: ``{"prompt": …}`` or ``{"messages": …}``, and what goes with it.

Files and lines are read as they are needed, so a file may be longer than memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

from ..engine.params import SamplingParams
from ..errors import PromptError, printable
from ..jsonl import conversation_of, json_lines
from .generating import Generation
from .prompts import PromptOptions

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..models.chat_template import Messages

_LONGEST_LINE = 100_000_000  # bytes; no context holds as much
_MARGIN = 50  # calls and levels by which writing may be nested deeper than checking
_FORM = 'write {"prompt": "..."} or {"messages": [...]}'


@dataclass(frozen=True)
class PromptLines:
    """The lines of a file that are not blank.

    Attributes:
        values: the number of each line, from 1, and its value; None where it is no JSON. It is
            read when the next one is asked for.
        count: how many there are; None where that cannot be known before, as in a pipe.
    """

    values: Iterator[tuple[int, Any]]
    count: int | None


@contextmanager
def open_prompts(name: str) -> Iterator[PromptLines]:
    """Open a file of prompts.

    Args:
        name: the file; - is standard input.

    Raises:
        PromptError: it cannot be read, or holds nothing but blank lines.
    """
    with ExitStack() as during:
        if name != "-":
            source = name
            try:
                file: BinaryIO = during.enter_context(open(name, "rb"))
            except OSError as error:
                raise PromptError(
                    f"--prompts {name} cannot be read ({error.strerror}): name a readable file"
                ) from error
        elif sys.stdin is None:
            raise PromptError("standard input is closed: give --prompts FILE")
        else:
            source, file = "standard input", sys.stdin.buffer
        count = _count(file) if file.seekable() else None
        values = json_lines(_lines(file))
        first = next(values, None)
        if first is None:
            raise PromptError(f"{source} holds no prompt: {_FORM}, one a line")
        yield PromptLines(chain([first], values), count)


def _count(file: BinaryIO) -> int:
    """How many lines that are not blank follow."""
    start = file.tell()
    count = sum(bool(line.strip()) for line in _lines(file))
    file.seek(start)
    return count


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines; of one that is too long its first byte alone, which is no JSON with a prompt."""
    while line := file.readline(_LONGEST_LINE):
        part = line
        while not part.endswith(b"\n") and (part := file.readline(_LONGEST_LINE)):
            line = line[:1]
        yield line


@dataclass(frozen=True)
class Asked:
    """A line of the file: a prompt, and what it says of its answer.

    Attributes:
        prompt: a text or token ids; None where there are messages.
        messages: a conversation; the model's turn comes next.
        max_tokens: how many tokens to generate at most; None where the line does not say it.
        ends: the given fields of :class:`.generating.Ends`.
        sampling: the given fields of :class:`mlxspec.SamplingParams`.
    """

    prompt: str | list[int] | None = None
    messages: Messages | None = None
    max_tokens: int | None = None
    ends: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    def generation(self, default: Generation) -> Generation:
        """How to generate: as ``default`` says where the line says nothing.

        Raises:
            OptionError: the line gives a value that is out of range.
        """
        return replace(
            default,
            max_tokens=self.max_tokens or default.max_tokens,
            ends=replace(default.ends, **self.ends),
            sampling=replace(default.sampling, **self.sampling),
        )

    def tokens(self, tokenizer: TokenizerWrapper, options: PromptOptions) -> tuple[list[int], bool]:
        """The prompt as token ids, and whether it went into the chat template.

        Args:
            tokenizer: the model's.
            options: what goes into the chat template, and how, where the line says nothing.

        Raises:
            PromptError, OptionError: the template does not apply, or there is none.
        """
        if self.messages is not None:
            return _conversation_tokens(self.messages, tokenizer, options), True
        assert self.prompt is not None
        if not isinstance(self.prompt, str) and (given := options.for_template()):
            raise PromptError(
                f"token ids are taken as they are: leave out {given[0]}, or give a text"
            )
        templated = options.uses_template(self.prompt, tokenizer)
        return options.tokens(self.prompt, tokenizer, templated), templated


def _conversation_tokens(
    messages: Messages, tokenizer: TokenizerWrapper, options: PromptOptions
) -> list[int]:
    from ..models.chat_template import apply_template

    if options.chat is False:
        raise PromptError('"messages" need the chat template: leave out --raw, or give a "prompt"')
    if not tokenizer.has_chat_template:
        raise PromptError(
            '"messages" need a chat template, and this model has none: give a "prompt"'
        )
    try:
        messages, how = options.turns(messages)
        tokens: list[int] = apply_template(tokenizer, messages, **how)
    except PromptError as error:
        raise PromptError(f'{error}: change the "messages"') from error
    return tokens


def id_of(value: Any) -> Any:
    """The "id" of a line's value, whatever else is wrong with the line; None without one."""
    given = value.get("id") if isinstance(value, dict) else None
    return given if _is_json(given) else None


def read_line(value: Any) -> Asked:
    """Understand the value of a line.

    An option that is null is taken as not given.

    Raises:
        PromptError: it is no prompt, has a key that means nothing, or a value of the wrong kind.
            The message names the key, and not the line.
    """
    record = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(record, dict):
        raise PromptError(f"no JSON with a prompt: {_FORM}")
    for key in record:
        if key not in _KEYS:
            raise PromptError(_unknown(key))
    if not _is_json(record.get("id")):
        raise PromptError('"id" holds NaN or an infinity, or is nested too deeply: write a text')
    given = {key: record[key] for key in _READ if record.get(key) is not None}
    read = {key: _READ[key](key, value) for key, value in given.items()}
    return Asked(
        **_prompt(record),
        max_tokens=read.get("max_tokens"),
        ends={key: read[key] for key in _ENDS if key in read},
        sampling={key: read[key] for key in _SAMPLING if key in read},
    )


def _prompt(record: dict[str, Any]) -> dict[str, Any]:
    """The prompt or the messages, as fields of :class:`Asked`."""
    kinds = [key for key in ("prompt", "messages") if key in record]
    if len(kinds) != 1:
        found = "both" if kinds else "neither"
        raise PromptError(f'it has {found} of "prompt" and "messages": {_FORM}')
    given = record[kinds[0]]
    if given in ("", []):
        raise PromptError(f'"{kinds[0]}" is empty: {_FORM}')
    if kinds == ["messages"]:
        return {"messages": _messages(given)}
    if not isinstance(given, str) and not _is_list_of(given, int):
        raise PromptError(f'"prompt" is {_shown(given)}: give a text, or a list of token ids')
    return {"prompt": given}


def _messages(given: Any) -> Messages:
    try:
        conversation = conversation_of({"messages": given})
    except ValueError as error:
        form = '[{"role": "user", "content": "..."}]'
        raise PromptError(f'"messages" cannot be read ({error}): write {form}') from error
    return [{"role": turn.role, "content": turn.content} for turn in conversation.messages]


def _max_tokens(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise PromptError(f'"{key}" is {_shown(value)}: give a whole number, 1 or more')
    return value


def _texts(key: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not _is_list_of(texts, str):
        raise PromptError(f'"{key}" is {_shown(value)}: give a text, or a list of texts')
    return tuple(texts)


def _tokens(key: str, value: Any) -> tuple[int | str, ...]:
    tokens = value if isinstance(value, list) else [value]
    if not _is_list_of(tokens, int, str):
        raise PromptError(f'"{key}" is {_shown(value)}: give ids, or texts of one token, in a list')
    return tuple(tokens)


def _whole_number(key: str, value: Any) -> int:
    if type(value) is not int:
        raise PromptError(f'"{key}" is {_shown(value)}: give a whole number')
    return value


def _number(key: str, value: Any) -> float:
    try:
        if type(value) in (int, float):
            return float(value)
    except OverflowError:  # an integer with hundreds of digits
        pass
    raise PromptError(f'"{key}" is {_shown(value)}: give a number')


def _biases(key: str, value: Any) -> dict[int, float]:
    try:
        return {int(token): _number(key, bias) for token, bias in value.items()}
    except (AttributeError, ValueError):
        raise PromptError(
            f'"{key}" is {_shown(value)}: write token ids and numbers, {{"42": -5}}'
        ) from None


_Read = Callable[[str, Any], Any]

_ENDS: dict[str, _Read] = {"stop": _texts, "stop_tokens": _tokens}
_KINDS: dict[str, _Read] = {"float": _number, "int": _whole_number, "Mapping[int, float]": _biases}
# What the command has as options; processors and samplers are functions.
_SAMPLING: dict[str, _Read] = {
    own.name: _KINDS[str(own.type).partition(" | ")[0]]
    for own in fields(SamplingParams)
    if "help" in own.metadata
}
_READ: dict[str, _Read] = {"max_tokens": _max_tokens, **_ENDS, **_SAMPLING}
_KEYS = ["prompt", "messages", "id", *_READ]


def _unknown(key: str) -> str:
    similar = get_close_matches(key, _KEYS, 1, cutoff=0.5)
    remedy = f'did you mean "{similar[0]}"' if similar else 'leave it out, or keep it in "id"'
    return f'"{printable(key)}" is no key of a prompt: {remedy}'


def _is_list_of(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(type(item) in kinds for item in value)


def _is_json(value: Any) -> bool:
    """Whether it can be written as JSON: Python also reads NaN and infinities."""
    for _ in range(_MARGIN):
        value = [value]
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _shown(value: Any) -> str:
    return printable(json.dumps(value) if _is_json(value) else type(value).__name__)
