"""Leaves out of a JSON Schema what cannot be enforced and need not be."""

from __future__ import annotations

import re
from typing import Any

_FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)
"""The formats that llguidance knows."""

_TYPES = frozenset(["null", "boolean", "object", "array", "number", "string", "integer"])
_NAMED = ("properties", "$defs", "definitions", "dependentSchemas", "patternProperties")
_VALUES = ("const", "default", "enum", "example", "examples", "required", "x-guidance")
_LOOKS_AROUND = re.compile(r"\(\?(?:<?[=!]|>|P=)|\\[1-9]")


def enforceable(schema: Any, lenient: bool = False) -> Any:
    """A schema without the formats that llguidance does not know, which are notes by definition.

    Args:
        schema: a JSON Schema.
        lenient: whether to leave out patterns with look-around or back-references, and types that
            JSON does not have, too.
    """
    if isinstance(schema, list):
        return [enforceable(item, lenient) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            kept[key] = value
        elif key in _NAMED and isinstance(value, dict):
            inside = {name: enforceable(subschema, lenient) for name, subschema in value.items()}
            if lenient and key == "patternProperties":
                inside = {name: subschema for name, subschema in inside.items() if _is_plain(name)}
            kept[key] = inside
        elif not _is_note(key, value, lenient):
            kept[key] = enforceable(value, lenient)
    return kept


def _is_note(key: str, value: Any, lenient: bool) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    if lenient and key == "pattern":
        return not _is_plain(value)
    if lenient and key == "type":
        types = value if isinstance(value, list) else [value]
        return not all(isinstance(name, str) and name in _TYPES for name in types)
    return False


def _is_plain(pattern: Any) -> bool:
    return isinstance(pattern, str) and not _LOOKS_AROUND.search(pattern)
