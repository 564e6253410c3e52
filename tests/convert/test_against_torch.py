"""Written files read back by PyTorch, where it is installed."""

from collections import OrderedDict
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.errors import LoadError
from mlxspec.models.torch_file import read_torch_file
from tests.support import torch_file

torch = pytest.importorskip("torch", reason="needs PyTorch as the reference")


def check(path: Path, expected: dict) -> None:
    tensors = dict(read_torch_file(path))
    assert list(tensors) == list(expected)
    for name, array in tensors.items():
        reference = expected[name].detach()
        assert str(array.dtype).rpartition(".")[2] == str(reference.dtype).rpartition(".")[2]
        np.testing.assert_array_equal(np.array(array.astype(mx.float32)), reference.float().numpy())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_saves_is_read_alike(tmp_path: Path, protocol: int):
    base = torch.randn(6, 8, dtype=torch.bfloat16)
    state = OrderedDict(
        base=base,
        transposed=base.T,
        sliced=base[1:5:2, 3:],
        expanded=base[:1].expand(5, 8),
        flipped_strides=torch.randn(2, 3, 4).permute(2, 0, 1),
        scalar=torch.tensor(3.5),
        empty=torch.zeros(0, 4),
        half=torch.randn(3).half(),
    )
    torch.save(state, tmp_path / "x.pth", pickle_protocol=protocol)
    check(tmp_path / "x.pth", state)


def test_a_modules_state_dict_is_read_alike(tmp_path: Path):
    state = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).state_dict()
    torch.save(state, tmp_path / "module.pth")
    check(tmp_path / "module.pth", state)


def test_torch_reads_the_tests_own_files_alike(tmp_path: Path):
    arrays = {
        "single": np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32),
        "bits": torch_file.bfloat16_bits(np.arange(6.0).reshape(2, 3)),
    }
    torch_file.save(tmp_path / "own.pth", arrays)
    check(tmp_path / "own.pth", torch.load(tmp_path / "own.pth", weights_only=True))


def test_the_format_before_zip_is_refused(tmp_path: Path):
    path = tmp_path / "old.pth"
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(LoadError, match="not a file of PyTorch"):
        dict(read_torch_file(path))


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Linear(2, 2),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
    ],
    ids=["module", "complex", "sparse", "float8"],
)
def test_other_things_that_torch_saves_are_refused(tmp_path: Path, value: object):
    torch.save({"a": value}, tmp_path / "x.pth")
    with pytest.raises(LoadError, match=r"asks for torch\.\S+, "):
        dict(read_torch_file(tmp_path / "x.pth"))
