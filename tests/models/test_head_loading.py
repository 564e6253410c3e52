"""Finding and loading trained heads, and refusing those for other targets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxspec.errors import LoadError
from mlxspec.models.heads import Head, loading
from mlxspec.models.heads.loading import find_head, head_directory, own_head
from mlxspec.models.heads.settings import args_of
from mlxspec.models.model import load
from tests.support.head_files import (
    EAGLE_3,
    HEADS,
    QWEN_TARGET,
    SIZES,
    TARGET,
    Config,
    Weights,
    original,
    random_weights,
    write,
    write_head,
    write_target,
)


def assert_has(head: Head, weights: Weights) -> None:
    """Assert that a head has exactly these parameters."""
    parameters = dict(tree_flatten(head.parameters()))
    assert parameters.keys() == weights.keys()
    for name, array in parameters.items():
        assert mx.allclose(array, weights[name], atol=1e-6).item(), name


def load_head(path_or_repo: str | Path, target_config: Config) -> Head:
    return loading.load_head(find_head(head_directory(path_or_repo)), target_config)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(LoadError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", HEADS)
def test_every_kind_is_recognised_by_its_config_and_has_its_weights(
    tmp_path: Path, name: str
) -> None:
    directory = write_head(tmp_path / "head", name)
    kind, _, target = HEADS[name]
    head = load_head(directory, target)
    assert type(head) is kind
    assert_has(head, random_weights(name))
    assert own_head(directory) is None


@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_the_place_of_a_model_is_an_error(tmp_path: Path, name: str) -> None:
    directory = write_head(tmp_path / "head", name)
    reason = "a trained head, not a model; name the model that it was made for, together with"
    assert refused(lambda: load(directory)).startswith(f"{directory}: {reason} the head: --model")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "gemma4_unified_assistant"}, "Gemma 4 assistant"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": SIZES}, "EAGLE-3"),
        ({"model_type": "llama", "draft_vocab_size": 32000}, "EAGLE-3"),
        ({"architectures": ["Eagle3DraftModel"], "model_type": "qwen3"}, "EAGLE-3"),
        ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 1}}, "DFlash"),
        ({"model_type": "qwen3", "dflash_config": {"projector_type": "dspark"}}, "DSpark"),
        ({"model_type": "qwen3", "dflash_config": {"markov_rank": 256}}, "DSpark"),
        ({"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1]}, "DSpark"),
        ({"speculators_model_type": "dflash"}, "DFlash"),
    ],
)
def test_other_names_of_the_kinds(tmp_path: Path, config: Config, name: str) -> None:
    found = find_head(write(tmp_path, config, {"a": mx.zeros(1)}))
    assert found.kind.title == name


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "glm4_moe_lite_mtp"}, "glm4_moe_lite_mtp"),
        ({"speculators_model_type": "medusa"}, "medusa"),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, "DFlash2DraftModel"),
        ({"dflash_config": {"projector_type": "new\nkind"}}, "new\\nkind"),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, "name the original model"),
        ({"model_type": "llama"}, "neither a trained head nor a model"),
    ],
)
def test_other_heads_are_refused_with_the_supported_kinds(
    tmp_path: Path, config: Config, named: str
) -> None:
    write(tmp_path, config, {"model.layers.0.norm.weight": mx.zeros(1)})
    message = refused(lambda: find_head(tmp_path))
    assert message.startswith(f"{tmp_path}: ")
    assert named in message
    assert "supported are Gemma 4's assistants" in message


@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp.", "model.mtp."])
def test_a_checkpoint_carries_its_head(tmp_path: Path, prefix: str) -> None:
    weights = random_weights("Qwen MTP")
    directory = write_target(tmp_path, original(weights, prefix))
    found = own_head(directory)
    assert found is not None
    assert found.tensors().keys() == original(weights, prefix).keys()
    assert_has(load_head(directory, QWEN_TARGET), weights)


def test_of_several_files_those_with_the_head_are_its_files(tmp_path: Path) -> None:
    weights = original(random_weights("Qwen MTP"))
    write(tmp_path, QWEN_TARGET, {"model.norm": mx.ones(1)}, "model-1")
    write(tmp_path, QWEN_TARGET, weights, "model-2")
    found = own_head(tmp_path)
    assert found is not None
    assert found.files == (tmp_path / "model-2.safetensors",)
    load_head(tmp_path, QWEN_TARGET)
    write(tmp_path, QWEN_TARGET, {"model.norm": mx.ones(1)}, "model-2")
    assert own_head(tmp_path) is None
    (tmp_path / "model-2.safetensors").write_bytes(b"damaged")
    assert "model-2.safetensors: truncated or damaged" in refused(lambda: own_head(tmp_path))


@pytest.mark.parametrize("prefix", ["mtp.", ""])
def test_a_head_in_a_file_beside_the_model_s(tmp_path: Path, prefix: str) -> None:
    weights = random_weights("Qwen MTP")
    write_target(tmp_path, {})
    assert own_head(tmp_path) is None
    named = {f"{prefix}{name}": array for name, array in weights.items()}
    mx.save_safetensors(str(tmp_path / "mtp.safetensors"), named)
    assert_has(load_head(tmp_path, QWEN_TARGET), weights)


@pytest.mark.parametrize("folder", ["mtp", "assistant", "head"])
def test_a_head_in_a_folder_of_the_model_s(tmp_path: Path, folder: str) -> None:
    write(tmp_path, TARGET, {})
    write_head(tmp_path / folder, "EAGLE-3")
    assert_has(load_head(tmp_path, TARGET), random_weights("EAGLE-3"))


def test_a_quantised_head_keeps_its_bits(tmp_path: Path) -> None:
    """Each layer's tensors determine its bits, not the target's settings."""
    weights = original(random_weights("Qwen MTP"))
    expected = random_weights("Qwen MTP")
    for name, bits in (("fc", 4), ("layers.0.mlp.up_proj", 8)):
        packed = mx.quantize(weights.pop(f"mtp.{name}.weight"), 32, bits)
        for kind, array in zip(("weight", "scales", "biases"), packed, strict=True):
            expected[f"{name}.{kind}"] = weights[f"mtp.{name}.{kind}"] = array
    config = {**QWEN_TARGET, "quantization": {"group_size": 64, "bits": 6}}
    write(tmp_path, config, weights)
    head = load_head(tmp_path, QWEN_TARGET)
    assert_has(head, expected)
    assert head.fc.bits == 4
    assert head["layers"][0].mlp.up_proj.bits == 8


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("size", ["hidden_size", "vocab_size"])
def test_a_head_for_another_size_is_refused(tmp_path: Path, name: str, size: str) -> None:
    directory = write_head(tmp_path, name)
    target = HEADS[name][2]
    text = {**target.get("text_config", target), size: 96}
    message = refused(lambda: load_head(directory, {**target, "text_config": text}))
    assert message.startswith(f"{directory}: ")
    assert size in message
    assert "96" in message


@pytest.mark.parametrize("name", ["Gemma 4 assistant", "Qwen MTP"])
def test_a_head_for_another_family_is_refused(tmp_path: Path, name: str) -> None:
    directory = write_head(tmp_path, name)
    message = refused(lambda: load_head(directory, TARGET))
    assert message.startswith(f"{directory}: {name} is a head for targets of another architecture")
    assert "qwen3; name a head" in message


def test_a_head_for_a_model_whose_text_settings_are_an_object(tmp_path: Path) -> None:
    """As Llama 4's; and the models of PLaMo and Youtu have a ``config`` in place of ``args``."""
    text = SimpleNamespace(**TARGET)
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="llama4", text_config=text))
    head = load_head(write_head(tmp_path / "head", "EAGLE-3"), vars(args_of(model)))
    assert_has(head, random_weights("EAGLE-3"))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    weights = random_weights("EAGLE-3")
    del weights["fc.weight"]
    write(tmp_path, EAGLE_3, weights)
    assert "fc.weight" in refused(lambda: load_head(tmp_path, TARGET))
    write(tmp_path, EAGLE_3, {**random_weights("EAGLE-3"), "evil": mx.zeros(1)})
    assert "evil" in refused(lambda: load_head(tmp_path, TARGET))
    incomplete = {name: value for name, value in EAGLE_3.items() if name != "hidden_size"}
    write(tmp_path, incomplete, random_weights("EAGLE-3"))
    assert "'hidden_size'" in refused(lambda: load_head(tmp_path, TARGET))
    write(tmp_path, {**EAGLE_3, "num_key_value_heads": 10**6}, random_weights("EAGLE-3"))
    assert "the weights do not fit config.json" in refused(lambda: load_head(tmp_path, TARGET))


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, kept: int) -> None:
    file = write_head(tmp_path, "EAGLE-3") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert refused(lambda: load_head(tmp_path, TARGET)).startswith(f"{file}: truncated or damaged")


def test_folders_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE_3))
    assert "no model*.safetensors" in refused(lambda: find_head(tmp_path))
    assert "no such directory" in refused(lambda: load_head("./nowhere", TARGET))


def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    write(tmp_path, {**EAGLE_3, "model_file": "evil.py"}, random_weights("EAGLE-3"))
    (tmp_path / "evil.py").write_text("raise SystemExit")
    assert "evil.py" in refused(lambda: load_head(tmp_path, TARGET))


def test_only_files_with_the_head_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[str]] = []

    def find(name: str, revision: str | None, *, weights: tuple[str, ...]) -> Path:
        asked.append(set(weights))
        return tmp_path

    monkeypatch.setattr(loading, "find_directory", find)
    write(tmp_path, QWEN_TARGET, {})
    beside = {"mtp.safetensors", "mtp/*.safetensors", "assistant/*.safetensors"}
    files = {"mtp.norm.weight": "model-9.safetensors", "model.norm.weight": "model-1.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    head_directory("owner/name")
    assert asked == [set(), {*beside, "head/*.safetensors", "model-9.safetensors"}]
    write(tmp_path, EAGLE_3, {})
    head_directory("owner/name")
    assert asked[-1] >= {"model*.safetensors"}


def test_pytorch_s_files_of_a_head_are_downloaded_if_there_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def find(name: str, revision: str | None, *, weights: tuple[str, ...]) -> Path:
        asked.append(weights)
        if "model*.safetensors" in weights:
            raise LoadError(f"{name}: no model*.safetensors")
        return tmp_path

    monkeypatch.setattr(loading, "find_directory", find)
    write(tmp_path, EAGLE_3, {})
    assert head_directory("owner/name") == tmp_path
    assert asked[-1] == ("pytorch_model*.bin",)
    write(tmp_path, TARGET, {})
    assert refused(lambda: head_directory("owner/name")) == "owner/name: no model*.safetensors"
