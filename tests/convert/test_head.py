"""``convert(head=True)``: heads extracted from checkpoints, and published heads."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxspec.convert.conversion import convert
from mlxspec.errors import FileError, LoadError, OptionError
from mlxspec.models.heads.chains import QwenMTP
from mlxspec.models.heads.loading import find_head, load_head
from tests.support.comparison import assert_same_bits, tensors
from tests.support.head_files import (
    HEADS,
    QWEN,
    QWEN_TARGET,
    TARGET,
    original,
    random_weights,
    write,
    write_head,
    write_target,
)


def converted(source: Path, target: Path, **options: object) -> tuple[int, int, str | None]:
    return convert(hf_path=source, mlx_path=target, head=True, **options)


def test_a_head_is_taken_out_of_a_checkpoint(tmp_path: Path) -> None:
    weights = random_weights("Qwen MTP")
    half = {name: array.astype(mx.bfloat16) for name, array in original(weights).items()}
    source = write_target(tmp_path / "source", half)
    nbytes, parameters, about = converted(source, tmp_path / "head")
    assert nbytes == 2 * parameters == 2 * sum(a.size for a in weights.values())
    assert about == "Qwen MTP (7 of its 7 norms were centred at zero, so 1.0 was added to them)"
    expected = {
        name: half[f"mtp.{name}"] + ("norm" in name and weights[name].ndim == 1) for name in weights
    }
    assert_same_bits(tensors(tmp_path / "head"), expected)
    names = {path.name for path in (tmp_path / "head").iterdir()}
    assert names == {"config.json", "model.safetensors", "model.safetensors.index.json"}
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_mtp"
    assert config["text_config"] == QWEN_TARGET["text_config"]
    load_head(find_head(tmp_path / "head"), QWEN_TARGET)


@pytest.mark.slow
def test_the_head_of_a_checkpoint_is_mlx_vlm_s(tmp_path: Path) -> None:
    split = pytest.importorskip(
        "mlx_vlm.speculative.drafters.qwen3_5_mtp.split", reason="compares with mlx-vlm"
    )
    source = write_target(tmp_path / "source", original(random_weights("Qwen MTP")))
    config, weights = split.Qwen3_5MTPSplitter().prepare(source)
    converted(source, tmp_path / "head", dtype="float32")
    assert_same_bits(tensors(tmp_path / "head"), weights)
    written = json.loads((tmp_path / "head" / "config.json").read_text())
    assert {name: config[name] for name in ("model_type", "text_config")} == {
        name: written[name] for name in ("model_type", "text_config")
    }


def test_no_norm_is_judged_twice(tmp_path: Path) -> None:
    """Norms far below zero look centred at zero even after 1 is added."""
    weights = original(random_weights("Qwen MTP"))
    weights["mtp.norm.weight"] = mx.full(32, -0.9)
    weights["mtp.layers.0.self_attn.q_norm.weight"] = mx.full(16, 1.6)
    *_, about = converted(write_target(tmp_path / "source", weights), tmp_path / "head")
    assert about == "Qwen MTP (7 of its 7 norms were centred at zero, so 1.0 was added to them)"
    head = load_head(find_head(tmp_path / "head"), QWEN_TARGET)
    assert mx.allclose(head.norm.weight, mx.array(0.1), atol=1e-3).item()
    assert mx.allclose(head.layers[0].self_attn.q_norm.weight, mx.array(2.6), atol=1e-2).item()
    again = converted(tmp_path / "head", tmp_path / "again", dtype="float32")
    assert again[2] == "Qwen MTP"
    assert mx.allclose(tensors(tmp_path / "again")["norm.weight"], mx.array(0.1), atol=1e-3).item()


def test_small_gains_of_a_converted_head_are_kept(tmp_path: Path) -> None:
    """Qwen 3.6's norms before ``fc`` have gains so small that they look centred at zero."""
    weights = {f"mtp.{name}": array for name, array in random_weights("Qwen MTP").items()}
    gains = {"embedding": 0.27, "hidden": 0.49}
    for name, gain in gains.items():
        weights[f"mtp.pre_fc_norm_{name}.weight"] = mx.full(32, gain)
    *_, about = converted(write_target(tmp_path / "source", weights), tmp_path / "head")
    assert about == "Qwen MTP (0 of its 7 norms were centred at zero, so 1.0 was added to them)"
    written = tensors(tmp_path / "head")
    for name, gain in gains.items():
        assert mx.allclose(written[f"pre_fc_norm_{name}.weight"], mx.array(gain), atol=1e-3).item()


def test_an_unconverted_convolution_shows_that_all_norms_are_original(tmp_path: Path) -> None:
    weights = {
        name: mx.full(array.shape, 1.7) if "norm" in name and array.ndim == 1 else array
        for name, array in original(random_weights("Qwen MTP")).items()
    }
    name = "model.language_model.layers.0.linear_attn.conv1d.weight"
    for shape, centred in (((8, 1, 3), 7), ((8, 3, 1), 0)):
        source = write_target(tmp_path / "source", {**weights, name: mx.zeros(shape)})
        *_, about = converted(source, tmp_path / f"head{centred}")
        assert (about or "").startswith(f"Qwen MTP ({centred} of its 7 norms")
        gain = tensors(tmp_path / f"head{centred}")["layers.0.input_layernorm.weight"]
        assert mx.allclose(gain, mx.array(2.7 if centred else 1.7), atol=1e-2).item()


@pytest.mark.parametrize("name", HEADS)
def test_every_kind_is_quantised_and_loaded(tmp_path: Path, name: str) -> None:
    source = write_head(tmp_path / "source", name)
    nbytes, parameters, about = converted(source, tmp_path / "head", quantize=True, q_group_size=32)
    assert 4 < 8 * nbytes / parameters < 16
    assert (about or "").startswith(name)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    head = load_head(find_head(tmp_path / "head"), HEADS[name][2])
    assert type(head) is HEADS[name][0]
    with pytest.raises(LoadError, match="is quantised already; leave out -q"):
        converted(tmp_path / "head", tmp_path / "again", quantize=True)


def test_routers_of_experts_keep_8_bits_as_those_of_the_target(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes |= {"shared_expert_intermediate_size": 64, "hidden_size": 64}
    config = {**QWEN, "text_config": {**QWEN["text_config"], **sizes}}
    weights = dict(tree_flatten(QwenMTP(config, config).parameters()))
    source = write(tmp_path / "source", config, weights)
    converted(source, tmp_path / "head", quantize=True)
    head = load_head(
        find_head(tmp_path / "head"), {**QWEN_TARGET, "text_config": config["text_config"]}
    )
    mlp = head.layers[0].mlp
    assert mlp.gate.bits == mlp.shared_expert_gate.bits == 8
    assert mlp.switch_mlp.up_proj.bits == mlp.shared_expert.up_proj.bits == head.fc.bits == 4


def test_a_head_is_not_converted_as_a_model(tmp_path: Path) -> None:
    source = write_head(tmp_path / "source", "EAGLE-3")
    with pytest.raises(LoadError, match="a trained head, not a model; name the model"):
        convert(hf_path=source, mlx_path=tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_head_in_full_precision_of_a_quantised_model_can_be_quantised(tmp_path: Path) -> None:
    quantised = {**QWEN_TARGET, "quantization": {"group_size": 64, "bits": 8}}
    source = write(tmp_path / "source", quantised, original(random_weights("Qwen MTP")))
    converted(source, tmp_path / "plain")
    assert "quantization" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    converted(source, tmp_path / "head", quantize=True, q_group_size=32, q_bits=3)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 3, "mode": "affine"}


def test_files_without_the_head_may_be_missing(tmp_path: Path) -> None:
    weights = original(random_weights("Qwen MTP"))
    source = write(tmp_path / "source", QWEN_TARGET, weights, "model-2")
    files = {**dict.fromkeys(weights, "model-2.safetensors"), "model.norm": "model-1.safetensors"}
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    converted(source, tmp_path / "head")


def test_a_model_without_a_head_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    for config, words in (
        (TARGET, "neither a trained head nor a model with one"),
        (QWEN_TARGET, "name the original model or a published head"),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}, "supported are Gemma 4"),
    ):
        source = write(tmp_path / "source", config, {"model.layers.9.norm.weight": mx.ones(1)})
        with pytest.raises(LoadError, match=words):
            converted(source, tmp_path / "head")
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_failure_leaves_the_old_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_head(tmp_path / "source", "EAGLE-3")
    converted(source, tmp_path / "head")
    before = (tmp_path / "head" / "model.safetensors").read_bytes()
    with pytest.raises(FileError, match="with --force"):
        converted(source, tmp_path / "head")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_lm.utils.save_model", full)
    with pytest.raises(FileError, match="No space left"):
        converted(source, tmp_path / "head", force=True)
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "source"]


def test_options_that_do_not_go_with_a_head(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--head"):
        convert(torch_path=tmp_path, mlx_path=tmp_path / "head", head=True)
    source = write_head(tmp_path / "source", "EAGLE-3")
    with pytest.raises(FileError, match="contains the checkpoint"):
        converted(source, source, force=True)
