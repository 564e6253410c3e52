"""Reads JSON lines, and the conversations that other programs log in this form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

_LONE = re.compile("[\ud800-\udfff]")


def load_json(text: str | bytes | bytearray, parse: Callable[[str], Any] = json.loads) -> Any:
    """Parse a JSON text; bytes are UTF-8.

    A lone surrogate (``"\\ud800"``), which cannot be encoded, becomes U+FFFD.

    Raises:
        ValueError, RecursionError: the text is not JSON, or is nested too deeply.
    """
    if not isinstance(text, str):
        text = text.decode("utf-8-sig")
    value = parse(text)
    return _mended(value) if "\\ud" in text or "\\uD" in text else value


_PIECE = 1 << 14  # characters; other threads wait while one is searched


def _mended(value: Any) -> Any:
    """A JSON value without lone surrogates."""
    if isinstance(value, str) and not value.isascii():
        pieces = (value[at : at + _PIECE] for at in range(0, len(value), _PIECE))
        return "".join(map(without_lone_surrogates, pieces))
    if isinstance(value, list):
        return [*map(_mended, value)]
    if isinstance(value, dict):
        return {_mended(name): _mended(item) for name, item in value.items()}
    return value


def without_lone_surrogates(text: str) -> str:
    """Replace the lone surrogates of a parsed text with U+FFFD, so that it can be encoded."""
    return _LONE.sub("\ufffd", text)  # the parser has joined the pairs


def json_lines(lines: Iterable[str | bytes]) -> Iterator[tuple[int, Any]]:
    """Parse JSON lines: yield the number of each line, from 1, and its value.

    Blank lines are skipped. The value is None if the line is not JSON, or is nested too deeply.

    Args:
        lines: split at line feeds only. ``str.splitlines`` also splits at U+2028, which a JSON
            string may contain.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, load_json(line)
            except (ValueError, RecursionError):
                yield number, None


def conversation_of(record: object) -> tuple[list[dict[str, str]], list[int]]:
    """Read the conversation in one record of a log.

    A record is ``{"messages": [{"role": …, "content": …}, …]}``. The content is a string, null, or
    a list of parts, whose texts are joined. Each tool call of a message adds a line to its content,
    in the form in which models write tool calls: ``{"name": …, "arguments": …}``.

    Returns:
        the messages, each with a "role" and a string as "content", and the indices of the messages
        that the model wrote. These are all messages of the assistant, or those in the record's
        ``"completions": [index, …]`` if it has them.

    Raises:
        ValueError: the record does not have this form.
    """
    try:
        record = cast(dict[str, Any], record)
        messages = [_message(message) for message in record["messages"]]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            'it must have "messages", each with a "role" and a text or a list of parts as "content"'
        ) from error
    written = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    completions = record.get("completions", written)
    if not isinstance(completions, list) or not all(
        type(index) is int and 0 <= index < len(messages) for index in completions
    ):
        raise ValueError('its "completions" must be a list of indices of messages')
    return messages, completions


def _message(message: dict[str, Any]) -> dict[str, str]:
    content = message.get("content")
    if not isinstance(content, str):
        content = "".join(part.get("text") or "" for part in content or [])
    texts = [content, *(_call(**call["function"]) for call in message.get("tool_calls") or [])]
    return {"role": "" + message["role"], "content": "\n".join(text for text in texts if text)}


def _call(name: Any = None, arguments: Any = None, **_: Any) -> str:
    """A tool call, as a model writes it."""
    # OpenAI logs the arguments as the text that the model wrote; others log them parsed.
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return f'{{"name": {_json(name)}, "arguments": {written}}}'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
