"""What has to hold of a model's directory before mlx-lm and transformers read it."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..errors import LoadError

if TYPE_CHECKING:
    import mlx.nn as nn

_COUNTS_LAYERS = re.compile(r"(^|_)(n|num)_(\w+_)?layers?$")  # and not vocab_size_per_layer_input
_MOST_LAYERS = 1000  # that a model may have with fewer tensors than layers


def local_path(name: str | os.PathLike[str]) -> Path:
    """A name as a path, with ``~`` for a home directory where there is such a user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # of somebody who has none
        return Path(name)


def check_readable(directory: Path) -> None:
    """Refuse a directory with pipes, sockets or devices in it: reading one could wait for ever.

    Raises:
        LoadError: which one, or MLX takes no name like the directory's.
    """
    check_name(directory)
    with suppress(OSError):  # what cannot be listed is told by what reads it
        for path in sorted(directory.iterdir()):
            if path.exists() and not path.is_file() and not path.is_dir():
                raise LoadError(f"{path}: no regular file; remove it, or replace it by one")


def check_name(path: Path) -> None:
    """Refuse a name that is not UTF-8: MLX and the tokenizers open no such file.

    Raises:
        LoadError: it is not.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise LoadError(f"{path}: a name that is not UTF-8 text; rename it") from None


def check_layers(settings: object, tensors: int) -> None:
    """Refuse more layers than there is a tensor for, each of which would be built.

    Args:
        settings: of ``config.json``, or a part of them.
        tensors: how many the weights have.

    Raises:
        ValueError: there are too many.
    """
    if not isinstance(settings, dict):
        return
    for key, value in settings.items():
        counts = _COUNTS_LAYERS.search(str(key))
        if counts and isinstance(value, int) and value > max(_MOST_LAYERS, tensors):
            raise ValueError(f"{key} is {value}, and the weights have {tensors} tensors")
        check_layers(value, tensors)


def load_mlx_lm_model(directory: Path, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """What mlx-lm makes of a directory, whatever it raises; the weights are not evaluated yet."""
    from mlx_lm.utils import load_model

    with _without_patterns(directory) as place:
        return load_model(place, lazy=True, model_config=changes)


@contextmanager
def _without_patterns(directory: Path) -> Iterator[Path]:
    """The directory under a name that means itself where mlx-lm takes names for patterns.

    What was opened below it stays open afterwards.
    """
    if glob.escape(str(directory)) == str(directory):
        yield directory
        return
    with TemporaryDirectory() as place:
        link = Path(place) / "model"
        link.symlink_to(directory.absolute(), target_is_directory=True)
        yield link
