"""What a decoder has learned from its generations, and keeps for later ones."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..cache_files import cache_directory, oldest_first, read_kept, write_among_newest
from .cost_file import Identity
from .p_accept import TOKEN_FEATURES, Corrections

_EXPERIENCE_VERSION = 4
_KIND_TOKENS = 32
_MOST_KINDS = 16
_SECONDS_BETWEEN_SAVES = 30.0


def experience_directory() -> Path:
    """The directory of experience; raises what :func:`cache_directory` raises."""
    return cache_directory() / "experience"


def experience_path(model: Identity) -> Path:
    """The path of a model's experience.

    The file's name depends on the version of the format and on the weights that experience
    corrects. So a file from another version is neither read nor replaced.

    Args:
        model: from :func:`mlxspec.engine.machine.model_identity`.
    """
    prior = files(__package__).joinpath("p_accept_prior.json").read_bytes()
    identity = json.dumps([_EXPERIENCE_VERSION, TOKEN_FEATURES, model], sort_keys=True).encode()
    digest = hashlib.blake2b(identity + prior, digest_size=12).hexdigest()
    return experience_directory() / f"{digest}.json"


def _read_weights(content: Any) -> dict[int, float]:
    return {int(feature): weight for feature, weight in content.items()}


class Experience:
    """What a decoder has learned from its generations.

    Requests whose prompts begin in the same way, such as with the same system prompt, are of one
    kind. From its second request on, a kind has its own corrections. They begin as a copy of the
    corrections of all requests, and are lost when the process ends.

    With a path, experience outlives the process. It is saved after a generation, but at most every
    30 seconds. If several processes save it, the last one wins. Weights of single tokens are not
    saved, since they would reveal texts. If the file has been removed, this process also forgets
    its experience. A damaged file is ignored with a warning.

    Args:
        path: the file; with None, nothing is saved.
        clock: returns the time in seconds.

    Attributes:
        corrections: the corrections to the probabilities of drafts from the context, learned from
            all requests.
        probe_step: the ``probe_step`` with which the next generation begins; see
            :class:`mlxspec.drafting.planner.Policy`.
    """

    def __init__(
        self, path: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.probe_step = 0
        self._kinds: dict[tuple[int, ...], Corrections | None] = {}  # the last used comes last
        self.of_memory = Corrections()
        self._path, self._clock = path, clock
        self._next_save = clock()
        kept = read_kept("experience", path, _read_weights) if path else None
        self._has_file = kept is not None
        self.corrections = Corrections(kept or {})

    def of_kind(self, prompt: Sequence[int]) -> list[Corrections]:
        """The corrections that a request uses, followed by others that also learn from it."""
        kind = tuple(prompt[:_KIND_TOKENS])
        known = kind in self._kinds
        for_kind = self._kinds.pop(kind, None)
        if known and for_kind is None:
            for_kind = Corrections(self.corrections)
        self._kinds[kind] = for_kind
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return [self.corrections] if for_kind is None else [for_kind, self.corrections]

    def end(self) -> None:
        """Save the experience if there is a path, unless the last save is recent."""
        if not self._path or self._clock() < self._next_save:
            return
        self._next_save = self._clock() + _SECONDS_BETWEEN_SAVES
        if self._has_file and not self._path.exists():  # the user has removed it
            self.corrections, self.of_memory, self._kinds = Corrections(), Corrections(), {}
        weights = {
            feature: round(weight, 4)
            for feature, weight in [*self.corrections.items()]  # other threads may be learning
            if feature < TOKEN_FEATURES
        }
        self._has_file = write_among_newest(self._path, weights)


def experience_files() -> list[Path]:
    """The experience files, from the oldest to the newest."""
    return oldest_first(experience_directory())
