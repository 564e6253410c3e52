"""What an output has to be: valid under a JSON Schema, or in the language of a regex or grammar.

Knows no MLX and no grammar engine; :mod:`mlxspec.engine.grammar` turns it into masks of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..errors import OptionError

_LONGEST = 1_000_000  # characters of a schema, regex or grammar
_MOST_CHOICES = 10_000


@dataclass(frozen=True)
class Constraint:
    """What a whole output has to be.

    Make one with :meth:`json_schema`, :meth:`json_object`, :meth:`regex`, :meth:`grammar` or
    :meth:`choice`. What the library llguidance cannot guarantee is refused when a generation is
    asked for, not before.

    Attributes:
        kind: the language of ``text``; a "grammar" is Lark or GBNF.
        text: a JSON Schema, a regular expression or a grammar.
        lead: a regular expression; what may come before the output proper.

    Raises:
        OptionError: the text is too long.
    """

    kind: Literal["json_schema", "regex", "grammar", "lark"]
    text: str
    lead: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > _LONGEST:
            raise OptionError(
                f"the {self.noun} has {len(self.text):,} characters: {_LONGEST:,} are the most"
            )

    @property
    def noun(self) -> str:
        """What messages call it."""
        return {"json_schema": "JSON schema", "regex": "regex"}.get(self.kind, "grammar")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Constraint:
        """JSON that is valid under a schema, on one line, with ``", "`` and ``": "`` between.

        Objects have their properties in the order of the schema. A key ``x-guidance`` of the schema
        with ``{"whitespace_flexible": true}`` leaves white space to the model.

        Args:
            schema: of JSON Schema, 2020-12 or before; as an object or as JSON.

        Raises:
            OptionError: it is not an object, or too long.
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
        """A text that a regular expression matches as a whole.

        The syntax is that of Rust's crate ``regex``: without look-around and back-references.
        """
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """A text of a context-free grammar.

        Args:
            text: in llguidance's variant of Lark, whose start symbol is ``start``, or in the GBNF
                of llama.cpp, whose start symbol is ``root``.
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
            raise OptionError(f"there are {len(choices)} choices: {_MOST_CHOICES} are the most")
        return cls.regex("|".join(map(re.escape, choices)))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The output's one phase."""
        return (Phase(self),)


class Phase(NamedTuple):
    """A part of an output.

    Attributes:
        constraint: what the rest of the output has to be; None where it is free text.
        exits: tokens that lead to another phase, by its number: in free text anywhere, otherwise
            instead of the phase's first token.
        may_end: whether the output may end in free text.
    """

    constraint: Constraint | None = None
    exits: Mapping[int, int] = {}  # a constant
    may_end: bool = True


class Phases(NamedTuple):
    """An output in several phases: reasoning before the answer, text before a call of a tool."""

    phases: tuple[Phase, ...]


ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
