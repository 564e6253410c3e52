"""Heads that draft a whole block of tokens in one forward: DFlash and DSpark.

A block is the last token and then mask tokens. Its slots see each other and the verified positions
before it, whose keys and values come from the target's hidden states. Formulas and names of the
tensors: https://github.com/z-lab/dflash (DFlash) and https://github.com/deepseek-ai/DeepSpec
(DSpark).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import ModelArgs, TransformerBlock

from ...errors import LoadError, printable
from . import BlockHead

_SLIDING = "sliding_attention"


class DFlash(BlockHead):
    """Slot i of a block predicts the i-th token after the last one; slot 0 predicts nothing.

    A block has only as many slots as its depth needs. Its slots see each other, so a shorter block
    also changes the logits of the slots that remain. Heads are trained on whole blocks, but other
    engines draft shorter ones in this way, too.
    """

    _first = 1  # the slot that predicts the next token
    # What some heads of other kinds vary.
    _fixed: Mapping[str, Any] = {
        "attention_bias": False,
        "attention_sink_bias": False,
        "hidden_act": "silu",
        "rope_is_neox_style": True,
        "use_swa": False,
    }

    def __init__(self, config: dict[str, Any], target_config: dict[str, Any]) -> None:
        """Make a head with random weights.

        Args:
            config: the head's config.json.
            target_config: the target's, whose text part may be under ``text_config``.

        Raises:
            LoadError: a setting is missing, wrong or not supported, or the head is for another
                model.
        """
        super().__init__(config, target_config)
        target = target_config.get("text_config") or target_config
        settings = _settings(config)
        self._check(settings, target)
        self.width = _positive(settings, "hidden_size")
        self.most = _positive(settings, "block_size") - self._first
        self._mask_token = settings["mask_token_id"]
        self._is_sliding = [kind == _SLIDING for kind in settings["layer_types"]]
        self._window = _positive(settings, "sliding_window") if any(self._is_sliding) else 0
        # If the checkpoint does not say it, slots of sliding layers do not see later ones.
        causal = settings.get("is_causal", settings.get("causal"))
        self._causal = {kind: kind if causal is None else bool(causal) for kind in (False, True)}
        self.layers = _layers(settings)
        self.reads = tuple(settings["target_layer_ids"])
        self.fc = nn.Linear(len(self.reads) * self.width, self.width, bias=False)
        self.hidden_norm = nn.RMSNorm(self.width, settings["rms_norm_eps"])
        self.norm = nn.RMSNorm(self.width, settings["rms_norm_eps"])

    def _check(self, settings: Mapping[str, Any], target: Mapping[str, Any]) -> None:
        for key, value in self._fixed.items():
            if (given := settings.get(key)) not in (None, value):
                raise _error(f"the key {key!r} is {printable(given)}, only {value!r} is supported")
        of_target = {"num_target_layers": "num_hidden_layers"}
        for key in ("hidden_size", "vocab_size", "num_target_layers"):
            given, its = settings.get(key), target.get(of_target.get(key, key))
            if given not in (None, its):
                raise _error(f"its {key} is {printable(given)}, but this model's is {its}")
        if _positive(settings, "block_size") <= self._first:
            raise _error("its blocks have no slot to draft with (block_size)")
        if not _is_below(target.get("vocab_size", 0), settings.get("mask_token_id")):
            raise _error("its mask_token_id is not a token of this model")
        ids = settings.get("target_layer_ids")
        below = target.get("num_hidden_layers", 0)
        if not (isinstance(ids, list) and ids and all(_is_below(below, i) for i in ids)):
            raise _error("its target_layer_ids are not layers of this model")

    @staticmethod
    def sanitize(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """A checkpoint's weights under the module's names, without those that are not used.

        The embedding and the output layer are copies of the target's. The confidence head's
        estimate is not needed: probabilities come from the logits and what steps observe.
        """
        unused = ("embed_tokens.", "lm_head.", "confidence_head.")
        names = {name.removeprefix("model."): name for name in weights}
        return {new: weights[old] for new, old in names.items() if not new.startswith(unused)}

    def features(self, states: Sequence[mx.array]) -> mx.array:
        return self.hidden_norm(self.fc(mx.concatenate(list(states), axis=-1)))

    def make_cache(self) -> list[Any]:
        """One cache per layer of the head.

        Those of sliding layers keep all entries, too: a rotating cache cannot be cut back, since
        it no longer has the older entries that the window then reaches.
        """
        return [KVCache() for _ in self.layers]

    def see(self, features: mx.array, cache: Sequence[Any]) -> None:
        self._append([features], [cache])

    def __call__(
        self,
        tokens: mx.array,
        depth: int,
        features: Sequence[mx.array],
        caches: Sequence[Sequence[Any]],
    ) -> mx.array:
        self._append(features, caches)
        masks = mx.full((len(caches), self._first + depth - 1), self._mask_token, tokens.dtype)
        x = self.embed(mx.concatenate([tokens[:, None], masks], axis=1))
        views = {
            sliding: [self._view(sliding, cache[0].offset, x.shape[1]) for cache in caches]
            for sliding in set(self._is_sliding)
        }
        for i, (layer, sliding) in enumerate(zip(self.layers, self._is_sliding, strict=True)):
            of_layer = [cache[i] for cache in caches]
            attention = layer.self_attn
            x = x + _attend(attention, layer.input_layernorm(x), of_layer, views[sliding])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)[:, self._first :]

    def logits(self, hidden: mx.array) -> mx.array:
        return self._target["output"](hidden)

    def _append(self, features: Sequence[mx.array], caches: Sequence[Sequence[Any]]) -> None:
        """Append the verified positions of several sequences to their caches."""
        ends = [0, *accumulate(of_one.shape[1] for of_one in features)]
        if not ends[-1]:
            return
        joined = mx.concatenate(list(features), axis=1)
        for i, layer in enumerate(self.layers):
            keys, values = _keys_and_values(layer.self_attn, joined)
            for s, cache in enumerate(caches):
                rows = slice(ends[s], ends[s + 1])
                if features[s].shape[1]:
                    its_keys = layer.self_attn.rope(keys[:, :, rows], offset=cache[i].offset)
                    cache[i].update_and_fetch(its_keys, values[:, :, rows])

    def _view(self, sliding: bool, context: int, slots: int) -> tuple[int, mx.array | None]:
        """What the slots of a sequence's block see in a kind of layer.

        Args:
            sliding: whether the layer has the window.
            context: the verified positions before the block.
            slots: those of the block.

        Returns:
            the first verified position that a slot sees, and for each slot which of the positions
            from there on it sees, (slots, positions); None if all slots see all of them.
        """
        causal, window = self._causal[sliding], self._window if sliding else context + slots
        if not causal and window >= context + slots:
            return 0, None
        start = max(0, context + 1 - window)
        distance = mx.arange(context, context + slots)[:, None] - mx.arange(start, context + slots)
        visible = mx.abs(distance) < window
        return start, visible & (distance >= 0) if causal else visible


class DSpark(DFlash):
    """A DFlash whose slot 0 predicts the next token, and whose logits depend on the token before.

    With a ``markov_rank`` of 0 they do not: DeepSpec's own DFlash checkpoints.
    """

    _first = 0
    _fixed: Mapping[str, Any] = {
        **DFlash._fixed,
        "markov_head_type": "vanilla",
        "sample_from_anchor": True,
    }

    def __init__(self, config: dict[str, Any], target_config: dict[str, Any]) -> None:
        super().__init__(config, target_config)
        settings = _settings(config)
        self.most -= bool(settings.get("dspark_bonus_anchor"))  # block_size counts the last token
        if settings.get("markov_rank"):
            rank, vocabulary = (_positive(settings, key) for key in ("markov_rank", "vocab_size"))
            self.markov_head = {
                "markov_w1": nn.Embedding(vocabulary, rank),
                "markov_w2": nn.Linear(rank, vocabulary, bias=False),
            }

    def after(self, logits: mx.array, previous: mx.array) -> mx.array:
        if "markov_head" not in self:
            return logits
        return logits + self.markov_head["markov_w2"](self.markov_head["markov_w1"](previous))


def _attend(
    attention: Any,
    x: mx.array,
    caches: Sequence[Any],
    views: Sequence[tuple[int, mx.array | None]],
) -> mx.array:
    """One layer's attention of blocks, whose own keys and values do not stay in the caches.

    Args:
        attention: mlx-lm's.
        x: (sequences, slots, width).
        caches: the layer's of each sequence.
        views: what the slots of each sequence see, as of :meth:`DFlash._view`.
    """
    keys, values = _keys_and_values(attention, x)
    queries = _of_heads(attention.q_norm, attention.q_proj(x), attention.n_heads)
    outputs = []
    for s, (cache, (start, visible)) in enumerate(zip(caches, views, strict=True)):
        its_queries = attention.rope(queries[s : s + 1], offset=cache.offset)
        its_keys = attention.rope(keys[s : s + 1], offset=cache.offset)
        # Behind the context in the cache's memory and cut off at once: nothing copies the context.
        all_keys, all_values = cache.update_and_fetch(its_keys, values[s : s + 1])
        cache.trim(x.shape[1])
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                its_queries,
                all_keys[:, :, start:],
                all_values[:, :, start:],
                scale=attention.scale,
                mask=visible,
            )
        )
    output = mx.concatenate(outputs).transpose(0, 2, 1, 3)
    return attention.o_proj(output.reshape(*x.shape[:2], -1))


def _keys_and_values(attention: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    """Keys without positions, and values, (sequences, heads, rows, width of a head)."""
    keys = _of_heads(attention.k_norm, attention.k_proj(x), attention.n_kv_heads)
    return keys, _of_heads(lambda values: values, attention.v_proj(x), attention.n_kv_heads)


def _of_heads(norm: Any, x: mx.array, heads: int) -> mx.array:
    return norm(x.reshape(*x.shape[:2], heads, -1)).transpose(0, 2, 1, 3)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A head's settings, whether flat (DeepSpec) or partly under ``dflash_config`` (z-lab)."""
    of_dflash = config.get("dflash_config") or {}
    if not isinstance(of_dflash, Mapping):
        raise _error(f"the key 'dflash_config' is {printable(of_dflash)}, not an object")
    settings = {**config, **of_dflash}
    full = ["full_attention"] * _positive(settings, "num_hidden_layers")
    kinds = settings["layer_types"] = settings.get("layer_types") or full
    known = isinstance(kinds, list) and all(kind in (full[0], _SLIDING) for kind in kinds)
    if not known or len(kinds) != len(full):
        raise _error(f"its layer_types are not {len(full)} of {full[0]} and {_SLIDING}")
    return settings


def _layers(settings: Mapping[str, Any]) -> list[TransformerBlock]:
    """Layers as Qwen 3 has them."""
    width, heads, key_heads = (
        _positive(settings, key)
        for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    args = {
        **settings,
        "intermediate_size": _positive(settings, "intermediate_size"),
        "head_dim": _positive(settings, "head_dim", width // heads),
        "rms_norm_eps": _positive(settings, "rms_norm_eps", kind=int | float),
        # What the layers do not have, but their arguments.
        "model_type": "qwen3",
        "vocab_size": 0,
        "tie_word_embeddings": True,
    }
    if args["head_dim"] % 2 or heads % key_heads:
        raise _error("its head_dim is odd, or num_key_value_heads does not divide its heads")
    try:
        return [TransformerBlock(ModelArgs.from_dict(args)) for _ in settings["layer_types"]]
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise _error(f"its positions (RoPE) are not supported ({error!r})") from error


def _positive(settings: Mapping[str, Any], key: str, default: Any = None, kind: Any = int) -> Any:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
        what = "whole number" if kind is int else "number"
        raise _error(f"the key {key!r} is {printable(value)}, not a positive {what}")
    return value


def _is_below(bound: int, value: object) -> bool:
    return isinstance(value, int) and 0 <= value < bound


def _error(problem: str) -> LoadError:
    return LoadError(f"the head's config.json: {problem}; use a head that was made for this model")
