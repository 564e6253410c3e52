"""Constraints with long chains of references, which nest deeply when compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxspec import Constraint


def _schema(link: Callable[[dict[str, str]], Any]) -> Callable[[int], Constraint]:
    def chain(length: int) -> Constraint:
        defined = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
        defined[f"d{length}"] = {"const": "end"}
        return Constraint.json_schema({"$ref": "#/$defs/d0", "$defs": defined})

    return chain


def _grammar(first: str, link: str, last: str) -> Callable[[int], Constraint]:
    def chain(length: int) -> Constraint:
        links = [link.format(i, i + 1) for i in range(length)]
        return Constraint.grammar("\n".join([first, *links, last.format(length), ""]))

    return chain


CHAINS: Mapping[str, Callable[[int], Constraint]] = {
    "objects": _schema(lambda ref: {"type": "object", "properties": {"a": ref}}),
    "lists": _schema(lambda ref: {"type": "array", "items": ref}),
    "anyOf": _schema(lambda ref: {"anyOf": [ref, {"type": "integer"}]}),
    "allOf": _schema(lambda ref: {"allOf": [ref, {"type": "string"}]}),
    "bare": _schema(lambda ref: ref),
    "rules": _grammar("start: r0", 'r{}: "a" r{}', 'r{}: "b"'),
    "rules alone": _grammar("start: r0", "r{}: r{}", 'r{}: "b"'),
    "terminals": _grammar("start: T0", 'T{}: "a" T{}', 'T{}: "b"'),
    "GBNF": _grammar("root ::= r0", 'r{} ::= "a" r{}', 'r{} ::= "b"'),
}
"""By kind, functions that make a chain of the given length."""
