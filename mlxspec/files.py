"""Atomic writes of files and directories.

New content is written to a temporary file next to its target, under an unguessable name. Once it is
complete, it replaces the target in one step. Only regular files are ever replaced: links are not
followed, and devices, pipes and sockets are not written to.

A killed process leaves its temporary file behind. Each process locks its temporary files while it
runs, so the next writer of the same target recognises abandoned ones and removes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .errors import MlxspecError, OptionError

PRIVATE = 0o600
"""The mode of files that hold prompts or outputs: only their owner may read them."""
SHARED = 0o644

_PATIENCE = 30.0  # seconds to wait for another writer
_POLL = 0.02
_MAX_NAME_BYTES = 200  # of a file's name within its temporary name; file systems allow 255


def directory_in(variable: str) -> Path | None:
    """The directory that an environment variable names; None if it is not set.

    Raises:
        OptionError: it names the home directory of an unknown user.
    """
    named = os.environ.get(variable)
    try:
        return Path(named).expanduser() if named else None
    except RuntimeError:
        raise OptionError(
            f"{variable} is {named!r}, but that user has no known home directory; name another "
            "directory"
        ) from None


def check_writable(path: Path, error: type[MlxspecError]) -> None:
    """Raise an error if a file cannot be written, before any work is done for it.

    Args:
        path: the file, which may exist.
        error: the class of the error to raise.

    Raises:
        error: the directory is missing, there is no permission to write, or ``path`` is
            something other than a regular file.
    """
    with _os_errors_as(error, path):
        exists = _check_regular(path, error)
    if not path.parent.is_dir():
        raise error(f"{path}: cannot be written (there is no directory {path.parent}); create it")
    may_write = os.access(path.parent, os.W_OK | os.X_OK)
    if not may_write or (exists and not os.access(path, os.W_OK)):
        raise error(f"{path}: cannot be written (no permission); name another file")


def is_ours_alone(path: Path) -> bool:
    """Whether this user owns a file or directory and no other user may write to it.

    Symbolic links are followed.

    Raises:
        OSError: it does not exist.
    """
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextmanager
def replaced(path: Path, error: type[MlxspecError], mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """Yield a new file that is flushed to the disk at the end, and then replaces ``path``.

    If the body raises or is interrupted, the new file is removed and ``path`` is unchanged.

    Args:
        path: the file to write; an existing regular file is replaced.
        error: the class of the error to raise.
        mode: the new file's permissions; the process's umask applies.

    Raises:
        error: ``path`` cannot be written, or the disk is full.
    """
    check_writable(path, error)
    partial = _temporary(path)
    with _os_errors_as(error, path):
        remove_leftovers(path)
        try:
            with _new_file(partial, mode) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                _check_regular(path, error)
                os.replace(partial, path)  # still locked, so not taken for a leftover
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
    with suppress(OSError):  # some file systems cannot sync a directory
        _synchronize(path.parent)


@contextmanager
def sole_writer(path: Path, error: type[MlxspecError], *, create: bool) -> Iterator[None]:
    """Keep other processes from writing a file while the body runs.

    It takes an advisory lock (flock) on the file itself, without a lock file. A process that
    replaces the file still holds the lock of the old one. Waiting processes notice this, and then
    wait for the new file. So replace the file last: from then on others may write.

    Args:
        path: the file.
        error: the class of the error to raise.
        create: create an empty file if it is missing; remove it if still empty at the end.

    Raises:
        error: the file is missing or cannot be written, or another process does not finish
            writing it.
    """
    with _os_errors_as(error, path):
        locked = _wait_for_lock(path, create, error)
    with locked:
        try:
            yield
        finally:
            with suppress(OSError):
                if (
                    create
                    and _is_at(locked.fileno(), path)
                    and os.fstat(locked.fileno()).st_size == 0
                ):
                    path.unlink()


@contextmanager
def new_directory(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a new directory next to ``path`` that replaces ``path`` at the end.

    If the body raises or is interrupted, the new directory is removed and ``path`` is unchanged. An
    existing directory is first moved aside. If the process is killed right then,
    :func:`recover_directory` moves it back.

    Args:
        path: where to put the directory.
        replace: replace an existing directory, even if it is not empty.

    Raises:
        OSError: it cannot be written.
    """
    partial = _temporary(path)
    try:
        partial.mkdir(parents=True)
        with ExitStack() as lock:
            with suppress(OSError):  # a file system without locks
                lock.enter_context(_locked(partial))
            yield partial
            if replace and path.is_dir() and not path.is_symlink():
                for file in partial.rglob("*"):
                    _synchronize(file)  # before the old one is gone
                aside = partial.with_suffix(".replaced")
                try:
                    path.rename(aside)
                    partial.rename(path)
                except BaseException:
                    with suppress(OSError):  # fails if the new one is in place
                        aside.rename(path)
                    raise
                with suppress(OSError):  # another process may have removed it already
                    aside.rename(partial)
            else:
                partial.rename(path)
    finally:
        # By now this is the old directory, or the new one if it could not replace the old.
        shutil.rmtree(partial, ignore_errors=True)


def recover_directory(path: Path) -> None:
    """Move back a directory that a killed process had moved aside, and remove leftovers.

    Raises:
        OSError: it cannot be moved.
    """
    for old in _beside(path, "replaced"):
        # A "replaced" directory must be whole, so rename it before removing it.
        old.rename(_temporary(path) if path.exists() else path)
    remove_leftovers(path)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that dead processes left next to ``path``."""
    for leftover in _beside(path, "partial"):
        with suppress(OSError), _locked(leftover):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()


def _temporary(path: Path) -> Path:
    return path.parent / f".{_short_name(path)}.{secrets.token_hex(8)}.partial"


def _short_name(path: Path) -> str:
    return os.fsdecode(os.fsencode(path.name)[:_MAX_NAME_BYTES])


def _beside(path: Path, kind: str) -> list[Path]:
    """This user's temporary files and directories for ``path``."""
    pattern = re.compile(rf"\.{re.escape(_short_name(path))}\.[0-9a-f]{{16}}\.{kind}")
    found = []
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name) and not entry.is_symlink():
                is_ours = entry.is_file() or entry.is_dir()
                if is_ours and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    found.append(path.parent / entry.name)
    return found


def _new_file(path: Path, mode: int) -> BinaryIO:
    """Create a file under a temporary name, and lock it."""
    while True:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        # Before it was locked, another process may have taken it for a leftover.
        if _is_at(file.fileno(), path):
            return file
        file.close()


def _wait_for_lock(path: Path, create: bool, error: type[MlxspecError]) -> BinaryIO:
    """Open and lock the file at ``path``, after waiting for other writers."""
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    deadline = time.monotonic() + _PATIENCE
    while True:
        _check_regular(path, error)
        file = os.fdopen(os.open(path, flags, PRIVATE), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file.fileno(), path):
                return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise error(
                    f"{path}: another process has been writing it for {_PATIENCE:.0f} seconds; "
                    "end that process, or try again later"
                ) from None
            time.sleep(_POLL)
        file.close()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file or directory; the system releases it when the process ends.

    Raises:
        OSError: another process holds the lock, or ``path`` no longer leads to the file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # In the meantime another process may have removed it, and its owner made a new one.
        if not _is_at(descriptor, path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        os.close(descriptor)


def _check_regular(path: Path, error: type[MlxspecError]) -> bool:
    """Return whether a file exists; raise an error if it is not a regular one."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    except ValueError as failure:  # a zero byte in the name
        raise OSError(failure) from failure
    if not stat.S_ISREG(mode):
        raise error(f"{path}: is a directory, a link or a device; name a regular file")
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether ``path`` still leads to the open file: it was neither moved nor replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _synchronize(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _os_errors_as(error: type[MlxspecError], path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        reason = failure.strerror or failure
        raise error(f"{path}: cannot be written ({reason}); name another file") from failure
