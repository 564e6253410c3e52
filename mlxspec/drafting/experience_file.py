"""What generations teach, on disk: one small JSON file per model, which holds no text."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import MlxspecError
from ..files import replaced, sole_writer
from .cost_file import Identity, cache_directory, warn_of_unkept
from .experience import MOST_KINDS, MOST_SEEN, SALT_BYTES, Corrections, Experience
from .p_accept import TOKEN_FEATURES

_log = logging.getLogger(__name__)

_FORMAT = "mlxspec experience"
_VERSION = 1
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
    identity = json.dumps([_VERSION, TOKEN_FEATURES, model], sort_keys=True).encode()
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
            kept = _read(path)
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
            there = _read(self._path)
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
        "format": _FORMAT,
        "salt": experience.salt.hex(),
        "everything": _figures(experience.everything),
        "kinds": {kind: own and _figures(own) for kind, own in experience.kinds.items()},
    }
    return json.dumps(content, separators=(",", ":"))


def _figures(corrections: Corrections) -> list[list[float]]:
    return [[feature, round(weight, 4), times] for feature, weight, times in corrections]


def _read(path: Path) -> Experience:
    """What a file holds.

    Raises:
        OSError: it cannot be read.
        ValueError, RecursionError: it is not what it should be.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError("the file is too large")
    content: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
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
