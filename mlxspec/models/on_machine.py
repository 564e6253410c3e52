"""Models whose files are on this machine: what they are, and whether they can be run as they are.

Files are looked at, and no model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import LoadError
from .model_files import check_safetensors, instead_of_files, listed_weights, read_json_object

_HALF = ("F16", "BF16")
_TYPES = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}
_REST = "the rest is downloaded when it is first named"


@dataclass(frozen=True)
class ModelFiles:
    """A model's files.

    Attributes:
        directory: where they are.
        architecture: the ``model_type`` of ``config.json``; "" without one.
        weights: how they are written, in words: "4 bits", "bf16".
        nbytes: the size of all files.
        weight_bytes: the size of the weights.
        half_bytes: how much of that is in half precision, which becomes float32 on the CPU.
        trouble: why it cannot be run as it is, and what helps; "" where it can.
    """

    directory: Path
    architecture: str = ""
    weights: str = ""
    nbytes: int = 0
    weight_bytes: int = 0
    half_bytes: int = 0
    trouble: str = ""


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """Name and directory of each model's repository in the cache of the Hugging Face Hub.

    Of several revisions it is the one that is taken when the name alone is given.
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


def model_files(directory: Path) -> ModelFiles:
    """Look at a model's directory."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    names = {path.relative_to(directory).as_posix() for path in files}
    nbytes = sum(path.stat().st_size for path in files)
    if "config.json" not in names:
        return ModelFiles(directory, nbytes=nbytes, trouble=_other_kind(directory, names))
    try:
        config = read_json_object(directory / "config.json")
    except LoadError:
        trouble = "its config.json is damaged; fetch it again"
        return ModelFiles(directory, nbytes=nbytes, trouble=trouble)
    architecture = str(config.get("model_type") or "")
    weights = sorted(directory.glob("model*.safetensors"))
    trouble = (
        _other_kind(directory, names)
        if not weights
        else _missing_part(directory, names) or _unsupported(config, architecture)
    )
    types: dict[str, int] = {}
    try:
        for path in weights:
            for dtype, size in check_safetensors(path).values():
                types[dtype] = types.get(dtype, 0) + size
    except (OSError, SafetensorError):
        trouble = trouble or "its weights are cut short or damaged; fetch them again"
    size = sum(types.values())
    return ModelFiles(
        directory,
        architecture,
        _in_words(config, types),
        nbytes,
        size,
        sum(types.get(dtype, 0) for dtype in _HALF),
        trouble,
    )


def _other_kind(directory: Path, names: set[str]) -> str:
    """What a directory without weights of MLX's is, and what helps."""
    if any(name.endswith(".gguf") for name in names):
        return "GGUF, for llama.cpp; convert the model that it was made of: mlxspec convert MODEL"
    if problem := instead_of_files(names, directory.name):
        return problem
    if "config.json" in names or any(name.startswith("tokenizer") for name in names):
        return f"its weights are not here; {_REST}"
    return "not a language model: no config.json and no weights"


def _missing_part(directory: Path, names: set[str]) -> str:
    try:
        listed = listed_weights(directory)
    except LoadError:
        return "its model.safetensors.index.json is damaged; fetch it again"
    missing = len(listed - names)
    return f"{missing} of {len(listed)} files of weights are not here; {_REST}" if missing else ""


def _unsupported(config: dict[str, Any], architecture: str) -> str:
    if config.get("model_file") is not None:
        return "it needs Python code from its repository, which is never run here"
    if not architecture:
        return "not a language model: its config.json names no model_type"
    if not _is_known(architecture):
        return f"mlx-lm has no architecture {json.dumps(architecture)}"
    return ""


def _is_known(architecture: str) -> bool:
    """Whether mlx-lm has an architecture; it is imported only for those under another name."""
    found = find_spec("mlx_lm")
    places = found.submodule_search_locations if found else None
    if any((Path(place) / "models" / f"{architecture}.py").is_file() for place in places or ()):
        return True
    from mlx_lm.utils import MODEL_REMAPPING  # takes more than a second

    return architecture in MODEL_REMAPPING


def _in_words(config: dict[str, Any], types: dict[str, int]) -> str:
    """How weights are written: their bits, or the type of most of them."""
    quantized = config.get("quantization")
    if isinstance(quantized, dict) and isinstance(quantized.get("bits"), int):
        mode = quantized.get("mode", "affine")
        return f"{quantized['bits']} bits" + (f", {mode}" if mode != "affine" else "")
    foreign = config.get("quantization_config")
    if isinstance(foreign, dict) and isinstance(foreign.get("quant_method"), str):
        return foreign["quant_method"][:20]
    if not types:
        return ""
    most = max(types, key=lambda dtype: (types[dtype], dtype))
    return _TYPES.get(most, most)
