"""Files of what can be measured or learned again: JSON with a digest, in the user's cache."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from .errors import MlxspecError
from .files import directory_in, replaced

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


def file_name(key: Any) -> str:
    """The name of the file for a key, which consists of JSON values."""
    text = json.dumps(key, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


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
            raise ValueError("the digest does not match")
        return read(file["content"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
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
    dated = []
    for path in directory.glob("*.json"):
        with suppress(OSError):
            dated.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(dated)]
