"""Reads the tensors of a PyTorch ``.pth`` file, without PyTorch and without copying them.

Since version 1.6 ``torch.save`` writes a zip archive whose members are not compressed:
``<name>/data.pkl`` describes the tensors, and ``<name>/data/<record>`` hold their elements.

Python's unpickler calls any function that a pickle names. The one here knows only the opcodes of a
state dict. The few names that it accepts stand for functions of this file, which make views of the
mapped file. It imports nothing, and reads or sets no attribute.
"""

import functools
import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from ..errors import ConversionError, printable

BFLOAT16 = np.dtype("<u2")
"""numpy has no bfloat16: arrays hold its bits in a type that no other weights have."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of the name and the extra field
_ENCRYPTED = 0x1
# What zipfile raises for damaged archives.
_ZIP_ERRORS = (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, struct.error)

_MAX_PICKLE_BYTES = 16 << 20  # a state dict of a thousand tensors takes 200 kB
_MOST_DIMENSIONS = 32
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING", "BINSTRING", "STRING"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    # Names pass through find_class. INST is the old protocols' way to name and call.
    *("GLOBAL", "STACK_GLOBAL", "INST", "REDUCE", "BINPERSID"),
}
"""Opcodes for Python's unpickler. SETITEM, SETITEMS and BUILD are overridden, others refused."""

_TYPES = {
    **{"torch.FloatStorage": np.dtype("f4"), "torch.float32": np.dtype("f4")},
    **{"torch.DoubleStorage": np.dtype("f8"), "torch.float64": np.dtype("f8")},
    **{"torch.HalfStorage": np.dtype("f2"), "torch.float16": np.dtype("f2")},
    **{"torch.BFloat16Storage": BFLOAT16, "torch.bfloat16": BFLOAT16},
    **{"torch.LongStorage": np.dtype("i8"), "torch.int64": np.dtype("i8")},
    **{"torch.IntStorage": np.dtype("i4"), "torch.int32": np.dtype("i4")},
    **{"torch.ShortStorage": np.dtype("i2"), "torch.int16": np.dtype("i2")},
    **{"torch.CharStorage": np.dtype("i1"), "torch.int8": np.dtype("i1")},
    **{"torch.ByteStorage": np.dtype("u1"), "torch.uint8": np.dtype("u1")},
    **{"torch.BoolStorage": np.dtype("?"), "torch.bool": np.dtype("?")},
    "torch.storage.UntypedStorage": np.dtype("u1"),
}


Storages = Callable[[str, np.dtype, int], np.ndarray]
"""Returns a storage as a flat memmap, given its record, type and number of elements."""


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a ``.pth`` file by name, as views of the mapped file; bfloat16 as its bits.

    Raises:
        ConversionError: the file is truncated, has the format before PyTorch 1.6, is compressed,
            encrypted or big-endian, asks for code, or has a tensor that reaches beyond its
            storage.
    """
    try:
        mapped = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ConversionError(f"{path}: cannot be read ({error})") from None
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
            if len(members) != len(archive.infolist()):
                raise ConversionError(f"{path}: the archive contains a name twice")
            pickles = [n for n in members if n.count("/") == 1 and n.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise ConversionError(f"{path}: is a zip file, but not one that PyTorch wrote")
            prefix = pickles[0].removesuffix("data.pkl")
            # PyTorch before 2.1 does not write it, and its files are little-endian.
            if (byte_order := f"{prefix}byteorder") in members:
                with archive.open(byte_order) as record:
                    if record.read(16) != b"little":
                        raise ConversionError(f"{path}: was not written on a little-endian machine")
            with archive.open(pickles[0]) as content:
                data = content.read(_MAX_PICKLE_BYTES + 1)
    except _ZIP_ERRORS as error:
        problem = "is not a file of PyTorch 1.6 or newer; save it again with a newer torch.save"
        if mapped[:4].tobytes() == b"PK\3\4":
            problem = f"is truncated or damaged ({printable(error)})"
        raise ConversionError(f"{path}: {problem}") from None

    @functools.cache
    def storage(record: str, dtype: np.dtype, size: int) -> np.ndarray:
        name, nbytes = f"{prefix}data/{record}", size * dtype.itemsize
        member = members.get(name)
        if member is None:
            problem = f"has no {printable(name)}; the file is damaged"
        elif member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            problem = f"{printable(name)} is compressed or encrypted; save it with torch.save"
        elif not member.file_size == member.compress_size == nbytes:
            problem = f"{printable(name)} is damaged: {member.file_size} bytes instead of {nbytes}"
        elif (start := _data_offset(mapped, member)) is None:
            problem = f"{printable(name)} reaches beyond the file, which is damaged"
        else:
            return mapped[start : start + nbytes].view(dtype)
        raise ConversionError(f"{path}: {problem}")

    return _read_state_dict(data, path, storage)


def as_array(tensor: np.ndarray) -> mx.array:
    """Copy a tensor of :func:`read_torch_file` into memory."""
    if tensor.dtype == BFLOAT16:
        return mx.array(tensor).view(mx.bfloat16)
    # MLX has float64 on the CPU only, and no checkpoint needs more than float32.
    return mx.array(tensor.astype(np.float32) if tensor.dtype == np.float64 else tensor)


def _data_offset(mapped: np.ndarray, member: zipfile.ZipInfo) -> int | None:
    """The offset of a member's bytes, which follow its local header; None outside the file."""
    start = member.header_offset
    header = mapped[start : start + _LOCAL_HEADER.size].tobytes()
    if start < 0 or len(header) < _LOCAL_HEADER.size:
        return None
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    offset: int = start + _LOCAL_HEADER.size + name_length + extra_length
    lies_within = signature == b"PK\3\4" and offset + member.file_size <= mapped.size
    return offset if lies_within else None


# --- the pickle ---


def _read_state_dict(data: bytes, path: Path, storage: Storages) -> dict[str, np.ndarray]:
    if len(data) > _MAX_PICKLE_BYTES:
        raise ConversionError(f"{path}: its pickle is far too long to describe weights")
    try:
        state = _StateDictUnpickler(data, path, storage).load()
    except ConversionError:
        raise
    except Exception as error:  # with hostile operands any operation of the unpickler may fail
        reason = printable(error) or "it ends too soon"
        raise ConversionError(
            f"{path}: its pickle is damaged or holds more than tensors ({reason})"
        ) from None
    if not isinstance(state, dict):
        raise ConversionError(f"{path}: does not hold a dictionary of tensors")
    for name, value in state.items():
        if type(value) is not np.ndarray:  # a storage is a memmap
            raise ConversionError(f"{path}: the entry {printable(name)} is not a tensor")
        if max(value.shape, default=0) >= 1 << 31:
            raise ConversionError(f"{path}: {printable(name)} is too large for MLX")
    return state


class _StateDictUnpickler(pickle._Unpickler):
    """Python's unpickler, for data only.

    Of the unpickler in C only the look-up of names can be overridden. A LONG_BINPUT with the index
    2³² - 1 would make it allocate 64 GB, and hashing a key of nested tuples would take it
    exponential time.
    """

    stack: list[Any]  # since the last MARK

    def __init__(self, data: bytes, path: Path, storage: Storages) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")
        self._path = path
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """The function of this file, or the numpy type, that stands for a name in the pickle."""
        full_name = f"{module}.{name}"
        if full_name in _TYPES:
            return _TYPES[full_name]
        if full_name in _FUNCTIONS:
            return _FUNCTIONS[full_name]
        raise ConversionError(
            f"{self._path}: asks for {printable(full_name)}, which is neither a tensor nor a "
            "container; nothing was run"
        )

    def persistent_load(self, pid: Any) -> np.ndarray:
        """The flat array for PyTorch's ``("storage", type, record, device, numel)``."""
        _expect(isinstance(pid, tuple) and len(pid) == 5)
        kind, dtype, record, _, size = pid
        _expect(kind == "storage" and isinstance(record, str) and _is_size(size))
        _expect(isinstance(dtype, np.dtype))
        return self._storage(record, dtype, size)

    # Keys must be strings: hashing nested tuples takes exponential time, and an attacker can choose
    # numbers whose hashes collide.
    def _set_item(self) -> None:
        _expect(isinstance(self.stack[-2], str))
        self.load_setitem()  # type: ignore[attr-defined]

    def _set_items(self) -> None:
        _expect(all(isinstance(key, str) for key in self.stack[::2]))
        self.load_setitems()  # type: ignore[attr-defined]

    def _build(self) -> None:
        # The attributes of a state dict (its _metadata) do not affect the weights.
        self.stack.pop()
        _expect(isinstance(self.stack[-1], dict))

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("an opcode that no state dict needs")

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict.fromkeys(range(256), _refuse)
    dispatch |= {c: f for c, f in pickle._Unpickler.dispatch.items() if _NAMES[c] in _OPCODES}
    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.BUILD[0]] = _build


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    # Python 2 wrote the items as an argument: a list of two-element lists.
    _expect(isinstance(pairs, list | tuple))
    _expect(all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs))
    _expect(all(isinstance(key, str) for key, _ in pairs))
    return dict(pairs)


def _tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _requires_grad: Any,
    _hooks: Any,
    *type_and_metadata: Any,
) -> np.ndarray:
    """A view of a storage. Version 3 names the type. Offset and strides count elements."""
    _expect(isinstance(storage, np.memmap))
    dtype, *metadata = type_and_metadata or [None]
    if not isinstance(dtype, np.dtype):
        dtype, metadata = storage.dtype, [dtype, *metadata]
    _expect(not any(metadata))  # lazy conjugation and negation, which weights do not have
    _expect(_is_size(offset) and isinstance(shape, tuple) and isinstance(strides, tuple))
    _expect(len(shape) == len(strides) <= _MOST_DIMENSIONS)
    _expect(all(map(_is_size, shape + strides)))
    steps = [stride * dtype.itemsize for stride in strides]
    try:
        return np.ndarray(shape, dtype, storage.view(np.uint8), offset * dtype.itemsize, steps)
    except ValueError as error:
        raise pickle.UnpicklingError(f"a tensor reaches beyond its storage: {error}") from None


def _parameter(data: Any, *_requires_grad_hooks_and_state: Any) -> np.ndarray:
    _expect(type(data) is np.ndarray)
    return data


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}


def _is_size(value: Any) -> bool:
    """Whether a value can be a size, a stride or an offset, which are never negative here."""
    return type(value) is int and 0 <= value < 1 << 48


def _expect(condition: bool) -> None:
    if not condition:
        raise pickle.UnpicklingError("not a state dict")
