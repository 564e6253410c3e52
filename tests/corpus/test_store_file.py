"""Files that are no store, or no longer one: a line, or right results, and nothing else."""

import json
import os
import random
import struct
import zlib
from pathlib import Path

import pytest

from mlxspec.corpus.answers import identify
from mlxspec.corpus.store import Store, build_store
from mlxspec.errors import FileError
from tests.support.tokenizers import FIRST


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pick = random.Random(0)
    texts = [[pick.randrange(4) for _ in range(30)] for _ in range(5)]
    build_store(tmp_path / "s", texts, FIRST)
    return tmp_path / "s"


def body(data: bytes) -> int:
    """Where the arrays begin, behind the line of JSON."""
    return data.index(b"\n") + 1


def refused(path: Path, data: bytes) -> str:
    """The message with which this content is refused."""
    path.write_bytes(data)
    with pytest.raises(FileError) as caught:
        Store(path, FIRST).verify()
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def resealed(data: bytes) -> bytes:
    """The same content with a right checksum, as somebody who means harm would write it."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


def with_header(data: bytes, **values: object) -> bytes:
    """The same arrays behind another header, with a right checksum."""
    header = json.loads(data[: body(data)]) | values
    line = json.dumps(header).encode().ljust(body(data) - 1)
    return resealed(line + b"\n" + data[body(data) :])


def test_the_file_is_a_line_of_json_and_two_arrays(path: Path):
    data = path.read_bytes()
    header = json.loads(data[: body(data)])
    assert header == {
        **{"format": "mlxspec store", "tokenizer": "first", "vocab_size": 100},
        **{"fingerprint": identify(FIRST).fingerprint.hex()},
        "lengths": [5 * 31, 5 * 29],
    }
    assert len(data) == body(data) + 4 * (5 * 31 + 5 * 29 + 1)
    assert resealed(data) == with_header(data) == data


@pytest.mark.nightly
@pytest.mark.slow
def test_every_flipped_bit_is_noticed(path: Path):
    data = path.read_bytes()
    pick = random.Random(0)
    for offset in range(len(data)):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << pick.randrange(8)
        refused(path, bytes(flipped))


def test_every_truncation_is_noticed(path: Path):
    data = path.read_bytes()
    for size in (*range(0, len(data), 4), 1, body(data) + 1, len(data) - 1):
        refused(path, data[:size])
    assert "is damaged" in refused(path, data + b"\0\0\0\0")


@pytest.mark.parametrize("seed", range(4))
def test_look_ups_bear_what_was_not_verified(path: Path, seed: int):
    data = path.read_bytes()
    pick = random.Random(seed)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(pick.choice((1, 5, 50))):
            word = pick.randrange(body(data) // 4, len(data) // 4)
            struct.pack_into(
                "<I", changed, 4 * word, pick.choice((0, 1, 3, 99, 100, 2**31, 2**32 - 2))
            )
        path.write_bytes(changed)
        store = Store(path)
        for tail in ([0, 1, 2], [3], [1] * 70, [2, 2, 0, 1]):
            tokens, occurrences = store.look_up(tail, 8)
            assert len(occurrences) <= 8
            assert all(-1 <= token < 100 for token in tokens)
            assert all(-1 in tokens[place:] for _, place in occurrences)


@pytest.mark.parametrize(
    "lengths",
    [
        *([2**32, 2**32], [0, 9], [300], [155, 145, 0], [-1, 301], [301, -1], [155.0, 145]),
        *({"tokens": 155, "order": 145}, {}, None),
    ],
)
def test_arrays_that_do_not_fill_the_file_are_refused(path: Path, lengths: object):
    message = refused(path, with_header(path.read_bytes(), lengths=lengths))
    assert "is not an mlxspec store, or is damaged" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("vocab_size", value) for value in ("many", None)),
        *(("tokenizer", value) for value in (5, None, ["first"])),
        *(("fingerprint", value) for value in ("zz", 5, None)),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(path: Path, name: str, value: object):
    assert "build it again" in refused(path, with_header(path.read_bytes(), **{name: value}))


def test_what_is_no_store_is_called_so(path: Path, tmp_path: Path):
    for content in (b"", b"{}", b"x" * 4096, b"[" * 5000 + b"\n", b'{"format": 1}  \n'):
        assert "is not an mlxspec store" in refused(path, content)
    with pytest.raises(FileError, match=r"nowhere: .*No such file.*`mlxspec store build`"):
        Store(tmp_path / "nowhere")
    with pytest.raises(FileError, match="is not an mlxspec store"):
        Store(tmp_path)
    with pytest.raises(FileError, match="cannot be read"):
        Store(path / "below")


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="pipe: is not an mlxspec store"):
        Store(tmp_path / "pipe")


def test_a_damaged_store_is_replaced_only_with_force(path: Path):
    whole = path.read_bytes()
    for damaged in (whole[:-4], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(FileError):
            build_store(path, [[1, 2]], FIRST)
        assert path.read_bytes() == damaged


def test_a_name_cannot_command_a_terminal(path: Path):
    path.write_bytes(with_header(path.read_bytes(), tokenizer="a\x1b[2J\r\nb\u202e\ufffd"))
    assert Store(path).identity.name == r"a\x1b[2J\r\nb\u202e\ufffd"
