"""Safetensors files: other programs' are read, damaged ones are named in an error."""

import json
import struct
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.convert.conversion import convert
from mlxspec.errors import MlxspecError


def read(path: Path) -> None:
    params = json.dumps({"dim": 64, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5})
    (path.parent / "params.json").write_text(params)
    convert(torch_path=path.parent, mlx_path=path.parent / "out")


@pytest.mark.parametrize("kept", [0, 4, 30, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int):
    path = tmp_path / "consolidated.safetensors"
    mx.save_safetensors(str(path), {"a": mx.zeros((4, 4))})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(MlxspecError, match=r"consolidated\.safetensors: truncated or damaged"):
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
def test_a_wrong_header_is_refused(tmp_path: Path, entry: object):
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "consolidated.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(MlxspecError, match=r".+"):
        read(path)


@pytest.mark.parametrize("length", [1 << 62, 1 << 20, 3])
def test_a_header_of_impossible_length_is_refused(tmp_path: Path, length: int):
    path = tmp_path / "consolidated.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 20)
    with pytest.raises(MlxspecError, match="truncated or damaged"):
        read(path)
