"""Finds out what a model verifies, and keeps the findings on disk.

Trial steps run on a miniature of the model if there is one, and otherwise on the model itself (see
:mod:`mlxspec.engine.capability` and :mod:`mlxspec.engine.miniature`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.nn as nn
from mlx_lm.models import base, cache

from ..drafting.learned import cache_directory, read_kept, write_among_newest
from .capability import chain_capability, examine, examine_joint
from .costs import machine_identity, model_identity
from .joint import JointMode
from .miniature import miniature
from .target import Capability

_log = logging.getLogger(__name__)

_WHAT = "findings about a model"


@dataclass(frozen=True)
class Findings:
    """What trial steps have shown about a model; None for what they have not been run for.

    Attributes:
        tried_on: what the trial steps ran on.
        chains: how the model verifies chains.
        drafts: the richest drafts that the model verifies, and the reason why it has no richer
            ones.
        joint: how several sequences share a forward, and the reason.
    """

    tried_on: str = "a miniature"
    chains: Capability | None = None
    drafts: tuple[Capability, str] | None = None
    joint: tuple[JointMode, str] | None = None


def _read(content: dict[str, Any]) -> Findings:
    chains, drafts, joint = (content[name] for name in ("chains", "drafts", "joint"))
    return Findings(
        content["tried_on"],
        chains and Capability(chains),
        drafts and (Capability(drafts[0]), drafts[1]),
        joint and (JointMode(joint[0]), joint[1]),
    )


class Probes:
    """Findings about a model. Each is read from disk, or found by trial steps on its first use.

    They are kept in one file for each configuration, data type, quantisation, device, and version
    of the code that they depend on. A damaged file is ignored with a warning.

    Args:
        model: an mlx-lm model. Findings about a model with layers of other packages are not kept,
            since their code may change.
        anew: ignore what is kept, and run the model itself rather than a miniature.
    """

    def __init__(self, model: nn.Module, anew: bool = False) -> None:
        self._model, self._anew = model, anew

    @property
    def tried_on(self) -> str:
        """What the trial steps ran on: "a miniature" or "the model"."""
        return self._findings.tried_on

    @property
    def chains(self) -> Capability:
        """How the model verifies chains; see :func:`.capability.chain_capability`."""
        found = self._findings.chains or self._keep(chains=chain_capability(self._tried)).chains
        self._model.chain_capability = found
        return cast(Capability, found)

    @property
    def drafts(self) -> tuple[Capability, str]:
        """The result of :func:`.capability.examine`."""
        if self._findings.drafts is None:
            found = examine(self._tried)
            self._keep(chains=chain_capability(self._tried), drafts=found)
        return cast("tuple[Capability, str]", self._findings.drafts)

    @property
    def joint(self) -> tuple[JointMode, str]:
        """The result of :func:`.capability.examine_joint`."""
        if self._findings.joint is None:
            self._keep(joint=examine_joint(self._tried, self.chains))
        return cast("tuple[JointMode, str]", self._findings.joint)

    @cached_property
    def _tried(self) -> nn.Module:
        """The model that trial steps run on."""
        small = None if self._anew else miniature(self._model)
        if small is None:
            self._findings = replace(self._findings, tried_on="the model")
        _log.info("trial steps run on %s", self.tried_on)
        return small or self._model

    @cached_property
    def _findings(self) -> Findings:
        kept = None if self._anew or not self._path else read_kept(_WHAT, self._path, _read)
        if kept:
            _log.info("what the model verifies is known from %s", self._path)
        return kept or Findings()

    @cached_property
    def _path(self) -> Path | None:
        """The file of the findings; None if they cannot be kept."""
        names = {type(module).__module__ for module in self._model.modules()} | {base.__name__}
        if not all(name.split(".")[0] in ("mlx", "mlx_lm", "mlxspec") for name in names):
            return None
        # Versions do not change with every commit, so the code counts, too.
        code = hashlib.sha256(version("mlx-lm").encode())
        theirs = [sys.modules[name].__file__ for name in sorted({*names, cache.__name__})]
        ours = sorted(Path(__file__).parent.glob("*.py"))
        for source in [*map(Path, filter(None, theirs)), *ours]:
            code.update(source.read_bytes() if source.suffix == ".py" else b"")
        group = getattr(self._model, "split_over", None)
        ranks = group.size() if group else 1
        key = [code.hexdigest(), machine_identity(), model_identity(self._model), ranks]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        return cache_directory() / "findings" / f"{digest}.json"

    def _keep(self, **found: Any) -> Findings:
        self._findings = replace(self._findings, **found)
        if self._path:
            write_among_newest(self._path, self._findings)
        return self._findings
