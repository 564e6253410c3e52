"""The public errors: users can import and catch all that public docstrings name."""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlxspec
from mlxspec import errors


def docstrings() -> Iterator[tuple[str, str]]:
    """Return the docstrings of public names and their public members, by name."""
    for name in mlxspec.__all__:
        thing = getattr(mlxspec, name)
        yield name, inspect.getdoc(thing) or ""
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            if not member.startswith("_"):
                yield f"{name}.{member}", inspect.getdoc(value) or ""


def test_errors_that_docstrings_name_can_be_imported() -> None:
    named = {
        (where, error)
        for where, text in docstrings()
        for error in re.findall(r"\b[A-Z]\w*Error\b", text)
    }
    assert {error for _, error in named} >= {"LoadError", "PromptError", "TypeError"}
    known = {*mlxspec.__all__, *vars(builtins)}
    assert [where for where in sorted(named) if where[1] not in known] == []


def test_errors_are_public_unless_the_commands_alone_raise_them() -> None:
    own = {name: thing for name, thing in vars(errors).items() if inspect.isclass(thing)}
    defined = {name: kind for name, kind in own.items() if kind.__module__ == errors.__name__}
    assert all(issubclass(kind, mlxspec.MlxspecError) for kind in defined.values())
    package = Path(mlxspec.__file__).parent
    library = [path for path in package.glob("*/**/*.py") if "cli" not in path.parts]
    raised = {word for path in library for word in re.findall(r"\w+Error\b", path.read_text())}
    public = {name for name in mlxspec.__all__ if name.endswith("Error")}
    assert public == defined.keys() & raised


@pytest.mark.parametrize("name", mlxspec.__all__)
def test_public_names_are_found_and_are_themselves(name: str) -> None:
    assert getattr(mlxspec, name).__name__ == name
