"""Writing files and directories: whole or not at all, and over nothing that is not to be lost.

What is new is written beside its place, under a name that nobody can guess and that no link
leads to, and takes the place in one step once it is complete. Only a regular file is ever
replaced: no link is followed, and no device, pipe or socket written to.

A process that is killed leaves what it was writing. It holds a lock on that while it lives, so
the next one that writes in the same place knows what nobody is writing any more, and removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .errors import MlxspecError

PRIVATE = 0o600
"""The mode of files that hold prompts or outputs: for their owner alone."""
SHARED = 0o644

_PATIENCE = 30.0  # seconds to wait for another writer
_POLL = 0.02
_LONGEST_NAME = 200  # bytes of a name that are repeated in a temporary one; 255 is the limit
_REFUSED = {
    stat.S_IFDIR: "is a directory; name a file",
    stat.S_IFLNK: "is a symbolic link; name the file that it leads to",
    stat.S_IFIFO: "is a pipe; name a regular file",
    stat.S_IFSOCK: "is a socket; name a regular file",
    stat.S_IFCHR: "is a device; name a regular file",
    stat.S_IFBLK: "is a device; name a regular file",
}


def check_writable(path: Path, error: type[MlxspecError]) -> None:
    """Find out before the work for it begins that a file cannot be written.

    Args:
        path: of the file; it may be there already.
        error: the class of the error.

    Raises:
        error: there is no such directory, or no permission to write there, or what stands at
            ``path`` is no regular file.
    """
    with _os_errors_as(error, path):
        status = _status(path)
    if status is not None:
        _check_regular(path, status, error)
    if not path.parent.is_dir():
        raise error(f"{path}: cannot be written (there is no directory {path.parent}); make it")
    may_write = os.access(path.parent, os.W_OK | os.X_OK)
    if not may_write or (status is not None and not os.access(path, os.W_OK)):
        raise error(f"{path}: cannot be written (no permission); name a file of yours")


@contextmanager
def replaced(path: Path, error: type[MlxspecError], mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of ``path`` at the end, on the disk by then.

    If the body raises, an interrupt included, it is removed and ``path`` stays as it was.

    Args:
        path: the file to write; whatever regular file is there is replaced.
        error: the class of errors.
        mode: the new file's permissions, of which the process's umask takes some away.

    Raises:
        error: ``path`` cannot be written, or the disk is full.
    """
    check_writable(path, error)
    with _os_errors_as(error, path):
        _remove_leftovers(path)
        partial, descriptor = _new_file(path, mode)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if (status := _status(path)) is not None:
                    _check_regular(path, status, error)
                os.replace(partial, path)  # while it is locked: nobody takes it for a leftover
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    with contextlib.suppress(OSError):  # where this cannot be, it is done soon anyway
        _synchronize(path.parent)


@contextmanager
def sole_writer(path: Path, error: type[MlxspecError], *, create: bool) -> Iterator[None]:
    """Keep other writers of a file away while the body runs.

    The lock is an advisory one (flock) on the file itself, so nothing else lies about. Whoever
    replaces the file holds the lock of the old one; those who waited for it notice and wait for
    the new one. So the body's last act is to replace the file: then others may go on.

    Args:
        path: the file.
        error: the class of errors.
        create: make an empty file if there is none. If it is still empty at the end, it goes.

    Raises:
        error: there is no such file, it cannot be written, or another process does not finish
            writing it.
    """
    with _os_errors_as(error, path):
        descriptor = _locked_file(path, create, error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if create and _is_at(descriptor, path) and os.fstat(descriptor).st_size == 0:
                os.unlink(path)
        os.close(descriptor)


@contextmanager
def new_directory(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a new directory beside ``path``; it takes the place of ``path`` at the end.

    If the body raises, an interrupt included, it is removed and ``path`` stays as it was. A
    directory that is replaced changes places with the new one, in one step where the system can,
    and is removed. Where it cannot, a process killed between the steps leaves both beside
    ``path`` and none there: :func:`recover_directory` puts the new one there.

    Args:
        path: where the directory shall be.
        replace: replace a directory that is there, even if it is not empty.

    Raises:
        OSError: it cannot be written.
    """
    partial = _temporary(path)
    try:
        partial.mkdir(parents=True)
        with contextlib.ExitStack() as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                lock.enter_context(_locked_directory(partial))
            yield partial
            if replace and path.is_dir() and not path.is_symlink():
                for file in partial.rglob("*"):
                    _synchronize(file)  # before what it replaces is gone
                _exchange(partial, path)
            else:
                partial.rename(path)
    finally:
        # The new one if it has not taken the place, the old one if it has.
        shutil.rmtree(partial, ignore_errors=True)


def recover_directory(path: Path) -> None:
    """Finish what a process that was killed has begun to do at ``path``, and tidy up after it.

    Raises:
        OSError: it cannot be done.
    """
    for old in _beside(path, "replaced"):
        new = old.with_suffix(".partial")  # complete, or the old one would be in its place
        if new.is_dir() and not path.exists():
            with contextlib.suppress(OSError), _locked_directory(new):
                new.rename(path)
        if path.exists():
            old.rename(_temporary(path))  # what is called replaced is whole; this will not be
        elif not new.exists():
            old.rename(path)
    _remove_leftovers(path)


def _exchange(new: Path, old: Path) -> None:
    """Let two directories change places."""
    try:
        _exchange_at_once(new, old)
    except (OSError, AttributeError):  # an older system, or a file system that cannot
        aside = new.with_suffix(".replaced")
        try:
            old.rename(aside)
            new.rename(old)
        except BaseException:
            with contextlib.suppress(OSError):  # which it is if the new one is there
                aside.rename(old)
            raise
        with contextlib.suppress(OSError):  # somebody who recovers may have been faster
            aside.rename(new)


def _exchange_at_once(first: Path, second: Path) -> None:
    """Let two directories change places in one step.

    Raises:
        OSError, AttributeError: the file system or the system cannot.
    """
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin":
        failed = library.renamex_np(*names, ctypes.c_uint(2))  # RENAME_SWAP
    else:
        here = ctypes.c_int(-100)  # AT_FDCWD
        exchange = ctypes.c_uint(2)  # RENAME_EXCHANGE
        failed = library.renameat2(here, names[0], here, names[1], exchange)
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(second))


def _temporary(path: Path) -> Path:
    name = os.fsdecode(os.fsencode(path.name)[:_LONGEST_NAME])
    return path.parent / f".{name}.{secrets.token_hex(8)}.partial"


def _beside(path: Path, kind: str) -> list[Path]:
    """What writers of ``path`` have called their own; links and other people's left out."""
    name = os.fsdecode(os.fsencode(path.name)[:_LONGEST_NAME])
    pattern = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.{kind}")
    found = []
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                status = entry.stat(follow_symlinks=False)
                ours = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
                if ours and status.st_uid == os.geteuid():
                    found.append(path.parent / entry.name)
    return found


def _remove_leftovers(path: Path) -> None:
    """Remove what was written for ``path`` by processes that are gone."""
    for leftover in _beside(path, "partial"):
        with contextlib.suppress(OSError):
            if leftover.is_dir():
                with _locked_directory(leftover):
                    shutil.rmtree(leftover, ignore_errors=True)
            else:
                descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(leftover)
                finally:
                    os.close(descriptor)


def _new_file(path: Path, mode: int) -> tuple[Path, int]:
    """A new file beside ``path``, open and locked."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        partial = _temporary(path)
        descriptor = -1
        try:
            descriptor = os.open(partial, flags, mode)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Before it was locked, somebody may have taken it for a leftover.
            if _is_at(descriptor, partial):
                return partial, descriptor
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        os.close(descriptor)


def _locked_file(path: Path, create: bool, error: type[MlxspecError]) -> int:
    """An open descriptor of the file that is at ``path``, locked."""
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    flags |= os.O_CREAT if create else 0
    deadline = time.monotonic() + _PATIENCE
    while True:
        if (status := _status(path)) is not None:
            _check_regular(path, status, error)
        descriptor = os.open(path, flags, PRIVATE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise error(
                    f"{path}: another process has been writing it for {_PATIENCE:.0f} seconds; "
                    "end that process, or try again later"
                ) from None
            time.sleep(_POLL)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def _locked_directory(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends.

    Raises:
        OSError: another process holds it, or ``path`` is no directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _status(path: Path) -> os.stat_result | None:
    """What stands at ``path`` itself, be it a link; None where nothing does."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
    except ValueError as error:  # a zero byte
        raise OSError(error) from error


def _check_regular(path: Path, status: os.stat_result, error: type[MlxspecError]) -> None:
    if not stat.S_ISREG(status.st_mode):
        refusal = _REFUSED.get(stat.S_IFMT(status.st_mode), "is no file; name a regular file")
        raise error(f"{path}: {refusal}")


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file has not been moved away from ``path`` or replaced there."""
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
        raise error(
            f"{path}: cannot be written ({reason}); name a file in a directory with room"
        ) from failure
