"""Checkpoints that MLX cannot represent without losing weights, or cannot run at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxspec.convert.conversion import convert
from mlxspec.errors import LoadError
from mlxspec.models.model import find_adapters, load
from tests.convert.test_hugging_face import write_model
from tests.support.comparison import tensors

NORM = "model.norm.weight"
PROJECTION = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def source(tmp_path: Path, tokenizer_model: Path) -> Path:
    return write_model(tmp_path / "source", tokenizer_model)


def change(source: Path, dtype: mx.Dtype, **changed: Callable[[mx.array], mx.array]) -> None:
    """Cast a model's weights and change some of them; a double underscore means a dot."""
    weights = {name: array.astype(dtype) for name, array in tensors(source).items()}
    for name, function in changed.items():
        name = name.replace("__", ".")
        weights[name] = function(weights[name])
    mx.eval(weights)
    mx.save_safetensors(str(source / "model.safetensors"), weights)


def settings(source: Path, **changed: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changed))


def refused(source: Path, **how: Any) -> str:
    target = source.parent / "out"
    with pytest.raises(LoadError) as caught:
        convert(hf_path=source, mlx_path=target, **how)
    assert "\n" not in str(caught.value)
    assert not target.exists()
    return str(caught.value)


def put(*numbers: float) -> Callable[[mx.array], mx.array]:
    """Replace the first numbers of an array."""

    def changed(array: mx.array) -> mx.array:
        flat = array.flatten()
        flat[: len(numbers)] = mx.array(numbers, array.dtype)
        return flat.reshape(array.shape)

    return changed


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_numbers_beyond_float16_are_counted_and_refused(source: Path, dtype: mx.Dtype) -> None:
    change(source, dtype, model__norm__weight=put(1e5, -7e4, 3.0))
    asked = {} if dtype == mx.float32 else {"dtype": "float16"}
    message = refused(source, **asked)
    assert message == (
        f"{source}: 2 of 64 numbers of {NORM} are not finite in float16, whose largest is 65,504; "
        "use --dtype bfloat16"
    )
    convert(hf_path=source, mlx_path=source.parent / "out", dtype="bfloat16")
    written = tensors(source.parent / "out")[NORM]
    assert mx.allclose(written[:3], mx.array([1e5, -7e4, 3.0]), rtol=1e-2).item()


def test_a_quantised_weight_beyond_float16_is_refused(source: Path) -> None:
    change(source, mx.float32, model__layers__1__mlp__up_proj__weight=put(1e5))
    layer = PROJECTION.removesuffix(".weight")
    assert f" numbers of {layer} are not finite in float16" in refused(source, quantize=True)
    convert(hf_path=source, mlx_path=source.parent / "out", quantize=True, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nan_in_the_checkpoint_is_refused(source: Path, dtype: str) -> None:
    change(source, mx.float32, model__norm__weight=put(float("nan"), float("nan")))
    message = refused(source, dtype=dtype)
    expected = f"{source}: 2 of 64 numbers of {NORM} are not finite, so the checkpoint is damaged"
    assert message.startswith(expected)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("stated", "nested"), [("bfloat16", False), ("torch.bfloat16", False), ("bfloat16", True)]
)
def test_the_type_that_the_configuration_names_is_taken(
    source: Path, name: str, stated: str, nested: bool
) -> None:
    change(source, mx.float32)
    named = {name: stated}
    settings(source, **({"text_config": named} if nested else named))
    convert(hf_path=source, mlx_path=source.parent / "out")
    assert {a.dtype for a in tensors(source.parent / "out").values()} == {mx.bfloat16}
    config = json.loads((source.parent / "out" / "config.json").read_text())
    assert config.get("text_config", config)[name] == "bfloat16"
    convert(hf_path=source, mlx_path=source.parent / "half", dtype="float16")
    config = json.loads((source.parent / "half" / "config.json").read_text())
    assert config.get("text_config", config)[name] == "float16"


def raw_file(path: Path, dtype: str) -> None:
    """Return a file with one tensor of a type that MLX or NumPy may lack."""
    width = {"F64": 8, "I64": 8, "I32": 4}.get(dtype, 1)
    tensor = {"dtype": dtype, "shape": [64], "data_offsets": [0, 64 * width]}
    header = json.dumps({NORM: tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64 * width))


@pytest.mark.parametrize("dtype", ["F64", "F8_E5M2", "F8_E4M3FNUZ"])
def test_a_tensor_of_a_type_that_mlx_lacks_is_named(source: Path, dtype: str) -> None:
    file = source / "model-2.safetensors"
    raw_file(file, dtype)
    message = (
        f"{file}: the tensor {NORM} has the type {dtype}, which MLX cannot read; use a version of "
        "the model in 16 or 32 bits"
    )
    with pytest.raises(LoadError) as error:
        load(source)
    assert str(error.value).startswith(message)
    assert refused(source).startswith(message)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_weights_of_8_bits_without_scales_are_refused(source: Path, dtype: str) -> None:
    weights = tensors(source)
    del weights[NORM]
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    raw_file(source / "model-2.safetensors", dtype)
    message = refused(source)
    assert message.startswith(f"{source}: the weights {NORM} have 8 bits, but no scales")
    with pytest.raises(LoadError, match="have 8 bits, but no scales"):
        load(source)


@pytest.mark.parametrize(("dtype", "named"), [("I64", "int64"), ("I32", "int32"), ("BOOL", "bool")])
def test_weights_of_whole_numbers_are_refused(source: Path, dtype: str, named: str) -> None:
    weights = tensors(source)
    del weights[NORM]
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    raw_file(source / "model-2.safetensors", dtype)
    told = f"{source}: the weights {NORM} have numbers of type {named}, but no scales"
    assert refused(source).startswith(told)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "affine"])
def test_scales_of_8_bits_are_scales(source: Path, mode: str) -> None:
    out = source.parent / "out"
    convert(hf_path=source, mlx_path=out, quantize=True, q_mode=mode)
    load(out)


def test_what_has_quantised_a_model_is_named(source: Path) -> None:
    settings(source, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    packed = {f"{PROJECTION}.absmax": np.zeros(4, np.float32)}
    save_file(packed, source / "model-2.safetensors")
    message = refused(source)
    assert message.startswith(f"{source}: the weights are quantised by bitsandbytes, which mlx-lm")
    assert "use the original in 16 bits" in message
    settings(source, quantization_config={"quant_method": "gptq", "bits": 4})
    (source / "model-2.safetensors").unlink()
    assert refused(source) == (
        f"{source}: the weights are quantised by gptq, which mlx-lm cannot read; use the original "
        "in 16 bits, and quantise it with `mlxspec convert -q`"
    )


def test_adapters_alone_are_named(tmp_path: Path) -> None:
    adapters = tmp_path / "source"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"a": np.zeros(1, np.float32)}, adapters / "adapter_model.safetensors")
    assert refused(adapters).startswith(f"{adapters}: adapters, not a model; name their model")
    with pytest.raises(LoadError, match=r"PEFT's adapters, .* merge them into their model"):
        find_adapters(adapters)


@pytest.mark.parametrize("name", ["max_position_embeddings", "attention_bias", "rope_scaling"])
def test_a_model_with_a_setting_that_is_null_is_converted_and_loaded(
    source: Path, name: str
) -> None:
    settings(source, **{name: None})
    convert(hf_path=source, mlx_path=source.parent / "out")
    for directory in (source, source.parent / "out"):
        _, tokenizer = load(directory)
        assert tokenizer.encode("a")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_a_truncated_file_of_the_tokenizer_is_named(source: Path, name: str) -> None:
    (source / name).write_text('{"a": ')
    assert refused(source).startswith(f"{source / name}: not valid JSON")
