"""Small original checkpoints with random weights, and a reference forward."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import torch_file

PARAMS = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "hidden_dim": 96,
    "norm_eps": 1e-5,
    "vocab_size": 320,
}


def random_weights(params: dict[str, Any] = PARAMS, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 weights, by original name, that every float type holds exactly."""
    generator = np.random.default_rng(seed)
    dim, hidden = params["dim"], params["hidden_dim"]
    queries = params["n_heads"] * params["head_dim"]
    keys = params["n_kv_heads"] * params["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (params["vocab_size"], dim)}
    for layer in range(params["n_layers"]):
        shapes |= {
            f"layers.{layer}.attention.wq.weight": (queries, dim),
            f"layers.{layer}.attention.wk.weight": (keys, dim),
            f"layers.{layer}.attention.wv.weight": (keys, dim),
            f"layers.{layer}.attention.wo.weight": (dim, queries),
            f"layers.{layer}.feed_forward.w1.weight": (hidden, dim),
            f"layers.{layer}.feed_forward.w2.weight": (dim, hidden),
            f"layers.{layer}.feed_forward.w3.weight": (hidden, dim),
            f"layers.{layer}.attention_norm.weight": (dim,),
            f"layers.{layer}.ffn_norm.weight": (dim,),
        }
    shapes |= {"norm.weight": (dim,), "output.weight": (params["vocab_size"], dim)}
    weights = {}
    for name, shape in shapes.items():
        values = generator.normal(1.0 if "norm" in name else 0.0, 0.25, shape)
        weights[name] = np.clip(np.round(values * 64), -127, 127).astype(np.float32) / 64
    return weights


def write_checkpoint(
    directory: Path,
    tokenizer: Path,
    *shards: dict[str, np.ndarray],
    params: dict[str, Any] = PARAMS,
) -> Path:
    """Write a complete checkpoint in the original layout; return its directory."""
    directory.mkdir(parents=True)
    (directory / "params.json").write_text(json.dumps(params))
    shutil.copyfile(tokenizer, directory / "tokenizer.model")
    for index, shard in enumerate(shards):
        torch_file.save(directory / f"consolidated.{index:02d}.pth", shard)
    return directory


def as_bfloat16(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weights in the form that :func:`torch_file.save` takes for bfloat16."""
    return {name: torch_file.bfloat16_bits(array) for name, array in weights.items()}


def split(weights: dict[str, np.ndarray], count: int, embedding_axis: int) -> list[dict]:
    """Return model-parallel shards like Llama's: first products by rows, second by columns."""
    axes = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
    axes["tok_embeddings"] = embedding_axis
    shards: list[dict] = [{} for _ in range(count)]
    for name, array in weights.items():
        module = name.split(".")[-2]
        pieces = np.split(array, count, axes[module]) if module in axes else [array] * count
        for shard, piece in zip(shards, pieces, strict=True):
            shard[name] = np.ascontiguousarray(piece)
    return shards


def logits(weights: dict[str, np.ndarray], params: dict[str, Any], tokens: list[int]) -> np.ndarray:
    """Run a float64 forward written from the paper, which rotates neighbouring pairs.

    Returns:
        (tokens, vocabulary)
    """
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    head_dim, heads, kv_heads = params["head_dim"], params["n_heads"], params["n_kv_heads"]
    count = len(tokens)
    frequencies = params.get("rope_theta", 10000.0) ** -(np.arange(0, head_dim, 2) / head_dim)
    turn = np.exp(1j * np.outer(np.arange(count), frequencies))  # (tokens, head_dim / 2)
    hidden = np.where(np.tri(count, dtype=bool), 0.0, -np.inf)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + params["norm_eps"]) * w[name]

    def rotated(x: np.ndarray) -> np.ndarray:
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)

    x = w["tok_embeddings.weight"][tokens]
    for layer in range(params["n_layers"]):
        prefix = f"layers.{layer}"
        y = norm(x, f"{prefix}.attention_norm.weight")
        q, k, v = (
            (y @ w[f"{prefix}.attention.{name}.weight"].T)
            .reshape(count, -1, head_dim)
            .swapaxes(0, 1)
            for name in ("wq", "wk", "wv")
        )
        k, v = (np.repeat(a, heads // kv_heads, axis=0) for a in (rotated(k), v))
        scores = rotated(q) @ k.swapaxes(1, 2) / np.sqrt(head_dim) + hidden
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = scores / scores.sum(-1, keepdims=True) @ v
        x = x + attended.swapaxes(0, 1).reshape(count, -1) @ w[f"{prefix}.attention.wo.weight"].T
        y = norm(x, f"{prefix}.ffn_norm.weight")
        gate = y @ w[f"{prefix}.feed_forward.w1.weight"].T
        up = y @ w[f"{prefix}.feed_forward.w3.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}.feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ w["output.weight"].T
