"""The table of architectures and their capabilities.

python -m tests.support.architecture_table > docs/architectures.md
"""

from __future__ import annotations

from tests.support.harness import examined

import mlxspec  # isort: skip  # noqa: F401  (before mlx.core)

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING

from mlxspec.engine.caches import parts
from mlxspec.engine.capability import Capability, examine_joint
from mlxspec.engine.loaded_model import LoadedModel
from tests.support.architectures import ARCHITECTURES, Architecture
from tests.support.rarer_architectures import NOT_TRIED

_INTRODUCTION = """\
# Architectures

The table shows which drafts these models verify, and why. Small models of each
architecture were run to find out, and their output equals mlx-lm's token for token
(`tests/engine/test_architectures.py`). `mlxspec inspect MODEL` does the same for any
model. **tree**: branching drafts. **chain**: one continuation. **replay**: one continuation;
some states cannot be trimmed, so after a rejection they are computed again for the accepted
tokens: from the step's intermediate results, which takes a few small operations per layer, or,
where that is not possible, by running these tokens again. **plain**: no drafts, token by token.

The column "several sequences" shows how they share a forward. **joint**: attention runs once per
sequence, recurrent blocks once for all sequences with equally many rows, and everything else once
for all rows. **joint with a block mask**: attention runs over the keys of all sequences, with
a mask that hides them from each other. **one at a time**: each sequence has forwards of its own.

The last column shows in which chunks prompts may run. **any**: the answer is the same in all
chunks. **mlx-lm's**: other chunks could change the answer, so these prompts run in mlx-lm's,
and the server shares no part of them. This applies to models that verify no drafts.

| Models | mlx-lm's architecture | caches | drafts | why | several sequences | chunks |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the page as Markdown."""
    rows = [
        row(architecture, *examined(model), model)
        for architecture in ARCHITECTURES.values()
        for model in (architecture.model(),)
    ]
    return "\n".join([_INTRODUCTION.rstrip(), *rows, "", *notes(), ""])


def notes() -> list[str]:
    """Return the notes below the table, on architectures that it omits."""
    others = [f"`{other}` ({name})" for other, name in sorted(MODEL_REMAPPING.items())]
    return [
        "PLaMo 3: rows in one chunk see more of the window than one by one, so a prompt longer "
        "than the window runs in mlx-lm's chunks.",
        "",
        "These are all of mlx-lm's architectures except the following, which were not tried:",
        "",
        *(f"- `{name}`: {reason}" for name, reason in NOT_TRIED.items()),
        "",
        "Some have other names: " + ", ".join(others) + ".",
    ]


def row(
    architecture: Architecture, capability: Capability, reason: str, model: nn.Module | None = None
) -> str:
    """Return an architecture's row; without a model to probe, only its first columns."""
    caches = sorted(
        {type(cache).__name__ for cache in parts(make_prompt_cache(architecture.model()))}
    )
    line = (
        f"| {architecture.published} | `{architecture.model_type}` | {', '.join(caches)} "
        f"| {capability.value} | {reason} |"
    )
    if model is None:
        return line
    joint, _ = examine_joint(LoadedModel(model), capability)
    chunked = "mlx-lm's" if capability is Capability.PLAIN else "any"
    return f"{line} {joint.value} | {chunked} |"


if __name__ == "__main__":
    print(page(), end="")
