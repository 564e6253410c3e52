"""Reading the fields of a JSON body: each is what it should be, or an error that names it.

A body is whatever a client sends. ``null`` is the same as an absent field, and a number such as
5.0 is the integer 5, since some languages write it so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from .errors import ApiError

_LONGEST_SHOWN = 60  # characters of a value that a message repeats
_INTEGERS = 2**63


def checked_body(body: object) -> dict[str, Any]:
    """A body, which should be an object.

    Raises:
        ApiError: it is none.
    """
    if not isinstance(body, dict):
        raise ApiError(
            f"The body is {shown(body)}: send a JSON object, such as "
            '{"messages": [{"role": "user", "content": "Hello"}]}.'
        )
    return body


def without_lone_surrogates(text: str) -> str:
    """A text that can be encoded: half a surrogate pair becomes U+FFFD."""
    # Through UTF-16 two halves that follow each other become the character that they mean.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def shown(value: object) -> str:
    """A value as an error may repeat it: short, on one line."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= _INTEGERS:  # Python refuses to write very long ones
        return "a number beyond 64 bits"
    text = ascii(value[:_LONGEST_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def refuse(param: str | None, value: object, remedy: str) -> NoReturn:
    """Raise an ApiError that names a field, its value, and what to send instead."""
    raise ApiError(f"{param or 'The body'} is {shown(value)}: {remedy}.", param=param)


class Fields:
    """An object of the body, read field by field; each method returns ``None`` for ``null``.

    Args:
        value: the JSON value, which should be an object.
        path: where it stands in the body, in OpenAI's notation; empty for the body itself.

    Raises:
        ApiError: it is no object.
    """

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            refuse(path, value, "send an object")
        self._fields = value
        self.path = path

    def __iter__(self) -> Iterator[str]:
        """The names of all fields that are not null."""
        return (name for name, value in self._fields.items() if value is not None)

    def __getitem__(self, name: str) -> Any:
        """A field's value as it was sent."""
        return self._fields.get(name)

    def at(self, name: str) -> str:
        """A field's name in OpenAI's notation."""
        return f"{self.path}.{name}" if self.path else name

    def refuse(self, name: str, remedy: str) -> NoReturn:
        """Raise an ApiError for a field's value."""
        refuse(self.at(name), self[name], remedy)

    def text(self, name: str) -> str | None:
        """A string."""
        if not isinstance(self[name], (str, type(None))):
            self.refuse(name, "send a string")
        value: str | None = self[name]
        return value

    def needed_text(self, name: str) -> str:
        """A string that must be there, and not be empty."""
        text = self.text(name)
        if not text:
            self.refuse(name, "send a string that is not empty")
        return text

    def word(self, name: str, words: Collection[str]) -> str | None:
        """One of several strings."""
        word = self.text(name)
        if word is not None and word not in words:
            self.refuse(name, f"choose one of {', '.join(words)}")
        return word

    def flag(self, name: str) -> bool | None:
        """true or false."""
        if not isinstance(self[name], (bool, type(None))):
            self.refuse(name, "send true or false")
        value: bool | None = self[name]
        return value

    def integer(self, name: str, least: int, most: int) -> int | None:
        """An integer of this range."""
        if self[name] is None:
            return None
        value = as_integer(self[name])
        if value is None or not least <= value <= most:
            self.refuse(name, f"choose an integer from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number of this range."""
        if self[name] is None:
            return None
        value = as_number(self[name])
        if value is None or not least <= value <= most:
            self.refuse(name, f"choose a number from {least:g} to {most:g}")
        return value

    def items(self, name: str) -> list[Any] | None:
        """A list, whatever it holds."""
        if not isinstance(self[name], (list, type(None))):
            self.refuse(name, "send a list")
        value: list[Any] | None = self[name]
        return value

    def object(self, name: str) -> Fields | None:
        """An object."""
        return None if self[name] is None else Fields(self[name], self.at(name))


def as_integer(value: object) -> int | None:
    """An integer, also one that is written as 5.0; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if isinstance(value, int) and abs(value) >= _INTEGERS:
        return None
    return float(value) if math.isfinite(value) else None
