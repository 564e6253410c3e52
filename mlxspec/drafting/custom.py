"""Drafters that users write: checking them and what they propose, and loading them by name."""

from __future__ import annotations

import importlib
import inspect
import os
import sys

from ..errors import DrafterError, OptionError
from .drafter import Drafter, DraftTree


def checked_drafter(drafter: object) -> Drafter:
    """Check and return a drafter that may be anybody's.

    Raises:
        DrafterError: it lacks something that a drafter has.
    """
    if isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, type) and issubclass(drafter, Drafter):
        raise DrafterError(
            f"drafter is the class {drafter.__name__}: pass an instance, {drafter.__name__}()"
        )
    # Not by hasattr: a property may need what only `begin` gives it.
    missing = [name for name in _INTERFACE if inspect.getattr_static(drafter, name, None) is None]
    if missing:
        raise DrafterError(
            f"drafter is {_described(drafter)} without {', '.join(missing)}: derive it from "
            "mlxspec.Drafter, and give it propose and observe"
        )
    return drafter  # type: ignore[return-value]  # it has all that is used


_INTERFACE = ("begin", "propose", "observe", "end", "pipelined", "branching")


def checked_draft(proposed: object, drafter: Drafter, last: int) -> DraftTree:
    """Check and return what a drafter has proposed to follow the token ``last``.

    Raises:
        DrafterError: it is not a draft tree, or its root is another token.
    """
    name = type(drafter).__name__
    if not isinstance(proposed, DraftTree):
        raise DrafterError(
            f"{name}.propose returned {_described(proposed)}: return a DraftTree, such as "
            "DraftTree.chain(last token, drafted tokens)"
        )
    if proposed.tokens[0] != last:
        raise DrafterError(
            f"{name}.propose returned a tree with the root {proposed.tokens[0]}, but the context "
            f"ends with {last}: its last token comes from the prompt, and then from step.tokens"
        )
    return proposed


def load_drafter(name: str) -> type[Drafter]:
    """The drafter class that ``module:Class`` names; the working directory is searched too.

    Raises:
        OptionError: there is no such class, it is not derived from :class:`Drafter`, or it
            cannot be made without arguments.
    """
    module_name, _, class_name = name.partition(":")
    parts = module_name.split(".")
    if not (class_name and all(map(str.isidentifier, parts))) or parts[-1] == "py":
        raise OptionError(f"drafter is {name!r}: write it as module:Class, such as mine:MyDrafter")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise OptionError(f"drafter {name}: {error}") from error
    except Exception as error:
        raise OptionError(
            f"drafter {name}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise OptionError(
            f"drafter {name}: {module_name} has no class {class_name} derived from mlxspec.Drafter"
        )
    missing = [
        method
        for method in ("propose", "observe")
        if getattr(found, method) is getattr(Drafter, method)
    ]
    if missing:
        raise OptionError(
            f"drafter {name}: it has no method {' and no method '.join(missing)}: every drafter "
            "needs both propose and observe"
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(found).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if needed:
        raise OptionError(
            f"drafter {name}: it is made without arguments, but needs {', '.join(needed)}: give "
            "these defaults"
        )
    return found


def _described(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
