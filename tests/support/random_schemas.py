"""Random JSON Schemas with short values, even from a model with random output."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "colour", "size", "tags", "city", "is open", "größe", 'quo"te', "x")


def random_schema(source: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema of objects, lists, unions and plain values of at most this depth."""
    kinds = [_string, _integer, _number, _constant, _enumeration, _plain]
    if depth:
        kinds += [_object, _list, _union, _tuple] * 2
    return source.choice(kinds)(source, depth - 1)


def random_object(source: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return the schema of an object."""
    return _object(source, depth)


def _string(source: random.Random, depth: int) -> dict[str, Any]:
    forms: list[dict[str, Any]] = [
        {"maxLength": source.randrange(1, 12)},
        {"pattern": "^[A-Z][a-z]{1,6}$"},
        {"format": "date"},
        {"format": "uuid"},
        {"minLength": 2, "maxLength": 4},
    ]
    return {"type": "string", **source.choice(forms)}


def _integer(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randrange(-50, 100)
    return {"type": "integer", "minimum": least, "maximum": least + source.randrange(1, 5000)}


def _number(source: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10}


def _constant(source: random.Random, depth: int) -> dict[str, Any]:
    return {"const": source.choice(["fixed text", 17, None, True, {"a": [1, "b"]}])}


def _enumeration(source: random.Random, depth: int) -> dict[str, Any]:
    values = ["red", "green", "greenish", "dark blue", 1, 12, 123, None, "日本語", "</s>"]
    return {"enum": source.sample(values, source.randrange(1, 6))}


def _plain(source: random.Random, depth: int) -> dict[str, Any]:
    return {"type": source.choice(["boolean", "null", ["boolean", "null"]])}


def _object(source: random.Random, depth: int) -> dict[str, Any]:
    names = source.sample(WORDS, source.randrange(0, 5))
    return {
        "type": "object",
        "properties": {name: random_schema(source, depth) for name in names},
        "required": [name for name in names if source.random() < 0.8],
        "additionalProperties": False,
    }


def _list(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randrange(3)
    most = least + source.randrange(3)
    return {
        "type": "array",
        "items": random_schema(source, depth),
        "minItems": least,
        "maxItems": most,
    }


def _tuple(source: random.Random, depth: int) -> dict[str, Any]:
    items = [random_schema(source, depth) for _ in range(source.randrange(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(source: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(source, depth) for _ in range(2)]}
