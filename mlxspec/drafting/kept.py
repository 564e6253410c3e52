"""What is kept on disk between processes: step times and experience, a JSON file each."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import Any

import platformdirs

from ..errors import MlxspecError, OptionError
from ..files import replaced, sole_writer
from .acceptance import MOST_KINDS, MOST_SEEN, SALT_BYTES, TOKEN_FEATURES, Corrections, Experience
from .costs import MOST_UNCERTAINTY, STEP_SECONDS, WIDEST, KnownTime, context_range
from .measurement import COST_PER_ROW, is_whole

_log = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "MLXSPEC_CACHE_DIR"

_FORMAT = "mlxspec step times"
_VERSION = 1
_MAX_BYTES = 1 << 20
_UNUSABLE = (OSError, ValueError, RecursionError)
_MOST = 1e18  # of whatever is counted in a machine or model
_SOURCES = ("steps", "quick", "careful")  # the best one last

Identity = dict[str, str | int | float | None]


@dataclass(frozen=True)
class CostKey:
    """What step times hold for.

    Attributes:
        machine: what the steps run on: chip, device, libraries.
        model: what they run: configuration, data types, quantisation.
    """

    machine: Identity
    model: Identity

    def of_sequences(self, count: int) -> CostKey:
        """The key of steps that so many sequences share."""
        return CostKey(
            self.machine, {**self.model, "sequences": count} if count > 1 else self.model
        )

    @property
    def file_name(self) -> str:
        text = json.dumps([_VERSION, self.machine, self.model], sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True)
class KnownRange:
    """What is known at the context lengths of one range.

    Attributes:
        times: T(rows), fewest rows first.
        source: "quick" or "careful" for a measurement, "steps" where decoding alone has told.
        updated: when this was last measured or corrected, in UTC, as ISO 8601 has it.
        name: what the user called the model; empty where nobody has said it.
    """

    times: tuple[KnownTime, ...]
    source: str
    updated: str
    name: str = ""

    @classmethod
    def now(cls, times: list[KnownTime], source: str, name: str = "") -> KnownRange:
        """What has just been measured or learned."""
        updated = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(tuple(times), source, updated, name)


Ranges = dict[int, KnownRange]
"""By the end of the range; see :func:`mlxspec.drafting.live_costs.context_range`."""


class CostCache:
    """Keeps what is known of step times from run to run.

    A file is written whole or not at all, readable by the user alone. Where several processes
    write at the same time, the last one's corrections of a range stay. A file that is damaged,
    another program's or another version's is ignored with a warning, and its times are measured
    again. A directory that cannot be written gives a warning too.

    Args:
        directory: where the files are; by default ``step_times`` in the directory that
            ``MLXSPEC_CACHE_DIR`` names, or else in the user's cache directory.

    Raises:
        OptionError: ``MLXSPEC_CACHE_DIR`` begins with ``~`` and a user name that is not known.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or cache_directory() / "step_times"

    def read(self, key: CostKey) -> Ranges:
        """What is kept for a key; empty where there is nothing, or nothing of use."""
        path = self.directory / key.file_name
        found: list[Ranges] = []
        with _unusable_ignored(path):
            found.append(_read(path, key))
        return found[0] if found else {}

    def entries(self) -> list[tuple[CostKey, Ranges]]:
        """All that is kept, for all machines and models."""
        entries = []
        for path in sorted(self.directory.glob("*.json")):
            with _unusable_ignored(path):
                entries.append(_parse(path))
        return entries

    def update(self, key: CostKey, ranges: Mapping[int, KnownRange]) -> None:
        """Replace these ranges where they are plausible, and leave the others as they are.

        A range that is better known stays, too. A careful measurement is better than a quick one,
        unless it lacks steps that tell what drafts cost; of two of a kind, the one with more
        numbers of rows is better. A change of MLX, the model or the machine gives another key.
        """
        path = self.directory / key.file_name
        kept: Ranges = {}
        with suppress(*_UNUSABLE):
            kept = _read(path, key)
        for end, known in ranges.items():
            with suppress(ValueError):
                _check(known.times)
                if end not in kept:
                    kept[end] = known
                elif _rank(kept[end]) <= _rank(known):
                    kept[end] = replace(known, name=known.name or kept[end].name)
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "machine": key.machine,
            "model": key.model,
            "ranges": {end: asdict(known) for end, known in sorted(kept.items())},
        }
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replaced(path, MlxspecError) as file:
                file.write(json.dumps(content, indent=1).encode())
        except (OSError, MlxspecError) as error:
            warn_of_unkept("step times are", self.directory, error)


def _rank(known: KnownRange) -> tuple[bool, bool, int, int]:
    """How well a range is known, for comparison."""
    times = known.times
    return is_whole(times), len(times) > 1, _SOURCES.index(known.source), len(times)


def cache_directory() -> Path:
    """Where mlxspec keeps what it can find out again, by default the user's cache directory.

    Raises:
        OptionError: ``MLXSPEC_CACHE_DIR`` begins with ``~`` and a user name that is not known.
    """
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if not chosen:
        return platformdirs.user_cache_path("mlxspec")
    try:
        return Path(chosen).expanduser()
    except RuntimeError:
        raise OptionError(
            f"{ENVIRONMENT_VARIABLE} is {chosen!r}: that user's home directory is not known; "
            "name another directory"
        ) from None


_warned_of: set[Path] = set()


def warn_of_unkept(what: str, directory: Path, error: OSError | MlxspecError) -> None:
    """Warn that a directory cannot be written: once for all that is kept beside each other.

    Args:
        what: is not kept, with its verb.
        directory: in the cache directory.
        error: the reason.
    """
    if directory.parent in _warned_of:
        return
    _warned_of.add(directory.parent)
    failure = error if isinstance(error, OSError) else error.__cause__
    reason = getattr(failure, "strerror", None) or error
    _log.warning(
        "%s not kept in %s (%s); %s names another place",
        what,
        directory,
        reason,
        ENVIRONMENT_VARIABLE,
    )


@contextmanager
def _unusable_ignored(path: Path) -> Iterator[None]:
    """Ignore a file that cannot be used, with a warning if it exists."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        pass
    except _UNUSABLE as error:
        reason = error.strerror if isinstance(error, OSError) else error
        _log.warning("ignoring the step times in %s: %s", path, reason)


def _read(path: Path, key: CostKey) -> Ranges:
    """The ranges in the file of a key.

    Raises:
        OSError: it cannot be read.
        ValueError, RecursionError: it is not what it should be.
    """
    found, ranges = _parse(path)
    if found != key:
        raise ValueError("for another machine or model")
    return ranges


def _parse(path: Path) -> tuple[CostKey, Ranges]:
    """The content of a file, with all checked that decoding relies on; raises as :func:`_read`."""
    if path.stat().st_size > _MAX_BYTES or not path.is_file():
        raise ValueError("no file of step times")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("not written by mlxspec")
    if content.get("version") != _VERSION:
        raise ValueError("written by another version of mlxspec")
    key = CostKey(_identity(content.get("machine")), _identity(content.get("model")))
    ranges = content.get("ranges")
    if not isinstance(ranges, dict):
        raise ValueError("no ranges of context lengths")
    return key, dict(_range(end, known) for end, known in ranges.items())


def _identity(value: Any) -> Identity:
    if not isinstance(value, dict) or not all(
        isinstance(field, (str, int, float, type(None))) for field in value.values()
    ):
        raise ValueError("it does not say which machine and model it is for")
    for name, field in value.items():
        is_number = not isinstance(field, (str, type(None)))
        if is_number and not 0 <= field <= _MOST:  # false for a NaN, too
            raise ValueError(f"an implausible number of {name!r}")
    if isinstance(value.get("parameters"), str):
        raise ValueError("a number of parameters that is a text")
    return value


def _range(end: str, known: Any) -> tuple[int, KnownRange]:
    if not end.isascii() or not end.isdigit() or len(end) > 12:
        raise ValueError("a range of context lengths that is no number")
    if int(end) < 1 or context_range(int(end) - 1) != int(end):
        raise ValueError(f"no range of context lengths ends at {end}")
    if not isinstance(known, dict) or not isinstance(known.get("times"), list):
        raise ValueError("a range without times")
    times = tuple(_time(time) for time in known["times"])
    _check(times)
    source, updated = known.get("source"), str(known.get("updated"))
    name = known.get("name", "")
    if source not in _SOURCES:
        raise ValueError("a range of unknown source")
    if not isinstance(name, str):
        raise ValueError("a range whose model's name is no text")
    datetime.fromisoformat(updated)
    return int(end), KnownRange(times, source, updated, name)


def _time(value: Any) -> KnownTime:
    if not isinstance(value, dict):
        raise ValueError("a time that is no object")
    rows: Any = value.get("rows")
    seconds: Any = value.get("seconds")
    uncertainty: Any = value.get("uncertainty")
    if type(rows) is not int or not {type(seconds), type(uncertainty)} <= {int, float}:
        raise ValueError("a time without its figures")
    return KnownTime(rows, seconds, uncertainty)


def _check(times: tuple[KnownTime, ...]) -> None:
    """Raise ValueError unless these are plausible. (All comparisons with NaN are false.)"""
    rows = [time.rows for time in times]
    if rows[:1] != [1] or rows != sorted(set(rows)) or rows[-1] > WIDEST:
        raise ValueError("times that are not sorted by their rows, from 1 on")
    low, high = COST_PER_ROW
    for one in times:
        if not (
            STEP_SECONDS[0] <= one.seconds <= STEP_SECONDS[1]
            and low <= one.seconds / times[0].seconds <= high * one.rows
            and 0 <= one.uncertainty <= MOST_UNCERTAINTY
        ):
            raise ValueError(f"an implausible time of {one.rows} rows")


_EXPERIENCE_FORMAT = "mlxspec experience"
_EXPERIENCE_VERSION = 1
_MOST_BYTES = 1 << 20
_MOST_FILES = 64
_MOST_WEIGHT = 30.0
_SECONDS_BETWEEN_SAVES = 30.0


def experience_directory() -> Path:
    """Where what generations teach is kept.

    Raises:
        OptionError: as :func:`mlxspec.drafting.cost_file.cache_directory`.
    """
    return cache_directory() / "experience"


def experience_path(model: Identity) -> Path:
    """The file of a model.

    Its name depends on the version of the format and on the weights that experience corrects. So
    a file of another version is never read, nor replaced.

    Args:
        model: from :func:`mlxspec.engine.costs.model_identity`.
    """
    prior = files(__package__).joinpath("p_accept_prior.json").read_bytes()
    identity = json.dumps([_EXPERIENCE_VERSION, TOKEN_FEATURES, model], sort_keys=True).encode()
    return experience_directory() / f"{blake2b(identity + prior, digest_size=12).hexdigest()}.json"


class KeptExperience(Experience):
    """Experience that goes from one process to the next.

    It is saved after a generation, at most every 30 seconds, and merged with what other processes
    have saved meanwhile. Weights of single tokens stay in the process, since they reveal texts. If
    the file has been removed, what came from it is forgotten here, too. A damaged file is ignored
    with a warning; one that cannot be written gives a warning, too.

    Args:
        path: the file.
        clock: tells the time in seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        kept = None
        try:
            kept = _read_experience(path)
        except OSError:
            pass  # there is none yet; any other reason keeps us from saving, which says so
        except (ValueError, RecursionError) as error:
            _log.warning("ignoring what generations taught in %s: %s", path, error)
        super().__init__(kept.salt if kept else None)
        self._path, self._clock = path, clock
        self._next_save = clock()
        self._came_from_file = kept is not None
        if kept:
            self.everything, self.kinds = kept.everything, kept.kinds
        self._saved = _copy(self)

    def end(self) -> None:
        """Save what was learned, if the last save is not recent."""
        if self._clock() < self._next_save:
            return
        self._next_save = self._clock() + _SECONDS_BETWEEN_SAVES
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with sole_writer(self._path, MlxspecError, create=True):
                merged = self._merged()
                with replaced(self._path, MlxspecError) as file:
                    file.write(_text(merged).encode())
            for path in kept_experience()[:-_MOST_FILES]:
                path.unlink(missing_ok=True)
        except (OSError, MlxspecError) as error:
            self._next_save = float("inf")
            warn_of_unkept("what drafts teach is", self._path.parent, error)

    def _merged(self) -> Experience:
        """The file's content with what was learned here since the last save."""
        there, now = None, _copy(self)  # other threads may go on learning
        with suppress(OSError, ValueError, RecursionError):
            there = _read_experience(self._path)
        if self._came_from_file and (there is None or there.salt != self.salt):
            fresh = there or Experience()  # somebody wanted it forgotten
            self.salt, self.everything, self.kinds = fresh.salt, fresh.everything, fresh.kinds
            now = _copy(fresh)
        elif there and there.salt == self.salt:
            there.everything = _sum(there.everything, self._saved.everything, now.everything)
            for kind, own in now.kinds.items():
                kept, before = there.kinds.pop(kind, None), self._saved.kinds.get(kind)
                # A kind begins with a copy of what all requests taught. Where two processes began
                # with it, that must not count twice.
                if kept and before and own:
                    there.kinds[kind] = _sum(kept, before, own)
                else:
                    there.kinds[kind] = kept or own
            while len(there.kinds) > MOST_KINDS:
                there.kinds.popitem(last=False)
        elif there:  # another process was the first to save
            there.everything = _sum(there.everything, self._saved.everything, now.everything)
            self.salt, self.kinds, now.kinds = there.salt, _copy(there).kinds, there.kinds
        self._came_from_file = True
        self._saved = now
        return there or now


def _copy(experience: Experience) -> Experience:
    copied = Experience(experience.salt)
    copied.everything = _copied(experience.everything)
    copied.kinds = OrderedDict(
        (kind, own and _copied(own)) for kind, own in [*experience.kinds.items()]
    )
    return copied


def _copied(corrections: Corrections) -> Corrections:
    return _sum(Corrections(), Corrections(), corrections)


def _sum(kept: Corrections, before: Corrections, now: Corrections) -> Corrections:
    """What is kept, and what was learned between two states of a process, tokens left out."""
    weights = {feature: weight for feature, weight, _ in kept}
    seen = {feature: times for feature, _, times in kept}
    for sign, corrections in ((1, now), (-1, before)):
        for feature, weight, times in corrections:
            if feature < TOKEN_FEATURES:
                weights[feature] = weights.get(feature, 0.0) + sign * weight
                seen[feature] = seen.get(feature, 0) + sign * times
    return Corrections(
        {f: min(max(weight, -_MOST_WEIGHT), _MOST_WEIGHT) for f, weight in weights.items()},
        {f: min(max(times, 0), MOST_SEEN) for f, times in seen.items()},
    )


def _text(experience: Experience) -> str:
    content = {
        "format": _EXPERIENCE_FORMAT,
        "salt": experience.salt.hex(),
        "everything": _figures(experience.everything),
        "kinds": {kind: own and _figures(own) for kind, own in experience.kinds.items()},
    }
    return json.dumps(content, separators=(",", ":"))


def _figures(corrections: Corrections) -> list[list[float]]:
    return [[feature, round(weight, 4), times] for feature, weight, times in corrections]


def _read_experience(path: Path) -> Experience:
    """What a file holds.

    Raises:
        OSError: it cannot be read.
        ValueError, RecursionError: it is not what it should be.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError("the file is too large")
    content: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != _EXPERIENCE_FORMAT:
        raise ValueError("not written by mlxspec")
    salt, kinds = bytes.fromhex(str(content.get("salt"))), content.get("kinds")
    if len(salt) != SALT_BYTES or not isinstance(kinds, Mapping) or len(kinds) > MOST_KINDS:
        raise ValueError("without its salt or kinds")
    experience = Experience(salt)
    experience.everything = _corrections(content.get("everything"))
    for kind, figures in kinds.items():
        experience.kinds[kind] = None if figures is None else _corrections(figures)
    return experience


def _corrections(figures: Any) -> Corrections:
    if not isinstance(figures, list):
        raise ValueError("corrections that are no list")
    weights, seen = {}, {}
    for feature, weight, times in _checked(figures):
        weights[feature], seen[feature] = float(weight), times
    return Corrections(weights, seen)


def _checked(figures: list[Any]) -> Iterator[Any]:
    for one in figures:
        match one:
            case [int(feature), int() | float() as weight, int(times)] if (
                0 <= feature < TOKEN_FEATURES
                and abs(weight) <= _MOST_WEIGHT  # false for a NaN, too
                and 0 <= times <= MOST_SEEN
            ):
                yield one
            case _:
                raise ValueError(f"an impossible correction: {one!r:.60}")


def kept_experience() -> list[Path]:
    """The files that are kept, the last written last."""
    found = []
    for path in experience_directory().glob("*.json"):
        with suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]
