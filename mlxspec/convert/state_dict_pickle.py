"""Read the pickle of a PyTorch state dict without running anything it says.

Python's unpickler calls whatever a pickle names. Here it knows only the opcodes that a state dict
is made of, and the few names it may ask for stand for functions of this file, which describe
tensors as :class:`TensorLayout`. Nothing is imported, no attribute is looked up or set.

The base class is the standard library's unpickler in Python. Of the one in C only the look-up of
names can be overridden: a LONG_BINPUT with the index 2³² - 1 would make it allocate 64 GB, and it
would hash a dictionary's key of nested tuples, which takes exponential time.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConversionError, printable

# A state dict of a thousand tensors takes 200 kB.
MAX_PICKLE_BYTES = 16 << 20
_MOST_DIMENSIONS = 32

_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING", "BINSTRING", "STRING"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    # What they name passes through find_class; INST is the old protocols' way to name and call.
    *("GLOBAL", "STACK_GLOBAL", "INST", "REDUCE", "BINPERSID"),
}
"""What the base class executes. SETITEM, SETITEMS and BUILD are overridden, others refused."""

_STORAGE_DTYPES = {
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.storage.UntypedStorage": None,
}
_DTYPES = {f"torch.{dtype}": dtype for dtype in _STORAGE_DTYPES.values() if dtype is not None}


@dataclass(frozen=True, slots=True)
class Storage:
    """A flat stretch of elements in the file, named by its record.

    ``dtype`` is None for an untyped storage, whose ``numel`` counts bytes.
    """

    record: str
    dtype: str | None
    numel: int


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor as a view of a storage; ``offset`` and ``strides`` count elements."""

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Type:
    """The name of an element type or of a storage's, never what it stands for."""

    name: str


def read_state_dict(data: bytes, source: str) -> dict[str, TensorLayout]:
    """The tensors of a pickled state dict by name, in its order.

    Args:
        data: the pickle.
        source: the file's name, for messages.

    Raises:
        ConversionError: the pickle asks for anything but tensors and containers, is damaged,
            or is no flat dictionary of tensors.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise ConversionError(f"{source}: its pickle is far too long to describe weights")
    try:
        state = _StateDictUnpickler(data, source).load()
    except ConversionError:
        raise
    except Exception as error:  # with hostile operands any operation of the unpickler may fail
        reason = printable(error) or "it ends too soon"
        raise ConversionError(
            f"{source}: its pickle is damaged or holds more than tensors ({reason})"
        ) from None
    if not isinstance(state, dict):
        raise ConversionError(f"{source}: holds no dictionary of tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, TensorLayout):
            raise ConversionError(f"{source}: the entry {printable(name)} is no tensor")
    return state


class _Dispatch(dict[int, Callable[[Any], None]]):
    """What executes each opcode; those that are not there are refused by name."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"opcode {_NAMES.get(code, code)}")


class _StateDictUnpickler(pickle._Unpickler):
    """Python's unpickler, for data alone."""

    stack: list[Any]  # since the last MARK

    def __init__(self, data: bytes, source: str) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        """The function or type of this file that stands for what a pickle names."""
        full_name = f"{module}.{name}"
        if full_name in _FUNCTIONS:
            return _FUNCTIONS[full_name]
        if full_name in _STORAGE_DTYPES or full_name in _DTYPES:
            return _Type(full_name)
        raise ConversionError(
            f"{self._source}: asks for {printable(full_name)}, which is neither a tensor nor a "
            "container; nothing was run"
        )

    def persistent_load(self, pid: Any) -> Storage:
        """PyTorch's ``("storage", type, record, device, numel)``."""
        _expect(isinstance(pid, tuple) and len(pid) == 5)
        kind, storage_type, record, _, numel = pid
        _expect(kind == "storage" and isinstance(record, str) and _is_size(numel))
        _expect(isinstance(storage_type, _Type) and storage_type.name in _STORAGE_DTYPES)
        return Storage(record, _STORAGE_DTYPES[storage_type.name], numel)

    # Keys are strings: nested tuples take exponential time to hash, and numbers can be chosen
    # whose hashes all collide.
    def _set_item(self) -> None:
        _expect(isinstance(self.stack[-2], str))
        self.load_setitem()  # type: ignore[attr-defined]

    def _set_items(self) -> None:
        _expect(all(isinstance(key, str) for key in self.stack[::2]))
        self.load_setitems()  # type: ignore[attr-defined]

    def _build(self) -> None:
        # Attributes of a state dict (its _metadata) say nothing about the weights.
        self.stack.pop()
        _expect(isinstance(self.stack[-1], dict))

    dispatch = _Dispatch(
        {
            code: execute
            for code, execute in pickle._Unpickler.dispatch.items()
            if _NAMES[code] in _OPCODES
        }
    )
    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.BUILD[0]] = _build


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    # Python 2 wrote the items as an argument, a list of two-element lists.
    _expect(isinstance(pairs, list | tuple))
    _expect(all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs))
    _expect(all(isinstance(key, str) for key, _ in pairs))
    return dict(pairs)


def _rebuild_tensor_v2(*arguments: Any) -> TensorLayout:
    storage, offset, shape, strides, _requires_grad, _hooks, *metadata = arguments
    _expect(isinstance(storage, Storage) and storage.dtype is not None)
    return _layout(storage, storage.dtype, offset, shape, strides, metadata)


def _rebuild_tensor_v3(*arguments: Any) -> TensorLayout:
    storage, offset, shape, strides, _requires_grad, _hooks, dtype, *metadata = arguments
    _expect(isinstance(storage, Storage) and isinstance(dtype, _Type) and dtype.name in _DTYPES)
    return _layout(storage, _DTYPES[dtype.name], offset, shape, strides, metadata)


def _layout(
    storage: Storage, dtype: str, offset: Any, shape: Any, strides: Any, metadata: list[Any]
) -> TensorLayout:
    _expect(_is_size(offset) and isinstance(shape, tuple) and isinstance(strides, tuple))
    _expect(len(shape) == len(strides) <= _MOST_DIMENSIONS)
    _expect(all(map(_is_size, shape + strides)))
    _expect(not any(metadata))  # lazy conjugation and negation, which weights do not have
    return TensorLayout(storage, dtype, shape, strides, offset)


def _rebuild_parameter(data: Any, *_requires_grad_hooks_and_state: Any) -> TensorLayout:
    _expect(isinstance(data, TensorLayout))
    return data


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}


def _is_size(value: Any) -> bool:
    """Whether a size, stride or offset; negative ones do not occur in a checkpoint."""
    return type(value) is int and 0 <= value < 1 << 48


def _expect(condition: bool) -> None:
    if not condition:
        raise pickle.UnpicklingError("not a state dict")
