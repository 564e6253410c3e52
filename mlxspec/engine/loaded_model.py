"""A loaded model, with what mlxspec knows about it.

What the model verifies is found out by trial steps, and kept on disk. The trial steps run on a
miniature of the model if there is one, and otherwise on the model itself (see
:mod:`mlxspec.engine.capability` and :mod:`mlxspec.engine.miniature`).
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base, cache
from mlx_lm.models.cache import make_prompt_cache

from ..cache_files import cache_directory, file_name, read_kept, write_among_newest
from .caches import smallest_window
from .capability import chain_capability, examine, examine_joint
from .joint import JointMode
from .machine import machine_identity, model_identity
from .miniature import miniature
from .target import Capability

if TYPE_CHECKING:
    from ..distributed.ranks import Leader
    from .heads import TrainedHead

_log = logging.getLogger(__name__)

_WHAT = "findings about a model"


@dataclass(frozen=True)
class Findings:
    """What trial steps have shown about a model; None for what they have not been run for.

    Attributes:
        tried_on: what the trial steps ran on: "a miniature" or "the model".
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


class LoadedModel:
    """An mlx-lm model, with what mlxspec knows about it.

    The model's decoders, targets and joints share this object. What the model verifies is read from
    disk, or found by trial steps, on first use. The findings are kept in one file for each
    configuration, data type, quantisation, device, and version of the code that they depend on. A
    damaged file is ignored with a warning.

    Args:
        model: an mlx-lm model. Findings about a model with layers of other packages are not kept,
            since their code may change.
        trained_head: the head attached to the model.
        anew: ignore what is kept, and run the model itself rather than a miniature.

    Attributes:
        split_from: the number of keys from which attention is split; None if it never is. See
            :func:`.patches.split_attention`.
        group: the ranks that the model is split over.
        is_pipeline: whether each of them has some of the layers, rather than a part of each.
        leader: has the other ranks repeat what is done with the model; None on all but rank 0.
    """

    def __init__(
        self, model: nn.Module, trained_head: TrainedHead | None = None, anew: bool = False
    ) -> None:
        self.model = model
        self.trained_head = trained_head
        self.split_from: int | None = None
        self.group: mx.distributed.Group | None = None
        self.is_pipeline = False
        self.leader: Leader | None = None
        self._anew = anew

    @classmethod
    def of(cls, model: nn.Module | LoadedModel) -> LoadedModel:
        """The given loaded model, or a new one of an mlx-lm model."""
        return model if isinstance(model, LoadedModel) else cls(model)

    @cached_property
    def vocab_size(self) -> int:
        """The size of the model's output layer: the number of token ids, including padding."""
        # The graph is built for the result's shape, but never evaluated.
        logits = self.model(mx.array([[0]]), cache=make_prompt_cache(self.model))
        return cast(int, logits.shape[-1])

    @cached_property
    def capability(self) -> Capability:
        """Which drafts the model can verify, as trial steps have shown."""
        capability, reason = self.drafts
        _log.info("drafts that the model can verify: %s (%s)", capability.value, reason)
        return capability

    @cached_property
    def chain_capability(self) -> Capability:
        """How the model can verify chains, which fewer trial steps show."""
        if self.findings.chains is None:
            self._keep(chains=self._trial()[1])
        return cast(Capability, self.findings.chains)

    @cached_property
    def joint_mode(self) -> JointMode:
        """How several sequences share one forward, as trial steps have shown."""
        mode, _ = self.joint
        _log.info("how several sequences share forwards: %s", mode.value)
        return mode

    @property
    def drafts(self) -> tuple[Capability, str]:
        """The result of :func:`.capability.examine`."""
        if self.findings.drafts is None:
            tried, chains = self._trial()
            self._keep(chains=chains, drafts=examine(tried, chains))
        return cast("tuple[Capability, str]", self.findings.drafts)

    @property
    def joint(self) -> tuple[JointMode, str]:
        """The result of :func:`.capability.examine_joint`."""
        if self.findings.joint is None:
            tried, chains = self._trial()
            self._keep(chains=chains, joint=examine_joint(tried, chains))
        return cast("tuple[JointMode, str]", self.findings.joint)

    def chunks_matter(self, length: int, caches: Sequence[Any]) -> bool:
        """Whether a prompt's result depends on the chunks that it runs in.

        If so, the prompt always runs in mlx-lm's chunks, and shares no prefix. With most models, no
        prompt's result depends on its chunks.

        Args:
            length: the number of the prompt's positions, including those already in the caches.
            caches: mlx-lm's or a target's caches for the prompt.
        """
        longest = self.longest_in_chunks(caches)
        return longest is not None and length > longest

    def longest_in_chunks(self, caches: Sequence[Any]) -> int | None:
        """The most positions for which :meth:`chunks_matter` returns False; None for any number."""
        # Some windows keep the context's first positions, but mlx-lm's mask hides them from a
        # chunk's rows. PLaMo 3's mask shows these one position more than its windows keep.
        keeping = getattr(self.model, "model_type", "") != "plamo3"
        longest = smallest_window(caches, keeping=keeping)
        return 0 if self.chain_capability is Capability.PLAIN else longest

    def _trial(self) -> tuple[LoadedModel, Capability]:
        """The model that trial steps run on, and how it verifies chains."""
        small = None if self._anew or self.leader else miniature(self.model)
        if small is None:
            self.findings = replace(self.findings, tried_on="the model")
        _log.info("trial steps run on %s", self.findings.tried_on)
        tried = LoadedModel(small) if small else self
        return tried, self.findings.chains or chain_capability(tried)

    @cached_property
    def findings(self) -> Findings:
        """What trial steps have shown so far."""
        kept = None if self._anew or not self._path else read_kept(_WHAT, self._path, _read)
        if kept:
            _log.info("what the model verifies is known from %s", self._path)
        return kept or Findings()

    @cached_property
    def _path(self) -> Path | None:
        """The file of the findings; None if they cannot be kept."""
        names = {type(module).__module__ for module in self.model.modules()} | {base.__name__}
        if not all(name.split(".")[0] in ("mlx", "mlx_lm", "mlxspec") for name in names):
            return None
        # Versions do not change with every commit, so the code counts, too.
        code = hashlib.sha256(version("mlx-lm").encode())
        theirs = [sys.modules[name].__file__ for name in sorted({*names, cache.__name__})]
        ours = sorted(Path(__file__).parent.glob("*.py"))
        for source in [*map(Path, filter(None, theirs)), *ours]:
            code.update(source.read_bytes() if source.suffix == ".py" else b"")
        ranks = self.group.size() if self.group else 1
        key = [code.hexdigest(), machine_identity(), model_identity(self.model), ranks]
        return cache_directory() / "findings" / file_name(key)

    def _keep(self, **findings: Any) -> None:
        self.findings = replace(self.findings, **findings)
        if self._path:
            write_among_newest(self._path, self.findings)
