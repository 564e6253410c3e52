"""JSON lines, and the conversations that other programs log in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def load_json(text: str | bytes) -> Any:
    """Parse a JSON text; bytes are UTF-8.

    Half a surrogate pair (``"\\ud800"``), which cannot be encoded, becomes a question mark.

    Raises:
        ValueError, RecursionError: the text is not JSON, or is nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    value = json.loads(text)
    if _SURROGATE.search(text):
        whole = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
        value = json.loads(whole)
    return value


def json_lines(lines: Iterable[str | bytes]) -> Iterator[tuple[int, Any]]:
    """Parse JSON lines: yield the number, from 1, and the value of each line that is not blank.

    The value is None if the line is not JSON, or is nested too deeply.

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

    A record is ``{"messages": [{"role": …, "content": …}, …]}``. A content is a text, null, or a
    list of parts whose texts are joined. Each tool call adds a line, as a model writes it:
    ``{"name": …, "arguments": …}``.

    Returns:
        the messages, each with a "role" and a text as "content", and the indices of the messages
        that the model wrote. These are all messages of the assistant, unless the record lists
        ``"completions": [index, …]``.

    Raises:
        ValueError: the record does not have this form.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(messages, list):
        raise ValueError('it has no list of "messages"')
    read = [_message(message) for message in messages]
    written = [index for index, message in enumerate(read) if message["role"] == "assistant"]
    completions = record.get("completions", written)
    if not isinstance(completions, list) or not all(
        type(index) is int and 0 <= index < len(read) for index in completions
    ):
        raise ValueError('its "completions" must be a list of indices of messages')
    return read, completions


def _message(message: object) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError('a message has no "role"')
    texts = [_content(message), *map(_call, _list(message, "tool_calls"))]
    return {"role": message["role"], "content": "\n".join(text for text in texts if text)}


def _content(message: dict[str, Any]) -> str:
    if isinstance(message.get("content"), str):
        return str(message["content"])
    texts = []
    for part in _list(message, "content"):
        if not isinstance(part, dict):
            raise ValueError("a part of a message's content must be an object")
        if isinstance(part.get("text"), str):
            texts.append(part["text"])
    return "".join(texts)


def _call(call: object) -> str:
    """A tool call, as a model writes it."""
    tool = call if isinstance(call, dict) else {}
    if isinstance(function := tool.get("function"), dict):
        # OpenAI logs the arguments as the model wrote them; others log them parsed.
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else _json(arguments)
        return f'{{"name": {_json(function.get("name"))}, "arguments": {text}}}'
    raise ValueError('a tool call must have a "function"')


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _list(message: dict[str, Any], key: str) -> list[Any]:
    value = message.get(key)
    if value is not None and not isinstance(value, list):
        raise ValueError(f'the "{key}" of a message must be a list')
    return value or []
