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

This table shows which drafts mlx-lm's architectures verify. Small random models of each were run to
find out, and their output equals mlx-lm's token for token. `mlxspec inspect MODEL` shows it for any
model.

- **tree**: branching drafts.
- **chain**: one continuation, for the reason given.
- **replay**: one continuation. Some states cannot be trimmed, so after a rejection they are
  computed again for the accepted tokens.
- **plain**: no drafts, for the reason given. Prompts run in mlx-lm's chunks, since other chunks
  could change the answer, and the server shares no part of them.

The last column shows how several sequences share a forward. **joint**: attention runs once per
sequence, recurrent blocks once for all sequences with equally many rows, and everything else once
for all rows. **joint with a block mask**: attention runs over the keys of all sequences, with
a mask that hides them from each other. **one at a time**: each sequence has forwards of its own.

| Models | mlx-lm's architecture | caches | drafts | several sequences |
|---|---|---|---|---|
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
    drafts = capability.value
    if capability in (Capability.CHAIN, Capability.PLAIN):
        drafts += f": {reason}"
    line = (
        f"| {architecture.published} | `{architecture.model_type}` | {', '.join(caches)} "
        f"| {drafts} |"
    )
    if model is None:
        return line
    joint, _ = examine_joint(LoadedModel(model), capability)
    return f"{line} {joint.value} |"


if __name__ == "__main__":
    print(page(), end="")
