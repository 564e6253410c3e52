"""What a constraint may hold at most: what is seen from its text, before anything compiles it.

Each bound has a message of its own. What slips through is found out by compiling it in another
process (:mod:`mlxspec.engine.compiling`), which can say only what happened. The expressions here
match in linear time whatever the text, and so do the walks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, DecimalException
from typing import Any
from urllib.parse import unquote

from ..errors import OptionError
from .constraint import Constraint

_MOST_PATTERN_PROPERTIES = 100  # of an object: each is compared with each, a second for so many
_LARGEST_MULTIPLE = 20_000  # which takes a second
_MOST_LEVELS = 1000  # of which each takes up to 10 kB of the stack
_MOST_REPETITIONS = 50_000  # each takes a state of the automaton, of which there are no more

_LONGEST_TEXT = 20_000  # characters that are fixed; each mask before them takes 12 ms for so many

_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([-+.0-9eE]+)')
_LEAST = re.compile(r'"(min(?:Length|Items|Properties))"\s*:\s*(\d+)')
_IN_REGEX = re.compile(r"\\.|\[(?:[^]\\]|\\.)*\]?|\{(\d+)", re.DOTALL)
_IN_GRAMMAR = re.compile(r'"(?:[^"\\\n]|\\.)*"?|(?:#|//)[^\n]*|\\.|[{~]\s*(\d+)')
_NAMES = re.compile(
    r'"(?:[^"\\\n]|\\.)*"?'  # a text, a comment or a regex: no names are in them
    r"|(?:#|//)[^\n]*"
    r"|/(?:[^/\\\n]|\\.)*/?"
    r"|([A-Za-z_][\w-]*)(?:\[[^]\n]*\]?|\{[^}\n]*\}?|\.-?\d+)*\s*(:(?!:)|::=)?"
)


def check_bounds(constraint: Constraint) -> None:
    """Refuse a constraint that would take too much.

    Raises:
        OptionError: it would.
    """
    text = constraint.text
    if constraint.kind == "regex":
        _check_length(constraint, max(map(len, text.split("|"))))
        _check_repetitions(constraint, _IN_REGEX.findall(text))
        return
    if constraint.kind == "json_schema":
        schema = json.loads(text)
        levels = list(_levels_of(schema))
        _check_levels(constraint, len(levels))
        inner = [one for level in levels for one in level]
        patterns = _check_patterns(inner)
        _check_length(constraint, _longest_text(inner, patterns))
        _check_repetitions(
            constraint, [n for pattern in patterns for n in _IN_REGEX.findall(pattern)]
        )
        if '"$ref"' in text:
            _check_levels(constraint, _longest_chain(_references_of(schema)))
    else:  # whose schemas may be written with escapes
        text = re.sub(r"\\u00([2-7][0-9a-fA-F])", lambda code: chr(int(code[1], 16)), text)
        _check_length(constraint, max(map(len, re.split(r"[|\n]", text))))
        _check_repetitions(constraint, _IN_GRAMMAR.findall(text))
        _check_levels(constraint, _longest_chain(_rules_of(text)))
    _check_repetitions(constraint, [number for _, number in _LEAST.findall(text)])
    _check_multiples(constraint, text)


def _check_length(constraint: Constraint, longest: int) -> None:
    """Refuse a fixed text that takes too long: all of it is looked through for each mask.

    Raises:
        OptionError: it is too long.
    """
    if longest > _LONGEST_TEXT:
        raise OptionError(
            f"the {constraint.noun} cannot be used: it fixes a text of {longest:,} characters, or "
            f"has a part as long without an alternative; {_LONGEST_TEXT:,} are the most"
        )


def _longest_text(parts: list[Any], patterns: list[str]) -> int:
    """The characters of the longest text that a schema fixes.

    Args:
        parts: all lists and objects of the schema.
        patterns: its regular expressions.
    """
    schemas = [one for one in parts if isinstance(one, dict)]
    # One may follow the other, and all that is between them may be fixed, too.
    constants = sum(len(json.dumps(one["const"])) for one in schemas if "const" in one)
    texts = [branch for pattern in patterns for branch in pattern.split("|")]
    for one in schemas:
        texts += one["properties"] if isinstance(one.get("properties"), dict) else ()
        texts += map(json.dumps, one["enum"]) if isinstance(one.get("enum"), list) else ()
    return max(constants, max(map(len, texts), default=0))


def _check_repetitions(constraint: Constraint, numbers: list[str]) -> None:
    """Refuse what has to repeat more often than any output can.

    Args:
        constraint: whose text has them.
        numbers: the least numbers of repetitions; empty ones do not count.

    Raises:
        OptionError: it has to.
    """
    for number in numbers:
        if len(number) > 18 or int(number or 0) > _MOST_REPETITIONS:
            raise OptionError(
                f"the {constraint.noun} cannot be used: {_shown(number)} is the least number of "
                f"repetitions of something, which takes too much; use {_MOST_REPETITIONS:,} at most"
            )


def _shown(number: str) -> str:
    return number if len(number) <= 18 else f"{number[:18]}..."


def _check_levels(constraint: Constraint, levels: int) -> None:
    """Refuse a chain of references, of which each nests compiling it deeper.

    Raises:
        OptionError: it is too long.
    """
    if levels > _MOST_LEVELS:
        raise OptionError(
            f"the {constraint.noun} cannot be used: it is {levels:,} levels deep where its "
            f"references are followed; {_MOST_LEVELS:,} are the most, so make it flatter"
        )


def _levels_of(value: Any) -> Iterator[list[Any]]:
    """All lists and objects of a JSON value, those of one depth at a time."""
    level = [value] if isinstance(value, (dict, list)) else []
    while level:
        yield level
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (dict, list))
        ]


def _references_of(schema: Any) -> dict[int, list[int]]:
    """To what each list and object of a schema leads: those in it, and its reference's target."""
    edges: dict[int, list[int]] = {}
    targets: dict[str, Any] = {}
    for level in _levels_of(schema):
        for one in level:
            inner = one.values() if isinstance(one, dict) else one
            found = [value for value in inner if isinstance(value, (dict, list))]
            reference = one.get("$ref") if isinstance(one, dict) else None
            if isinstance(reference, str):
                if reference not in targets:
                    targets[reference] = _target_of(reference, schema)
                found.append(targets[reference])
            edges[id(one)] = [id(value) for value in found]
    return edges


def _target_of(reference: str, schema: Any) -> Any:
    """What a reference within a schema points at; None where that is nothing."""
    if not reference.startswith("#"):
        return None
    found = schema
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key[:9]) < len(found):
            found = found[int(key[:9])]
        else:
            return None
    return found


def _rules_of(text: str) -> dict[str, list[str]]:
    """The names in each rule and terminal of a grammar, which is Lark or GBNF."""
    rules: dict[str, list[str]] = {}
    own: list[str] = []
    for name, defines in _NAMES.findall(text):
        if defines:
            own = rules.setdefault(name, [])
        elif name:
            own.append(name)
    return rules


def _longest_chain(edges: Mapping[Any, list[Any]]) -> int:
    """How many steps it takes at most to a place that leads nowhere, or back to the way there."""
    lengths: dict[Any, int] = {}
    done: set[Any] = set()
    for start in edges:
        way = [start]
        while way:
            place = way[-1]
            following = edges.get(place, ())
            if place not in lengths:
                lengths[place] = 0
                way += [other for other in following if other not in lengths]
                continue
            way.pop()
            if place not in done:
                done.add(place)
                lengths[place] = max((1 + lengths[other] for other in following), default=0)
    return max(lengths.values(), default=0)


def _check_multiples(constraint: Constraint, text: str) -> None:
    """Refuse what is to be a multiple of too much, which takes a state for each remainder.

    All of a schema's ``multipleOf`` count together, since one value may be under several. Factors
    of 2 and 5 are seen from the last digits.

    Raises:
        OptionError: it is.
    """
    common = 1
    for number in _MULTIPLE_OF.findall(text):
        try:
            digits = Decimal(number).as_tuple().digits
        except DecimalException:  # which llguidance will name
            continue
        step = int("".join(map(str, digits[:20])))
        for factor in (2, 5):
            while step and step % factor == 0:
                step //= factor
        common = math.lcm(common, step or 1)
        if common > _LARGEST_MULTIPLE:
            raise OptionError(
                f"the {constraint.noun} cannot be used: multipleOf {_shown(number)} takes too "
                "long; use such whose least common multiple is "
                f"{_LARGEST_MULTIPLE:,} at most, without factors of 2 and 5"
            )


def _check_patterns(parts: list[Any]) -> list[str]:
    """Refuse a schema with too many ``patternProperties``, each of which is compared with each.

    Args:
        parts: all lists and objects of the schema.

    Returns:
        all regular expressions in the schema.

    Raises:
        OptionError: it has.
    """
    patterns: list[str] = []
    for one in parts:
        if not isinstance(one, dict):
            continue
        own = one.get("patternProperties")
        if isinstance(own, dict):
            if len(own) > _MOST_PATTERN_PROPERTIES:
                raise OptionError(
                    f"an object of the JSON schema has {len(own)} patternProperties: "
                    f"{_MOST_PATTERN_PROPERTIES} are the most"
                )
            patterns += own
        if isinstance(one.get("pattern"), str):
            patterns.append(one["pattern"])
    return patterns
