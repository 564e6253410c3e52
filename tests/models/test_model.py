"""Loading models from directories, compared with mlx-lm, and every way in which it fails."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import quantize_model, save_config, save_model

from mlxspec.engine.model_sizes import context_length
from mlxspec.errors import LoadError
from mlxspec.models.model import encode_prompt, load
from mlxspec.models.sentencepiece_tokenizer import build_tokenizer
from tests.support.tokenizer_kinds import DEMO

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": [2, 7],
}
PROMPT = "def f(x):\n    return  x"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a small model as mlx-lm does, with the demo's tokenizer."""

    def write(*, dtype: mx.Dtype = mx.float32, quantization: dict | None = None) -> Path:
        mx.random.seed(0)
        model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
        model.set_dtype(dtype)
        config = dict(CONFIG)
        if quantization is not None:
            model, config = quantize_model(model, config, **quantization)
        directory = tmp_path / "model"
        save_model(directory, model, donate_model=False)
        save_config(config, directory / "config.json")
        build_tokenizer(DEMO)[0].save(str(directory / "tokenizer.json"))
        settings = json.dumps(build_tokenizer(DEMO)[1])
        (directory / "tokenizer_config.json").write_text(settings)
        return directory

    return write


def edit_config(directory: Path, **changes: object) -> None:
    """Change keys of ``config.json``; None removes one."""
    config = json.loads((directory / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))


def logits(model: nn.Module, ids: list[int]) -> mx.array:
    return model(mx.array([ids])).astype(mx.float32)


def load_error(directory: Path | str) -> str:
    with pytest.raises(LoadError) as error:
        load(directory)
    message = str(error.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


def dtypes(model: nn.Module) -> set[mx.Dtype]:
    return {parameter.dtype for _, parameter in tree_flatten(model.parameters())}


def test_a_model_computes_what_mlx_lm_computes(write: Callable[..., Path]) -> None:
    directory = write()
    model, tokenizer = load(directory)
    reference, reference_tokenizer = mlx_lm.load(str(directory))
    ids = encode_prompt(tokenizer, PROMPT)
    assert ids == reference_tokenizer.encode(PROMPT)
    assert mx.array_equal(logits(model, ids), logits(reference, ids))
    assert tokenizer.eos_token_ids == {2, 7}


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, {mx.float32}),
        ({"group_size": 32, "bits": 4}, {mx.float32, mx.uint32}),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, {mx.float32, mx.uint32, mx.uint8}),
    ],
)
def test_half_precision_becomes_float32_on_the_cpu(
    write: Callable[..., Path], quantization: dict | None, expected: set[mx.Dtype]
) -> None:
    if mx.default_device().type != mx.cpu:
        pytest.skip("half precision is emulated on the CPU back end only")
    directory = write(dtype=mx.float16, quantization=quantization)
    for lazy in (False, True):
        model, tokenizer = load(directory, lazy=lazy)
        assert dtypes(model) == expected
        reference, _ = mlx_lm.load(str(directory), lazy=True)
        reference.set_dtype(mx.float32)
        ids = encode_prompt(tokenizer, PROMPT)
        assert mx.array_equal(logits(model, ids), logits(reference, ids))


def test_a_prompt_has_one_bos(write: Callable[..., Path]) -> None:
    _, tokenizer = load(write())
    ids = encode_prompt(tokenizer, "Hello")
    assert ids[0] == 1
    assert encode_prompt(tokenizer, "<s>Hello") == ids
    assert encode_prompt(tokenizer, "") == [1]


def test_an_architecture_that_needs_another_package_does_not_end_the_process(
    write: Callable[..., Path],
) -> None:
    directory = write()
    edit_config(directory, model_type="olmo")
    assert "needs a package that is not installed" in load_error(directory)


def test_context_length_is_what_the_configuration_states(write: Callable[..., Path]) -> None:
    directory = write()
    assert context_length(load(directory)[0]) == 512
    edit_config(directory, max_position_embeddings=None)
    assert context_length(load(directory)[0]) is None


def test_context_length_of_a_nested_configuration() -> None:
    model = nn.Module()
    model.args = type("Args", (), {"text_config": {"max_position_embeddings": 77}})()
    assert context_length(model) == 77


def test_places_without_a_model_are_named(tmp_path: Path) -> None:
    assert "no such directory" in load_error("./not/there/at all")
    assert "no such directory" in load_error("mlx_model_of_nobody")
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "a file, not a model's directory" in load_error(file)
    assert "no config.json" in load_error(tmp_path)
    (tmp_path / "consolidated.00.pth").touch()
    assert "`mlxspec convert`" in load_error(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_an_invalid_config_is_named(write: Callable[..., Path], content: str) -> None:
    directory = write()
    (directory / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json: no" in load_error(directory)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "model_type"])
def test_a_missing_key_is_named(write: Callable[..., Path], key: str) -> None:
    directory = write()
    edit_config(directory, **{key: None})
    message = load_error(directory)
    assert message.startswith(f"{directory}: config.json does not fit")
    assert f"'{key}'" in message


def test_a_value_of_a_wrong_type_is_one_line(write: Callable[..., Path]) -> None:
    directory = write()
    edit_config(directory, num_hidden_layers="2")
    message = load_error(directory)
    assert message.startswith(f"{directory}: config.json does not fit this kind of model")
    assert "\n" not in message


def test_an_unknown_model_type_is_named(write: Callable[..., Path]) -> None:
    directory = write()
    edit_config(directory, model_type="gpt99")
    message = load_error(directory)
    assert "gpt99" in message
    assert "mlx-lm" in message


def test_a_model_with_code_of_its_own_is_refused(write: Callable[..., Path]) -> None:
    directory = write()
    marker = directory / "marker"
    (directory / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    edit_config(directory, model_file="evil.py")
    assert "never run" in load_error(directory)
    edit_config(
        directory, model_file=None, auto_map={"AutoConfig": "evil.C", "AutoModel": "evil.M"}
    )
    load(directory)  # mlx-lm knows the model_type, so no foreign code is needed
    assert not marker.exists()


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights_are_named(write: Callable[..., Path], keep: float) -> None:
    directory = write()
    path = directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    assert f"{path}: truncated or damaged" in load_error(directory)


@pytest.mark.parametrize("weight_map", [["a"], "a", {"a": 1}])
def test_a_damaged_index_is_named(write: Callable[..., Path], weight_map: object) -> None:
    directory = write()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "index.json: weight_map" in load_error(directory)


def test_a_missing_shard_is_named(write: Callable[..., Path]) -> None:
    directory = write()
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert "model-00002-of-00002.safetensors is missing" in load_error(directory)
    index.unlink()
    (directory / "model.safetensors").unlink()
    assert "no model*.safetensors" in load_error(directory)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight"),
        (lambda w: w.update({"model.extra.weight": mx.zeros(3)}), "model.extra.weight"),
        (lambda w: w.update({"model.norm.weight": mx.zeros(3)}), "model.norm.weight"),
    ],
    ids=["missing", "unknown", "of another shape"],
)
def test_weights_that_do_not_fit_are_named(
    write: Callable[..., Path], change: Callable[[dict], object], named: str
) -> None:
    directory = write()
    (directory / "model.safetensors.index.json").unlink()
    path = str(directory / "model.safetensors")
    weights = dict(mx.load(path))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(path, weights)
    message = load_error(directory)
    assert named in message
    assert "do not fit config.json" in message


def test_importing_the_loader_does_not_import_transformers() -> None:
    code = (
        "import sys, mlxspec.models.model;"
        "print({'transformers', 'mlx_lm', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
