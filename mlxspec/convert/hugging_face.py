"""Parts that only Hugging Face checkpoints have: tokenizers in several files, tensors of types that
MLX lacks, and trained heads.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LoadError, printable
from ..models.heads import Head
from ..models.heads import loading as heads
from ..models.heads.chains import QwenMTP, norms_centred_at_zero
from ..models.model_files import (
    WEIGHTS,
    read_json_object,
    tensor_types,
    without_byte_order_marks,
)

# Never *.py, since a repository's code is not trusted.
_COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("vocab.txt", "*.tiktoken", "*.jinja", "chat_template.json", "generation_config.json"),
    "LICENSE*",
)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, or make ``tokenizer.json`` from SentencePiece's model.

    Byte order marks are left out. mlx-lm's ``save`` would write the tokenizer as transformers does,
    and copy Python files.

    Raises:
        LoadError: there is no tokenizer, a file is damaged, or its SentencePiece model is of an
            unsupported kind.
    """
    from ..models.tokenizer import HUGGING_FACE_FILES, write_tokenizer

    with without_byte_order_marks(source) as plain:
        for pattern in _COPIED:
            for path in plain.glob(pattern):
                if path.is_file() and path.suffix != ".py":
                    if path.suffix == ".json":
                        read_json_object(source / path.name)  # raises if it is damaged
                    shutil.copyfile(path, target / path.name)
    if not any((source / name).is_file() for name in HUGGING_FACE_FILES):
        write_tokenizer(source, target)


# --- tensors ---


def without_float64(source: Path, folder: Path) -> Path:
    """A checkpoint whose float64 tensors, which MLX cannot read, are float32.

    Args:
        folder: an empty directory, for the changed files and links to the others.

    Returns:
        ``folder``; or ``source`` if it has no such tensors.
    """
    wide = {path for path in source.glob(WEIGHTS) if "F64" in tensor_types(path).values()}
    if not wide:
        return source
    for path in source.iterdir():
        if path in wide:
            _write_without_float64(path, folder / path.name)
        else:
            (folder / path.name).symlink_to(path.resolve())
    return folder


def _write_without_float64(source: Path, target: Path) -> None:
    """Copy a whole safetensors file, tensor by tensor, with float32 in the place of float64."""
    with source.open("rb") as old, target.open("wb") as new:
        length = int.from_bytes(old.read(8), "little")
        tensors = json.loads(old.read(length))
        header = {"__metadata__": tensors.pop("__metadata__", {})}
        end = 0
        for name, tensor in tensors.items():
            start, (first, last) = end, tensor["data_offsets"]
            dtype, width = tensor["dtype"], last - first
            if dtype == "F64":
                dtype, width = "F32", width // 2
            end += width
            header[name] = {"dtype": dtype, "shape": tensor["shape"], "data_offsets": [start, end]}
        written = json.dumps(header).encode()
        new.write(len(written).to_bytes(8, "little") + written)
        for name, tensor in tensors.items():
            first, last = tensor["data_offsets"]
            old.seek(8 + length + first)
            data = old.read(last - first)
            if tensor["dtype"] == "F64":
                wide = np.frombuffer(data, "<f8")
                with np.errstate(over="ignore"):
                    narrow = wide.astype("<f4")
                if not np.array_equal(np.isfinite(wide), np.isfinite(narrow)):
                    raise LoadError(f"{source}: {printable(name)} has numbers beyond float32")
                data = narrow.tobytes()
            new.write(data)


# --- trained heads ---


def load_head_alone(directory: Path) -> tuple[Head, dict[str, Any], str]:
    """Load a head with unevaluated weights.

    Args:
        directory: the folder of a head, or of a model that carries one.

    Returns:
        the head, its configuration, and a text on its kind and on its changed norms. (Norms may be
        centred at zero in the checkpoint, but the head expects them centred at one.)

    Raises:
        LoadError: there is no head of a supported kind, or a file is damaged.
    """
    head_files = heads.find_head(directory)
    head, config, about = heads.load_lazily(head_files), head_files.config, head_files.kind.title
    if head_files.kind is QwenMTP and not config.get(heads.CONVERTED):
        tensors = head_files.tensors()
        norms = sum("norm" in name and array.ndim == 1 for name, array in tensors.items())
        centred = len(norms_centred_at_zero(tensors, head_files.raw))
        about += f" ({centred} of its {norms} norms were centred at zero, so 1.0 was added to them)"
    return head, {**config, heads.CONVERTED: True}, about
