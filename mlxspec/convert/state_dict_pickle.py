"""Read the pickle of a PyTorch state dict without running anything it says.

Python's unpickler calls whatever a pickle names. This reader is an interpreter of its own for
the few opcodes a state dict is made of: it pushes containers and strings, and where a pickle
calls a function it accepts a handful of names that rebuild tensors, which it evaluates itself
into :class:`TensorLayout` descriptions. Nothing is imported, no attribute is looked up or set.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConversionError
from .messages import printable

# A state dict of a thousand tensors takes 200 kB.
MAX_PICKLE_BYTES = 16 << 20
_MOST_DIMENSIONS = 32


@dataclass(frozen=True)
class Storage:
    """A flat stretch of elements in the file, named by its record.

    ``dtype`` is None for an untyped storage, whose ``numel`` counts bytes.
    """

    record: str
    dtype: str | None
    numel: int


@dataclass(frozen=True)
class TensorLayout:
    """A tensor as a view of a storage; ``offset`` and ``strides`` count elements."""

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Global:
    """A name that a pickle asked for, never what it stands for."""

    name: str


_MARK = object()

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


def _rebuild_tensor_v2(
    storage: Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    metadata: Any = None,
) -> TensorLayout:
    _expect(isinstance(storage, Storage) and storage.dtype is not None)
    assert storage.dtype is not None
    return _layout(storage, storage.dtype, offset, shape, strides, metadata)


def _rebuild_tensor_v3(
    storage: Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    dtype: _Global,
    metadata: Any = None,
) -> TensorLayout:
    _expect(isinstance(storage, Storage) and isinstance(dtype, _Global) and dtype.name in _DTYPES)
    return _layout(storage, _DTYPES[dtype.name], offset, shape, strides, metadata)


def _layout(
    storage: Storage, dtype: str, offset: Any, shape: Any, strides: Any, metadata: Any
) -> TensorLayout:
    _expect(_is_size(offset) and isinstance(shape, tuple) and isinstance(strides, tuple))
    _expect(len(shape) == len(strides) <= _MOST_DIMENSIONS)
    _expect(all(map(_is_size, shape + strides)))
    _expect(not metadata)  # lazy conjugation and negation, which weights do not have
    return TensorLayout(storage, dtype, shape, strides, offset)


def _rebuild_parameter(
    data: TensorLayout, requires_grad: bool, hooks: Any, state: Any = None
) -> TensorLayout:
    _expect(isinstance(data, TensorLayout))
    return data


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    # Python 2 wrote the items as an argument, a list of two-element lists.
    _expect(isinstance(pairs, list | tuple))
    _expect(all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs))
    _expect(all(isinstance(key, str) for key, _ in pairs))
    return dict(pairs)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}
_ALLOWED = _FUNCTIONS.keys() | _STORAGE_DTYPES.keys() | _DTYPES.keys()


class _MalformedPickle(Exception):
    """The pickle is not what ``torch.save`` writes for a state dict."""


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
        state = _Interpreter(source).run(data)
    # The exceptions are those of Python's own operations on hostile operands.
    except (_MalformedPickle, ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise ConversionError(
            f"{source}: its pickle is damaged or holds more than tensors ({printable(error)})"
        ) from None
    if not isinstance(state, dict):
        raise ConversionError(f"{source}: holds no dictionary of tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, TensorLayout):
            raise ConversionError(f"{source}: the entry {printable(name)} is no tensor")
    return state


class _Interpreter:
    """The pickle machine, reduced to data: a stack, a memo and the opcodes of state dicts."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._execute(opcode.name, argument)
        raise _MalformedPickle("no end")

    def _execute(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                stack.append(_MARK)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "SHORT_BINSTRING" | "BINSTRING" | "STRING":
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                items = [stack.pop() for _ in range(count)]
                stack.append(tuple(reversed(items)))
            case "APPEND" | "APPENDS":
                self._extend([stack.pop()] if name == "APPEND" else self._pop_to_mark())
            case "SETITEM" | "SETITEMS":
                self._set_items(self._pop_to_mark() if name == "SETITEMS" else self._pop_pair())
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL" | "INST":  # no class of the old INST is allowed: it is named and refused
                module, _, attribute = argument.partition(" ")
                stack.append(self._global(module, attribute))
            case "STACK_GLOBAL":
                module, attribute = self._pop_pair()
                stack.append(self._global(module, attribute))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                function, arguments = self._pop_pair()
                stack.append(_call(function, arguments))
            case "BUILD":
                # Attributes of a state dict (its _metadata) say nothing about the weights.
                stack.pop()
                _expect(isinstance(stack[-1], dict))
            case _:
                raise _MalformedPickle(f"opcode {name}")

    def _global(self, module: Any, attribute: Any) -> _Global:
        _expect(isinstance(module, str) and isinstance(attribute, str))
        name = f"{module}.{attribute}"
        if name not in _ALLOWED:
            raise ConversionError(
                f"{self._source}: asks for {printable(name)}, which is neither a tensor nor a "
                "container; nothing was run"
            )
        return _Global(name)

    def _pop_pair(self) -> list[Any]:
        second, first = self._stack.pop(), self._stack.pop()
        return [first, second]

    def _pop_to_mark(self) -> list[Any]:
        items = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        _expect(isinstance(target, list))
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        _expect(isinstance(target, dict) and len(items) % 2 == 0)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of nested tuples can take exponential time.
            _expect(isinstance(key, str | int))
            target[key] = value


def _storage(persistent_id: Any) -> Storage:
    """PyTorch's ``("storage", type, record, device, numel)``."""
    _expect(isinstance(persistent_id, tuple) and len(persistent_id) == 5)
    kind, storage_type, record, _, numel = persistent_id
    _expect(kind == "storage" and isinstance(record, str) and _is_size(numel))
    _expect(isinstance(storage_type, _Global) and storage_type.name in _STORAGE_DTYPES)
    return Storage(record, _STORAGE_DTYPES[storage_type.name], numel)


def _call(function: Any, arguments: Any) -> Any:
    _expect(isinstance(function, _Global) and isinstance(arguments, tuple))
    _expect(function.name in _FUNCTIONS)
    return _FUNCTIONS[function.name](*arguments)


def _is_size(value: Any) -> bool:
    """Whether a size, stride or offset; negative ones do not occur in a checkpoint."""
    return type(value) is int and 0 <= value < 1 << 48


def _expect(condition: bool) -> None:
    if not condition:
        raise _MalformedPickle("not a state dict")
