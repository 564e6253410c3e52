"""A directory that appears when it is complete, or not at all."""

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConversionError


@contextlib.contextmanager
def output_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield a directory beside ``target`` to fill; it takes ``target``'s place at the end.

    If the body raises, an interrupt included, it is removed and ``target`` stays as it was.
    With ``force`` an existing model makes room only then. What earlier processes that were
    killed have left of their directories for ``target`` is removed.

    Args:
        target: where the model shall be.
        force: whether a model that is there may be replaced.

    Raises:
        ConversionError: ``target`` is in use, or cannot be written.
    """
    target = Path(os.path.abspath(target))
    _check_target(target, force=force)
    _remove_leftovers(target)
    token = secrets.token_hex(4)
    partial = target.parent / f".{target.name}.{token}.partial"
    replaced = target.parent / f".{target.name}.{token}.replaced"
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        with contextlib.ExitStack() as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                lock.enter_context(_locked(partial))
            yield partial
            if force and target.exists():
                target.rename(replaced)
            partial.rename(target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise ConversionError(_complaint(error, target, (partial, replaced))) from None
        raise
    finally:
        shutil.rmtree(replaced, ignore_errors=True)


def _complaint(error: OSError, target: Path, own: tuple[Path, ...]) -> str:
    """What cannot be written, or which file of the checkpoint cannot be read."""
    reason = error.strerror or error
    if isinstance(error.filename, str):
        file = Path(os.path.abspath(error.filename))
        written = any(file.is_relative_to(path) for path in (target, *own))
        if not written and not target.is_relative_to(file):
            return f"{error.filename}: cannot be read ({reason})"
    return f"{target}: cannot be written ({reason})"


def _remove_leftovers(target: Path) -> None:
    """Remove the directories that are still partial and whose process is gone."""
    hexadecimal = "[0-9a-f]" * 8
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.{hexadecimal}.partial"):
        with contextlib.suppress(OSError), _locked(leftover):
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends.

    Raises:
        OSError: another process holds it, or ``directory`` is none.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def check_outside(source: Path, target: Path) -> None:
    """Raise ConversionError if replacing ``target`` would remove the checkpoint that is read."""
    if source.resolve().is_relative_to(target.resolve()):
        raise ConversionError(f"{target}: holds the checkpoint itself; name another --mlx-path")


def _check_target(target: Path, *, force: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConversionError(
            f"{target}: exists and is a link or no directory; name another --mlx-path"
        )
    if Path.cwd().is_relative_to(target):
        raise ConversionError(
            f"{target}: is the working directory or above it; name a directory inside it"
        )
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise ConversionError(
            f"{target}: exists and is not empty; name another --mlx-path or add --force"
        )
    if not (target / "config.json").is_file():
        raise ConversionError(f"{target}: holds no model, and --force replaces nothing else")
