"""Conversions of Hugging Face checkpoints compared with mlx-lm's converter."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlxspec.convert.conversion import convert
from mlxspec.errors import MlxspecError
from mlxspec.models import model_files
from mlxspec.models.tokenizer import write_tokenizer
from tests.support.comparison import assert_same_bits, tensors

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
ARCHITECTURES = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0}
    | {"final_logit_softcapping": 30.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "conv_kernel": 4}
    | {"expand": 2, "chunk_size": 64, "time_step_limit": [0.0, 100.0], "time_step_rank": 4}
    | {"use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5}
    | {"time_step_min": 0.001, "time_step_max": 0.1},
}


def write_model(
    directory: Path, tokenizer_model: Path, model_type: str = "llama", **settings: object
) -> Path:
    """Write a Hugging Face checkpoint with random weights of mlx-lm's model class."""
    directory.mkdir()
    config = {"model_type": model_type} | SMALL | ARCHITECTURES.get(model_type, {}) | settings
    model_class, args_class = _get_classes(config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(config))
    weights = {name: array.astype(mx.bfloat16) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(directory / "model.safetensors"), split_experts(weights))
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(tokenizer_model.parent, directory)
    shutil.copyfile(tokenizer_model, directory / "tokenizer.model")
    return directory


def split_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Split Mixtral's experts, which its checkpoints store separately and mlx-lm together."""
    split: dict[str, mx.array] = {}
    originals = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name, array in weights.items():
        prefix, found, module = name.partition("switch_mlp.")
        if not found:
            split[name] = array
            continue
        for expert in range(array.shape[0]):
            original = originals[module.removesuffix(".weight")]
            split[f"{prefix}experts.{expert}.{original}.weight"] = array[expert]
    return split


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_architecture_converts_like_mlx_lm(
    tmp_path: Path, tokenizer_model: Path, model_type: str, quantize: bool
):
    source = write_model(tmp_path / "source", tokenizer_model, model_type, torch_dtype="float16")
    convert(hf_path=source, mlx_path=tmp_path / "ours", quantize=quantize)
    mlx_lm.convert(str(source), str(tmp_path / "theirs"), quantize=quantize)
    assert_same_bits(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs"))
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("ours", "theirs")]
    assert configs[0] == configs[1]
    assert mlx_lm.load(str(tmp_path / "ours"))


def test_without_a_named_type_16_bit_weights_keep_theirs_and_others_become_float16(
    tmp_path: Path, tokenizer_model: Path
):
    source = write_model(tmp_path / "source", tokenizer_model)
    convert(hf_path=source, mlx_path=tmp_path / "kept")
    assert {a.dtype for a in tensors(tmp_path / "kept").values()} == {mx.bfloat16}
    convert(hf_path=source, mlx_path=tmp_path / "wide", dtype="float32")
    assert {a.dtype for a in tensors(tmp_path / "wide").values()} == {mx.float32}
    convert(hf_path=tmp_path / "wide", mlx_path=tmp_path / "half")
    assert {a.dtype for a in tensors(tmp_path / "half").values()} == {mx.float16}


def test_the_tokenizer_is_copied_and_no_code_is(tmp_path: Path, tokenizer_model: Path):
    source = write_model(tmp_path / "source", tokenizer_model, auto_map={"AutoModel": "evil.Model"})
    for name in (
        "evil.py",
        "tokenizer_evil.py",
        "chat_template.jinja",
        "chat_template.json",
        "no.bin",
    ):
        (source / name).write_text("{}" if name.endswith(".json") else "raise SystemExit")
    convert(hf_path=source, mlx_path=tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("config.json", "model.safetensors"),
        *("model.safetensors.index.json", "chat_template.jinja", "chat_template.json"),
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    }
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    same = "tokenizer.json"
    assert (tmp_path / "out" / same).read_bytes() == (source / same).read_bytes()


def test_a_sentencepiece_model_alone_gets_its_own_ids(tmp_path: Path, tokenizer_model: Path):
    from sentencepiece import SentencePieceProcessor

    source = write_model(tmp_path / "source", tokenizer_model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    convert(hf_path=source, mlx_path=tmp_path / "out")
    _, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    reference = SentencePieceProcessor(model_file=str(tokenizer_model))
    text = "a model  reads\nwords é"
    assert tokenizer.encode(text) == [reference.bos_id(), *reference.encode(text)]


def test_a_quantised_model_is_not_quantised_again(tmp_path: Path, tokenizer_model: Path):
    source = write_model(tmp_path / "source", tokenizer_model)
    convert(hf_path=source, mlx_path=tmp_path / "q", quantize=True)
    with pytest.raises(MlxspecError, match=r"is quantised already; leave out -q$"):
        convert(hf_path=tmp_path / "q", mlx_path=tmp_path / "qq", quantize=True)
    convert(hf_path=tmp_path / "q", mlx_path=tmp_path / "copy")
    assert_same_bits(tensors(tmp_path / "q"), tensors(tmp_path / "copy"))


def spoil_weights(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def spoil_index(source: Path) -> None:
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def remove_a_tensor(source: Path) -> None:
    weights = mx.load(str(source / "model.safetensors"))
    del weights["model.norm.weight"]
    mx.save_safetensors(str(source / "model.safetensors"), weights)


def spoil_added_tokens(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {}}}')


def spoil_template(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").write_text('{"chat_template": "\\ud800"}')


def change_config(**changes: object):
    def spoil(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        config = {k: v for k, v in (config | changes).items() if v is not None}
        (source / "config.json").write_text(json.dumps(config))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_weights, r"model\.safetensors: truncated or damaged"),
        (spoil_index, r"weights file model-00002-of-00002\.safetensors is missing"),
        (
            lambda s: (s / "model.safetensors.index.json").write_text('{"weight_map": []}'),
            r"index\.json: weight_map must map",
        ),
        (spoil_added_tokens, r"the tokenizer cannot be loaded: .*'x'"),
        (spoil_template, r"the tokenizer cannot be loaded: .*surrogates"),
        (
            remove_a_tensor,
            r"weights do not fit config\.json: Missing 1 parameters.*model\.norm\.weight",
        ),
        (change_config(hidden_size=None), r"config\.json does not fit.*'hidden_size'"),
        (change_config(model_type=None), r"config\.json does not fit.*'model_type'"),
        (change_config(model_type="unheard_of"), r"Model type unheard_of not supported"),
        (change_config(hidden_size=32), r"weights do not fit config\.json: Expected shape"),
        (
            change_config(model_file="evil.py"),
            r"needs Python code from its repository \(evil\.py\)",
        ),
        (lambda s: (s / "config.json").unlink(), r"no config\.json"),
        (
            lambda s: (s / "config.json").rename(s / "params.json"),
            r"no config\.json",
        ),
        (lambda s: (s / "config.json").write_text("{"), r"config\.json: not valid JSON"),
        (lambda s: (s / "model.safetensors").unlink(), r"no model\*\.safetensors"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(
    tmp_path: Path, tokenizer_model: Path, spoil, message: str
):
    source = write_model(tmp_path / "source", tokenizer_model)
    (source / "evil.py").write_text("raise SystemExit('this ran')")
    spoil(source)
    with pytest.raises(MlxspecError, match=message) as error:
        convert(hf_path=source, mlx_path=tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_repository_is_downloaded_at_its_revision(
    tmp_path: Path, tokenizer_model: Path, monkeypatch: pytest.MonkeyPatch
):
    source = write_model(tmp_path / "source", tokenizer_model)

    def download(repository: str, revision: str | None, weights: tuple[str, ...]) -> Path:
        assert (repository, revision) == ("owner/name", "v2")
        assert "model*.safetensors" in weights
        return Path(shutil.copytree(source, tmp_path / "cache"))

    monkeypatch.setattr(model_files, "download", download)
    convert(hf_path="owner/name", revision="v2", mlx_path=tmp_path / "out")
    assert_same_bits(tensors(source), tensors(tmp_path / "out"))


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "a/b/c"])
def test_what_is_neither_directory_nor_repository_is_named(tmp_path: Path, name: str):
    with pytest.raises(
        MlxspecError, match="no such directory, and not the name of a Hub repository"
    ):
        convert(hf_path=name, mlx_path=tmp_path / "out")
