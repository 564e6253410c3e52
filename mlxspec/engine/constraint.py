"""Constraints on an output: a JSON Schema, a regular expression or a grammar.

Imports neither MLX nor a grammar engine; :mod:`mlxspec.engine.grammar` makes token masks of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..errors import OptionError

_LONGEST = 1_000_000  # characters in a schema, regex or grammar
_MOST_CHOICES = 10_000


@dataclass(frozen=True)
class Constraint:
    """A constraint that the whole output satisfies.

    Make one with :meth:`json_schema`, :meth:`json_object`, :meth:`regex`, :meth:`grammar` or
    :meth:`choice`. A constraint that the library llguidance cannot guarantee is refused when a
    generation starts, not before.

    Attributes:
        kind: the language of ``text``; a "grammar" is Lark or GBNF.
        text: a JSON Schema, a regular expression or a grammar.
        lead: a regular expression for the text that may precede the constrained output.

    Raises:
        OptionError: the text is too long.
    """

    kind: Literal["json_schema", "regex", "grammar", "lark"]
    text: str
    lead: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > _LONGEST:
            raise OptionError(
                f"the {self.noun} has {len(self.text):,} characters: use {_LONGEST:,} at most"
            )

    @property
    def noun(self) -> str:
        """The constraint's name in messages."""
        return {"json_schema": "JSON schema", "regex": "regex"}.get(self.kind, "grammar")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Constraint:
        """JSON that is valid under a schema, on one line, with separators ``", "`` and ``": "``.

        Objects have their properties in the schema's order. The key ``x-guidance`` in the schema,
        with ``{"whitespace_flexible": true}``, leaves white space to the model.

        Args:
            schema: a JSON Schema, 2020-12 or older, as an object or as JSON.

        Raises:
            OptionError: the schema is not an object, or too long.
        """
        if isinstance(schema, str):
            cls("json_schema", schema)  # refuses a long text before it is parsed
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise OptionError(
                    f"the JSON schema is not valid JSON ({error}): correct it"
                ) from error
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise OptionError("the JSON schema must be an object, such as {}")
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (ValueError, TypeError, RecursionError) as error:
            raise OptionError(f"the JSON schema cannot be written as JSON ({error})") from error

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that a regular expression matches from beginning to end.

        The syntax is that of Rust's ``regex`` crate, without look-around and back-references.
        """
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """A text that a context-free grammar generates.

        Args:
            text: the grammar, in llguidance's variant of Lark (start symbol ``start``) or in
                llama.cpp's GBNF (start symbol ``root``).
        """
        return cls("grammar", text)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Constraint:
        """One of several texts.

        Raises:
            OptionError: there are no choices, or one of them is not text.
        """
        if not choices or not all(isinstance(one, str) for one in choices):
            raise OptionError("choices must be a list of one text or more")
        if len(choices) > _MOST_CHOICES:
            raise OptionError(f"there are {len(choices)} choices: use {_MOST_CHOICES} at most")
        return cls.regex("|".join(map(re.escape, choices)))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The output's only phase."""
        return (Phase(self),)


class Phase(NamedTuple):
    """A part of an output.

    Attributes:
        constraint: what the rest of the output must satisfy; None for free text.
        exits: tokens that start another phase, with its number. In free text they may come
            anywhere, otherwise only as the phase's first token.
        may_end: whether the output may end in this phase, if it is free text.
    """

    constraint: Constraint | None = None
    exits: Mapping[int, int] = {}  # a constant
    may_end: bool = True


class Phases(NamedTuple):
    """An output in several phases, such as reasoning before the answer."""

    phases: tuple[Phase, ...]


ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
