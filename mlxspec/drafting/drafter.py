"""The base of all drafters, and checks of what users' drafters propose."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Sequence

from ..errors import MlxspecError, OptionError
from .accept import VerifiedStep
from .tree import DraftTree


class Drafter:
    """Proposes draft trees. A drafter can change the speed of decoding, but never the output.

    A subclass must define :meth:`propose` and :meth:`observe`; the other methods have defaults. A
    generation calls ``begin`` once with the prompt, then ``propose`` and ``observe`` alternately,
    and ``end`` at the end, even after an error. A planner drafts only when drafting pays, so it
    may call ``observe`` without calling ``propose`` before.
    """

    branching = True
    """Whether the drafter's trees may branch. If False, the model is not tried for trees."""

    pipelined = False
    """Whether the next forward may be dispatched before the token of this one is read, if nothing
    is proposed. The next proposal then has to wait for a plain step. This attribute is read after
    every proposal, so it may be a property.
    """

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation whose context is ``prompt`` (at least one token id)."""

    def propose(self, max_depth: int) -> DraftTree:
        """Draft the tokens that may follow the context, at most ``max_depth`` tokens deep.

        The tree's root is the context's last token. :meth:`DraftTree.chain` makes a tree without
        branches, or just the root if there is nothing to draft. A planner uses the tree's
        ``p_reached``. If it is empty, the planner learns how often the nodes are right.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define propose")

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a step, after which ``step.tokens`` belong to the context."""
        raise NotImplementedError(f"{type(self).__name__} does not define observe")

    def end(self) -> None:
        """Release the generation's state."""

    def no_draft(self) -> str:
        """A clause that says why the last proposal was just the root; called before ``observe``."""
        return "the drafter has nothing to propose"


class NoDraft(Drafter):
    """Plain decoding: proposes nothing."""

    pipelined = True
    branching = False

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]

    def no_draft(self) -> str:
        return "this decoder never drafts"

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._last)

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]


def checked_drafter(drafter: object) -> Drafter:
    """Return ``drafter`` if it is a :class:`Drafter`.

    Raises:
        MlxspecError: it is not an instance of a class derived from :class:`Drafter`.
    """
    if not isinstance(drafter, Drafter):
        name = repr(drafter) if isinstance(drafter, type) else f"of type {type(drafter).__name__}"
        raise MlxspecError(
            f"drafter is {name}: pass an instance of a class derived from mlxspec.Drafter"
        )
    return drafter


def checked_draft(proposed: object, drafter: object, last: int) -> DraftTree:
    """Return a drafter's proposal if it is a tree with the root ``last``.

    Raises:
        MlxspecError: the proposal is not a draft tree, or its root is another token.
    """
    name = type(drafter).__name__
    if not isinstance(proposed, DraftTree):
        raise MlxspecError(
            f"{name}.propose returned {type(proposed).__name__}: return a DraftTree, such as "
            "DraftTree.chain(last token, drafted tokens)"
        )
    if proposed.tokens[0] != last:
        raise MlxspecError(
            f"{name}.propose returned a tree with the root {proposed.tokens[0]}, but the context "
            f"ends with {last}: let the root be the last token of the prompt, or of step.tokens "
            "after a step"
        )
    return proposed


def load_drafter(name: str) -> type[Drafter]:
    """Import the drafter class ``module:Class``. The module may be in the working directory.

    Raises:
        OptionError: the class does not exist, is not derived from :class:`Drafter`, lacks a
            method, or requires arguments.
    """
    module, _, class_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        kind = getattr(importlib.import_module(module), class_name)
        inspect.signature(kind).bind()
        if issubclass(kind, Drafter) and not {kind.propose, kind.observe} & _UNDEFINED:
            return kind
        reason = "it is not derived from mlxspec.Drafter, or lacks one of its methods"
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
    raise OptionError(
        f"drafter {name}: {reason}; write it as module:Class, such as mine:MyDrafter, a class "
        "derived from mlxspec.Drafter that has the methods propose and observe and needs no "
        "arguments"
    )


_UNDEFINED = {Drafter.propose, Drafter.observe}
