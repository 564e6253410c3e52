"""Reading safetensors files: what others write, and damaged ones, which are named."""

import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.convert.checkpoint_files import count_tensors, read_safetensors
from mlxspec.errors import ConversionError


def test_what_mlx_writes_is_read_alike(tmp_path: Path):
    arrays = {str(d): mx.arange(6).reshape(2, 3).astype(d) for d in (mx.float16, mx.float32)}
    mx.save_safetensors(str(tmp_path / "x.safetensors"), arrays)
    for name, tensor in read_safetensors(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(tensor, np.array(arrays[name]))


@pytest.mark.parametrize("kept", [0, 4, 30, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int):
    path = tmp_path / "cut.safetensors"
    mx.save_safetensors(str(path), {"a": mx.zeros((4, 4))})
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
        {"dtype": "U16", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [0, *[2**31 - 1] * 3], "data_offsets": [0, 0]},
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
