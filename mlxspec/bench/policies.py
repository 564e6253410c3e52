"""The policies that can be replayed: mlxspec's decoders, with memories or a user's drafter."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence

from ..corpus.answer_index import AnswerIndex
from ..drafting.cost_curve import CostCurve
from ..drafting.costs import FixedCosts
from ..drafting.drafter import Drafter
from ..drafting.experience import Experience
from ..drafting.p_accept import TokenClasses
from ..drafting.planner import Planner, trees_pay
from ..drafting.prompt_lookup import PromptLookupDrafter
from ..errors import OptionError
from ..generation.drafter_factories import Auto

NewDrafter = Callable[[Sequence[int]], Drafter | Planner]
"""Makes the drafter for an output. Only replayed heads read the output."""

NewPlanner = Callable[[Sequence[int]], Planner]
"""Makes the planner for an output."""

ReplayPolicy = Callable[[CostCurve, TokenClasses], NewDrafter]
"""Makes a :data:`NewDrafter` for one replay, whose drafters share what they learn.

Its arguments are the cost curve, T(rows) / T(1), and the classes of the tokens (see
:class:`mlxspec.drafting.p_accept.TokenClasses`).
"""


def from_text(new: Callable[[], Drafter]) -> ReplayPolicy:
    """A policy that drafts from the text alone."""
    return lambda curve, classes: lambda output: new()


def planned(
    memory_tokens: int = 0, other: Callable[[], Drafter] | None = None
) -> Callable[[CostCurve, TokenClasses], NewPlanner]:
    """A policy that drafts as the default decoder does.

    Args:
        memory_tokens: the size of its memory of earlier outputs; 0 for no memory.
        other: makes a drafter whose candidates are used as well; None for none.
    """

    def planners(curve: CostCurve, classes: TokenClasses) -> NewPlanner:
        experience = Experience()
        memory = AnswerIndex(memory_tokens) if memory_tokens else None

        def new(output: Sequence[int]) -> Planner:
            if memory:
                memory.settle()  # so that look-ups find all outputs so far
            sources = Auto(memory).sources(classes, experience, other() if other else None)
            costs, branching = FixedCosts(curve), trees_pay(curve)
            return Planner(costs, sources, branching=branching, experience=experience)

        return new

    return planners


AUTO = "auto"

POLICIES: dict[str, ReplayPolicy] = {
    AUTO: planned(),
    "prompt-lookup": from_text(PromptLookupDrafter),
}
"""The policies, by the names that ``--decoder`` accepts."""


def policies_with(drafter: type[Drafter]) -> dict[str, ReplayPolicy]:
    """Policies for a custom drafter: one that uses it alone, and the default one with it added."""
    name = drafter.__name__
    return {name: from_text(drafter), f"{AUTO}+{name}": planned(other=drafter)}


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def policies_with_memory(sizes: str) -> dict[str, ReplayPolicy]:
    """Policies of the default decoder with a memory of earlier outputs, one for each size.

    Args:
        sizes: a comma-separated list of sizes in tokens, such as 4096, 16k or 1M (k stands for
            1,024 and M for 1,048,576), or "all" for no limit.

    Raises:
        OptionError: a size has another form.
    """
    policies: dict[str, ReplayPolicy] = {}
    for text in map(str.strip, sizes.split(",")):
        size = re.fullmatch("([0-9]{1,15})([km]?)", text, re.ASCII | re.IGNORECASE)
        if size is None and text != "all":
            raise OptionError(
                f"--remember: {text!r} is not a size: give tokens, such as 4096, 16k or 1M, or all"
            )
        tokens = int(size[1]) * _UNITS[size[2].lower()] if size else sys.maxsize
        policies[f"memory {text}"] = planned(tokens)
    return policies
