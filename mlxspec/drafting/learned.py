"""Keeps on disk what one process has learned for the next, in JSON files: step times, experience,
and findings about models.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import platformdirs

from ..errors import MlxspecError
from ..files import directory_in, replaced
from .acceptance import TOKEN_FEATURES, Corrections
from .costs import KnownTime

_log = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "MLXSPEC_CACHE_DIR"

_Kept = TypeVar("_Kept")


def cache_directory() -> Path:
    """The directory of what can be measured or learned again; by default in the user's cache."""
    return directory_in(ENVIRONMENT_VARIABLE) or platformdirs.user_cache_path("mlxspec")


def _written(content: Any) -> str:
    """A file's content as JSON; dataclasses become objects."""
    return json.dumps(content, default=vars)


def _digest(content: Any) -> str:
    return hashlib.blake2b(_written(content).encode(), digest_size=12).hexdigest()


def read_kept(what: str, path: Path, read: Callable[[Any], _Kept]) -> _Kept | None:
    """The content of a file; None if it is missing, or None with a warning if it is unusable.

    A digest shows that the content is as it was written. So ``read`` need not check it, and a start
    need not import a library that does.

    Args:
        what: what the file has, for the warning.
        path: the file, from :func:`write_kept`.
        read: makes the result from the content's JSON.
    """
    try:
        file = json.loads(path.read_bytes())
        if file["digest"] != _digest(file["content"]):
            raise ValueError("the digest is another")
        return read(file["content"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        reason = getattr(error, "strerror", "it is damaged, or from another version of mlxspec")
        _log.warning("ignoring the %s in %s: %s", what, path, reason)
        return None


@cache
def _warn_not_kept(directory: Path, reason: str) -> None:
    """Log, once per directory and reason, that nothing can be kept there."""
    _log.warning(
        "step times, experience and findings about models cannot be kept in %s (%s); "
        "set %s to another directory",
        directory,
        reason,
        ENVIRONMENT_VARIABLE,
    )


def write_kept(path: Path, content: Any) -> bool:
    """Write a file that only the user can read, wholly or not at all; return whether it worked.

    Args:
        path: the file.
        content: JSON values and dataclasses, for :func:`read_kept`.
    """
    digest = _digest(json.loads(_written(content)))  # as it will be read: keys become strings
    try:
        with replaced(path, parents=0o700) as file:
            file.write(_written({"digest": digest, "content": content}).encode())
    except (OSError, MlxspecError) as error:
        failure = error if isinstance(error, OSError) else error.__cause__
        _warn_not_kept(path.parent.parent, getattr(failure, "strerror", None) or str(error))
        return False
    return True


_MOST_FILES = 64


def write_among_newest(path: Path, content: Any) -> bool:
    """Write a file like :func:`write_kept`, and keep only the newest files of its directory."""
    written = write_kept(path, content)
    for old in oldest_first(path.parent)[:-_MOST_FILES] if written else ():
        old.unlink(missing_ok=True)
    return written


def oldest_first(directory: Path) -> list[Path]:
    """The JSON files in a directory, from the oldest to the newest."""
    found = []
    for path in directory.glob("*.json"):
        with suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


Source = Literal["steps", "quick", "careful"]  # the most reliable comes last
Identity = dict[str, str | int | float | None]
_STEP_TIMES_VERSION = 3


@dataclass(frozen=True)
class CostKey:
    """The machine and the model that step times belong to.

    Attributes:
        machine: its chip, device and libraries.
        model: its configuration, data types and quantisation.
    """

    machine: Identity
    model: Identity

    def of_sequences(self, count: int) -> CostKey:
        """The key of the times of steps that ``count`` sequences share."""
        return replace(self, model={**self.model, "sequences": count}) if count > 1 else self

    @property
    def file_name(self) -> str:
        text = json.dumps([_STEP_TIMES_VERSION, self.machine, self.model], sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class KnownTimes:
    """Step times at one context length.

    Attributes:
        times: T(rows), the fewest rows first.
        source: "quick" or "careful" for a measurement; "steps" if learned only from decoding.
        updated: when the times were last measured or corrected, in UTC, in ISO 8601.
        name: the model's name as the user gave it; empty if unknown.
        split: whether wide drafts were faster with split attention; see
            :func:`mlxspec.engine.patches.split_attention`. None if that was not measured.
    """

    times: list[KnownTime]
    source: Source
    updated: str = field(default_factory=_now)
    name: str = ""
    split: bool | None = None

    def corrected(self, times: list[KnownTime]) -> KnownTimes:
        """These times, corrected by later steps."""
        return replace(self, times=times, updated=_now())

    @property
    def rank(self) -> tuple[int, int]:
        """How reliable the times are; greater is better."""
        return get_args(Source).index(self.source), len(self.times)


TimesByContext = dict[int, KnownTimes]
"""Step times by context length."""


def _read_step_times(content: Any) -> tuple[CostKey, TimesByContext]:
    contexts = {
        int(context): KnownTimes(**{**known, "times": [KnownTime(**one) for one in known["times"]]})
        for context, known in content["contexts"].items()
    }
    return CostKey(content["machine"], content["model"]), contexts


class CostCache:
    """Keeps step times from process to process, in one file per machine and model.

    If several processes write at the same time, the corrections of the last one are kept, for each
    context length. A file that is damaged or from another version is ignored with a warning, and
    its times are measured again.

    Args:
        directory: the directory of the files; by default ``step_times`` in :func:`cache_directory`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or cache_directory() / "step_times"

    def read(self, key: CostKey) -> TimesByContext:
        """The times that are kept for a key; empty if there are none that can be used."""
        found = read_kept("step times", self.directory / key.file_name, _read_step_times)
        return found[1] if found else {}

    def entries(self) -> list[tuple[CostKey, TimesByContext]]:
        """All times that can be used, of all machines and models."""
        paths = sorted(self.directory.glob("*.json"))
        found = [read_kept("step times", path, _read_step_times) for path in paths]
        return [one for one in found if one]

    def update(self, key: CostKey, found: Mapping[int, KnownTimes]) -> None:
        """Replace the times of these context lengths, unless those that are kept are better.

        A careful measurement is replaced only by another. Of two measurements of the same kind, the
        one with more numbers of rows is kept.
        """
        kept = self.read(key)
        for context, known in found.items():
            if context not in kept or kept[context].rank <= known.rank:
                kept[context] = known
        content = {**vars(key), "contexts": dict(sorted(kept.items()))}
        write_kept(self.directory / key.file_name, content)


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
        model: from :func:`mlxspec.engine.costs.model_identity`.
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
        own = self._kinds.pop(kind, None)
        if known and own is None:
            own = Corrections(self.corrections)
        self._kinds[kind] = own
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return [self.corrections] if own is None else [own, self.corrections]

    def end(self) -> None:
        """Save the experience if there is a path, unless the last save is recent."""
        if not self._path or self._clock() < self._next_save:
            return
        self._next_save = self._clock() + _SECONDS_BETWEEN_SAVES
        if self._has_file and not self._path.exists():  # the user has removed it
            self.corrections, self._kinds = Corrections(), {}
        weights = {
            feature: round(weight, 4)
            for feature, weight in [*self.corrections.items()]  # other threads may be learning
            if feature < TOKEN_FEATURES
        }
        self._has_file = write_among_newest(self._path, weights)


def experience_files() -> list[Path]:
    """The experience files, from the oldest to the newest."""
    return oldest_first(experience_directory())
