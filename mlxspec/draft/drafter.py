"""What every drafter is; derive your own from :class:`Drafter`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import DrafterError, OptionError
from .tree import DraftTree


@dataclass(frozen=True)
class VerifiedStep:
    """What one step of the target says about a draft.

    Attributes:
        tree: the verified tree; the proposed one, less what the loop had to cut.
        choices: per node, the token that the target picks after it.
        argmaxes: per node, the target's most likely token; equals ``choices`` at temperature 0.
        accepted: the accepted nodes, from the root's child downwards.
        tokens: the emitted tokens: the accepted ones, then the bonus token, unless an end of
            the output was among them.
        pending: accepted tokens that the next step has to run again in front of its own rows,
            which makes it wider (models whose state cannot be cut back).
        rows: of the step's forward, pending ones included.
        seconds: wall time of the step, from the proposal to the commit; what the drafter took to
            observe the step before is a part of it. 0 where nobody measures.
        pipelined: whether its forward had been dispatched during the step before.
        context: positions of the context, these tokens included.
    """

    tree: DraftTree
    choices: tuple[int, ...]
    argmaxes: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    pending: int = 0
    rows: int = 1
    seconds: float = 0.0
    pipelined: bool = False
    context: int = 0

    @property
    def drafted(self) -> int:
        """Draft tokens that were verified."""
        return len(self.tree) - 1


class Drafter:
    """Proposes draft trees. It can change the speed of decoding, never its output.

    A drafter of your own needs :meth:`propose` and :meth:`observe`; all else has a default. The
    loop calls ``begin`` once with the prompt, then ``propose`` and ``observe`` in turn, and
    ``end`` when the generation ends in whatever way. Under a planner, which drafts where it
    pays, a step may be observed for which nothing was asked.
    """

    branching = True
    """Whether its trees may branch; False spares the check that the model verifies trees."""

    pipelined = False
    """Whether, when a proposal is empty, the loop may dispatch the next forward before it has
    read the token of the last one.

    Then a later proposal waits for one plain step. Asked after every proposal, so it may be a
    property: a drafter that never proposes says True, one that plans says True while it expects
    no draft soon."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation whose context is ``prompt`` (at least one token id)."""

    def propose(self, max_depth: int) -> DraftTree:
        """Draft what follows the context, at most ``max_depth`` tokens deep.

        The root of the tree is the context's last token; :meth:`DraftTree.chain` makes a tree
        of tokens in a row, and of the root alone where there is nothing to draft.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method propose")

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a step; ``step.tokens`` now belong to the context."""
        raise NotImplementedError(f"{type(self).__name__} has no method observe")

    def end(self) -> None:
        """Let go of the generation's state."""

    def origins(self) -> tuple[str, ...] | None:
        """Per node of the tree proposed last, a word for where it came from; the root's is "root".

        None is "draft" for all.
        """
        return None

    def window_rows(self) -> Mapping[tuple[int, int], int]:
        """Of lookahead decoding's window in the tree proposed last: the node of each row
        (level, column)."""
        return {}


class NoDraft(Drafter):
    """Plain decoding: proposes nothing."""

    pipelined = True
    branching = False

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._last)

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]


def checked_drafter(drafter: object) -> Drafter:
    """A drafter that somebody else has written, if it is one.

    Raises:
        DrafterError: it lacks what a drafter has.
    """
    if isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, type) and issubclass(drafter, Drafter):
        raise DrafterError(
            f"drafter is the class {drafter.__name__}: pass an instance, {drafter.__name__}()"
        )
    missing = [name for name in _INTERFACE if not hasattr(drafter, name)]
    if missing:
        raise DrafterError(
            f"drafter is {_described(drafter)} without {' and '.join(missing)}: derive it from "
            "mlxspec.Drafter, and give it propose and observe"
        )
    return drafter  # type: ignore[return-value]  # all that is asked of one


_INTERFACE = ("begin", "propose", "observe", "end", "pipelined", "branching")


def checked_tree(tree: object, drafter: Drafter, last: int) -> DraftTree:
    """What a drafter has proposed, if it is a draft for the last token.

    Raises:
        DrafterError: it is something else.
    """
    if not isinstance(tree, DraftTree):
        raise DrafterError(
            f"{type(drafter).__name__}.propose returned {_described(tree)}: return a DraftTree, "
            "such as DraftTree.chain(last token, drafted tokens)"
        )
    if tree.tokens[0] != last:
        raise DrafterError(
            f"{type(drafter).__name__}.propose returned a tree with the root {tree.tokens[0]}, "
            f"but the context ends with {last}: its last token comes from the prompt, and then "
            "from step.tokens"
        )
    return tree


def origins_of(drafter: Drafter, tree: DraftTree) -> tuple[str, ...]:
    """Per node of a tree that a drafter has just proposed, where it came from."""
    told = drafter.origins() if hasattr(drafter, "origins") else None
    return told or ("root", *["draft"] * (len(tree) - 1))


def window_rows_of(drafter: Drafter) -> Mapping[tuple[int, int], int]:
    """:meth:`Drafter.window_rows` of any drafter."""
    return drafter.window_rows() if hasattr(drafter, "window_rows") else {}


def load_drafter(name: str) -> type[Drafter]:
    """The drafter class that ``module:Class`` names; the working directory is searched too.

    Raises:
        OptionError: there is no such class, or it is no drafter's.
    """
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise OptionError(f"drafter is {name!r}: write it as module:Class, such as mine:MyDrafter")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise OptionError(f"drafter {name}: {error}") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise OptionError(
            f"drafter {name}: {module_name} has no class {class_name} derived from mlxspec.Drafter"
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(found).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if needed:
        raise OptionError(
            f"drafter {name}: it needs {', '.join(needed)}, and is made without arguments: give "
            "defaults, or a class of its own"
        )
    return found


def _described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
