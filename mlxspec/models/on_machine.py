"""Models on this machine: what they are, and whether they can run as they are.

This module examines files and loads no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import LoadError
from .heads import NO_MODEL, named_kind
from .model_files import BESIDE, check_weights, local_path, read_config, read_json_object

_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class ModelFiles:
    """A model's files.

    Attributes:
        directory: the model's directory.
        nbytes: the size of all files.
        trouble: why the model cannot run as it is, and the remedy; "" if it can.
        architecture: the ``model_type`` of ``config.json``.
        weights: the type of the weights, such as "4 bits" or "bf16".
        weight_bytes: the size of the weights, with those of a trained head beside them.
        half_bytes: how many of these bytes are in half precision, which becomes float32 on the CPU.
    """

    directory: Path
    nbytes: int
    trouble: str = ""
    architecture: str = ""
    weights: str = ""
    weight_bytes: int = 0
    half_bytes: int = 0


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """The name and the directory of each model in the Hugging Face Hub's cache.

    If several revisions are cached, the directory is that of the one that the name alone loads.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for one in sorted(repositories, key=lambda one: one.repo_id.lower()):
        revisions = sorted(one.revisions, key=lambda own: ("main" in own.refs, own.last_modified))
        if one.repo_type == "model" and revisions:
            yield one.repo_id, revisions[-1].snapshot_path


def models_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """The name and the directory of each model in a folder: MODEL, or PUBLISHER/MODEL.

    The folder may also be a model's own. What cannot be read is left out.
    """
    if _is_model(folder):
        yield folder.resolve().name, folder
        return
    for path in _listed(folder):
        if _is_model(path):
            yield path.name, path
        else:
            for own in _listed(path):
                if _is_model(own):
                    yield f"{path.name}/{own.name}", own


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # a file, or without permission
        return []


def _is_model(path: Path) -> bool:
    with suppress(OSError):
        return (path / "config.json").is_file()
    return False


def lm_studio_folders() -> Iterator[Path]:
    """The folders in which LM Studio keeps models as PUBLISHER/MODEL."""
    for home in map(local_path, ("~/.lmstudio", "~/.cache/lm-studio")):
        folder = home / "models"
        with suppress(LoadError):
            chosen = read_json_object(home / "settings.json").get("downloadsFolder")
            folder = local_path(chosen) if isinstance(chosen, str) and chosen else folder
        if folder.is_dir():
            yield folder


def model_files(directory: Path) -> ModelFiles:
    """Examine a model's directory."""
    nbytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
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
        return ModelFiles(directory, nbytes, trouble)
    types: Counter[str] = Counter()
    for tensor in tensors:
        types[str(tensor.dtype).removeprefix("mlx.core.")] += tensor.nbytes
    half = types["float16"] + types["bfloat16"]
    weights = _in_words(config, types)
    beside = sum(path.stat().st_size for pattern in BESIDE for path in directory.glob(pattern))
    return ModelFiles(directory, nbytes, "", architecture, weights, types.total() + beside, half)


def _is_known(architecture: str) -> bool:
    """Whether mlx-lm has an architecture; imports mlx-lm only to look up other names."""
    found = find_spec("mlx_lm")
    places = found.submodule_search_locations if found else None
    if any((Path(place) / "models" / f"{architecture}.py").is_file() for place in places or ()):
        return True
    from mlx_lm.utils import MODEL_REMAPPING  # takes more than a second

    return architecture in MODEL_REMAPPING


def _in_words(config: dict[str, Any], types: Counter[str]) -> str:
    """The kind of quantisation, or the type of most weights."""
    quantized, foreign = config.get("quantization"), config.get("quantization_config")
    if isinstance(quantized, dict) and isinstance(quantized.get("bits"), int):
        mode = quantized.get("mode", "affine")
        return f"{quantized['bits']} bits" + (f", {mode}" if mode != "affine" else "")
    if isinstance(foreign, dict) and isinstance(foreign.get("quant_method"), str):
        return foreign["quant_method"][:20]
    most = max(types, key=lambda dtype: (types[dtype], dtype), default="")
    return _TYPES.get(most, most)
