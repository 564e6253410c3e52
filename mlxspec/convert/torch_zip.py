"""Tensors of a PyTorch ``.pth`` file, without PyTorch and without copying them.

Since version 1.6 ``torch.save`` writes a zip archive whose members are not compressed:
``<name>/data.pkl`` describes the tensors, ``<name>/data/<record>`` hold their elements.
"""

import math
import struct
import zipfile
from pathlib import Path

import numpy as np

from ..errors import ConversionError, printable
from .checkpoint_files import BFLOAT16, map_file, view
from .state_dict_pickle import MAX_PICKLE_BYTES, Storage, TensorLayout, read_state_dict

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of the name and the extra field
_ENCRYPTED = 0x1
# What zipfile raises about damaged archives, besides the error that it has for them.
_ZIP_ERRORS = (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, struct.error)


def read_torch_zip(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a ``.pth`` file by name, as views of the mapped file; bfloat16 as its bits.

    Raises:
        ConversionError: the file is truncated, of the format before PyTorch 1.6, compressed,
            encrypted or big-endian, asks for code, or has a tensor that reaches beyond its
            storage.
    """
    mapped = map_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
            if len(members) != len(archive.infolist()):
                raise ConversionError(f"{path}: a name stands in the archive twice")
            prefix = _prefix(path, members)
            # PyTorch before 2.1 did not write it, and wrote on little-endian machines.
            if (byte_order := f"{prefix}byteorder") in members:
                with archive.open(_member(path, members, byte_order)) as record:
                    if record.read(16) != b"little":
                        raise ConversionError(f"{path}: was not written on a little-endian machine")
            with archive.open(_member(path, members, f"{prefix}data.pkl")) as pickle:
                layouts = read_state_dict(pickle.read(MAX_PICKLE_BYTES + 1), str(path))
    except _ZIP_ERRORS as error:
        raise ConversionError(f"{path}: {_why_not_a_zip(mapped, error)}") from None

    places: dict[Storage, int] = {}
    for layout in layouts.values():
        storage = layout.storage
        if storage not in places:
            member = _member(path, members, f"{prefix}data/{storage.record}")
            places[storage] = _data_offset(path, mapped, member)
            if member.file_size != _nbytes(storage):
                raise ConversionError(
                    f"{path}: {printable(member.filename)} has {member.file_size} bytes "
                    f"where {_nbytes(storage)} are announced"
                )
    return {
        name: _tensor(f"{path}: {printable(name)}", mapped, layout, places[layout.storage])
        for name, layout in layouts.items()
    }


def _prefix(path: Path, members: dict[str, zipfile.ZipInfo]) -> str:
    pickles = [n for n in members if n.count("/") == 1 and n.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ConversionError(f"{path}: is a zip file, but not one that PyTorch wrote")
    return pickles[0].removesuffix("data.pkl")


def _member(path: Path, members: dict[str, zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    if name not in members:
        raise ConversionError(f"{path}: has no {printable(name)}; the file is damaged")
    member = members[name]
    if member.flag_bits & _ENCRYPTED:
        raise ConversionError(f"{path}: {printable(name)} is encrypted")
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise ConversionError(
            f"{path}: {printable(name)} is compressed; save it again with torch.save"
        )
    return member


def _data_offset(path: Path, mapped: np.ndarray, member: zipfile.ZipInfo) -> int:
    """Where the member's bytes begin; the lengths in its local header are its own."""
    start = member.header_offset
    header = mapped[start : start + _LOCAL_HEADER.size].tobytes()
    if start >= 0 and len(header) == _LOCAL_HEADER.size:
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        offset = start + _LOCAL_HEADER.size + name_length + extra_length
        if signature == b"PK\3\4" and offset + member.file_size <= mapped.size:
            return offset
    name = printable(member.filename)
    raise ConversionError(f"{path}: {name} does not lie in the file; it is damaged")


def _numpy_type(dtype: str) -> np.dtype:
    return BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)


def _nbytes(storage: Storage) -> int:
    return storage.numel * (_numpy_type(storage.dtype).itemsize if storage.dtype else 1)


def _tensor(name: str, mapped: np.ndarray, layout: TensorLayout, place: int) -> np.ndarray:
    """The tensor in the mapped file, whose storage begins at byte ``place``."""
    dtype = _numpy_type(layout.dtype)
    last = layout.offset + sum(
        (size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True)
    )
    if math.prod(layout.shape) and (last + 1) * dtype.itemsize > _nbytes(layout.storage):
        raise ConversionError(f"{name} reaches beyond its storage")
    if any(size >= 1 << 31 for size in layout.shape):
        raise ConversionError(f"{name} has the shape {layout.shape}, too large for MLX")
    strides = [stride * dtype.itemsize for stride in layout.strides]
    offset = place + layout.offset * dtype.itemsize
    return view(name, mapped, dtype, layout.shape, offset, strides)


def _why_not_a_zip(mapped: np.ndarray, error: Exception) -> str:
    start = mapped[:512].tobytes()
    if start.startswith(b"PK\3\4"):
        return f"is truncated or damaged ({printable(error)})"
    # A pickled long, PyTorch's magic number, or the tar archive of its first releases.
    if start.startswith(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9") or start[257:262] == b"ustar":
        return "has the format before PyTorch 1.6; save it again with a newer torch.save"
    return "is no PyTorch file"
