"""Write a planned model's files, one tensor group in memory at a time."""

import json
import zipfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import ConversionError
from .planned_model import TensorGroup
from .safetensors_file import numpy_bits, write_safetensors

MAX_SHARD_BYTES = 5 << 30  # as mlx-lm's

Progress = Callable[[int, int], None]
"""Called with the bytes converted so far and those that there will be."""


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
    index: dict[str, Any] = {
        "metadata": {
            "total_size": sum(group.nbytes for group in groups),
            "total_parameters": sum(group.parameters for group in groups),
        },
        "weight_map": dict(
            sorted(
                (tensor, name)
                for name, shard in zip(names, shards, strict=True)
                for group in shard
                for tensor in group.specs
            )
        ),
    }
    tensors = _produced(groups, on_progress)
    for name, shard in zip(names, shards, strict=True):
        specs = {tensor: spec for group in shard for tensor, spec in group.specs.items()}
        shard.clear()
        write_safetensors(directory / name, specs, islice(tensors, len(specs)))
    text = json.dumps(index, indent=4)
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def write_npz(directory: Path, groups: list[TensorGroup], on_progress: Progress) -> None:
    """Write ``weights.npz``. ``groups`` is emptied on the way."""
    with zipfile.ZipFile(directory / "weights.npz", "w", zipfile.ZIP_STORED) as archive:
        for name, array in _produced(groups, on_progress):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, numpy_bits(array), allow_pickle=False)
            del array


def _shards(groups: list[TensorGroup], max_bytes: int) -> list[list[TensorGroup]]:
    """Groups in order, distributed over files; one that is larger has a file of its own."""
    shards: list[list[TensorGroup]] = []
    room = 0
    for group in groups:
        if not shards or group.nbytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(group)
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
