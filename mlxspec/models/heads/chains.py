"""Heads that draft a chain: EAGLE-3, the MTP of Qwen, the assistants of Gemma 4.

Each is made of two ``config.json``: its own and the target's. Parameters have the names of
published checkpoints; ``sanitize`` brings their variants to one form. Formulas and names were
compared with those of mlx-vlm 0.7.10, vLLM and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ...errors import LoadError
from . import ChainHead

Config = dict[str, Any]
Weights = dict[str, mx.array]


class Eagle3(ChainHead):
    """EAGLE-3 (Li et al. 2025, arXiv 2503.01840), of SGLang, AngelSlim or speculators.

    One layer of Llama's, whose attention sees the token's embedding beside the features. It drafts
    from its own vocabulary, if it has one; ``d2t`` says how far each token's id is from the
    target's.

    Raises:
        LoadError: the configuration is incomplete, not supported, or of another target.
    """

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__()
        layer = config.get("transformer_layer_config", config)  # that of speculators is nested
        target = _text(target_config)
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        _require(layer, *sizes)
        for name in ("hidden_size", "vocab_size"):
            _match(name, layer[name], target)
        if layer.get("num_hidden_layers", 1) != 1:
            raise LoadError("the head has several layers; only EAGLE-3 heads of one layer work")
        args = llama.ModelArgs.from_dict(
            {
                "rms_norm_eps": 1e-6,
                **layer,
                "model_type": "llama",
                "num_hidden_layers": 1,
                **_rope(layer),
            }
        )
        self.width = args.hidden_size
        # Past nn.Module, which takes a tuple for parameters.
        object.__setattr__(self, "layers", _layers_read(config, target["num_hidden_layers"]))
        inputs = len(self.layers) * self.width
        if config.get("norm_before_fc"):
            self.input_norm = nn.RMSNorm(inputs, eps=args.rms_norm_eps)
        self.fc = nn.Linear(inputs, self.width, bias=False)
        self.midlayer = _Eagle3Layer(args, bool(config.get("norm_before_residual")))
        self.norm = nn.RMSNorm(self.width, eps=args.rms_norm_eps)
        self._vocabulary = args.vocab_size
        own = config.get("draft_vocab_size") or args.vocab_size
        if own != args.vocab_size or not config.get("tie_word_embeddings"):
            self.lm_head = nn.Linear(self.width, own, bias=False)
        if own != args.vocab_size:
            self.d2t = mx.zeros(own, dtype=mx.int32)
            self.freeze(keys="d2t", recurse=False)

    def bind(
        self, embed: Callable[[mx.array], mx.array], output: Callable[[mx.array], mx.array]
    ) -> None:
        super().bind(embed, output)
        if "d2t" in self:
            _check_ids("d2t", self._ids(), self._vocabulary)

    def features(self, final: mx.array, of_layers: Sequence[mx.array]) -> mx.array:
        x = mx.concatenate(list(of_layers), axis=-1)
        return self.fc(self.input_norm(x) if "input_norm" in self else x)

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def __call__(
        self, tokens: mx.array, features: mx.array, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        hidden = self.midlayer(self.embed(tokens), features, cache[0])
        return hidden, hidden

    def logits(self, hidden: mx.array) -> mx.array:
        hidden = self.norm(hidden)
        if "lm_head" not in self:
            return self._target["output"](hidden)
        logits = self.lm_head(hidden)
        if "d2t" not in self:
            return logits
        scattered = mx.full((*logits.shape[:-1], self._vocabulary), -mx.inf, logits.dtype)
        scattered[..., self._ids()] = logits
        return scattered

    def _ids(self) -> mx.array:
        """The target's id of each token of the head's vocabulary."""
        return mx.arange(len(self.d2t)) + self.d2t

    @staticmethod
    def sanitize(weights: Weights) -> Weights:
        """Name a checkpoint's tensors as the head's parameters; drop those that it lacks.

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
        # Llama's attention with inputs twice as wide, and outputs as wide as ever.
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

    vLLM and speculators count the layer that the state *enters*; SGLang, which has the ids in
    ``eagle_config``, the one that it comes from.
    """
    entered = config.get("eagle_aux_hidden_state_layer_ids")
    of_sglang = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if entered is None and of_sglang:
        layers = tuple(of_sglang)
    else:
        layers = tuple(layer - 1 for layer in entered or (2, target_layers // 2, target_layers - 3))
    if not all(0 <= layer < target_layers for layer in layers):
        raise LoadError(
            f"the head reads the outputs of layers {', '.join(map(str, layers))}, but the model "
            f"has {target_layers} layers; use a head that was made for this model"
        )
    return layers


def _text(config: Config) -> Config:
    """The part of a configuration that describes text."""
    return config.get("text_config", config)


def _rope(config: Config) -> Config:
    """What mlx-lm's Llama takes; transformers 5 has one dictionary of all."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        "rope_theta": config.get("rope_theta") or rope.get("rope_theta", 10000.0),
        "rope_scaling": rope or None,
    }


def _require(config: Config, *names: str) -> None:
    for name in names:
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise LoadError(
                f"the head's config.json has no positive integer {name!r}; download the head again"
            )


def _match(name: str, expected: int, target: Config) -> None:
    if expected != target.get(name):
        raise LoadError(
            f"the head was made for a model whose {name} is {expected}, but this model's is "
            f"{target.get(name)}; use a head that was made for this model"
        )


def _check_ids(name: str, ids: mx.array, vocabulary: int) -> None:
    """Refuse ids outside the vocabulary: MLX would write or read outside an array."""
    if ids.min().item() < 0 or ids.max().item() >= vocabulary:
        raise LoadError(
            f"the head's {name} names tokens outside the vocabulary of {vocabulary}; "
            "download the head again"
        )
