"""Names and settings of original checkpoints, checked with mlx-lm's model classes."""

import json
from pathlib import Path

import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from mlxspec.convert.original import config_from_params, load_original, original_to_mlx_name
from mlxspec.errors import LoadError
from tests.support import original

# params.json of Mistral 7B v0.1, and of Llama 2 7B, as published.
MISTRAL = {
    "dim": 4096,
    "n_layers": 32,
    "head_dim": 128,
    "hidden_dim": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-05,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
LLAMA = {
    "dim": 4096,
    "multiple_of": 256,
    "n_heads": 32,
    "n_layers": 32,
    "norm_eps": 1e-05,
    "vocab_size": -1,
}
LLAMA_SHAPES = {
    "model.embed_tokens.weight": (32000, 4096),
    "model.layers.0.mlp.gate_proj.weight": (11008, 4096),
    "lm_head.weight": (32000, 4096),
}
MISTRAL_SHAPES = LLAMA_SHAPES | {"model.layers.0.mlp.gate_proj.weight": (14336, 4096)}


@pytest.mark.parametrize(("params", "shapes"), [(MISTRAL, MISTRAL_SHAPES), (LLAMA, LLAMA_SHAPES)])
def test_names_are_those_of_mlx_lms_model(params: dict, shapes: dict):
    config = config_from_params(params, shapes)
    model = Model(ModelArgs.from_dict(config))
    theirs = {name for name, _ in tree_flatten(model.parameters())}
    modules = [name.removeprefix("layers.0.") for name in original.random_weights()]
    ours = {
        original_to_mlx_name(name if "layers" not in name else f"layers.{layer}.{module}")
        for name, module in zip(original.random_weights(), modules, strict=True)
        if "layers.1" not in name
        for layer in range(32)
    }
    assert ours == theirs


def test_published_settings_of_mistral_7b():
    # config.json of mistralai/Mistral-7B-v0.1
    config = config_from_params(MISTRAL, MISTRAL_SHAPES)
    published = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    }
    assert config.items() >= published.items()


@pytest.mark.parametrize(
    "name",
    [
        "rope.freqs",
        "norm",
        "norm.bias",
        "layers.0.attention.wq",
        "layers.0.attention.wx.weight",
        "layers.-1.attention.wq.weight",
        "xlayers.0.attention.wq.weight",
        "",
    ],
)
def test_other_names_have_no_counterpart(name: str):
    with pytest.raises(ValueError, match="is unknown"):
        original_to_mlx_name(name)


@pytest.mark.parametrize(("dim", "factor"), [(2048, 32.0), (3072, 32.0), (4096, 8.0)])
def test_scaled_rope_has_the_factor_of_the_published_models(dim: int, factor: float):
    # config.json of Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B
    params = MISTRAL | {"dim": dim, "use_scaled_rope": True}
    assert config_from_params(params, MISTRAL_SHAPES)["rope_scaling"] == {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def test_an_unknown_setting_is_refused_unless_it_is_off(tmp_path: Path):
    def refused(params: dict[str, object]) -> str:
        (tmp_path / "params.json").write_text(json.dumps(MISTRAL | params))
        with pytest.raises(LoadError) as error:
            load_original(tmp_path, tmp_path / "scratch")
        return str(error.value)

    assert "the key logit_scale is not one of" in refused({"logit_scale": 2.0})
    off = {"vision_encoder": None, "use_biases": False}
    assert "has no consolidated" in refused(off)
    assert config_from_params(MISTRAL | off, MISTRAL_SHAPES)


def test_open_settings_without_tensors_name_what_is_missing():
    with pytest.raises(KeyError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight"):
        config_from_params(LLAMA, {})
