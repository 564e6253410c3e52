"""Safetensors files with false headers."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.errors import LoadError
from mlxspec.models.model_files import check_weights_file


def written(path: Path, header: bytes, data: bytes = bytes(16)) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entry(**changes: object) -> bytes:
    place = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}
    return json.dumps({"a": place}).encode()


def test_types_and_sizes_are_returned(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = {"a": mx.zeros((2, 3)), "b": mx.ones(4, mx.uint8), "c": mx.array(True)}
    mx.save_safetensors(str(path), arrays | {"d": mx.zeros((2, 2), mx.bfloat16)}, {"k": "v"})
    found = check_weights_file(path)
    assert {name: (one.dtype, one.nbytes) for name, one in found.items()} == {
        "a": (mx.float32, 24),
        "b": (mx.uint8, 4),
        "c": (mx.bool_, 1),
        "d": (mx.bfloat16, 8),
    }


@pytest.mark.parametrize(
    "header",
    [
        *(b'{"\xff":{}}', b"[]", b"{", b"[" * 100_000, b"\xef\xbb\xbf{}", b'{"a":' + b"9" * 9999),
        *(entry(shape=[2, float("inf")]), entry(data_offsets=[0, float("inf")])),
        *(entry(shape=[2, float("nan")]), entry(shape=[2.0, 2]), entry(shape=[True, 4])),
        *(entry(shape="no"), entry(shape=None), entry(shape=[2, 3]), entry(shape=[-2, -2])),
        entry(data_offsets=[0, 10**25]),
        *(entry(data_offsets=[16, 32]), entry(data_offsets=[-16, 0]), entry(data_offsets=[16])),
        *(entry(data_offsets=[16, 0]), entry(dtype=[]), entry(dtype=3), b'{"a":5}', b'{"a":null}'),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(LoadError):
        check_weights_file(written(tmp_path / "x", header))


def test_thousands_of_dimensions_take_no_time(tmp_path: Path) -> None:
    path = written(tmp_path / "x", entry(shape=[10**18] * 10_000))
    started = time.process_time()
    with pytest.raises(LoadError):
        check_weights_file(path)
    assert time.process_time() - started < 0.5
