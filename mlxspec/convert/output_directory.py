"""A directory that appears when it is complete, or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConversionError
from ..files import new_directory, recover_directory


@contextlib.contextmanager
def output_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield a directory beside ``target`` to fill; it takes ``target``'s place at the end.

    If the body raises, an interrupt included, it is removed and ``target`` stays as it was.
    With ``force`` an existing model is replaced only then. If an earlier process was killed, what
    it had finished is put at ``target``, and what it had not is removed.

    Args:
        target: where the model shall be.
        force: whether a model that is there may be replaced.

    Raises:
        ConversionError: ``target`` is in use, or cannot be written.
    """
    target = Path(os.path.abspath(target))
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        recover_directory(target)
        _check_target(target, force=force)
        with new_directory(target, replace=force) as partial:
            yield partial
    except BaseException as error:
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise ConversionError(_complaint(error, target)) from None
        raise


def _complaint(error: OSError, target: Path) -> str:
    """What cannot be written, or which file of the checkpoint cannot be read."""
    reason = error.strerror or error
    if isinstance(error.filename, str):
        file = Path(os.path.abspath(error.filename))
        unfinished = str(target.parent / f".{target.name[:50]}.")
        written = file.is_relative_to(target) or str(file).startswith(unfinished)
        if not written and not target.is_relative_to(file):
            return f"{error.filename}: cannot be read ({reason})"
    return f"{target}: cannot be written ({reason})"


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
