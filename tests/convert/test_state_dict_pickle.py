"""The state dict unpickler, which accepts only tensors and containers."""

import collections
import contextlib
import io
import os
import pickle
import sys
import tempfile
import types
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.errors import LoadError
from mlxspec.models.torch_file import read_torch_file
from tests.support.examples import examples
from tests.support.torch_file import (
    Call,
    Global,
    Persistent,
    Raw,
    dumps,
    storage,
    tensor,
    write_archive,
)

PLACE = storage("bfloat16", "0", 6)
VIEW = tensor(PLACE, (2, 3), (3, 1))
BITS = np.arange(6, dtype=np.uint16)
HOOKS = Call(Global("collections", "OrderedDict"), ())


def read_pickle(content: bytes) -> dict[str, mx.array]:
    """Read an archive with this pickle and one record of six 16-bit elements."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "weights.pth"
        write_archive(path, content, {"0": BITS.tobytes()})
        return dict(read_torch_file(path))


def read(value: object) -> dict[str, mx.array]:
    return read_pickle(dumps(value))


def assert_views(state: dict[str, mx.array], *names: str) -> None:
    assert list(state) == list(names)
    for array in state.values():
        assert array.dtype == mx.bfloat16
        np.testing.assert_array_equal(np.array(array.view(mx.uint16)), BITS.reshape(2, 3))


def test_a_dict_of_tensors_is_read_in_order():
    assert_views(read({"b": VIEW, "a": VIEW}), "b", "a")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_pythons_pickler_makes_of_a_state_dict_is_read(
    monkeypatch: pytest.MonkeyPatch, protocol: int
):
    """The pickle has PyTorch's names; the test supplies fake modules for them."""

    class Place:
        pass

    class Tensor:
        def __reduce__(self):
            return rebuild, (Place(), 0, (2, 3), (3, 1), False, collections.OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", half, "0", "cpu", 6) if isinstance(value, Place) else None

    half = type("BFloat16Storage", (), {"__module__": "torch"})
    rebuild = type("_rebuild_tensor_v2", (), {"__module__": "torch._utils"})
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(BFloat16Storage=half))
    utils = types.SimpleNamespace(_rebuild_tensor_v2=rebuild)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    state = collections.OrderedDict(a=Tensor(), b=Tensor())
    state._metadata = collections.OrderedDict({"": {"version": 1}})  # like an nn.Module's
    content = io.BytesIO()
    Pickler(content, protocol).dump(state)
    assert_views(read_pickle(content.getvalue()), "a", "b")


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/mlxspec_was_here",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_by_name(protocol: int):
    with pytest.raises(LoadError, match=r"weights\.pth: asks for (posix|nt)\.system"):
        read_pickle(pickle.dumps(Hostile(), protocol))
    with pytest.raises(LoadError, match=r"weights\.pth: asks for os\.system"):
        read_pickle(b"(S'id'\nios\nsystem\n.")  # protocol 0's INST


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("collections", "OrderedDict.fromkeys"),
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._utils", "_rebuild_qtensor"),
        ("argparse", "Namespace"),
        ("torch", "ComplexFloatStorage"),
    ],
)
def test_every_other_name_is_refused(module: str, name: str):
    with pytest.raises(LoadError, match=f"asks for {module}.{name}, ") as error:
        read({"a": Global(module, name)})
    assert "\n" not in str(error.value)


def test_a_name_cannot_forge_lines_in_the_message():
    with pytest.raises(LoadError) as error:
        read(Raw(b"X\x04\x00\x00\x00os\n\x1bX\x01\x00\x00\x00x\x93"))
    assert str(error.value).isprintable()


REBUILD = Global("torch._utils", "_rebuild_tensor_v2")


@pytest.mark.parametrize(
    "value",
    [
        [VIEW],
        {"a": 1},
        {"a": {"b": VIEW}},
        {"a": PLACE},
        {"a": REBUILD},
        {"a": Call(VIEW, ())},
        {"a": Call("text", ())},
        {"a": Call(Global("torch", "FloatStorage"), (1 << 40,))},
        {"a": Call(REBUILD, ())},
        {"a": Call(REBUILD, [PLACE])},
        {"a": tensor(PLACE, (2, 3), (3,))},
        {"a": tensor(PLACE, (-2, 3), (3, 1))},
        {"a": tensor(PLACE, (2, 3), (-3, 1))},
        {"a": tensor(PLACE, (2, 3), (3, 1), -1)},
        {"a": tensor(PLACE, (2, 3), (3, 1 << 60))},
        {"a": tensor(PLACE, ("2", 3), (3, 1))},
        {"a": tensor(VIEW, (2, 3), (3, 1))},
        {"a": Persistent(("storage",))},
        {"a": Persistent(("storage", Global("torch", "float16"), "0", "cpu", 6))},
    ],
)
def test_an_invalid_state_dict_is_refused_in_one_line(value: object):
    with pytest.raises(LoadError, match=r"weights\.pth: .+$"):
        read(value)


@pytest.mark.parametrize(
    "code",
    [
        b"\x82\x01",  # EXT1: a callable from the process's registry
        b"\x83\x01\x00",
        b"ios\nsystem\n",  # INST, with the arguments after a mark
        b"(cos\nsystem\no",  # OBJ
        b"]}b",  # BUILD on a list
        b"N}b",
        b"}\x94h\x01",  # BINGET of a missing memo entry
        b"r\xff\xff\xff\xff",  # LONG_BINPUT at index 2^32 - 1, with an empty stack
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",  # BINBYTES8 of 2^63 bytes
        b"X\xff\xff\xff\x7fabc",
        b"e",
        b"u",
        b"0",
        b"R",
        b"",
    ],
)
def test_other_opcodes_and_damaged_ones_are_refused(code: bytes):
    with pytest.raises(LoadError, match=r"weights\.pth: .+$"):
        read(Raw(code))


def test_what_is_left_after_the_end_is_not_read():
    assert_views(read_pickle(dumps({"a": VIEW}) + b"cos\nsystem\n."), "a")


def test_nothing_is_made_or_changed_but_by_calling_what_stands_for_a_name():
    """Refused: NEWOBJ and similar, BUILD on other types, and changes to the stand-ins for names."""
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    for code in (
        rebuild + b")\x81",  # NEWOBJ
        rebuild + b")}\x92",  # NEWOBJ_EX
        b"(" + rebuild + b"o",  # OBJ
        rebuild + b"}X\x08\0\0\0__code__Nsb",  # BUILD: attributes of the function itself
        rebuild + b"N}X\x08\0\0\0__code__Ns\x86b",  # and through the slots' state
        b"ctorch\nfloat16\n}X\x04\0\0\0nameNsb",
    ):
        with pytest.raises(LoadError):
            read(Raw(code))
    assert_views(read({"a": VIEW}), "a")


@settings(max_examples=examples(100))
@given(st.data())
def test_a_damaged_pickle_gives_tensors_or_a_conversion_error(data: st.DataObject):
    content = bytearray(dumps({"a": VIEW, "b": VIEW}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(LoadError):
        for array in read_pickle(bytes(content)).values():
            assert array.size >= 0
