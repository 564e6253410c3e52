"""Takes trained heads out of checkpoints, or from folders of their own, for conversion."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from ..models.heads import Head
from ..models.heads.chains import QwenMTP, norms_centred_at_zero
from ..models.heads.loading import CONVERTED, NAMES, find_head, head_directory, load_lazily
from .hugging_face import check_revision


def open_head(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """The directory with a head, downloaded from the Hub unless it is local.

    Raises:
        ConversionError: ``revision`` is given for a directory.
        LoadError: no directory or repository has this name, or the download fails.
    """
    check_revision(path_or_repo, revision)
    return head_directory(path_or_repo, revision)


def load_head_alone(directory: Path) -> tuple[Head, dict[str, Any], str]:
    """Load a head with unevaluated weights.

    Args:
        directory: a head's folder, or that of a model which carries one.

    Returns:
        the head, its configuration, and in words its kind and which of its norms were changed:
        a checkpoint's norms may be centred at zero, and those that the head applies are not.

    Raises:
        LoadError: there is no head of a kind that is supported, or a file is damaged.
    """
    found = find_head(directory)
    head, tensors = load_lazily(found)
    config = dict(found.config)
    if not any(name.endswith(".scales") for name in tensors):  # in a model that is quantised
        config.pop("quantization", None)
    told = NAMES[found.kind]
    if found.kind is QwenMTP and not config.get(CONVERTED):
        told += f", {_norms(tensors)}"
    return head, {**config, CONVERTED: True}, told


def _norms(tensors: dict[str, mx.array]) -> str:
    """What :meth:`QwenMTP.sanitize` does to the norms of a checkpoint with these tensors."""
    norms = sum("norm" in name and array.ndim == 1 for name, array in tensors.items())
    centred = len(norms_centred_at_zero(tensors))
    told = (
        f"{centred} centred at zero, 1.0 added" if centred else "",
        f"{norms - centred} as they are" if norms > centred else "",
    )
    return f"norms: {'; '.join(filter(None, told))}"
