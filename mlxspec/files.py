"""Atomic writes of files and directories.

New content is written to a temporary file next to its target. Once it is complete, it replaces the
target in one step. Only regular files are ever replaced: links are not followed, and devices, pipes
and sockets are not written to.

The temporary file's name is derived from the target's, so a file that a killed process left behind
is overwritten by the next one. A lock lets only one process write it at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from .errors import FileError

PRIVATE = 0o600
"""The mode of files that hold prompts or outputs: only their owner may read them."""
SHARED = 0o644


def directory_in(variable: str) -> Path | None:
    """The directory that an environment variable names; None if it is not set."""
    directory = os.environ.get(variable)
    return Path(os.path.expanduser(directory)) if directory else None


_OTHER_FILE = "name another file"


def check_writable(path: Path, remedy: str = _OTHER_FILE) -> None:
    """Raise an error if a file cannot be written, before any work is done for it.

    Args:
        path: the file to write.
        remedy: what the user can do, for the error.

    Raises:
        FileError: the directory is missing, there is no permission to write, or ``path`` is
            something other than a regular file.
    """
    exists = os.path.lexists(path)
    if exists and (path.is_symlink() or not os.path.isfile(path)):
        raise FileError(f"{path}: is a directory, a link or a device; name a regular file")
    if not os.path.isdir(path.parent):
        raise FileError(
            f"{path}: cannot be written (there is no directory {path.parent}); create it"
        )
    may_write = os.access(path.parent, os.W_OK | os.X_OK)
    if not may_write or (exists and not os.access(path, os.W_OK)):
        read_only = os.statvfs(path.parent).f_flag & os.ST_RDONLY
        reason = os.strerror(errno.EROFS if read_only else errno.EACCES)
        raise FileError(f"{path}: cannot be written ({reason}); {remedy}")


def is_ours_alone(path: Path) -> bool:
    """Whether this user owns a file or directory and no other user may write to it.

    Symbolic links are followed.

    Raises:
        OSError: it does not exist.
    """
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextmanager
def replaced(
    path: Path, mode: int = PRIVATE, *, parents: int | None = None, remedy: str = _OTHER_FILE
) -> Iterator[BinaryIO]:
    """Yield a new file, which is flushed to the disk at the end and then replaces ``path``.

    If the ``with`` block raises or is interrupted, the new file is removed and ``path`` is
    unchanged. No other process replaces ``path`` during the block, so the block may read the old
    content.

    Args:
        path: the file to write; an existing regular file is replaced.
        mode: the new file's permissions; the process's umask applies.
        parents: make the directories that are missing, with these permissions.
        remedy: what the user can do if ``path`` cannot be written, for the error.

    Raises:
        FileError: ``path`` cannot be written, or the disk is full.
    """
    if parents is not None:
        with _one_line(path, remedy):
            path.parent.mkdir(mode=parents, parents=True, exist_ok=True)
    check_writable(path, remedy)
    partial = _beside(path, "partial")
    with _one_line(path, remedy), _locked(path.parent):
        partial.unlink(missing_ok=True)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(partial, flags, mode), "r+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def new_directory(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a new directory next to ``path``, which is moved to ``path`` at the end.

    If the ``with`` block raises or is interrupted, the new directory is removed and ``path`` is
    unchanged.

    Args:
        replace: replace an existing directory, even if it is not empty.

    Raises:
        FileError: the directory cannot be written, or another process is writing it.
    """
    partial, old = _beside(path, "partial"), _beside(path, "replaced")
    with ExitStack() as stack, _one_line(path, "name another directory"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _locked(path.parent):
                if partial.exists():
                    with _locked(partial, wait=False):  # fails while its writer lives
                        shutil.rmtree(partial)
                partial.mkdir()
                stack.enter_context(_locked(partial, wait=False))
        except BlockingIOError as error:
            raise FileError(
                f"{path}: another process is writing it; wait for it, or name another directory"
            ) from error
        if old.exists() and not path.exists():
            old.rename(path)  # the process was killed between the two renames below
        shutil.rmtree(old, ignore_errors=True)
        try:
            yield partial
            with _locked(path.parent):
                if replace and path.exists():
                    path.rename(old)
                partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


@contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a directory's lock, once no other thread or process holds it.

    Raises:
        BlockingIOError: another one holds it, and ``wait`` is False.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _one_line(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        reason = failure.strerror or failure
        raise FileError(f"{path}: cannot be written ({reason}); {remedy}") from failure
