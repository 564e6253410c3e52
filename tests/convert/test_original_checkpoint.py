"""Original Mistral and Llama checkpoints: shards, defaults and errors."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.convert.conversion import convert
from mlxspec.convert.original import half_split_rows, original_to_mlx_name
from mlxspec.errors import LoadError, MlxspecError
from mlxspec.models.torch_file import read_torch_file
from tests.support import original, torch_file
from tests.support.comparison import tensors

WEIGHTS = original.random_weights()


def converted(directory: Path, **options: str) -> dict:
    """Return the configuration of the converted checkpoint."""
    out = directory.parent / f"{directory.name}_converted"
    convert(torch_path=directory, mlx_path=out, force=True, **options)
    return json.loads((out / "config.json").read_text())


def check_weights(directory: Path) -> None:
    converted(directory, dtype="float32")
    found = tensors(directory.parent / f"{directory.name}_converted")
    assert found.keys() == {original_to_mlx_name(name) for name in WEIGHTS}
    for name, array in WEIGHTS.items():
        expected = mx.array(array)
        if name.endswith(("attention.wq.weight", "attention.wk.weight")):
            expected = half_split_rows(expected, original.PARAMS["head_dim"])
        np.testing.assert_array_equal(found[original_to_mlx_name(name)], np.array(expected))


@pytest.mark.parametrize("embedding_axis", [0, 1], ids=["llama3", "llama2"])
@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_model_parallel_shards_are_joined_along_the_right_axes(
    tmp_path: Path, tokenizer_model: Path, count: int, embedding_axis: int
):
    shards = original.split(original.as_bfloat16(WEIGHTS), count, embedding_axis)
    check_weights(original.write_checkpoint(tmp_path / "x", tokenizer_model, *shards))


def test_consolidated_safetensors_are_read(tmp_path: Path, tokenizer_model: Path):
    directory = original.write_checkpoint(tmp_path / "x", tokenizer_model)
    arrays = {name: mx.array(array).astype(mx.bfloat16) for name, array in WEIGHTS.items()}
    mx.save_safetensors(str(directory / "consolidated.safetensors"), arrays)
    check_weights(directory)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_every_float_type_is_read(tmp_path: Path, tokenizer_model: Path, dtype: type):
    weights = {name: array.astype(dtype) for name, array in WEIGHTS.items()}
    directory = original.write_checkpoint(tmp_path / "x", tokenizer_model, weights)
    check_weights(directory)


def test_rope_tables_are_skipped(tmp_path: Path, tokenizer_model: Path):
    tables = {
        "rope.freqs": np.zeros(8, np.float32),
        "layers.0.attention.inner_attention.rope.freqs": np.zeros(8, np.float32),
    }
    check_weights(original.write_checkpoint(tmp_path / "x", tokenizer_model, WEIGHTS | tables))


def test_llamas_open_settings_come_from_the_tensors(tmp_path: Path, tokenizer_model: Path):
    params = {"dim": 64, "multiple_of": 32, "n_heads": 4, "n_layers": 2, "norm_eps": 1e-5}
    params |= {"vocab_size": -1, "n_kv_heads": 2}
    directory = original.write_checkpoint(
        tmp_path / "x", tokenizer_model, *original.split(WEIGHTS, 2, 1), params=params
    )
    config = converted(directory)
    keys = ("intermediate_size", "vocab_size", "head_dim", "rope_theta")
    assert tuple(config[key] for key in keys) == (96, 320, 16, 10000)


def test_without_an_output_layer_the_embedding_is_one(tmp_path: Path, tokenizer_model: Path):
    own = converted(original.write_checkpoint(tmp_path / "own", tokenizer_model, WEIGHTS))
    assert not own["tie_word_embeddings"]
    tied = {name: array for name, array in WEIGHTS.items() if name != "output.weight"}
    directory = original.write_checkpoint(tmp_path / "tied", tokenizer_model, tied)
    assert converted(directory)["tie_word_embeddings"]


def changed(**arrays: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the weights with some replaced or, if None, removed."""
    names = {name.replace("__", "."): array for name, array in arrays.items()}
    merged = {**WEIGHTS, **names}
    return {name: array for name, array in merged.items() if array is not None}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (changed(norm__weight=None), r"x: .*the weights do not fit .+ model\.norm\.weight"),
        (
            {n: a for n, a in WEIGHTS.items() if "layers.1" not in n},
            r"Missing 9 parameters: model\.layers\.1",
        ),
        (changed(extra__bias=np.zeros(3, np.float32)), r"the tensor extra\.bias is unknown$"),
        (
            changed(norm__weight=np.zeros(65, np.float32)),
            r"Expected shape \(64,\) but received shape \(65,\) for parameter model\.norm",
        ),
        (changed(norm__weight=np.zeros(64, np.int64)), "norm.weight have numbers of type int64"),
        (changed(tok_embeddings__weight=None), "embed_tokens"),
    ],
)
def test_wrong_tensors_are_named_in_one_line(
    tmp_path: Path, tokenizer_model: Path, weights: dict, message: str
):
    directory = original.write_checkpoint(tmp_path / "x", tokenizer_model, weights)
    with pytest.raises(LoadError, match=message) as error:
        converted(directory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": None}, "missing or wrong: 'dim'"),
        ({"n_layers": "two"}, "config.json does not fit"),
        ({"n_heads": 0, "head_dim": 0}, "missing or wrong"),
        ({"n_kv_heads": 3}, "weights do not fit"),
        ({"moe": {"num_experts": 8}}, "the key moe is not one of"),
        ({"vision_encoder": {"dim": 1}}, "the key vision_encoder is not one of"),
    ],
)
def test_wrong_settings_are_named_in_one_line(
    tmp_path: Path, tokenizer_model: Path, change: dict, message: str
):
    directory = original.write_checkpoint(
        tmp_path / "x", tokenizer_model, WEIGHTS, params=original.PARAMS | change
    )
    with pytest.raises(LoadError, match=message) as error:
        converted(directory)
    assert "\n" not in str(error.value)


def test_a_tensor_missing_from_one_shard_is_named(tmp_path: Path, tokenizer_model: Path):
    shards = original.split(WEIGHTS, 2, 1)
    del shards[1]["layers.0.attention.wo.weight"]
    directory = original.write_checkpoint(tmp_path / "x", tokenizer_model, *shards)
    with pytest.raises(LoadError, match=r"the shards differ in layers\.0\.attention\.wo\.weight"):
        converted(directory)


def test_missing_files_are_named(tmp_path: Path, checkpoint: Path):
    for name, message in {
        "params.json": r"params\.json: cannot be read",
        "consolidated.00.pth": r"has no consolidated\.\* file",
    }.items():
        copy = shutil.copytree(checkpoint, tmp_path / name)
        (copy / name).unlink()
        with pytest.raises(MlxspecError, match=message):
            converted(copy)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_params_that_are_no_settings_are_refused(tmp_path: Path, checkpoint: Path, content: str):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "params.json").write_text(content)
    with pytest.raises(MlxspecError, match=r"params\.json: "):
        converted(copy)


def test_bfloat16_survives_every_bit_pattern(tmp_path: Path):
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    torch_file.save(tmp_path / "x.pth", {"all": bits})
    ((_, array),) = read_torch_file(tmp_path / "x.pth")
    assert array.dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(array.view(mx.uint16)), bits)
    # and MLX reads the same numbers
    np.testing.assert_array_equal(
        np.array(array.astype(mx.float32)), torch_file.from_bfloat16_bits(bits)
    )
