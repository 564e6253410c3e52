"""Recording a drafter: every step of a generation, and where its draft tokens came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .drafter import (
    Drafter,
    DraftTree,
    VerifiedStep,
    no_draft_of,
    origins_of,
    window_rows_of,
)

WindowRows = Mapping[tuple[int, int], int]
"""Lookahead decoding's window: the node of each (level, column)."""


@dataclass(frozen=True)
class RecordedStep:
    """One step, and what its drafter says of the tree.

    Attributes:
        verified: the step.
        origins: per node of the verified tree, where it came from; the root's is "root".
        window: the nodes of lookahead decoding's window in the verified tree; empty without one.
        no_draft: why nothing was drafted, in a clause; empty where something was.
    """

    verified: VerifiedStep
    origins: tuple[str, ...]
    window: WindowRows
    no_draft: str = ""


class RecordingDrafter(Drafter):
    """Passes everything on to another drafter, and records every step.

    Args:
        drafter: the one to record.
        steps: the list to which they are appended.
    """

    def __init__(self, drafter: Drafter, steps: list[RecordedStep]) -> None:
        self._drafter = drafter
        self._steps = steps

    @property
    def pipelined(self) -> bool:  # type: ignore[override]  # the drafter's
        return self._drafter.pipelined

    @property
    def branching(self) -> bool:  # type: ignore[override]
        return self._drafter.branching

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        tree = self._drafter.propose(max_depth)
        # Asked now: after the step the drafter may have forgotten this tree.
        self._window = dict(window_rows_of(self._drafter))
        self._no_draft = no_draft_of(self._drafter) if max_depth > 0 else "the output ends here"
        self._proposed = replace(tree, origins=origins_of(self._drafter, tree)[1:])
        return self._proposed

    def observe(self, step: VerifiedStep) -> None:
        verified = dict(enumerate(self._proposed.nodes_in(step.tree)))
        window = {
            place: node
            for place, proposed in self._window.items()
            if (node := verified.get(proposed)) is not None
        }
        no_draft = "" if step.drafted else self._why_none(step)
        self._steps.append(RecordedStep(step, ("root", *step.tree.origins), window, no_draft))
        self._drafter.observe(step)

    def _why_none(self, step: VerifiedStep) -> str:
        """Why a step has no draft: one that was proposed may have come too late, or not fit."""
        proposed = len(self._proposed) - 1
        if proposed and step.pipelined:
            return "the step was dispatched before its draft was known, so that draft has to wait"
        if proposed:
            return "the output's form or its end leaves the proposed draft no room"
        return self._no_draft

    def end(self) -> None:
        self._drafter.end()
