"""Heads that draft a chain: EAGLE-3, the MTP of Qwen, the assistants of Gemma 4.

Parameters are named as in published checkpoints; ``sanitize`` unifies the variants. Formulas and
names were compared with mlx-vlm 0.7.10, vLLM and transformers.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text, llama, qwen3_5, qwen3_next
from mlx_lm.models.base import create_attention_mask

from . import Config, Head, settings_of, text_of

Weights = dict[str, mx.array]


class Eagle3(Head):
    """EAGLE-3 (Li et al. 2025, arXiv 2503.01840), of SGLang, AngelSlim or speculators.

    It is one of Llama's layers, whose attention sees the token's embedding beside the features. It
    may draft from its own vocabulary; ``d2t`` has the difference between each token's id and the
    target's.

    Raises:
        LoadError: the head was made for another target.
    """

    title = "EAGLE-3"

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__(config, target_config)
        settings = settings_of(config)
        args = llama.ModelArgs.from_dict(
            {
                "rms_norm_eps": 1e-6,
                **settings,
                "model_type": "llama",
                "num_hidden_layers": 1,
                **_rope(settings),
            }
        )
        self.width = args.hidden_size
        self.reads = _layers_read(config, text_of(target_config)["num_hidden_layers"])
        inputs = len(self.reads) * self.width
        if config.get("norm_before_fc"):
            self.input_norm = nn.RMSNorm(inputs, eps=args.rms_norm_eps)
        self.fc = nn.Linear(inputs, self.width, bias=False)
        self.midlayer = _Eagle3Layer(args, bool(config.get("norm_before_residual")))
        self.norm = nn.RMSNorm(self.width, eps=args.rms_norm_eps)
        own = config.get("draft_vocab_size") or self.vocabulary
        if own != self.vocabulary or not config.get("tie_word_embeddings"):
            self.lm_head = nn.Linear(self.width, own, bias=False)
        if own != self.vocabulary:
            self.d2t = mx.zeros(own, dtype=mx.int32)
            self.freeze(keys="d2t", recurse=False)

    def named_tokens(self) -> mx.array:
        return mx.arange(len(self.d2t)) + self.d2t if "d2t" in self else super().named_tokens()

    def features(self, states: Sequence[mx.array]) -> mx.array:
        x = mx.concatenate(list(states), axis=-1)
        return self.fc(self.input_norm(x) if "input_norm" in self else x)

    def __call__(
        self, tokens: mx.array, features: mx.array, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        hidden = self.midlayer(self.embed(tokens), features, cache[0])
        return hidden, hidden

    def logits(self, hidden: mx.array) -> mx.array:
        hidden = self.norm(hidden)
        if "lm_head" not in self:
            return super().logits(hidden)
        logits = self.lm_head(hidden)
        if "d2t" not in self:
            return logits
        scattered = mx.full((*logits.shape[:-1], self.vocabulary), -mx.inf, logits.dtype)
        scattered[..., self.named_tokens()] = logits
        return scattered

    @staticmethod
    def sanitize(weights: Weights) -> Weights:
        """Rename a checkpoint's tensors to the head's parameters, and drop tensors that it does not
        use.

        SGLang and AngelSlim call the layer ``midlayer``, speculators ``layers.0``.
        """
        dropped = ("t2d", "embed_tokens.", "verifier_")
        kept = {
            name.replace("layers.0.", "midlayer.", 1): weight
            for name, weight in weights.items()
            if not name.startswith(dropped) and "rotary_emb" not in name
        }
        if "d2t" in kept:
            kept["d2t"] = kept["d2t"].astype(mx.int32)
        return kept


class _Eagle3Layer(nn.Module):
    def __init__(self, args: llama.ModelArgs, norm_before_residual: bool) -> None:
        super().__init__()
        width, eps = args.hidden_size, args.rms_norm_eps
        head_dim = args.head_dim or width // args.num_attention_heads
        # Llama's attention with inputs of twice the width, and outputs of the usual width.
        self.self_attn = llama.Attention(replace(args, hidden_size=2 * width, head_dim=head_dim))
        self.self_attn.o_proj = nn.Linear(
            args.num_attention_heads * head_dim, width, bias=args.attention_bias
        )
        self.mlp = llama.MLP(args)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self._norm_before_residual = norm_before_residual

    def __call__(self, embedded: mx.array, features: mx.array, cache: Any) -> mx.array:
        normed = self.hidden_norm(features)
        x = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = normed if self._norm_before_residual else features
        h = residual + self.self_attn(x, create_attention_mask(x, cache), cache)
        return h + self.mlp(self.post_attention_layernorm(h))


def _layers_read(config: Config, target_layers: int) -> tuple[int, ...]:
    """The target's layers whose outputs EAGLE-3 reads.

    vLLM and speculators give the layer that a state *enters*; SGLang, which has the ids in
    ``eagle_config``, gives the layer that it leaves.
    """
    entered = config.get("eagle_aux_hidden_state_layer_ids")
    of_sglang = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if entered is None and of_sglang:
        return tuple(of_sglang)
    return tuple(layer - 1 for layer in entered or (2, target_layers // 2, target_layers - 3))


class QwenMTP(Head):
    """The multi-token prediction of Qwen 3 Next, 3.5, 3.6 and 3.8, dense and with experts.

    It is a layer of the target's kind with full attention, which sees the token's embedding and the
    feature, both normalised. Its output, after a norm, goes to the target's output layer and is fed
    back.

    Raises:
        LoadError: the head was made for another target.
    """

    title = "Qwen MTP"
    families = ("qwen3_5", "qwen3_next")

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__(config, target_config)
        # Qwen 3 Next has no rope_parameters, but mlx-lm's class has defaults for them. It also
        # changes the given ones.
        args = qwen3_5.TextModelArgs.from_dict(
            {
                "rope_parameters": None,
                **copy.deepcopy(settings_of(config)),
                "num_hidden_layers": 1,
                "full_attention_interval": 1,
            }
        )
        self.width = args.hidden_size
        self.pre_fc_norm_embedding = nn.RMSNorm(self.width, eps=args.rms_norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(self.width, eps=args.rms_norm_eps)
        self.fc = nn.Linear(2 * self.width, self.width, bias=False)
        self.layers = [qwen3_5.DecoderLayer(args, layer_idx=0)]
        self.norm = nn.RMSNorm(self.width, eps=args.rms_norm_eps)

    def __call__(
        self, tokens: mx.array, features: mx.array, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        embedded = self.pre_fc_norm_embedding(self.embed(tokens))
        x = self.fc(mx.concatenate([embedded, self.pre_fc_norm_hidden(features)], axis=-1))
        x = self.layers[0](x, create_attention_mask(x, cache[0]), cache[0])
        hidden = self.norm(x)
        return hidden, hidden

    quant_predicate = qwen3_next.Model.quant_predicate  # expert routers keep 8 bits

    @staticmethod
    def sanitize(weights: Weights) -> Weights:
        """Rename a checkpoint's tensors to the head's parameters, with norms as MLX expects them.

        Names may begin with ``mtp.``; experts may be separate, or fused as ``gate_up_proj``. Norms
        centred at zero get 1 added (:func:`norms_centred_at_zero`).
        """
        centred = set(norms_centred_at_zero(weights))
        kept: Weights = {}
        experts: defaultdict[str, dict[int, mx.array]] = defaultdict(dict)
        for full_name, weight in weights.items():
            name = full_name.rpartition("mtp.")[2]
            if match := re.fullmatch(r"(.*\.)experts\.(\d+)\.(.*)", name):
                experts[f"{match[1]}switch_mlp.{match[3]}"][int(match[2])] = weight
            elif name.endswith(".experts.gate_up_proj"):
                base = name.removesuffix("experts.gate_up_proj") + "switch_mlp."
                gate, up = mx.split(weight, 2, axis=-2)
                kept |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
            elif name.endswith(".experts.down_proj"):
                kept[name.replace(".experts.", ".switch_mlp.") + ".weight"] = weight
            else:
                kept[name] = weight + 1.0 if full_name in centred else weight
        for name, of_each in experts.items():
            kept[name] = mx.stack([of_each[index] for index in sorted(of_each)])
        return kept


def norms_centred_at_zero(weights: Weights) -> list[str]:
    """The names of the norms of Qwen's MTP whose weights are centred at 0 instead of 1.

    In original checkpoints all norms are, in converted ones none or some. So each tensor is judged
    separately: it is centred at 0 if its mean is closer to 0 than to 1.
    """
    return [
        name
        for name, weight in weights.items()
        if "norm" in name and weight.ndim == 1 and (weight.mean() < 0.5).item()
    ]


class Gemma4Assistant(Head):
    """The assistant of Gemma 4.

    Its layers have no keys and values: they attend to those of the target's last layer with full
    attention, and of its last with a sliding window. ``cache`` has these two views, in this order.
    Each has ``offset``, the position of the query, which stays the same throughout a chain, and
    ``keys_and_values()``, which returns those that the query may see, both of shape (1, heads,
    entries, head_dim).

    Raises:
        LoadError: the head was made for another target.
    """

    title = "Gemma 4 assistant"
    families = ("gemma4",)

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__(config, target_config)
        text = text_of(config)
        args = gemma4_text.ModelArgs.from_dict(
            {
                **text,
                "num_kv_shared_layers": text["num_hidden_layers"],
                "hidden_size_per_layer_input": 0,
            }
        )
        self.width = config["backbone_hidden_size"]
        self.pre_projection = nn.Linear(2 * self.width, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, self.width, bias=False)
        self.model = {
            "embed_tokens": nn.Embedding(args.vocab_size, args.hidden_size),
            "layers": [gemma4_text.DecoderLayer(args, i) for i in range(args.num_hidden_layers)],
            "norm": nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps),
        }
        if config.get("use_ordered_embeddings"):
            self.masked_embedding = _MaskedEmbedding(args, config)

    def named_tokens(self) -> mx.array:
        if "masked_embedding" not in self:
            return super().named_tokens()
        return self.masked_embedding.token_ordering

    def make_cache(self) -> list[Any]:
        return []

    def __call__(
        self, tokens: mx.array, features: mx.array, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        x = self.pre_projection(mx.concatenate([self.embed(tokens), features], axis=-1))
        views = [(view.keys_and_values(), view.offset) for view in cache]
        for layer in self.model["layers"]:
            shared, offset = views[layer.self_attn.is_sliding]
            x, _, _ = layer(x, shared_kv=shared, offset=offset)
        hidden = self.model["norm"](x)
        return self.post_projection(hidden), hidden

    def logits(self, hidden: mx.array) -> mx.array:
        embedding = self.model["embed_tokens"]
        if "masked_embedding" not in self:
            return embedding.as_linear(hidden)
        return self.masked_embedding(hidden, embedding)

    @staticmethod
    def sanitize(weights: Weights) -> Weights:
        """Drop the output layer, which equals the embedding, and convert ids to a type for
        indexing.
        """
        kept = {name: each for name, each in weights.items() if name != "lm_head.weight"}
        if (ordering := kept.get("masked_embedding.token_ordering")) is not None:
            kept["masked_embedding.token_ordering"] = ordering.astype(mx.int32)
        return kept


class _MaskedEmbedding(nn.Module):
    """Computes logits only for the tokens of the likeliest clusters."""

    def __init__(self, args: gemma4_text.ModelArgs, config: Config) -> None:
        super().__init__()
        clusters, most = config["num_centroids"], config["centroid_intermediate_top_k"]
        self.centroids = nn.Linear(args.hidden_size, clusters, bias=False)
        self.token_ordering = mx.zeros(args.vocab_size, dtype=mx.int32)
        self.freeze(keys="token_ordering", recurse=False)
        self._most = most

    def __call__(self, hidden: mx.array, embedding: nn.Embedding) -> mx.array:
        best = mx.argpartition(self.centroids(hidden), kth=-self._most, axis=-1)
        clusters = self.token_ordering.reshape(len(self.centroids.weight), -1)
        tokens = clusters[best[..., -self._most :]].flatten(-2)
        logits = (embedding(tokens) @ hidden[..., None]).squeeze(-1)
        everywhere = mx.full((*hidden.shape[:-1], self.token_ordering.size), -mx.inf, logits.dtype)
        return mx.put_along_axis(everywhere, tokens, logits, axis=-1)


def _rope(config: Config) -> Config:
    """The RoPE settings for mlx-lm's Llama; transformers 5 has them in one dictionary."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        "rope_theta": config.get("rope_theta") or rope.get("rope_theta", 10000.0),
        "rope_scaling": rope or None,
    }
