"""``.pth`` files: the meaning of PyTorch's views, and damaged files."""

import contextlib
import pickle
import struct
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.errors import LoadError
from mlxspec.models.torch_file import read_torch_file
from tests.support import torch_file
from tests.support.examples import examples
from tests.support.torch_file import dumps, storage, tensor, write_archive

VALUES = np.arange(12, dtype=np.float32)
PLACE = storage("float32", "0", 12)


def read(path: Path) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in read_torch_file(path)}


def write(
    path: Path, *views: torch_file.Call, content: bytes = VALUES.tobytes(), **options
) -> Path:
    state = {str(index): view for index, view in enumerate(views)}
    write_archive(path, dumps(state), {"0": content}, **options)
    return path


def test_shared_sliced_transposed_and_expanded_views_are_right(tmp_path: Path):
    path = write(
        tmp_path / "views.pth",
        tensor(PLACE, (3, 4), (4, 1)),
        tensor(PLACE, (4, 3), (1, 4)),
        tensor(PLACE, (2, 2), (4, 2), 5),
        tensor(PLACE, (3, 2), (0, 1), 7),
        tensor(PLACE, (), (), 11),
    )
    whole = VALUES.reshape(3, 4)
    expected = [whole, whole.T, whole[1:3, 1::2], np.broadcast_to(VALUES[7:9], (3, 2)), VALUES[11]]
    for view, array in zip(read(path).values(), expected, strict=True):
        np.testing.assert_array_equal(view, array)


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((13,), (1,), 0), ((3, 4), (5, 1), 0), ((2,), (1,), 11), ((2, 2), (1, 11), 0)],
)
def test_a_view_beyond_its_storage_is_refused(tmp_path: Path, shape, strides, offset):
    path = write(tmp_path / "beyond.pth", tensor(PLACE, shape, strides, offset))
    with pytest.raises(LoadError, match="damaged, or not a file of PyTorch"):
        read(path)


@pytest.mark.parametrize("shape", [(2**31 - 1,) * 3, (0, *[2**31 - 1] * 3)])
def test_a_view_of_more_elements_than_can_be_counted_is_refused(tmp_path: Path, shape):
    path = write(tmp_path / "huge.pth", tensor(PLACE, shape, (0,) * len(shape)))
    with pytest.raises(LoadError, match="damaged, or not a file of PyTorch"):
        read(path)


def test_a_short_storage_is_refused(tmp_path: Path):
    path = write(tmp_path / "short.pth", tensor(PLACE, (3, 4), (4, 1)), content=b"\0" * 47)
    with pytest.raises(LoadError, match="damaged, or not a file of PyTorch"):
        read(path)


def test_a_missing_storage_is_refused(tmp_path: Path):
    path = tmp_path / "missing.pth"
    write_archive(path, dumps({"a": tensor(PLACE, (3, 4), (4, 1))}), {"1": VALUES.tobytes()})
    with pytest.raises(LoadError, match="damaged, or not a file of PyTorch"):
        read(path)


def test_zip64_archives_are_read(tmp_path: Path):
    path = tmp_path / "zip64.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", dumps({"a": tensor(PLACE, (3, 4), (4, 1))}))
        with archive.open("archive/data/0", "w", force_zip64=True) as member:
            member.write(VALUES.tobytes())
    np.testing.assert_array_equal(read(path)["a"], VALUES.reshape(3, 4))


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.01])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: float):
    path = write(tmp_path / "cut.pth", tensor(PLACE, (3, 4), (4, 1)))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(LoadError, match=r"cut\.pth: .+$"):
        read(path)


def test_a_damaged_local_header_is_refused(tmp_path: Path):
    path = write(tmp_path / "header.pth", tensor(PLACE, (3, 4), (4, 1)))
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo("archive/data/0").header_offset
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, place + 28, 0xFFFF)
    path.write_bytes(content)
    with pytest.raises(LoadError, match="damaged, or not a file of PyTorch"):
        read(path)


@settings(max_examples=examples(66))
@given(st.data())
def test_a_damaged_file_gives_tensors_or_a_conversion_error(data: st.DataObject):
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory) / "x.pth", tensor(PLACE, (3, 4), (4, 1)))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        with contextlib.suppress(LoadError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # duplicate names
            for view in read(path).values():
                assert view.tobytes()


# The first bytes of PyTorch's two older formats: a pickled magic number and a tar archive.
LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
TAR = b"\0" * 257 + b"ustar\x0000" + b"\0" * 300


@pytest.mark.parametrize("content", [LEGACY, TAR])
def test_the_formats_before_zip_are_refused_by_name(tmp_path: Path, content: bytes):
    path = tmp_path / "old.pth"
    path.write_bytes(content)
    with pytest.raises(LoadError, match="damaged, or not a file of PyTorch"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\3\4"])
def test_other_files_are_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "other.pth"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=r"other\.pth: "):
        read(path)


def test_a_zip_file_of_something_else_is_refused(tmp_path: Path):
    path = tmp_path / "photos.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("beach.jpg", b"")
    with pytest.raises(LoadError, match="damaged, or not a file of PyTorch"):
        read(path)
