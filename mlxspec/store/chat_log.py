"""What models wrote in recorded conversations."""

from __future__ import annotations

from typing import Any


def outputs_of(record: object) -> list[str] | None:
    """The outputs in one record of a chat log; None if it is no such record.

    A record is ``{"messages": [{"role": …, "content": …}, …]}``, as in OpenAI's chat format.
    The outputs are what the assistant wrote, arguments of tool calls included; in a trace with
    ``"completions": [index, …]`` they are the messages that these name.
    """
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        return None
    messages = [message for message in record["messages"] if isinstance(message, dict)]
    named = record.get("completions")
    if isinstance(named, list):
        numbers = {index for index in named if type(index) is int}
        chosen = [m for index, m in enumerate(record["messages"]) if index in numbers]
        messages = [message for message in chosen if isinstance(message, dict)]
    else:
        messages = [message for message in messages if message.get("role") == "assistant"]
    return [text for message in messages for text in _texts(message) if text]


def _texts(message: dict[str, Any]) -> list[str]:
    """What was written in one message: its content, whole or in parts, and its tool calls."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            texts.append(function["arguments"])
    return texts
