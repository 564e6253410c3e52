"""The table of architectures and their capabilities.

python -m tests.support.architecture_table > docs/architectures.md
"""

from __future__ import annotations

import mlxspec  # isort: skip  # noqa: F401  (before mlx.core)

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING

from mlxspec.engine.caches import parts
from mlxspec.engine.capability import Finding, examine, examine_chunks, examine_joint
from tests.support.architectures import ARCHITECTURES, Architecture
from tests.support.rarer_architectures import NOT_TRIED

_INTRODUCTION = """\
# Architectures

What drafts these models verify, found out by running small ones of each, whose output equals
mlx-lm's token for token (`tests/engine/test_architectures.py`). `mlxspec inspect MODEL` finds it
out for any model. **tree**: branching drafts. **chain**: one continuation. **tape**: one
continuation; after a rejection the states of recurrent layers are computed again for the accepted
tokens from what the step has computed, which takes a few small operations a layer. **replay**: one
continuation; the states of some layers cannot be computed so, and after a rejection the accepted
tokens run once more with the next step. **plain**: no drafts, token by token.

The column of several sequences says how they share a forward. **joint**: attention is computed for
each by itself, recurrent blocks for those with equally many rows, all else for the rows of all.
**joint with a block mask**: attention sees the keys of all, under a mask that hides each from the
others. **one at a time**: each has forwards of its own.

The last column says in which chunks prompts may run. **any**: the answer is the same in all.
**mlx-lm's**: in others the answer may be another one, so they run in mlx-lm's, and the server
shares no part of them. This holds for all prompts where no drafts are verified, for those longer
than the window where rows see more of it in one chunk, and otherwise for those that go beyond the
position named.

| Models | mlx-lm's architecture | caches | drafts | why | several sequences | chunks |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    rows = [
        row(architecture, examine(model), model)
        for architecture in ARCHITECTURES.values()
        for model in (architecture.model(),)
    ]
    return "\n".join([_INTRODUCTION.rstrip(), *rows, "", *notes(), ""])


def notes() -> list[str]:
    """The lines below the table: what it leaves out."""
    others = [f"`{other}` ({name})" for other, name in sorted(MODEL_REMAPPING.items())]
    return [
        "These are all that mlx-lm has, but for some that were not tried:",
        "",
        *(f"- `{name}`: {reason}" for name, reason in NOT_TRIED.items()),
        "",
        "Other names of some of them: " + ", ".join(others) + ".",
    ]


def row(architecture: Architecture, finding: Finding, model: nn.Module | None = None) -> str:
    """One architecture's line, or its beginning where the model is not given to be tried."""
    caches = sorted(
        {type(cache).__name__ for cache in parts(make_prompt_cache(architecture.model()))}
    )
    line = (
        f"| {architecture.published} | `{architecture.model_type}` | {', '.join(caches)} "
        f"| {finding.capability.value} | {finding.reason} |"
    )
    if model is None:
        return line
    joint, _ = examine_joint(model, finding.capability)
    chunk_end, _ = examine_chunks(model, finding.capability, finding.draft_end)
    chunked = "any" if chunk_end is None else "mlx-lm's"
    return f"{line} {joint.value} | {chunked} |"


if __name__ == "__main__":
    print(page(), end="")
