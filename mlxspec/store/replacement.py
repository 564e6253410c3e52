"""Replacing a file that other processes read and replace at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import StoreError

_PATIENCE = 30.0  # seconds to wait for another writer
_POLL = 0.02


@contextmanager
def sole_writer(path: Path, *, create: bool) -> Iterator[None]:
    """Keep other writers of the file away while the body runs.

    The lock is an advisory one (flock) on the file itself, so nothing else lies about. Whoever
    replaces the file holds the lock of the old one; those who waited for it notice and wait for
    the new one. So the body's last act is to replace the file: then others may go on.

    Args:
        path: the file; symbolic links resolved.
        create: make an empty file if there is none. If it is still empty at the end, it goes.

    Raises:
        StoreError: there is no such file, it cannot be written, or another process does not
            finish writing it.
    """
    try:
        descriptor = _lock(path, create)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if create and _is_at(descriptor, path) and os.fstat(descriptor).st_size == 0:
                os.unlink(path)
        os.close(descriptor)


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Yield a file, readable by its owner alone, that takes the place of ``path`` at the end.

    It is on the disk before it is moved there. If the body raises, an interrupt included, it is
    removed and ``path`` stays as it was. What a killed process has left is removed as well, so
    the caller must be the :func:`sole_writer`.

    Raises:
        StoreError: the disk is full, or the directory cannot be written.
    """
    partial = None
    try:
        _remove_leftovers(path)
        descriptor, partial = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".partial", dir=path.parent
        )
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        if partial is not None:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        if isinstance(error, OSError):
            raise StoreError(f"{path}: cannot be written ({error.strerror or error})") from error
        raise
    _sync_directory(path.parent)


def _remove_leftovers(path: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}\.partial")
    for entry in path.parent.iterdir():
        if pattern.fullmatch(entry.name):
            entry.unlink(missing_ok=True)


def _lock(path: Path, create: bool) -> int:
    """An open descriptor of the file that is at ``path``, locked."""
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    deadline = time.monotonic() + _PATIENCE
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise StoreError(
                    f"{path}: another process has been writing it for {_PATIENCE:.0f} seconds; "
                    "end that process, or try again later"
                ) from None
            time.sleep(_POLL)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file has not been moved away from ``path`` or replaced there."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sync_directory(directory: Path) -> None:
    """Make a rename last; where a directory cannot be synchronised it is done soon anyway."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
