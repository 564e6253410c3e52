"""Files that are no store, or no longer one: a line, or right results, and nothing else."""

import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxspec.corpus.building import add_to_store, build_store
from mlxspec.corpus.learner import Learner
from mlxspec.corpus.store import Store, open_store
from mlxspec.errors import StoreError
from tests.corpus.test_store import places
from tests.support.tokenizers import FIRST, FakeTokenizer

HEADER = 256
LENGTHS, CHECKSUMS, HEADER_CHECKSUM = 16, 32, 252


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with both parts."""
    pick = random.Random(0)
    texts = [[pick.randrange(4) for _ in range(30)] for _ in range(4)]
    build_store(tmp_path / "s", texts, FIRST)
    with Learner(tmp_path / "s", FIRST) as learner:
        learner.add([pick.randrange(4) for _ in range(30)])
    return tmp_path / "s"


def learn(path: Path) -> None:
    with Learner(path, FIRST) as learner:
        learner.add([1, 2, 3])


def refused(path: Path, data: bytes) -> str:
    """The message with which this content is refused."""
    path.write_bytes(data)
    with pytest.raises(StoreError) as caught:
        open_store(path, FIRST).verify()
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def resealed(data: bytes) -> bytes:
    """The same content with right checksums, as somebody who means harm would write it."""
    lengths = struct.unpack_from("<4I", data, LENGTHS)
    checksums, at = [], HEADER
    for length in lengths:
        checksums.append(zlib.crc32(data[at : at + 4 * length]))
        at += 4 * length
    header = data[:CHECKSUMS] + struct.pack("<4I", *checksums) + data[CHECKSUMS + 16 : HEADER]
    header = header[:HEADER_CHECKSUM]
    return header + struct.pack("<I", zlib.crc32(header)) + data[HEADER:]


def assert_all_right(store: Store) -> None:
    """Whatever the store holds, look-ups stay within it and their matches are matches."""
    tokens = list(store.tokens)
    for tail in ([0, 1, 2], [3], [1] * 70, [2, 2, 0, 1]):
        for length, position in places(store, tail, 20):
            assert position - length >= 0
            assert tokens[position - length : position] == tail[-length:]
            assert -1 in tokens[position:]
    assert all(-1 <= token < 100 for token in tokens)


def test_the_file_is_as_its_page_says(path: Path):
    data = path.read_bytes()
    magic, version, vocabulary = struct.unpack_from("<8sII", data)
    lengths = struct.unpack_from("<4I", data, LENGTHS)
    assert (magic, version, vocabulary) == (b"mlxstore", 1, 100)
    assert lengths == (4 * 31, 31, 4 * 29, 29)
    assert data[80:176] == b"first".ljust(96, b"\0")
    assert len(data) == HEADER + 4 * sum(lengths)
    assert resealed(data) == data


def test_every_flipped_bit_is_noticed(path: Path):
    data = path.read_bytes()
    pick = random.Random(0)
    for offset in range(len(data)):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << pick.randrange(8)
        refused(path, bytes(flipped))


def test_every_truncation_is_noticed(path: Path):
    data = path.read_bytes()
    for size in (*range(0, len(data), 4), 1, HEADER + 1, len(data) - 1):
        refused(path, data[:size])
    assert "4 bytes too long" in refused(path, data + b"\0\0\0\0")


@pytest.mark.parametrize("seed", range(4))
def test_content_of_ill_will_gives_an_error_or_right_results(path: Path, seed: int):
    """Numbers in header and body are replaced by tempting ones, and the checksums made right."""
    data = path.read_bytes()
    pick = random.Random(seed)
    tempting = (0, 1, 2, 31, 99, 100, 123, 124, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2)
    opened = 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(pick.choice((1, 2, 5))):
            body = pick.random() < 0.8
            word = pick.randrange(HEADER // 4, len(data) // 4) if body else pick.randrange(3, 63)
            struct.pack_into("<I", changed, 4 * word, pick.choice(tempting))
        path.write_bytes(resealed(bytes(changed)))
        try:
            store = open_store(path).verify()
        except StoreError:
            continue
        opened += 1
        assert_all_right(store)
    assert 0 < opened < 300


@pytest.mark.parametrize("seed", range(4))
def test_look_ups_bear_what_was_not_verified(path: Path, seed: int):
    data = path.read_bytes()
    pick = random.Random(seed)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(pick.choice((1, 5, 50))):
            word = pick.randrange(HEADER // 4, len(data) // 4)
            struct.pack_into(
                "<I", changed, 4 * word, pick.choice((0, 1, 3, 99, 100, 2**31, 2**32 - 2))
            )
        path.write_bytes(changed)
        store = open_store(path)
        for tail in ([0, 1, 2], [3], [1] * 70, [2, 2, 0, 1]):
            tokens, occurrences, _ = store.look_up(tail, 8)
            assert len(occurrences) <= 8
            assert all(-1 <= token < 100 for token in tokens)
            assert all(-1 in tokens[place:] for _, place in occurrences)


@pytest.mark.parametrize("lengths", [(2**32 - 1,) * 4, (2**30, 2**30, 0, 0), (0, 0, 9, 9)])
def test_sections_that_do_not_fill_the_file_are_refused(path: Path, lengths: tuple[int, ...]):
    data = bytearray(path.read_bytes())
    struct.pack_into("<4I", data, LENGTHS, *lengths)
    header = bytes(data[:HEADER_CHECKSUM])
    sealed = header + struct.pack("<I", zlib.crc32(header)) + data[HEADER:]
    assert "bytes too" in refused(path, sealed)


def test_what_is_no_store_is_called_so(path: Path, tmp_path: Path):
    assert "is no store" in refused(path, b"")
    assert "is no store" in refused(path, b"{}")
    assert "is no store" in refused(path, b"x" * 4096)
    with pytest.raises(StoreError, match=r"nowhere: no such file; .*`mlxspec store build`"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="is not a regular file"):
        open_store(tmp_path)
    with pytest.raises(StoreError, match="cannot be read"):
        open_store(path / "below")


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="pipe: is not a regular file"):
        open_store(tmp_path / "pipe")


def test_another_version_says_what_to_do(path: Path):
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, 2)
    assert "has version 2 of the format" in refused(path, resealed(bytes(data)))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: learn(path),
        lambda path: build_store(path, [[1, 2]], FIRST),
        lambda path: add_to_store(path, [[1, 2]], FIRST),
    ],
)
def test_a_damaged_store_is_neither_learned_into_nor_replaced(
    path: Path, change: Callable[[Path], object]
):
    whole = path.read_bytes()
    for damaged in (whole[:-4], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(StoreError):
            change(path)
        assert path.read_bytes() == damaged


def test_a_long_name_is_cut_between_characters(tmp_path: Path):
    tokenizer = FakeTokenizer("n" * 95 + "漢字")
    store = build_store(tmp_path / "s", [[1, 2]], tokenizer)
    assert store.info.identity.name == "n" * 95


def test_a_name_cannot_command_a_terminal(path: Path):
    data = bytearray(path.read_bytes())
    data[80:96] = b"a\x1b[2J\r\nb\xe2\x80\xae\xff".ljust(16, b"\0")
    path.write_bytes(resealed(bytes(data)))
    assert open_store(path).info.identity.name == "a?[2J??b?\ufffd"
