"""The state dict unpickler: tensors and containers, and nothing else."""

import collections
import contextlib
import copyreg
import io
import os
import pickle
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.convert.torch_file import BFLOAT16, read_torch_file
from mlxspec.errors import ConversionError
from tests.support.examples import examples
from tests.support.hostile import harmless
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
BITS = np.arange(6, dtype=BFLOAT16)
HOOKS = Call(Global("collections", "OrderedDict"), ())


def read_pickle(content: bytes) -> dict[str, np.ndarray]:
    """The tensors of an archive with this pickle and one record of six 16-bit elements."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "weights.pth"
        write_archive(path, content, {"0": BITS.tobytes()})
        return read_torch_file(path)


def read(value: object) -> dict[str, np.ndarray]:
    return read_pickle(dumps(value))


def assert_views(state: dict[str, np.ndarray], *names: str) -> None:
    assert list(state) == list(names)
    for array in state.values():
        np.testing.assert_array_equal(array, BITS.reshape(2, 3))


def test_a_dict_of_tensors_is_read_in_order():
    assert_views(read({"b": VIEW, "a": VIEW}), "b", "a")


def test_a_parameter_is_its_tensor():
    parameter = Call(Global("torch._utils", "_rebuild_parameter"), (VIEW, True, HOOKS))
    assert_views(read({"a": parameter}), "a")


def test_an_untyped_storage_takes_the_type_from_the_tensor():
    place = Persistent(("storage", Global("torch.storage", "UntypedStorage"), "0", "cpu", 12))
    arguments = (place, 0, (2, 3), (3, 1), False, HOOKS, Global("torch", "float16"))
    v3 = Call(Global("torch._utils", "_rebuild_tensor_v3"), arguments)
    array = read({"a": v3})["a"]
    assert array.dtype == np.float16
    np.testing.assert_array_equal(array, BITS.view(np.float16).reshape(2, 3))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_pythons_pickler_makes_of_a_state_dict_is_read(
    monkeypatch: pytest.MonkeyPatch, protocol: int
):
    """Of one with the names of PyTorch in it, whose modules are made for the test."""

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
    state._metadata = collections.OrderedDict({"": {"version": 1}})  # as of an nn.Module
    content = io.BytesIO()
    Pickler(content, protocol).dump(state)
    assert_views(read_pickle(content.getvalue()), "a", "b")


def test_attributes_of_a_state_dict_are_dropped():
    metadata = {"_metadata": Call(Global("collections", "OrderedDict"), ())}
    state = Raw(
        dumps(Call(Global("collections", "OrderedDict"), ([["a", VIEW]],)))[2:-1]
        + dumps(metadata)[2:-1]
        + b"b"
    )
    assert_views(read(state), "a")


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/mlxspec_was_here",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_by_name(protocol: int):
    with pytest.raises(ConversionError, match=r"weights\.pth: asks for (posix|nt)\.system"):
        read_pickle(pickle.dumps(Hostile(), protocol))
    with pytest.raises(ConversionError, match=r"weights\.pth: asks for os\.system"):
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
    with pytest.raises(ConversionError, match=f"asks for {module}.{name}, ") as error:
        read({"a": Global(module, name)})
    assert "\n" not in str(error.value)


def test_a_name_cannot_forge_lines_in_the_message():
    with pytest.raises(ConversionError) as error:
        read(Raw(b"X\x04\x00\x00\x00os\n\x1bX\x01\x00\x00\x00x\x93"))
    assert str(error.value).isprintable()


REBUILD = Global("torch._utils", "_rebuild_tensor_v2")


@pytest.mark.parametrize(
    "value",
    [
        [VIEW],
        {"a": 1},
        {1: VIEW},
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
        {"a": tensor(PLACE, (True, 3), (3, 1))},
        {"a": tensor(VIEW, (2, 3), (3, 1))},
        {"a": Call(REBUILD, (PLACE, 0, (2, 3), (3, 1), False, HOOKS, {"conj": True}))},
        {"a": Persistent(("module", Global("torch", "HalfStorage"), "0", "cpu", 6))},
        {"a": Persistent(("storage", "HalfStorage", "0", "cpu", 6))},
        {"a": Persistent(("storage", Global("torch", "HalfStorage"), "0", "cpu", -6))},
        {"a": Persistent(("storage",))},
        {("a",): VIEW},
        {"a": Persistent(("storage", Global("torch", "float16"), "0", "cpu", 6))},
        {"a": Call(Global("collections", "OrderedDict"), ([[1, VIEW]],))},
    ],
)
def test_what_is_no_state_dict_of_tensors_is_refused_in_one_line(value: object):
    with pytest.raises(ConversionError, match=r"weights\.pth: .+$"):
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
        b"}\x94h\x01",  # BINGET of a memo that is not there
        b"r\xff\xff\xff\xff",  # LONG_BINPUT into the four-billionth place, of nothing
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
    with pytest.raises(ConversionError, match=r"weights\.pth: .+$"):
        read(Raw(code))


@pytest.mark.parametrize(
    "code",
    [
        b"Nr\xff\xff\xff\xff",  # LONG_BINPUT: one place of a memo that has all the others, too
        b"X\xff\xff\xff\x7fabc",  # BINUNICODE
        b"T\xff\xff\xff\x7fabc",  # BINSTRING
        b"B\xff\xff\xff\x7fabc",  # BINBYTES
        b"\x8b\xff\xff\xff\x7fabc",  # LONG4
        b"\x8d\0\0\0\0\1\0\0\0abc",  # BINUNICODE8
        b"\x8e\0\0\0\0\1\0\0\0abc",  # BINBYTES8
        b"\x96\0\0\0\0\1\0\0\0abc",  # BYTEARRAY8
        b"\x95\0\0\0\0\1\0\0\0N",  # FRAME
    ],
)
def test_sizes_that_are_only_announced_take_no_memory(code: bytes):
    assert isinstance(harmless(lambda: read(Raw(code))), ConversionError)


def test_a_memo_bomb_is_neither_expanded_nor_hashed():
    # Each level holds the one before twice: 2^200 elements if anything walks through them, which
    # this test would not outlive.
    nest = b")" + b"".join(b"q\x00h\x00\x86" for _ in range(200))
    with pytest.raises(ConversionError):
        read(Raw(b"}" + nest + b"Ns"))
    with pytest.raises(ConversionError):
        read({"a": Raw(nest)})


def test_keys_whose_hashes_all_collide_take_no_time():
    numbers = (i * ((1 << 61) - 1) for i in range(1, 20_000))
    items = b"".join(b"\x8a\x0b" + number.to_bytes(11, "little") + b"N" for number in numbers)
    started = time.process_time()
    with pytest.raises(ConversionError):
        read(Raw(b"}(" + items + b"u"))
    assert time.process_time() - started < 1


def test_a_class_of_the_extension_registry_is_refused_though_it_was_unpickled_before():
    copyreg.add_extension("collections", "Counter", 77)
    try:
        assert pickle.loads(b"\x80\x02\x82\x4d.") is collections.Counter  # and is cached now
        with pytest.raises(ConversionError, match="opcode"):
            read(Raw(b"\x82\x4d"))
    finally:
        copyreg.remove_extension("collections", "Counter", 77)


def test_what_is_left_after_the_end_is_not_read():
    assert_views(read_pickle(dumps({"a": VIEW}) + b"cos\nsystem\n."), "a")


def test_nothing_is_made_or_changed_but_by_calling_what_stands_for_a_name():
    """NEWOBJ and its kin, BUILD on what is no dictionary, and changes to what stands for names."""
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    for code in (
        rebuild + b")\x81",  # NEWOBJ
        rebuild + b")}\x92",  # NEWOBJ_EX
        b"(" + rebuild + b"o",  # OBJ
        rebuild + b"}X\x08\0\0\0__code__Nsb",  # BUILD: attributes of the function itself
        rebuild + b"N}X\x08\0\0\0__code__Ns\x86b",  # and through the state of slots
        b"ctorch\nfloat16\n}X\x04\0\0\0nameNsb",
    ):
        with pytest.raises(ConversionError):
            read(Raw(code))
    assert_views(read({"a": VIEW}), "a")


def test_deep_nesting_is_refused_without_exhausting_the_stack():
    with pytest.raises(ConversionError):
        read({"a": Raw(b"]" * 200_000 + b"a" * 199_999)})


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_a_damaged_pickle_gives_tensors_or_a_conversion_error(data: st.DataObject):
    content = bytearray(dumps({"a": VIEW, "b": VIEW}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ConversionError):
        for array in read_pickle(bytes(content)).values():
            assert array.tobytes() is not None
