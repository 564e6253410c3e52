"""Safetensors files: written ones load elsewhere, damaged ones are named."""

import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.convert.safetensors_file import (
    TensorSpec,
    count_tensors,
    read_safetensors,
    write_safetensors,
)
from mlxspec.errors import ConversionError

DTYPES = [mx.float16, mx.bfloat16, mx.float32, mx.uint32, mx.uint8, mx.int64, mx.bool_]


def write(path: Path, arrays: dict[str, mx.array]) -> Path:
    specs = {name: TensorSpec.of(array) for name, array in arrays.items()}
    write_safetensors(path, specs, iter(arrays.items()))
    return path


def test_mlx_and_the_reference_library_read_what_is_written(tmp_path: Path):
    from safetensors import safe_open

    arrays = {str(dtype): mx.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES}
    arrays["transposed"] = mx.arange(6).reshape(2, 3).T
    arrays["scalar"] = mx.array(2.5)
    path = write(tmp_path / "x.safetensors", arrays)
    loaded = mx.load(str(path))
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert mx.array_equal(loaded[name], array)
    with safe_open(path, "numpy") as reference:
        assert reference.metadata() == {"format": "mlx"}
        assert set(reference.keys()) == set(arrays)
        np.testing.assert_array_equal(reference.get_tensor("transposed"), arrays["transposed"])


def test_what_mlx_writes_is_read_alike(tmp_path: Path):
    arrays = {str(d): mx.arange(6).reshape(2, 3).astype(d) for d in (mx.float16, mx.float32)}
    mx.save_safetensors(str(tmp_path / "x.safetensors"), arrays)
    for name, tensor in read_safetensors(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(tensor.bits(), np.array(arrays[name]))


@pytest.mark.parametrize("kept", [0, 4, 30, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int):
    path = write(tmp_path / "cut.safetensors", {"a": mx.zeros((4, 4))})
    path.write_bytes(path.read_bytes()[:kept])
    for read in (read_safetensors, count_tensors):
        with pytest.raises(ConversionError, match=r"cut\.safetensors: .+"):
            read(path)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        7,
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": "no", "data_offsets": [0, 8]},
        {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]},
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(tmp_path: Path, entry: object):
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(ConversionError, match=r"x\.safetensors: .*\ba\b"):
        read_safetensors(path)


@pytest.mark.parametrize("length", [1 << 62, 1 << 20, 3])
def test_a_header_of_impossible_length_is_refused(tmp_path: Path, length: int):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 20)
    with pytest.raises(ConversionError, match="truncated or no safetensors file"):
        read_safetensors(path)
