"""Fuzzed original checkpoints are converted or refused with the package's error."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.convert.conversion import convert
from mlxspec.errors import LoadError, MlxspecError
from mlxspec.models.torch_file import read_torch_file
from tests.support import original, torch_file
from tests.support.examples import examples
from tests.support.hostile import harmless, json_values, mutated

pytestmark = pytest.mark.slow

SHARD = "consolidated.00.pth"
Write = Callable[[str, bytes], Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Write:
    """Copies a checkpoint and replaces one file."""
    place = tmp_path_factory.mktemp("damaged") / "checkpoint"

    def write(name: str, content: bytes) -> Path:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(checkpoint, place)
        (place / name).write_bytes(content)
        return place

    return write


def converted_or_refused(source: Path) -> None:
    target = source.parent / "out"
    result = harmless(lambda: convert(torch_path=source, mlx_path=target, force=True))
    assert target.exists() != isinstance(result, MlxspecError)
    shutil.rmtree(target, ignore_errors=True)


@settings(max_examples=examples(20))
@given(data=st.data())
def test_a_damaged_archive(data: st.DataObject, write: Write, checkpoint: Path) -> None:
    whole = (checkpoint / SHARD).read_bytes()
    edge = 2000  # which contain the headers, the pickle and the directory
    head, tail = data.draw(mutated(whole[:edge])), data.draw(mutated(whole[-edge:]))
    kept = data.draw(st.sampled_from(["head", "tail", "none"]))
    head = whole[:edge] if kept == "head" else head
    tail = whole[-edge:] if kept == "tail" else tail
    converted_or_refused(write(SHARD, head + whole[edge:-edge] + tail))


@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_damaged_pickle_within_a_good_archive(
    data: st.DataObject, write: Write, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with zipfile.ZipFile(checkpoint / SHARD) as archive:
        names = [name for name in archive.namelist() if "/data/" in name]
        records = {name.rpartition("/")[2]: archive.read(name) for name in names}
        pickle = archive.read("archive/data.pkl")
    path = tmp_path_factory.mktemp("archive") / SHARD
    torch_file.write_archive(path, data.draw(mutated(pickle)), records)
    converted_or_refused(write(SHARD, path.read_bytes()))


SIZES = st.integers(0, 4) | st.sampled_from([2**31, 2**47, 2**63, -1])


@settings(max_examples=examples(20))
@given(shape=st.lists(SIZES, max_size=40), strides=st.lists(SIZES, max_size=40), offset=SIZES)
def test_any_shape_and_strides(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], strides: list[int], offset: int
) -> None:
    path = tmp_path_factory.mktemp("views") / SHARD
    storage = torch_file.storage("float32", "0", 16)
    view = torch_file.tensor(storage, tuple(shape), tuple(strides), offset)
    torch_file.write_archive(path, torch_file.dumps({"a": view}), {"0": bytes(64)})
    result = harmless(lambda: [array.size for _, array in read_torch_file(path)])
    assert isinstance(result, list | LoadError)


def test_hundreds_of_thousands_of_dimensions_take_no_time(tmp_path: Path) -> None:
    storage = torch_file.storage("float32", "0", 1)
    view = torch_file.tensor(storage, (2**30,) * 350_000, (0,) * 350_000)
    path = tmp_path / SHARD
    torch_file.write_archive(path, torch_file.dumps({"a": view}), {"0": bytes(4)})
    assert isinstance(harmless(lambda: dict(read_torch_file(path))), LoadError)


@settings(max_examples=examples(25))
@given(data=st.data())
def test_damaged_params(data: st.DataObject, write: Write) -> None:
    keys = [*original.PARAMS, "rope_theta", "multiple_of", "sliding_window", "moe", "max_seq_len"]
    change = data.draw(st.dictionaries(st.sampled_from(keys), json_values, max_size=2))
    text = json.dumps(original.PARAMS | change).encode()
    converted_or_refused(write("params.json", data.draw(st.just(text) | mutated(text))))


@settings(max_examples=examples(10))
@given(data=st.data())
def test_a_damaged_tokenizer(data: st.DataObject, write: Write, checkpoint: Path) -> None:
    whole = (checkpoint / "tokenizer.model").read_bytes()
    converted_or_refused(write("tokenizer.model", data.draw(mutated(whole))))
