"""Write a planned model's files, one tensor group in memory at a time.

mlx-lm's ``save_model`` evaluates all tensors of a file, of up to 5 GB, before it writes the first:
on a checkpoint of 640 MB mlx-lm's converter takes 700 MB of memory, this one 210 MB
(``benchmarks/convert_memory.py --layers 4``).
"""

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import ConversionError
from ..models.safetensors_header import LENGTH

MAX_SHARD_BYTES = 5 << 30  # as mlx-lm's

Progress = Callable[[int, int], None]
"""Called with the bytes converted so far and those that there will be."""

Quantization = dict[str, Any]
"""``mode``, ``bits`` and ``group_size``, as MLX takes them and ``config.json`` has them."""

_SAFETENSORS_TYPES = {
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.bool_: "BOOL",
}


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that come from one source tensor or module: a weight, or its quantised parts.

    ``outline`` has their names, shapes and types, in arrays that are never evaluated;
    ``parameters`` counts the model's numbers in them; ``produce`` reads and converts them.
    """

    outline: dict[str, mx.array]
    parameters: int
    produce: Callable[[], dict[str, mx.array]]

    @property
    def nbytes(self) -> int:
        """Size of the tensors as written."""
        return sum(array.nbytes for array in self.outline.values())


@dataclass(frozen=True)
class PlannedModel:
    """A model as it will be written, before any weight is read.

    ``write_tokenizer`` fills in a directory's tokenizer files.
    """

    config: dict[str, Any]
    groups: list[TensorGroup]
    write_tokenizer: Callable[[Path], None]


def write_safetensors_model(
    directory: Path,
    groups: list[TensorGroup],
    on_progress: Progress,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``model*.safetensors`` and their index. ``groups`` is emptied on the way."""
    shards = _shards(groups, max_shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, 1 + len(shards))
        ]
    files = dict(zip(names, shards, strict=True))
    weight_map = {tensor: name for name, outlines in files.items() for tensor in outlines}
    metadata = {
        "total_size": sum(group.nbytes for group in groups),
        "total_parameters": sum(group.parameters for group in groups),
    }
    tensors = _produced(groups, on_progress)
    for name, outlines in files.items():
        write_safetensors(directory / name, outlines, islice(tensors, len(outlines)))
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=4)
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def write_safetensors(
    path: Path, outline: Mapping[str, mx.array], tensors: Iterable[tuple[str, mx.array]]
) -> None:
    """Write a file tensor by tensor, so that one of them is in memory at a time.

    ``tensors`` come in the order of ``outline``, and have the shapes and types of its arrays.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, array in outline.items():
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _SAFETENSORS_TYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned to 8 bytes
    with open(path, "wb") as file:
        file.write(LENGTH.pack(len(text)))
        file.write(text)
        for name, array in tensors:
            assert (array.shape, array.dtype) == (outline[name].shape, outline[name].dtype)
            file.write(_bits(array).reshape(-1).view(np.uint8).data)
            del array  # not while the next one is made


def write_npz(directory: Path, groups: list[TensorGroup], on_progress: Progress) -> None:
    """Write ``weights.npz``. ``groups`` is emptied on the way."""
    with zipfile.ZipFile(directory / "weights.npz", "w", zipfile.ZIP_STORED) as archive:
        for name, array in _produced(groups, on_progress):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _bits(array), allow_pickle=False)
            del array


def _shards(groups: list[TensorGroup], max_bytes: int) -> list[dict[str, mx.array]]:
    """The outlines of the files; a group that is larger than ``max_bytes`` has a file of its own.

    mlx-lm's ``make_shards`` would put a weight and its scales into different files.
    """
    shards: list[dict[str, mx.array]] = []
    room = 0
    for group in groups:
        if not shards or group.nbytes > room:
            shards.append({})
            room = max_bytes
        shards[-1] |= group.outline
        room -= group.nbytes
    return shards


def _produced(groups: list[TensorGroup], on_progress: Progress) -> Iterator[tuple[str, mx.array]]:
    """The tensors in order; what has been handed out is given up before the next one."""
    total = sum(group.nbytes for group in groups)
    done = 0
    on_progress(done, total)
    while groups:
        tensors = groups.pop(0).produce()
        for name in list(tensors):
            array = tensors.pop(name)
            _check_finite(name, array)
            done += array.nbytes
            on_progress(done, total)
            yield name, array
            del array  # not while the next one is made
        # MLX would keep the buffers for arrays to come.
        mx.clear_cache()


def _check_finite(name: str, array: mx.array) -> None:
    """Refuse what float16 cannot hold: its largest number is 65504."""
    if array.dtype == mx.float16 and not mx.isfinite(mx.stack([array.max(), array.min()])).all():
        raise ConversionError(f"{name}: float16 cannot hold its values; choose another --dtype")


def _bits(array: mx.array) -> np.ndarray:
    """The elements of an array, without a copy where they are contiguous; bfloat16 as uint16."""
    array = mx.contiguous(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
