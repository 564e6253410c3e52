"""Complete conversions, checked with mlx-lm and an independent forward."""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step

import mlxspec
from mlxspec.convert.conversion import convert
from mlxspec.errors import LoadError, MlxspecError, OptionError
from mlxspec.models.torch_file import read_torch_file
from tests.support import original
from tests.support.comparison import assert_same_bits, tensors

WEIGHTS = original.random_weights()
TOKENS = [1, 17, 300, 5, 42, 42, 260, 7, 99]


def load_in_float32(path: Path):
    model, tokenizer = mlx_lm.load(str(path))
    model.update(
        tree_map(
            lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a,
            model.parameters(),
        )
    )
    return model, tokenizer


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    model, _ = load_in_float32(path)
    steps = generate_step(mx.array(prompt), model, max_tokens=count)
    return [token for token, _ in steps]


def test_the_result_loads_in_mlx_lm_and_computes_what_the_original_does(
    tmp_path: Path, checkpoint: Path
):
    convert(torch_path=checkpoint, mlx_path=tmp_path / "out")
    model, _ = load_in_float32(tmp_path / "out")
    expected = original.logits(WEIGHTS, original.PARAMS, TOKENS)
    np.testing.assert_allclose(
        np.array(model(mx.array([TOKENS]))[0]), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
def test_the_demo_model_writes_what_the_original_does(tmp_path: Path, shared: Path):
    source = shared / "models" / "demo"
    nbytes, parameters, _ = convert(torch_path=source, mlx_path=tmp_path / "out")
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert size < 12e6
    assert 8 * nbytes / parameters == 16

    _, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    prompt = tokenizer.encode("[INST] Repeat this 3 times: 'The red fox sleeps.' [/INST]")
    weights = {
        name: np.array(array.astype(mx.float32))
        for name, array in read_torch_file(source / "consolidated.00.pth")
    }
    params = json.loads((source / "params.json").read_text())
    output = greedy(tmp_path / "out", prompt, 12)
    # Each token is the original model's choice after the preceding ones.
    logits = original.logits(weights, params, [*prompt, *output[:-1]])
    assert logits[len(prompt) - 1 :].argmax(axis=-1).tolist() == output
    assert "The red fox sleeps." in tokenizer.decode(output)


def test_shards_and_one_file_convert_alike(tmp_path: Path, tokenizer_model: Path, checkpoint: Path):
    parts = original.split(original.as_bfloat16(WEIGHTS), 2, 1)
    sharded = original.write_checkpoint(tmp_path / "sharded", tokenizer_model, *parts)
    for name, source in (("a", checkpoint), ("b", sharded)):
        convert(torch_path=source, mlx_path=tmp_path / name, quantize=True)
    assert_same_bits(tensors(tmp_path / "a"), tensors(tmp_path / "b"))


def test_the_default_type_is_the_checkpoints_own(
    tmp_path: Path, tokenizer_model: Path, checkpoint: Path
):
    single = original.write_checkpoint(tmp_path / "single", tokenizer_model, WEIGHTS)
    for source, dtype, expected in (
        (checkpoint, None, mx.bfloat16),
        (single, None, mx.float16),
        (single, "float32", mx.float32),
        (checkpoint, "float16", mx.float16),
    ):
        convert(torch_path=source, mlx_path=tmp_path / "out", dtype=dtype, force=True)
        assert {array.dtype for array in tensors(tmp_path / "out").values()} == {expected}


MODES = [
    {},
    {"q_bits": 8},
    {"q_bits": 3, "q_group_size": 32},
    {"q_mode": "mxfp4"},
    {"q_mode": "mxfp8"},
    {"q_mode": "nvfp4"},
]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantised_tensors_equal_those_of_mlx_lm(
    tmp_path: Path, checkpoint: Path, options: dict, dtype: str
):
    convert(torch_path=checkpoint, mlx_path=tmp_path / "plain", dtype=dtype)
    mlx_lm.convert(str(tmp_path / "plain"), str(tmp_path / "theirs"), quantize=True, **options)
    convert(
        torch_path=checkpoint, mlx_path=tmp_path / "ours", quantize=True, dtype=dtype, **options
    )
    assert_same_bits(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs"))
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("ours", "theirs")]
    assert configs[0]["quantization"] == configs[1]["quantization"]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_weights_that_do_not_divide_into_groups_stay_as_they_are(tmp_path: Path, checkpoint: Path):
    # The width is 64 and the hidden width 96, so only down_proj's rows are no multiple of 64.
    convert(torch_path=checkpoint, mlx_path=tmp_path / "out", quantize=True)
    names = tensors(tmp_path / "out").keys()
    assert "model.layers.0.mlp.gate_proj.scales" in names
    assert "model.layers.0.mlp.down_proj.scales" not in names
    assert mlx_lm.load(str(tmp_path / "out"))


def test_the_index_counts_like_mlx_lm(tmp_path: Path, checkpoint: Path):
    nbytes, parameters, _ = convert(torch_path=checkpoint, mlx_path=tmp_path / "out", quantize=True)
    model, _ = mlx_lm.load(str(tmp_path / "out"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == mlx_lm.utils.get_total_parameters(model)
    assert index["metadata"]["total_size"] == nbytes
    assert 8 * nbytes / parameters == pytest.approx(mlx_lm.utils.compute_bits_per_weight(model))


def rounded_to_8_bits(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Quantise and dequantise the weights whose rows divide into groups of 64."""

    def rounded(array: np.ndarray) -> np.ndarray:
        if array.ndim < 2 or array.shape[-1] % 64:
            return array
        packed, *floats = mx.quantize(mx.array(array).astype(mx.float16), 64, 8)
        return np.array(mx.dequantize(packed, *(f.astype(mx.float32) for f in floats), 64, 8))

    return {name: rounded(array) for name, array in weights.items()}


@pytest.mark.parametrize("quantize", [False, True])
def test_mlxspec_loads_the_result_and_computes_what_the_original_does(
    tmp_path: Path, checkpoint: Path, quantize: bool
):
    convert(
        torch_path=checkpoint,
        mlx_path=tmp_path / "out",
        dtype="float16",
        quantize=quantize,
        q_bits=8 if quantize else None,
    )
    weights = rounded_to_8_bits(WEIGHTS) if quantize else WEIGHTS
    assert_computes(tmp_path / "out", weights)


def assert_computes(path: Path, weights: dict[str, np.ndarray]) -> None:
    model, tokenizer = mlxspec.load(path)
    assert tokenizer.encode("words")[0] == tokenizer.bos_token_id
    logits = np.array(model(mx.array([TOKENS]))[0].astype(mx.float32))
    expected = original.logits(weights, original.PARAMS, TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=2e-3, atol=2e-3)


def test_token_ids_equal_sentencepieces(tmp_path: Path, checkpoint: Path, tokenizer_model: Path):
    from sentencepiece import SentencePieceProcessor

    convert(torch_path=checkpoint, mlx_path=tmp_path / "out")
    _, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    reference = SentencePieceProcessor(model_file=str(tokenizer_model))
    text = "that a model\n\treads  words: é 🦊"
    assert tokenizer.encode(text) == [reference.bos_id(), *reference.encode(text)]
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == tokenizer_model.read_bytes()
    assert tokenizer.eos_token_ids == {reference.eos_id()}


def test_a_tiktoken_tokenizer_is_refused_by_name(tmp_path: Path, tokenizer_model: Path):
    source = original.write_checkpoint(tmp_path / "x", tokenizer_model, WEIGHTS)
    (source / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(MlxspecError, match=r"tokenizer\.model: .* tiktoken's; use a version"):
        convert(torch_path=source, mlx_path=tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"text", b"\x0a\xff\xff"])
def test_a_tokenizer_of_another_kind_is_refused(
    tmp_path: Path, tokenizer_model: Path, content: bytes
):
    source = original.write_checkpoint(tmp_path / "x", tokenizer_model, WEIGHTS)
    (source / "tokenizer.model").write_bytes(content)
    with pytest.raises(MlxspecError, match=r"tokenizer\.model: .*not a (SentencePiece|BPE) model"):
        convert(torch_path=source, mlx_path=tmp_path / "out")


def test_a_tokenizer_whose_error_message_is_no_text_is_refused(
    tmp_path: Path, tokenizer_model: Path
):
    source = original.write_checkpoint(tmp_path / "x", tokenizer_model, WEIGHTS)
    damaged = tokenizer_model.read_bytes().replace(b"<0x02>", b"\x800x02>")
    (source / "tokenizer.model").write_bytes(damaged)
    with pytest.raises(MlxspecError, match=r"tokenizer\.model: .*not a (SentencePiece|BPE) model"):
        convert(torch_path=source, mlx_path=tmp_path / "out")


def test_a_tekken_tokenizer_is_refused_by_name(tmp_path: Path, tokenizer_model: Path):
    source = original.write_checkpoint(tmp_path / "x", tokenizer_model, WEIGHTS)
    (source / "tokenizer.model").rename(source / "tekken.json")
    with pytest.raises(LoadError, match="Tekken's and tiktoken's files"):
        convert(torch_path=source, mlx_path=tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name one checkpoint: MODEL, --torch-path or --hf-path"),
        ({"torch_path": "a", "hf_path": "b"}, "name one checkpoint: MODEL"),
        (
            {"torch_path": "a", "quantize": True, "q_mode": "int4"},
            "Invalid quantization mode",
        ),
        ({"torch_path": "a", "quantize": True, "q_bits": 7}, "number of bits 7 is not supported"),
        ({"torch_path": "a", "quantize": True, "q_bits": 0}, "number of bits 0 is not supported"),
        ({"torch_path": "a", "quantize": True, "q_group_size": 48}, "group size 48"),
        (
            {"torch_path": "a", "quantize": True, "q_mode": "mxfp4", "q_bits": 8},
            "mxfp4 quantization requires bits to be 4 but got 8",
        ),
        (
            {"torch_path": "a", "quantize": True, "q_mode": "nvfp4", "q_group_size": 32},
            "nvfp4 quantization requires group size 16",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused_in_one_line(options: dict, message: str):
    with pytest.raises(OptionError, match=message) as error:
        convert(**options)
    assert "\n" not in str(error.value)


def test_llama_31_scales_its_rope_like_mlx_lm_does_for_hugging_face(
    tmp_path: Path, tokenizer_model: Path
):
    params = original.PARAMS | {"use_scaled_rope": True, "rope_theta": 500000.0, "multiple_of": 32}
    source = original.write_checkpoint(tmp_path / "x", tokenizer_model, WEIGHTS, params=params)
    convert(torch_path=source, mlx_path=tmp_path / "out")
    model, _ = mlx_lm.load(str(tmp_path / "out"))
    assert type(model.layers[0].self_attn.rope).__name__ == "Llama3RoPE"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] == 131072


def test_every_written_tensor_is_one_of_the_models(tmp_path: Path, checkpoint: Path):
    convert(torch_path=checkpoint, mlx_path=tmp_path / "out")
    model, _ = mlx_lm.load(str(tmp_path / "out"))
    assert dict(tree_flatten(model.parameters())).keys() == tensors(tmp_path / "out").keys()
