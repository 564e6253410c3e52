"""Mistral's and Llama's original checkpoints: ``consolidated.*``, ``params.json``."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import ConversionError, LoadError, printable
from ..models.npz import complete_params, expected_shapes
from .checkpoint_files import BFLOAT16, read_safetensors, read_settings
from .torch_zip import read_torch_zip

# Model parallelism splits a layer's first product by rows (its outputs), its second one by
# columns (its inputs); norms stand in every shard.
_SPLIT_BY_ROWS = {"wq", "wk", "wv", "w1", "w3", "output"}
_SPLIT_BY_COLUMNS = {"wo", "w2"}
_HALVES = {np.dtype(np.float16): "float16", BFLOAT16: "bfloat16"}
_FLOATS = {*_HALVES, np.dtype(np.float32), np.dtype(np.float64)}
_COMPARED_ROWS = 1024


@dataclass(frozen=True)
class OriginalTensor:
    """A tensor of the checkpoint, in one piece or split between shards along ``axis``.

    The pieces are views of mapped files: they take no memory before :meth:`load` reads them.
    """

    pieces: tuple[np.ndarray, ...]
    axis: int = 0

    @property
    def dtype(self) -> np.dtype:
        """The element type; unsigned 16-bit integers are the bits of bfloat16."""
        return self.pieces[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        shape = list(self.pieces[0].shape)
        if len(self.pieces) > 1:
            shape[self.axis] = sum(piece.shape[self.axis] for piece in self.pieces)
        return tuple(shape)

    def bits(self) -> np.ndarray:
        """The elements; a copy only where pieces are joined."""
        if len(self.pieces) == 1:
            return self.pieces[0]
        return np.concatenate(self.pieces, axis=self.axis)

    def load(self) -> mx.array:
        """The whole tensor in memory."""
        bits = self.bits()
        if bits.dtype == BFLOAT16:
            return mx.array(bits).view(mx.bfloat16)
        # MLX has float64 on the CPU only, and no checkpoint needs more than float32.
        return mx.array(bits.astype(np.float32) if bits.dtype == np.float64 else bits)


@dataclass(frozen=True)
class OriginalCheckpoint:
    """An opened checkpoint whose tensors are all there and have the right shapes.

    ``params`` are the settings of ``params.json``, completed; ``tied`` says whether the output
    layer repeats the embedding.
    """

    directory: Path
    params: dict[str, Any]
    tensors: dict[str, OriginalTensor]
    tied: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def half_type(self) -> str:
        """The 16-bit float type that most matrices have, or float16 if none has one."""
        types = Counter(t.dtype for t in self.tensors.values() if len(t.shape) == 2)
        halves = [_HALVES[dtype] for dtype, _ in types.most_common() if dtype in _HALVES]
        return halves[0] if halves else "float16"


def open_original(directory: Path) -> OriginalCheckpoint:
    """Open a checkpoint, without reading its weights but to compare output and embedding.

    Raises:
        ConversionError: a file or tensor is missing, damaged, mis-shaped or not known.
    """
    path = directory / "params.json"
    if not path.is_file() and (directory / "config.json").is_file():
        raise ConversionError(f"{path}: does not exist; use --hf-path for it")
    params = read_settings(path)
    try:
        tensors = _read_tensors(directory, params)
        params = complete_params(params, {name: t.shape for name, t in tensors.items()})
    except LoadError as error:
        raise ConversionError(f"{path}: {error}") from None
    if params.get("tied_embeddings") and "output.weight" not in tensors:
        tensors["output.weight"] = tensors["tok_embeddings.weight"]
    if params["n_layers"] > len(tensors):
        raise ConversionError(
            f"{directory}: has no {params['n_layers']} layers, as params.json says"
        )
    expected = expected_shapes(params)
    _check_tensors(directory, tensors, expected)
    tied = _identical(tensors["output.weight"], tensors["tok_embeddings.weight"])
    return OriginalCheckpoint(directory, params, {n: tensors[n] for n in expected}, tied)


def _read_tensors(directory: Path, params: Mapping[str, Any]) -> dict[str, OriginalTensor]:
    """All tensors by name, those of model-parallel shards joined, without RoPE's tables."""
    tensors: dict[str, OriginalTensor] = {}
    if safetensors := sorted(directory.glob("consolidated*.safetensors")):
        for path in safetensors:
            tensors |= {n: OriginalTensor((array,)) for n, array in read_safetensors(path).items()}
    elif shards := _numbered_shards(directory):
        contents = {path: read_torch_zip(path) for path in shards}
        names = dict.fromkeys(name for content in contents.values() for name in content)
        tensors = {name: _join(name, contents, params.get("dim")) for name in names}
    else:
        raise ConversionError(
            f"{directory}: has neither consolidated.*.pth nor consolidated.safetensors"
        )
    return {name: t for name, t in tensors.items() if not name.endswith("rope.freqs")}


def _numbered_shards(directory: Path) -> list[Path]:
    shards = sorted(directory.glob("consolidated.*.pth"))
    for index, path in enumerate(shards):
        number = re.fullmatch(r"consolidated\.([0-9]+)\.pth", path.name)
        if number is None or int(number[1]) != index:
            raise ConversionError(f"{path}: the shard consolidated.{index:02d}.pth is missing")
    return shards


def _join(
    name: str, shards: Mapping[Path, Mapping[str, np.ndarray]], dim: int | None
) -> OriginalTensor:
    for path, content in shards.items():
        if name not in content:
            raise ConversionError(f"{path}: {printable(name)} is missing")
    pieces = tuple(content[name] for content in shards.values())
    module = name.removesuffix(".weight").rpartition(".")[2]
    if len({(piece.dtype, piece.ndim) for piece in pieces}) > 1:
        raise ConversionError(f"{printable(name)}: the shards disagree about its type")
    if module in _SPLIT_BY_ROWS:
        axis = 0
    elif module in _SPLIT_BY_COLUMNS:
        axis = 1
    elif module == "tok_embeddings":
        # Llama 1 and 2 split the embedding's width, Llama 3 its vocabulary.
        axis = 0 if pieces[0].shape[-1:] == (dim,) else 1
    else:
        return OriginalTensor(pieces[:1])
    others = {piece.shape[:axis] + piece.shape[axis + 1 :] for piece in pieces}
    if pieces[0].ndim != 2 or len(others) > 1:
        shapes = ", ".join(str(piece.shape) for piece in pieces)
        raise ConversionError(f"{name}: its pieces {shapes} do not fit together")
    return OriginalTensor(pieces, axis)


def _check_tensors(
    directory: Path,
    tensors: Mapping[str, OriginalTensor],
    expected: Mapping[str, tuple[int, ...]],
) -> None:
    if missing := [name for name in expected if name not in tensors]:
        raise ConversionError(f"{directory}: missing: {_first(missing)}")
    if unknown := [name for name in tensors if name not in expected]:
        raise ConversionError(f"{directory}: not known: {_first(unknown)}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ConversionError(
                f"{directory}: {name} has the shape {tensors[name].shape}, "
                f"params.json makes it {shape}"
            )
        if tensors[name].dtype not in _FLOATS:
            raise ConversionError(f"{directory}: {name} has the type {tensors[name].dtype}")


def _first(names: list[str]) -> str:
    shown = printable(names[0])
    return shown if len(names) == 1 else f"{shown} and {len(names) - 1} more"


def _identical(left: OriginalTensor, right: OriginalTensor) -> bool:
    """Whether two tensors have the same bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    a, b = left.bits(), right.bits()
    return all(
        np.array_equal(a[row : row + _COMPARED_ROWS], b[row : row + _COMPARED_ROWS])
        for row in range(0, left.shape[0], _COMPARED_ROWS)
    )
