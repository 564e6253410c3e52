"""Finds the models on this machine, and checks, without loading them, whether they can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from ..errors import LoadError
from .heads import NO_MODEL, named_kind
from .model_files import BESIDE, check_weights, local_path, read_config, read_json_object


@dataclass(frozen=True)
class ModelFiles:
    """A model's files.

    Attributes:
        nbytes: the size of all files.
        trouble: why the model cannot run as it is, and the remedy; "" if it can.
        architecture: the ``model_type`` in ``config.json``.
        weights: the type of the weights, such as "4 bits" or "bfloat16".
        memory_bytes: the memory for the weights, including those of a trained head. On the CPU,
            half precision becomes float32.
    """

    nbytes: int
    trouble: str = ""
    architecture: str = ""
    weights: str = ""
    memory_bytes: int = 0


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """The name and the directory of each model in the Hugging Face Hub's cache.

    If several revisions are cached, the directory is that of the one that the name loads.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repositories, key=lambda repo: repo.repo_id.lower()):
        revisions = sorted(
            repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified)
        )
        if repo.repo_type == "model" and revisions:
            yield repo.repo_id, revisions[-1].snapshot_path


def models_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """The name and the directory of each model in a folder.

    A name is the path within the folder: MODEL or PUBLISHER/MODEL. The folder itself may also be a
    model.
    """
    if (folder / "config.json").is_file():
        yield folder.resolve().name, folder
        return
    for pattern in ("*/config.json", "*/*/config.json"):
        for config in sorted(folder.glob(pattern)):
            directory = config.parent
            if not (directory.parent / "config.json").is_file():  # otherwise it is part of a model
                yield directory.relative_to(folder).as_posix(), directory


def lm_studio_folder() -> Path:
    """The folder in which LM Studio keeps models as PUBLISHER/MODEL."""
    home = local_path("~/.lmstudio")
    with suppress(LoadError):
        chosen = read_json_object(home / "settings.json").get("downloadsFolder")
        if isinstance(chosen, str) and chosen:
            return local_path(chosen)
    return home / "models"


def model_files(directory: Path) -> ModelFiles:
    """What a model's directory contains, and whether the model can run."""
    nbytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    import mlx.core as mx

    try:
        config = read_config(directory)
        if named_kind(config):
            raise LoadError(NO_MODEL)
        tensors = check_weights(directory)
        architecture = config.get("model_type")
        if not isinstance(architecture, str) or not _is_known(architecture):
            raise LoadError(f"mlx-lm does not know its architecture, {architecture!r}")
    except LoadError as error:
        trouble = str(error).removeprefix(str(directory)).lstrip("/: ")
        return ModelFiles(nbytes, trouble)
    types: Counter[str] = Counter()
    for tensor in tensors:
        types[str(tensor.dtype).removeprefix("mlx.core.")] += tensor.nbytes
    memory = types.total()
    if mx.default_device().type == mx.cpu:
        memory += types["float16"] + types["bfloat16"]
    memory += sum(path.stat().st_size for pattern in BESIDE for path in directory.glob(pattern))
    return ModelFiles(nbytes, "", architecture, _in_words(config, types), memory)


def _is_known(architecture: str) -> bool:
    """Whether mlx-lm supports an architecture, under this name or an alias."""
    import mlx_lm.models  # takes a second
    from mlx_lm.utils import MODEL_REMAPPING

    known = {module.name for module in iter_modules(mlx_lm.models.__path__)}
    return MODEL_REMAPPING.get(architecture, architecture) in known


def _in_words(config: dict[str, Any], types: Counter[str]) -> str:
    """The number of bits of quantised weights, or the type of most weights, as text."""
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and "bits" in quantization:
        return f"{quantization['bits']} bits"
    return max(types, key=lambda dtype: (types[dtype], dtype), default="")
