"""Step times and experience, kept on disk between processes, in JSON files."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import platformdirs
from pydantic import AfterValidator, Field, TypeAdapter

from ..errors import MlxspecError
from ..files import directory_in, replaced
from .acceptance import TOKEN_FEATURES, Corrections
from .costs import KnownTime
from .measurement import COST_PER_ROW, is_whole

_log = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "MLXSPEC_CACHE_DIR"

_STEP_TIMES = {"format": "mlxspec step times", "version": 2}
_EXPERIENCE = {"format": "mlxspec experience", "version": 3}
_MAX_BYTES = 1 << 20
_UNUSABLE = (OSError, ValueError, RecursionError)

_Read = TypeVar("_Read")


def cache_directory() -> Path:
    """Where mlxspec keeps what it can find out again, by default the user's cache directory."""
    return directory_in(ENVIRONMENT_VARIABLE) or platformdirs.user_cache_path("mlxspec")


def _read_json(path: Path, head: Mapping[str, object]) -> dict[str, Any]:
    """The JSON object in a file, which begins with ``head``.

    Raises:
        OSError: it cannot be read.
        ValueError, RecursionError: it is not such a file.
    """
    if path.stat().st_size > _MAX_BYTES or not path.is_file():
        raise ValueError("not a file of this kind")
    content: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or {**content, **head} != content:
        raise ValueError("not written by this version of mlxspec")
    return content


def _usable(what: str, path: Path, read: Callable[[Path], _Read]) -> _Read | None:
    """The content of a file; None if it is missing or, with a warning, if it cannot be used."""
    try:
        return read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _UNUSABLE as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        _log.warning("ignoring the %s in %s: %s", what, path, reason)
        return None


_warned_of: set[Path] = set()


def _write_json(what: str, path: Path, content: Mapping[str, object]) -> bool:
    """Write a whole file that only the user can read; return whether that worked.

    The first failure in a cache directory is logged.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(json.dumps(content, separators=(",", ":")).encode())
    except (OSError, MlxspecError) as error:
        if path.parent.parent not in _warned_of:
            _warned_of.add(path.parent.parent)
            failure = error if isinstance(error, OSError) else error.__cause__
            reason = getattr(failure, "strerror", None) or error
            place = path.parent, reason, ENVIRONMENT_VARIABLE
            _log.warning("%s are not kept in %s (%s); %s names another place", what, *place)
        return False
    return True


Source = Literal["steps", "quick", "careful"]  # the best one last
Identity = dict[str, str | int | float | None]


def _plausible(times: tuple[KnownTime, ...]) -> tuple[KnownTime, ...]:
    rows = [known.rows for known in times]
    if rows[:1] != [1] or rows != sorted(set(rows)):
        raise ValueError("times must be sorted by their rows, from 1 on")
    low, high = COST_PER_ROW
    for known in times:
        if not low <= known.seconds / times[0].seconds <= high * known.rows:
            raise ValueError(f"an implausible time of {known.rows} rows")
    return times


@dataclass(frozen=True)
class CostKey:
    """The machine and the model that step times belong to.

    Attributes:
        machine: what the steps run on: chip, device, libraries.
        model: what they run: configuration, data types, quantisation.
    """

    machine: Identity
    model: Identity

    def of_sequences(self, count: int) -> CostKey:
        """The key of steps shared by ``count`` sequences."""
        return replace(self, model={**self.model, "sequences": count}) if count > 1 else self

    @property
    def file_name(self) -> str:
        text = json.dumps([_STEP_TIMES["version"], self.machine, self.model], sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True)
class KnownTimes:
    """Step times behind one context length.

    Attributes:
        times: T(rows), fewest rows first.
        source: "quick" or "careful" for a measurement, "steps" if learned from decoding alone.
        updated: when this was last measured or corrected, in UTC, in ISO 8601.
        name: what the user called the model; empty if unknown.
        split: whether wide drafts were faster with their attention split; see
            :func:`mlxspec.engine.patches.split_attention`. None if that was not measured.
    """

    times: Annotated[tuple[KnownTime, ...], AfterValidator(_plausible)]
    source: Source
    updated: str
    name: str = ""
    split: bool | None = None

    @classmethod
    def now(
        cls, times: list[KnownTime], source: Source, name: str = "", split: bool | None = None
    ) -> KnownTimes:
        """Times that were measured or learned just now."""
        updated = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(tuple(times), source, updated, name, split)

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """How well the times are known, for comparison."""
        times = self.times
        return is_whole(times), len(times) > 1, get_args(Source).index(self.source), len(times)


TimesByContext = dict[int, KnownTimes]
"""By the length of the context."""


class CostCache:
    """Keeps step times from run to run, in one file per machine and model.

    If several processes write at the same time, the last one's corrections of a context length are
    kept. A file that is damaged or of another version is ignored with a warning, and its times
    are measured again.

    Args:
        directory: where the files are; by default ``step_times`` in :func:`cache_directory`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or cache_directory() / "step_times"

    def read(self, key: CostKey) -> TimesByContext:
        """The times that are kept for a key; empty without any usable ones."""
        path = self.directory / key.file_name
        return _usable("step times", path, lambda path: _times_of(path, key)) or {}

    def entries(self) -> list[tuple[CostKey, TimesByContext]]:
        """All usable times, of all machines and models."""
        paths = sorted(self.directory.glob("*.json"))
        found = [_usable("step times", path, _read_times) for path in paths]
        return [entry for entry in found if entry]

    def update(self, key: CostKey, found: Mapping[int, KnownTimes]) -> None:
        """Replace the times of these context lengths, and leave the others as they are.

        Implausible times are ignored, and times that are better known stay. A careful measurement
        is better than a quick one, unless it lacks rows that show what drafts cost; of two of a
        kind, the one with more numbers of rows is better. A change of MLX, the model or the
        machine gives another key.
        """
        path = self.directory / key.file_name
        kept: TimesByContext = {}
        with suppress(*_UNUSABLE):
            kept = _times_of(path, key)
        for context, known in found.items():
            with suppress(ValueError):
                _KNOWN.validate_python(asdict(known))
                before = kept.get(context, known)
                if before.rank <= known.rank:
                    split = before.split if known.split is None else known.split
                    kept[context] = replace(known, name=known.name or before.name, split=split)
        contexts = {context: asdict(known) for context, known in sorted(kept.items())}
        _write_json("step times", path, {**_STEP_TIMES, **asdict(key), "contexts": contexts})


def _times_of(path: Path, key: CostKey) -> TimesByContext:
    """The times in the file of a key; raises as :func:`_read_json`."""
    found, times = _read_times(path)
    if found != key:
        raise ValueError("for another machine or model")
    return times


def _read_times(path: Path) -> tuple[CostKey, TimesByContext]:
    """The content of a file; all that decoding relies on is checked. Raises as `_read_json`."""
    content = _read_json(path, _STEP_TIMES)
    key = CostKey(*(_IDENTITY.validate_python(content.get(of)) for of in ("machine", "model")))
    return key, _CONTEXTS.validate_python(content.get("contexts"))


_IDENTITY = TypeAdapter(Identity)
_KNOWN = TypeAdapter(KnownTimes)
_CONTEXTS = TypeAdapter(dict[Annotated[int, Field(ge=0, lt=1 << 60)], KnownTimes])


_KIND_TOKENS = 32
_MOST_KINDS = 16
_MOST_FILES = 64
_MOST_WEIGHT = 30.0
_SECONDS_BETWEEN_SAVES = 30.0


def experience_directory() -> Path:
    """Where experience is kept; raises as :func:`cache_directory`."""
    return cache_directory() / "experience"


def experience_path(model: Identity) -> Path:
    """The file of a model.

    Its name depends on the version of the format and on the weights that experience corrects, so
    a file of another version is never read, nor replaced.

    Args:
        model: from :func:`mlxspec.engine.costs.model_identity`.
    """
    prior = files(__package__).joinpath("p_accept_prior.json").read_bytes()
    identity = json.dumps([_EXPERIENCE["version"], TOKEN_FEATURES, model], sort_keys=True).encode()
    digest = hashlib.blake2b(identity + prior, digest_size=12).hexdigest()
    return experience_directory() / f"{digest}.json"


class Experience:
    """What a decoder has learned from its generations.

    Requests whose prompts begin alike, with one system prompt or one template, are of one kind,
    which has corrections of its own from its second request on. They begin as a copy of those of
    all requests, and last until the process ends.

    With a path, it outlives the process. It is saved after a generation, at most every 30 seconds;
    if several processes save it, the last one wins. Weights of single tokens are not saved, since
    they reveal texts. If the file has been removed, this process forgets what it knew, too. A
    damaged file is ignored with a warning.

    Args:
        path: the file; None keeps nothing.
        clock: returns the time in seconds.

    Attributes:
        corrections: those of all requests, of the probabilities of drafts from the context.
        probe_step: where in its round of probes the next generation continues; see
            :class:`mlxspec.drafting.policy.Policy`.
    """

    def __init__(
        self, path: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.probe_step = 0
        self._kinds: dict[tuple[int, ...], Corrections | None] = {}  # the last used last
        self._of_texts: defaultdict[str, Corrections] = defaultdict(Corrections)
        self._path, self._clock = path, clock
        self._next_save = clock()
        kept = _usable("experience", path, _read_experience) if path else None
        self._has_file = kept is not None
        self.corrections = kept or Corrections()

    def of_kind(self, prompt: Sequence[int]) -> list[Corrections]:
        """The corrections that a request follows, then others that learn from it."""
        kind = tuple(prompt[:_KIND_TOKENS])
        known = kind in self._kinds
        own = self._kinds.pop(kind, None)
        self._kinds[kind] = own = (own or Corrections(self.corrections)) if known else None
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return [self.corrections] if own is None else [own, self.corrections]

    def of_texts(self, name: str) -> Corrections:
        """What was learned about other texts, such as a memory; it is not saved."""
        return self._of_texts[name]

    def end(self) -> None:
        """Save what was learned, if there is a path and the last save is not recent."""
        if not self._path or self._clock() < self._next_save:
            return
        self._next_save = self._clock() + _SECONDS_BETWEEN_SAVES
        if self._has_file and not self._path.exists():  # the user has removed it
            self.corrections, self._kinds = Corrections(), {}
        weights = {
            feature: round(min(max(weight, -_MOST_WEIGHT), _MOST_WEIGHT), 4)
            for feature, weight in [*self.corrections.items()]  # other threads may be learning
            if feature < TOKEN_FEATURES
        }
        content = _EXPERIENCE | {"weights": weights}
        self._has_file = _write_json("corrections", self._path, content)
        for path in kept_experience()[:-_MOST_FILES] if self._has_file else ():
            path.unlink(missing_ok=True)


def _read_experience(path: Path) -> Corrections:
    """The content of a file; raises as :func:`_read_json`."""
    return Corrections(_WEIGHTS.validate_python(_read_json(path, _EXPERIENCE).get("weights")))


_WEIGHTS = TypeAdapter(
    dict[
        Annotated[int, Field(ge=0, lt=TOKEN_FEATURES)],
        Annotated[float, Field(strict=True, ge=-_MOST_WEIGHT, le=_MOST_WEIGHT)],
    ]
)


def kept_experience() -> list[Path]:
    """The kept files, the last written last."""
    found = []
    for path in experience_directory().glob("*.json"):
        with suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]
