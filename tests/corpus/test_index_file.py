"""Files that hold no index, or no longer one: refused, or searched without harm."""

import json
import os
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.corpus.suffix_index import SuffixArray, excerpts, write_index
from tests.support.examples import examples
from tests.support.hostile import harmless, mutated

FORMAT = "an index of a test"
VOCABULARY = 100


def written(path: Path, index: SuffixArray) -> bytes:
    with path.open("wb") as file:
        lengths = len(index.tokens), len(index.order)
        write_index(file, {"format": FORMAT}, lengths, [index.tokens, index.order])
    return path.read_bytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index") / "x.index"


@pytest.fixture(scope="module")
def whole(path: Path) -> bytes:
    pick = random.Random(0)
    texts = [[pick.randrange(4) for _ in range(30)] for _ in range(5)]
    return written(path, SuffixArray.of(np.array(text, np.int32).tobytes() for text in texts))


def body(data: bytes) -> int:
    """Where the arrays begin, after the line of JSON."""
    return data.index(b"\n") + 1


def is_refused(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    try:
        return not SuffixArray.open(path, FORMAT).is_intact()
    except ValueError as error:
        return str(error).startswith(f"is not an {FORMAT}")


def drafted(path: Path, tail: list[int]) -> list[int]:
    """The tokens that a look-up in a file finds; none if the file is refused."""
    try:
        index = SuffixArray.open(path, FORMAT)
    except ValueError:
        return []
    tokens, occurrences = excerpts([index], tail, 8, 48, VOCABULARY)
    assert len(occurrences) <= 8
    assert all(-1 in tokens[position:] for _, position in occurrences)
    return [token for token in tokens if token != -1]


def test_the_file_is_a_line_of_json_two_arrays_and_a_checksum(whole: bytes):
    header = json.loads(whole[: body(whole)])
    assert header == {"format": FORMAT, "lengths": [5 * 31, 5 * 29]}
    assert len(whole) == body(whole) + 4 * (5 * 31 + 5 * 29 + 1)
    assert whole[-4:] == struct.pack("<I", zlib.crc32(whole[:-4]))


@pytest.mark.nightly
@pytest.mark.slow
def test_every_flipped_bit_is_noticed(path: Path, whole: bytes):
    pick = random.Random(0)
    for offset in range(len(whole)):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << pick.randrange(8)
        assert is_refused(path, bytes(flipped))


def test_every_truncation_is_noticed(path: Path, whole: bytes):
    for size in (*range(0, len(whole), 4), 1, body(whole) + 1, len(whole) - 1):
        assert is_refused(path, whole[:size])
    assert is_refused(path, whole + b"\0\0\0\0")


@pytest.mark.parametrize(
    "lengths",
    [
        *([2**32, 2**32], [0, 9], [300], [155, 145, 0], [-1, 301], [301, -1], [155.0, 145]),
        *({"tokens": 155, "order": 145}, {}, None),
    ],
)
def test_arrays_that_do_not_fill_the_file_are_refused(path: Path, whole: bytes, lengths: object):
    line = json.dumps({"format": FORMAT, "lengths": lengths}).encode().ljust(body(whole) - 1)
    data = line + b"\n" + whole[body(whole) : -4]
    assert is_refused(path, data + struct.pack("<I", zlib.crc32(data)))


def test_other_files_are_refused(path: Path, tmp_path: Path):
    for content in (b"", b"{}", b"x" * 4096, b"[" * 5000 + b"\n", b'{"format": 1}  \n'):
        assert is_refused(path, content)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=f"is not an {FORMAT}"):
            SuffixArray.open(other, FORMAT)


@pytest.mark.parametrize("seed", range(4))
def test_look_ups_bear_what_was_not_verified(path: Path, whole: bytes, seed: int):
    pick = random.Random(seed)
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(pick.choice((1, 5, 50))):
            word = pick.randrange(body(whole) // 4, len(whole) // 4)
            value = pick.choice((0, 1, 3, 99, 100, 2**31, 2**32 - 2))
            struct.pack_into("<I", changed, 4 * word, value)
        path.write_bytes(changed)
        for tail in ([0, 1, 2], [3], [1] * 70, [2, 2, 0, 1]):
            assert all(0 <= token < VOCABULARY for token in drafted(path, tail))


def drafts_only_tokens(path: Path) -> None:
    found = harmless(lambda: drafted(path, [1, 2, 3]))
    assert isinstance(found, list)
    assert all(0 <= token < VOCABULARY for token in found)


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(data=st.data())
def test_damaged_bytes_do_no_harm(path: Path, whole: bytes, data: st.DataObject) -> None:
    path.write_bytes(data.draw(mutated(whole)))
    drafts_only_tokens(path)


numbers = st.one_of(st.integers(-2, 12), st.sampled_from([2**31 - 1, -(2**31), VOCABULARY]))
sections = st.lists(numbers, max_size=20).map(lambda values: np.array(values, dtype=np.int32))


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(index=st.builds(SuffixArray, sections, sections))
def test_what_has_the_right_checksum_and_makes_no_sense_is_harmless(
    path: Path, index: SuffixArray
) -> None:
    written(path, index)
    drafts_only_tokens(path)
