"""Headers of safetensors files that lie."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.models.safetensors_header import DamagedHeader, Header, Place, read_header


def written(path: Path, header: bytes, data: bytes = bytes(16)) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entry(**changes: object) -> bytes:
    place = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}
    return json.dumps({"a": place}).encode()


def test_a_header_says_where_tensors_lie(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    mx.save_safetensors(str(path), {"a": mx.zeros((2, 3)), "b": mx.ones(4, mx.uint8)}, {"k": "v"})
    header = read_header(path)
    places = header.tensors
    assert header.metadata == {"k": "v"}
    assert {name: (p.dtype, p.shape) for name, p in places.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("U8", (4,)),
    }
    begin = places["b"].begin
    assert path.read_bytes()[begin : begin + 4] == b"\1\1\1\1"


def test_an_unknown_type_is_left_to_the_reader(tmp_path: Path) -> None:
    path = written(tmp_path / "x", entry(dtype="F4"))
    assert read_header(path).tensors["a"] == Place("F4", (2, 2), path.stat().st_size - 16)


@pytest.mark.parametrize("metadata", [None, 1, [], "text", {"k": 1}, {"k": {"l": "m"}}])
def test_metadata_that_is_no_text_is_left_out(tmp_path: Path, metadata: object) -> None:
    header = json.dumps({"__metadata__": metadata}).encode()
    assert read_header(written(tmp_path / "x", header)) == Header({}, {})


@pytest.mark.parametrize(
    "header",
    [
        *(b'{"\xff":{}}', b"[]", b"{", b"[" * 100_000, b"\xef\xbb\xbf{}", b'{"a":' + b"9" * 9999),
        *(entry(shape=[2, float("inf")]), entry(data_offsets=[0, float("inf")])),
        *(entry(shape=[2, float("nan")]), entry(shape=[2.0, 2]), entry(shape=[True, 4])),
        *(entry(shape="no"), entry(shape=None), entry(shape=[2, 3]), entry(shape=[-2, -2])),
        *(entry(shape=[2**31, 0], data_offsets=[0, 0]), entry(data_offsets=[0, 10**25])),
        *(entry(data_offsets=[16, 32]), entry(data_offsets=[-16, 0]), entry(data_offsets=[16])),
        *(entry(data_offsets=[16, 0]), entry(dtype=[]), entry(dtype=3), b'{"a":5}', b'{"a":null}'),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(DamagedHeader):
        read_header(written(tmp_path / "x", header))


def test_thousands_of_dimensions_take_no_time(tmp_path: Path) -> None:
    path = written(tmp_path / "x", entry(shape=[10**18] * 10_000))
    started = time.process_time()
    with pytest.raises(DamagedHeader):
        read_header(path)
    assert time.process_time() - started < 0.5


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_header(tmp_path / "pipe")
