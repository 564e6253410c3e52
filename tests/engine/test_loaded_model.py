"""Capabilities are probed on a miniature, saved, and probed again when they may have changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlxspec
from mlxspec.engine import loaded_model
from mlxspec.engine.capability import Capability, chain_capability, examine, examine_joint
from mlxspec.engine.hidden import HiddenStates
from mlxspec.engine.joint import JointMode
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.miniature import miniature
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import demo
from tests.support.harness import examined
from tests.support.random_models import random_model


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of saved findings."""
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path))
    return tmp_path / "findings"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Record the models that are probed."""
    models: list[nn.Module] = []

    def examine_one(loaded: LoadedModel, chains: Capability) -> tuple[Capability, str]:
        models.append(loaded.model)
        return examine(loaded, chains)

    monkeypatch.setattr(loaded_model, "examine", examine_one)
    return models


# --- miniatures ---


def big(**settings: object) -> nn.Module:
    """A Llama with a much smaller miniature."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    sizes |= {"intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 4096}
    return random_model("llama", **sizes, **settings)


def test_a_miniature_has_few_layers_heads_features_and_tokens() -> None:
    small = miniature(big())
    assert small is not None
    assert len(small.layers) == 2
    assert small.model.embed_tokens.weight.shape == (64, 64)
    attention = small.layers[0].self_attn
    assert (attention.n_heads, attention.n_kv_heads, attention.rope.dims) == (2, 1, 32)
    assert small.layers[0].mlp.up_proj.weight.shape == (32, 64)


def test_a_miniature_has_a_layer_of_each_kind() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    settings = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 9}
    small = miniature(random_model("llama", **settings))
    assert small is not None
    assert [layer.use_sliding for layer in small.layers] == [True, False]


def test_a_miniature_is_in_the_model_s_data_type() -> None:
    model = big()
    model.set_dtype(mx.bfloat16)
    small = miniature(model)
    assert small is not None
    assert small.model.embed_tokens.weight.dtype == mx.bfloat16


def test_quantised_weights_and_a_head_s_readers_do_not_matter() -> None:
    model = big()
    nn.quantize(model, 64, 4)
    HiddenStates(model)  # replaces the classes of layers
    small = miniature(model)
    assert small is not None
    assert small.model.embed_tokens.weight.shape == (64, 64)


def test_weights_of_a_miniature_that_is_too_large_are_never_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxspec.engine.miniature._SMALL", 1000)
    monkeypatch.setattr("mlxspec.engine.miniature._MOST_SHARE", 0.0)
    model = big()
    mx.eval(model.parameters())
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert miniature(model) is None
    assert mx.get_peak_memory() - before < 100_000


def test_the_user_s_random_numbers_stay_as_they_were() -> None:
    model = big()
    mx.random.seed(3)
    expected = mx.random.normal((4,)).tolist()
    mx.random.seed(3)
    miniature(model)
    assert mx.random.normal((4,)).tolist() == expected


def test_a_model_with_a_module_of_the_user_s_has_no_miniature() -> None:
    class Own(nn.Linear):
        """A subclass with unknown behaviour."""

    model = random_model("llama")
    model.layers[0].mlp.up_proj = Own(32, 64, bias=False)
    assert miniature(model) is None


def test_rows_that_disturb_each_other_do_so_in_a_miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "create_attention_mask", lambda *_, **__: None)  # rows see all rows
    small = miniature(big())
    assert small is not None
    assert chain_capability(LoadedModel(small)) is Capability.PLAIN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt2", "mamba2", "llama4"])
def test_a_miniature_verifies_what_the_model_does(name: str) -> None:
    assert_same_findings(ARCHITECTURES[name].model())


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_miniature_that_verifies_what_it_does(name: str) -> None:
    assert_same_findings(ARCHITECTURES[name].model())


@pytest.mark.slow
@pytest.mark.skipif("MLXSPEC_REAL_MODEL" not in os.environ, reason="names no model")
def test_a_real_model_has_a_miniature_that_verifies_what_it_does() -> None:
    assert_same_findings(mlxspec.load(os.environ["MLXSPEC_REAL_MODEL"])[0])


def assert_same_findings(model: nn.Module) -> None:
    small = miniature(model)
    assert small is not None
    found = examined(model)
    assert examined(small) == found
    joint = examine_joint(LoadedModel(model), found[0])
    assert examine_joint(LoadedModel(small), found[0]) == joint


# --- saving ---


def test_what_is_kept_is_what_was_found(kept: Path, trials: list[nn.Module]) -> None:
    first, again, tried = (LoadedModel(random_model("llama")) for _ in range(3))
    assert first.drafts == examined(random_model("llama"))
    chains = first.chain_capability
    assert first.joint == examine_joint(tried, chains)
    assert first.joint[0] is JointMode.SPLIT
    assert again.chain_capability is chains
    assert (again.drafts, again.joint) == (first.drafts, first.joint)
    assert len(trials) == 1
    assert len([*kept.iterdir()]) == 1


def sized(**settings: object) -> Callable[[], nn.Module]:
    return lambda: random_model("llama", hidden_size=64, head_dim=16, **settings)


def quantized() -> nn.Module:
    model = sized()()
    nn.quantize(model, group_size=32, bits=4)
    return model


def half() -> nn.Module:
    model = sized()()
    model.set_dtype(mx.float16)
    return model


@pytest.mark.parametrize("other", [sized(rope_theta=5e5), quantized, half])
def test_another_configuration_quantisation_or_type_is_tried_anew(
    other: Callable[[], nn.Module], trials: list[nn.Module]
) -> None:
    for make in (sized(), other, sized(), other):
        assert LoadedModel(make()).drafts[0] is Capability.TREE
    assert len(trials) == 2


@pytest.mark.parametrize("package", ["mlx-lm", "mlx"])
def test_another_version_of_mlx_or_mlx_lm_is_tried_anew(
    package: str, trials: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    _ = LoadedModel(random_model("llama")).drafts

    def changed(name: str) -> str:
        return "9.9" if name == package else version(name)

    monkeypatch.setattr(loaded_model, "version", changed)
    monkeypatch.setattr("mlxspec.engine.machine.version", changed)
    _ = LoadedModel(random_model("llama")).drafts
    assert len(trials) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"drafts": ["forest", "x"]}', b"\xff"])
def test_a_damaged_file_is_ignored_and_replaced(
    content: bytes, kept: Path, trials: list[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    expected = LoadedModel(random_model("llama")).drafts
    (path,) = kept.iterdir()
    path.write_bytes(content)
    for _ in range(2):
        assert LoadedModel(random_model("llama")).drafts == expected
    assert len(trials) == 2
    assert caplog.text.count("ignoring the findings about a model") == 1


def test_where_nothing_can_be_written_the_findings_are_the_same(
    kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept.write_text("in the way")
    for _ in range(2):
        assert LoadedModel(random_model("llama")).drafts[0] is Capability.TREE
    assert caplog.text.count("cannot be kept") == 1


def test_the_oldest_files_go(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxspec.cache_files._MOST_FILES", 2)
    for theta in (1e3, 2e3, 3e3):
        _ = LoadedModel(random_model("llama", rope_theta=theta)).chain_capability
    assert len([*kept.iterdir()]) == 2


def test_findings_about_layers_of_the_user_s_are_not_kept(
    kept: Path, trials: list[nn.Module]
) -> None:
    class Own(llama.MLP):
        """A class outside the model's library, whose code may change."""

    for _ in range(2):
        model = random_model("llama")
        model.layers[0].mlp.__class__ = Own
        assert LoadedModel(model).drafts[0] is Capability.TREE
    assert len(trials) == 2
    assert not kept.exists()


def test_anew_the_model_itself_is_tried_and_what_was_kept_is_replaced(
    trials: list[nn.Module],
) -> None:
    model = random_model("llama")
    kept, anew = LoadedModel(model), LoadedModel(random_model("llama"), anew=True)
    assert (kept.drafts, kept.findings.tried_on) == (anew.drafts, "a miniature")
    assert trials[0] is not model
    assert trials[1] is anew.model
    assert LoadedModel(model).findings.tried_on == "the model"


@pytest.mark.slow
def test_nothing_is_set_on_the_model_and_all_trial_steps_run_on_a_miniature() -> None:
    model = random_model("llama")
    own = {*vars(model)}
    decoder = mlxspec.AutoDecoder(model, demo().tokenizer)
    list(decoder.stream([5, 6, 7], max_tokens=2))
    _ = decoder.loaded.joint_mode
    assert {*vars(model)} == own
    assert decoder.loaded.findings.tried_on == "a miniature"


# --- starts ---


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the number of rows of each of the demo model's forwards."""
    rows: list[int] = []
    kind = type(demo().model)
    call = kind.__call__

    def counted(self: nn.Module, inputs: mx.array, *args: object, **named: object) -> mx.array:
        rows.append(inputs.size)
        return call(self, inputs, *args, **named)

    monkeypatch.setattr(kind, "__call__", counted)
    return rows


def fresh() -> tuple[nn.Module, TokenizerWrapper]:
    return mlxspec.load("demo")


@pytest.mark.slow
def test_a_start_with_everything_known_runs_only_the_prompt(forwards: list[int]) -> None:
    prompt = [5] * 20

    def run() -> list[int]:
        model, tokenizer = fresh()
        decoder = mlxspec.AutoDecoder(model, tokenizer)
        del forwards[:]
        list(decoder.stream(prompt, max_tokens=1))
        return [*forwards]

    first, second = run(), run()
    assert len(first) > len(second)
    # The graph for the vocabulary's size is built but not run.
    assert sum(second) <= len(prompt) + 1
