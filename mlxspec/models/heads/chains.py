"""Heads that draft a chain: EAGLE-3, the MTP of Qwen, the assistants of Gemma 4.

Parameters are named as in published checkpoints; where checkpoints differ, ``sanitize`` renames
tensors. Formulas and names were compared with mlx-vlm 0.7.10, vLLM and transformers.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from statistics import median_low
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text, llama, qwen3, qwen3_5, qwen3_next
from mlx_lm.models.base import create_attention_mask

from ...errors import LoadError
from . import Head
from .settings import Config, checked_layers, layer_windows, rope_of, settings_of, text_of

Weights = dict[str, mx.array]


def _fields(args: Any) -> frozenset[str]:
    """The names of the settings that a class of mlx-lm reads."""
    return frozenset(field.name for field in fields(args))


class Eagle3(Head):
    """EAGLE-3 (Li et al. 2025, arXiv 2503.01840), in SGLang's, AngelSlim's or speculators' format.

    It is one layer like Llama's, or several. The input of the first one's attention is the token's
    embedding, concatenated with the features. EAGLE-3.1 feeds back the layers' output after the
    norm.

    Raises:
        LoadError: the head was made for another target, or has settings that exclude each other.
    """

    title = "EAGLE-3"
    used = _fields(llama.ModelArgs) | {
        *("draft_vocab_size", "truncated_vocab_size", "target_hidden_size", "num_target_layers"),
        *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        *("eagle_aux_hidden_state_layer_ids", "use_sliding_window", "rope_parameters"),
        *("bias", "qkv_bias", "final_logit_softcapping"),
    }
    only: ClassVar = {"is_causal": True, "partial_rotary_factor": 1}

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__(config, target_config)
        settings = settings_of(config)
        args = llama.ModelArgs.from_dict(
            {
                "rms_norm_eps": 1e-6,
                "num_hidden_layers": 1,
                **settings,
                **_rope(settings),
                "model_type": "llama",
                "attention_bias": False,  # the tensors show which layers have a bias
                "mlp_bias": False,
            }
        )
        self.width, eps = args.hidden_size, args.rms_norm_eps
        self.reads = _layers_read(config, text_of(target_config)["num_hidden_layers"])
        read_width = settings.get("target_hidden_size") or self.width
        inputs = len(self.reads) * read_width
        norm_before_fc, fc_norm = settings.get("norm_before_fc"), settings.get("fc_norm")
        if norm_before_fc and fc_norm:
            raise LoadError("config.json has both norm_before_fc and fc_norm; keep one of them")
        if norm_before_fc:
            self.input_norm = nn.RMSNorm(inputs, eps=eps)
        if fc_norm:
            self.fc_norm = [nn.RMSNorm(read_width, eps=eps) for _ in self.reads]
        self.fc = nn.Linear(inputs, self.width, bias=False)
        first = _Eagle3Layer(args, bool(settings.get("norm_before_residual")))
        others = (llama.TransformerBlock(args) for _ in range(1, args.num_hidden_layers))
        self.layers = [first, *others]
        self.norm = nn.RMSNorm(self.width, eps=eps)
        self._args, self._norm_output = args, bool(settings.get("norm_output"))
        if self._own_vocabulary != self.vocabulary or not settings.get("tie_word_embeddings"):
            self.lm_head = nn.Linear(self.width, self._own_vocabulary, bias=False)
        self._windows = layer_windows(settings, args.num_hidden_layers)

    def fit(self, names: Collection[str]) -> None:
        for i, layer in enumerate(self.layers):
            if f"layers.{i}.self_attn.q_norm.weight" in names:  # like Qwen 3's
                layer.self_attn = _attention(self._args, qwen3.Attention, doubled=i == 0)
        super().fit(names)

    def features(self, states: Sequence[mx.array]) -> mx.array:
        if "fc_norm" in self:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        x = mx.concatenate(list(states), axis=-1)
        return self.fc(self.input_norm(x) if "input_norm" in self else x)

    def __call__(
        self, tokens: mx.array, features: mx.array, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        first, *others = (
            create_attention_mask(features, each, window_size=window)
            for each, window in zip(cache, self._windows, strict=True)
        )
        hidden = self.layers[0](self.embed(tokens), features, first, cache[0])
        for layer, mask, each in zip(self.layers[1:], others, cache[1:], strict=True):
            hidden = layer(hidden, mask, each)
        if self._norm_output:
            hidden = self.norm(hidden)
        return hidden, hidden

    def logits(self, hidden: mx.array) -> mx.array:
        return super().logits(hidden if self._norm_output else self.norm(hidden))

    @staticmethod
    def sanitize(weights: Weights) -> Weights:
        """Rename a checkpoint's tensors to the head's parameters, and drop those it does not use.

        SGLang and AngelSlim call the first layer ``midlayer``, speculators calls it ``layers.0``.
        """
        kept: Weights = {}
        for full_name, weight in weights.items():
            name = re.sub("^midlayer[.]", "layers.0.", full_name.removeprefix("model."))
            if not name.startswith(("t2d", "verifier_")) and "rotary_emb" not in name:
                kept[name] = weight.astype(mx.int32) if name == "d2t" else weight
        return kept


class _Eagle3Layer(nn.Module):
    def __init__(self, args: llama.ModelArgs, norm_before_residual: bool) -> None:
        super().__init__()
        width, eps = args.hidden_size, args.rms_norm_eps
        self.self_attn = _attention(args, llama.Attention, doubled=True)
        self.mlp = llama.MLP(args)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self._norm_before_residual = norm_before_residual

    def __call__(self, embedded: mx.array, features: mx.array, mask: Any, cache: Any) -> mx.array:
        normed = self.hidden_norm(features)
        x = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = normed if self._norm_before_residual else features
        h = residual + self.self_attn(x, mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


def _attention(args: llama.ModelArgs, kind: Any, doubled: bool) -> nn.Module:
    """An attention of this class of mlx-lm, with inputs of twice the width if ``doubled``."""
    width = args.hidden_size
    head_dim = args.head_dim or width // args.num_attention_heads
    attention = kind(replace(args, hidden_size=(1 + doubled) * width, head_dim=head_dim))
    attention.o_proj = nn.Linear(args.num_attention_heads * head_dim, width, bias=False)
    return attention


def _layers_read(config: Config, target_layers: int) -> tuple[int, ...]:
    """The target's layers whose outputs EAGLE-3 reads.

    Checkpoints for vLLM and speculators have the id of the layer that a state *enters*. Those for
    SGLang, which have the ids in ``eagle_config``, have the id of the layer that the state leaves.
    """
    entered = config.get("eagle_aux_hidden_state_layer_ids")
    left = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if entered is not None or not left:
        default = (2, target_layers // 2, target_layers - 3)
        left = [layer - 1 for layer in entered or default]
    return checked_layers(left, target_layers)


class QwenMTP(Head):
    """The multi-token prediction of Qwen 3 Next, 3.5, 3.6 and 3.8, dense and with experts.

    It is a layer of the target's kind with full attention. Its input combines the token's embedding
    and the feature, both normalised. Its output, after a norm, goes to the target's output layer,
    and is the feature for the next token of the draft.

    Raises:
        LoadError: the head was made for another target.
    """

    title = "Qwen MTP"
    families = ("qwen3_5", "qwen3_next")
    used = _fields(qwen3_5.TextModelArgs) | {
        *("block_size", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "mlp_only_layers"),
        *("layer_types", "attn_output_gate", "output_gate_type"),
    }
    only: ClassVar = {"attn_output_gate": True}

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__(config, target_config)
        # Qwen 3 Next has no rope_parameters, but mlx-lm's class has defaults for them. The class
        # changes the dictionary that it is given, so it gets a copy.
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
    def sanitize(weights: Weights, raw: bool = False) -> Weights:
        """Rename a checkpoint's tensors to the head's parameters, with norms as MLX expects them.

        Names may begin with ``mtp.``. The experts' tensors may be separate, or fused as
        ``gate_up_proj``. To norms centred at zero (:func:`norms_centred_at_zero`), 1 is added.
        """
        centred = set(norms_centred_at_zero(weights, raw))
        kept: Weights = {}
        experts: defaultdict[str, dict[int, mx.array]] = defaultdict(dict)
        for full_name, weight in weights.items():
            name = _own_name(full_name)
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


def _own_name(name: str) -> str:
    return name.rpartition("mtp.")[2]


def norms_centred_at_zero(weights: Weights, raw: bool = False) -> list[str]:
    """The names of the norms of Qwen's MTP whose weights are centred at 0 instead of 1.

    In original checkpoints these are all norms; in converted ones, none or some. A norm's own mean
    does not show it: trained gains of the two norms before ``fc`` are 0.3 and 0.5 in Qwen 3.6, and
    others exceed 1.5 by far. So the layer's norms decide together, by the median of their means,
    and those before ``fc`` follow them (jundot/omlx#3750). The final norm decides for itself, since
    some files have converted it alone (jundot/omlx#1507).

    Args:
        raw: whether they are known to be an original checkpoint's.
    """
    means: dict[str, float] = {
        name: cast(float, weight.mean().item())
        for name, weight in weights.items()
        if "norm" in name and weight.ndim == 1
    }
    final = [name for name in means if _own_name(name) == "norm.weight"]
    of_layer = [mean for name, mean in means.items() if _own_name(name).startswith("layers.")]
    if raw:
        return list(means)
    centred = bool(of_layer) and median_low(of_layer) < 0.5
    return [name for name in means if (means[name] < 0.5 if name in final else centred)]


class Gemma4Assistant(Head):
    """The assistant of Gemma 4.

    Its layers have no keys and values of their own. They attend to those of two target layers: the
    last one with full attention, and the last one with a sliding window. ``cache`` has a view of
    each, in this order. A view has ``offset``, the position of the query, which stays the same
    throughout a chain, and ``keys_and_values()``, which returns the keys and the values that the
    query may attend to, both of shape (1, heads, entries, head_dim).

    Raises:
        LoadError: the head was made for another target.
    """

    title = "Gemma 4 assistant"
    families = ("gemma4",)
    used = _fields(gemma4_text.ModelArgs) | {
        *("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "block_size"),
        *("centroid_intermediate_top_k", "attention_bias", "per_layer_config"),
    }
    only: ClassVar = {"tie_word_embeddings": True, "attention_bias": False}

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
        """Drop the output layer, which is the embedding, and convert token ids to int32.

        Raises:
            LoadError: the output layer is another one.
        """
        kept = dict(weights)
        output, embedding = kept.pop("lm_head.weight", None), kept.get("model.embed_tokens.weight")
        if output is not None and embedding is not None and not mx.array_equal(output, embedding):
            raise LoadError("lm_head differs from embed_tokens, which is not supported")
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
    """The RoPE settings for mlx-lm's Llama; transformers 5 keeps them in one dictionary."""
    rope = rope_of(config)
    return {
        "rope_theta": config.get("rope_theta") or rope.get("rope_theta", 10000.0),
        "rope_scaling": rope or None,
    }
