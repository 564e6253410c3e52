"""Read llama2.c's float32 checkpoints and tokenizers into mlx-lm's Llama."""

from __future__ import annotations

import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.llama import Model, ModelArgs


def load_llama2c(path: Path) -> Model:
    """Load the model of a llama2.c ``.bin`` file, in float32."""
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, seq_len = struct.unpack("<7i", raw[:28])
    args = ModelArgs(
        model_type="llama",
        hidden_size=dim,
        num_hidden_layers=layers,
        intermediate_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        vocab_size=vocab,
        rope_theta=10000.0,
        rope_traditional=True,
        tie_word_embeddings=True,
        max_position_embeddings=seq_len,
    )
    values = np.frombuffer(raw, dtype="<f4", offset=28)
    position = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal position
        size = int(np.prod(shape))
        position += size
        return values[position - size : position].reshape(shape)

    kv_dim = dim * kv_heads // heads
    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    for name, shape in (
        ("input_layernorm", (dim,)),
        ("self_attn.q_proj", (dim, dim)),
        ("self_attn.k_proj", (kv_dim, dim)),
        ("self_attn.v_proj", (kv_dim, dim)),
        ("self_attn.o_proj", (dim, dim)),
        ("post_attention_layernorm", (dim,)),
        ("mlp.gate_proj", (hidden, dim)),
        ("mlp.down_proj", (dim, hidden)),
        ("mlp.up_proj", (hidden, dim)),
    ):
        stacked = take(layers, *shape)
        for layer in range(layers):
            weights[f"model.layers.{layer}.{name}.weight"] = stacked[layer]
    weights["model.norm.weight"] = take(dim)
    model = Model(args)
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    mx.eval(model.parameters())
    return model


def decode_llama2c(path: Path, tokens: list[int]) -> str:
    """Decode tokens that follow BOS with the pieces of a llama2.c tokenizer file."""
    raw, position, pieces = path.read_bytes(), 4, []
    while position < len(raw):
        _score, length = struct.unpack_from("<fi", raw, position)
        position += 8
        pieces.append(raw[position : position + length])
        position += length
    text = b""
    for token in tokens:
        piece = pieces[token]
        if piece.startswith(b"<0x"):
            piece = bytes([int(piece[3:5], 16)])
        text += piece
    return text.decode().removeprefix(" ")
