"""Reference implementations of trained heads in float32 NumPy, from their authors' formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]

EPS = 1e-6


def numpy_of(weights: Mapping[str, mx.array]) -> dict[str, Array]:
    return {name: np.array(array) for name, array in weights.items()}


def rms(x: Array, gain: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * gain


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def rotated(
    x: Array, positions: Array, theta: float, part: float = 1.0, over: int | None = None
) -> Array:
    """Apply RoPE to the first ``part`` of the last axis, pairing its halves; x is (rows, heads, d).

    Args:
        over: the width whose halves are paired, if it is more than the rotated part (Gemma).
    """
    width = x.shape[-1]
    turned = int(width * part)
    pairs = turned // 2
    half = (over or turned) // 2
    angles = positions[:, None] * theta ** (-2 * np.arange(pairs) / (over or turned))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :pairs], x[..., half : half + pairs]
    result = x.copy()
    result[..., :pairs] = first * cos - second * sin
    result[..., half : half + pairs] = second * cos + first * sin
    return result


def attended(
    queries: Array, keys: Array, values: Array, visible: Array, scale: float | None = None
) -> Array:
    """Return attention; queries are (rows, heads, d), keys and values (entries, fewer heads, d)."""
    shared = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(each, shared, axis=1) for each in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries, keys) * (scale or queries.shape[-1] ** -0.5)
    scores = np.where(visible, scores, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(scores), values).reshape(len(queries), -1)


def causal(rows: int, window: int | None = None) -> Array:
    distance = np.arange(rows)[:, None] - np.arange(rows)
    return (distance >= 0) & (distance < (window or rows + 1))


def linear(w: Weights, name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", np.float32(0))


def mlp(w: Weights, name: str, x: Array, activation: Callable[[Array], Array] = silu) -> Array:
    gate = activation(linear(w, f"{name}.gate_proj", x))
    return linear(w, f"{name}.down_proj", gate * linear(w, f"{name}.up_proj", x))


def of_heads(w: Weights, name: str, norm: str, x: Array, width: int) -> Array:
    y = linear(w, name, x).reshape(len(x), -1, width)
    return rms(y, w[f"{norm}.weight"]) if f"{norm}.weight" in w else y


# --- EAGLE-3 ---


def eagle3(
    w: Weights,
    settings: Mapping[str, Any],
    embedding: Array,
    pairs: Sequence[tuple[int, Array]],
) -> Array:
    """Return the layers' output for each pair of a token and a feature, (pairs, width).

    Args:
        w: the tensors, under the speculators library's names without ``model.``.
        settings: ``head_dim``, ``theta``, ``window`` and ``norm_before_residual``.
    """
    positions = np.arange(len(pairs))
    x = np.stack([feature for _, feature in pairs])
    visible = causal(len(pairs), settings.get("window"))
    for i in range(settings.get("layers", 1)):
        at = f"layers.{i}."
        own = f"{at}self_attn."
        inner = x
        if i == 0:
            embedded = np.stack([embedding[token] for token, _ in pairs])
            normed = rms(x, w[f"{at}hidden_norm.weight"])
            embedded = rms(embedded, w[f"{at}input_layernorm.weight"])
            inner = np.concatenate([embedded, normed], axis=-1)
            x = normed if settings.get("norm_before_residual") else x
        else:
            inner = rms(x, w[f"{at}input_layernorm.weight"])
        q, k, v = (
            of_heads(w, f"{own}{n}_proj", f"{own}{n}_norm", inner, settings["head_dim"])
            for n in "qkv"
        )
        q, k = (rotated(each, positions, settings["theta"]) for each in (q, k))
        x = x + linear(w, f"{own}o_proj", attended(q, k, v, visible))
        x = x + mlp(w, f"{at}mlp", rms(x, w[f"{at}post_attention_layernorm.weight"]))
    return x


def eagle3_features(w: Weights, states: Sequence[Array]) -> Array:
    """Return each row's feature g from the states of three layers, (rows, width) each."""
    if "fc_norm.0.weight" in w:
        states = [rms(each, w[f"fc_norm.{i}.weight"]) for i, each in enumerate(states)]
    x = np.concatenate(list(states), axis=-1)
    if "input_norm.weight" in w:
        x = rms(x, w["input_norm.weight"])
    return linear(w, "fc", x)


# --- DFlash and DSpark ---


def block(
    w: Weights,
    settings: Mapping[str, Any],
    embedding: Array,
    states: Sequence[Array],
    tokens: Sequence[int],
) -> Array:
    """Return the normed output at each slot of a block that follows the rows of these states.

    Args:
        settings: ``head_dim``, ``theta``, and ``layers``: for each layer its window or None, and
            whether slots see only earlier slots.
        tokens: the last token and the mask tokens.
    """
    context = rms(linear(w, "fc", np.concatenate(list(states), -1)), w["hidden_norm.weight"])
    before, slots = len(context), len(tokens)
    x = embedding[list(tokens)]
    places = np.arange(before + slots)
    distance = places[before:, None] - places
    for i, (window, is_causal) in enumerate(settings["layers"]):
        at = f"layers.{i}."
        own = f"{at}self_attn."
        normed = rms(x, w[f"{at}input_layernorm.weight"])
        q, k, v = (
            of_heads(w, f"{own}{n}_proj", f"{own}{n}_norm", rows, settings["head_dim"])
            for n, rows in zip(
                "qkv", [normed] + [np.concatenate([context, normed])] * 2, strict=True
            )
        )
        q = rotated(q, places[before:], settings["theta"])
        k = rotated(k, places, settings["theta"])
        visible = np.abs(distance) < (window or before + slots)
        if is_causal:
            visible &= distance >= 0
        x = x + linear(w, f"{own}o_proj", attended(q, k, v, visible))
        x = x + mlp(w, f"{at}mlp", rms(x, w[f"{at}post_attention_layernorm.weight"]))
    return rms(x, w["norm.weight"])


# --- Qwen's MTP ---


def qwen_mtp(
    w: Weights,
    settings: Mapping[str, Any],
    embedding: Array,
    pairs: Sequence[tuple[int, Array]],
) -> Array:
    """Return the normed output for each pair of a token and a hidden state, (pairs, width).

    Args:
        w: the tensors below ``mtp.``, with separate experts and uncentred gains.
    """
    positions = np.arange(len(pairs))
    embedded = rms(embedding[[token for token, _ in pairs]], w["pre_fc_norm_embedding.weight"])
    hidden = rms(np.stack([each for _, each in pairs]), w["pre_fc_norm_hidden.weight"])
    x = linear(w, "fc", np.concatenate([embedded, hidden], axis=-1))
    own, width = "layers.0.self_attn.", settings["head_dim"]
    normed = rms(x, w["layers.0.input_layernorm.weight"])
    gated = linear(w, f"{own}q_proj", normed).reshape(len(pairs), -1, 2 * width)
    q, gate = rms(gated[..., :width], w[f"{own}q_norm.weight"]), gated[..., width:]
    k = of_heads(w, f"{own}k_proj", f"{own}k_norm", normed, width)
    v = of_heads(w, f"{own}v_proj", "", normed, width)
    q, k = (rotated(each, positions, settings["theta"], settings["part"]) for each in (q, k))
    seen = attended(q, k, v, causal(len(pairs))) * sigmoid(gate).reshape(len(pairs), -1)
    x = x + linear(w, f"{own}o_proj", seen)
    normed = rms(x, w["layers.0.post_attention_layernorm.weight"])
    return rms(x + _feed_forward(w, settings, normed), w["norm.weight"])


def _feed_forward(w: Weights, settings: Mapping[str, Any], x: Array) -> Array:
    name = "layers.0.mlp"
    if f"{name}.gate.weight" not in w:
        return mlp(w, name, x)
    chances = softmax(linear(w, f"{name}.gate", x))
    shared = sigmoid(linear(w, f"{name}.shared_expert_gate", x))
    result = shared * mlp(w, f"{name}.shared_expert", x)
    for row in range(len(x)):
        best = np.argsort(-chances[row])[: settings["experts"]]
        for expert in best:
            share = chances[row, expert] / chances[row, best].sum()
            result[row] += share * mlp(w, f"{name}.experts.{expert}", x[row])
    return result


# --- Gemma 4's assistant ---


def gemma4_assistant(
    w: Weights,
    settings: Mapping[str, Any],
    embedded: Array,
    hidden: Array,
    shared: Mapping[str, tuple[Array, Array]],
    position: int,
) -> tuple[Array, Array]:
    """Return the next hidden state of the chain, and the normed output, for one token.

    Args:
        shared: by kind of layer, the target's keys and values, (entries, heads, width).
    """
    x = linear(w, "pre_projection", np.concatenate([embedded, hidden])[None])
    for i, kind in enumerate(settings["layer_types"]):
        at, (keys, values) = f"model.layers.{i}.", shared[kind]
        width = keys.shape[-1]
        normed = rms(x, w[f"{at}input_layernorm.weight"])
        q = of_heads(w, f"{at}self_attn.q_proj", f"{at}self_attn.q_norm", normed, width)
        theta, part = settings[kind]
        q = rotated(q, np.array([position]), theta, part, over=width)
        seen = attended(q, keys, values, np.ones((1, len(keys)), bool), scale=1.0)
        y = linear(w, f"{at}self_attn.o_proj", seen)
        x = x + rms(y, w[f"{at}post_attention_layernorm.weight"])
        y = mlp(w, f"{at}mlp", rms(x, w[f"{at}pre_feedforward_layernorm.weight"]), gelu)
        x = x + rms(y, w[f"{at}post_feedforward_layernorm.weight"])
        x = x * w[f"{at}layer_scalar"]
    output = rms(x, w["model.norm.weight"])
    return linear(w, "post_projection", output)[0], output[0]
