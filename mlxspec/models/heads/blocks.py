"""Heads that draft a whole block of tokens in one forward: DFlash and DSpark.

A block is the context's last token followed by mask tokens. Its positions, the slots, attend to
each other and to the verified positions before the block. The keys and values of these come from
the target's hidden states. Sources of the formulas and the tensors' names:
https://github.com/z-lab/dflash (DFlash) and https://github.com/deepseek-ai/DeepSpec (DSpark).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3 import ModelArgs, TransformerBlock

from . import Head
from .settings import Config, checked_layers, layer_windows, rope_of, settings_of, text_of


class DFlash(Head):
    """Slot i of a block predicts the i-th token after the last one; slot 0 predicts nothing.

    A block has only as many slots as the draft needs. Since slots attend to each other, a shorter
    block changes the logits of its slots. Heads are trained on whole blocks, but other engines also
    draft shorter ones in this way. The caches hold only verified positions.

    Raises:
        LoadError: the head was made for another target.
    """

    title = "DFlash"
    used = frozenset(field.name for field in fields(ModelArgs)) | {
        *("block_size", "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids"),
        *("num_target_layers", "target_hidden_size", "draft_vocab_size", "truncated_vocab_size"),
        *("layer_types", "sliding_window", "use_sliding_window", "use_swa", "swa_window_size"),
        *("is_causal", "causal", "dflash_query_causal", "sliding_window_non_causal"),
        *("sample_from_anchor", "projector_type", "markov_rank", "dspark_bonus_anchor"),
        *("attention_bias", "mlp_bias", "final_logit_softcapping"),
    }
    only: ClassVar = {"rope_traditional": False, "partial_rotary_factor": 1}
    _samples_anchor = False  # whether slot 0 predicts a token, if the checkpoint does not say

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__(config, target_config)
        settings = settings_of(config)
        self.width = settings["hidden_size"]
        samples_anchor = settings.get("sample_from_anchor")
        if samples_anchor is None:
            # speculators' first DSpark heads, which do not say so, leave the slot out.
            samples_anchor = self._samples_anchor and "speculators_model_type" not in config
        self._first = 0 if samples_anchor else 1
        self.most = settings["block_size"] - self._first
        self._mask_token = settings["mask_token_id"]
        count = settings["num_hidden_layers"]
        windows = layer_windows(settings, count, unless_stated=False)
        self._is_sliding = [window is not None for window in windows]
        self._window = next((window for window in windows if window), 0)
        causal = _is_causal(config)
        # If the checkpoint does not say which layers are causal, those with a sliding window are.
        slides = not settings.get("sliding_window_non_causal")
        self._causal = {
            kind: (kind and slides) if causal is None else causal for kind in (False, True)
        }
        rope = rope_of(settings)
        # The layers are Qwen 3's.
        args = ModelArgs.from_dict(
            {
                "head_dim": self.width // settings["num_attention_heads"],
                **settings,
                "rope_parameters": rope or None,
                "model_type": "qwen3",
                "vocab_size": 0,
                "tie_word_embeddings": True,
            }
        )
        self.layers = [TransformerBlock(args) for _ in range(count)]
        self.reads = checked_layers(
            _layers_read(settings), text_of(target_config)["num_hidden_layers"]
        )
        inputs = len(self.reads) * (settings.get("target_hidden_size") or self.width)
        self.fc = nn.Linear(inputs, self.width, bias=False)
        self.hidden_norm = nn.RMSNorm(self.width, args.rms_norm_eps)
        self.norm = nn.RMSNorm(self.width, args.rms_norm_eps)

    @staticmethod
    def sanitize(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """A checkpoint's weights under the module's names, without unused ones.

        The confidence head is not needed: probabilities come from the logits and from observed
        steps. ``t2d`` is the inverse of ``d2t``, and ``verifier_`` are parts of the target.
        """
        unused = ("confidence_head.", "t2d", "verifier_")
        names = {name.removeprefix("model."): name for name in weights}
        kept = {new: weights[old] for new, old in names.items() if not new.startswith(unused)}
        if "d2t" in kept:
            kept["d2t"] = kept["d2t"].astype(mx.int32)
        return kept

    def named_tokens(self) -> mx.array:
        return mx.concatenate([super().named_tokens(), mx.array([self._mask_token])])

    def features(self, states: Sequence[mx.array]) -> mx.array:
        return self.hidden_norm(self.fc(mx.concatenate(list(states), axis=-1)))

    def block(
        self,
        tokens: mx.array,
        depth: int,
        features: Sequence[mx.array],
        caches: Sequence[Sequence[Any]],
    ) -> mx.array:
        """Run a block for each of several sequences.

        Args:
            tokens: (sequences,), the last token of each.
            depth: how many tokens to draft, at most ``most``.
            features: for each sequence, the features of the verified positions that its caches
                lack, (1, rows, ``width``). The positions are appended to the caches.
            caches: for each sequence, one cache per layer.

        Returns:
            the argument for :meth:`logits`, (sequences, depth, …).
        """
        self.see(features, caches)
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

    def after(self, logits: mx.array, previous: mx.array) -> mx.array:
        """Correct a slot's logits once the token before it is drafted.

        Args:
            logits: (sequences, vocabulary).
            previous: (sequences,), the tokens before the slot.
        """
        return logits

    def see(self, features: Sequence[mx.array], caches: Sequence[Sequence[Any]]) -> None:
        """Append verified positions of several sequences to their caches.

        Args:
            features: for each sequence, the positions' features, (1, rows, ``width``).
            caches: for each sequence, one cache per layer.
        """
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
        """The positions that the slots of a sequence's block attend to in one kind of layer.

        Args:
            sliding: whether these are the layers with a sliding window.
            context: the number of verified positions before the block.

        Returns:
            the first verified position that any slot attends to, and a mask over the positions from
            there on, (slots, positions). The mask is None if all slots attend to all of them.
        """
        causal, window = self._causal[sliding], self._window if sliding else context + slots
        if not causal and window >= context + slots:
            return 0, None
        start = max(0, context + 1 - window)
        distance = mx.arange(context, context + slots)[:, None] - mx.arange(start, context + slots)
        visible = mx.abs(distance) < window
        return start, visible & (distance >= 0) if causal else visible


class DSpark(DFlash):
    """A DFlash whose slot 0 predicts the next token, unless ``sample_from_anchor`` is false.

    A slot's logits also depend on the token drafted before it, unless ``markov_rank`` is 0, as in
    DeepSpec's own DFlash checkpoints.
    """

    title = "DSpark"
    _samples_anchor = True

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__(config, target_config)
        settings = settings_of(config)
        # With this setting, block_size counts the context's last token, too.
        self.most -= bool(settings.get("dspark_bonus_anchor") and not self._first)
        if rank := settings.get("markov_rank"):
            self.markov_head = {
                "markov_w1": nn.Embedding(self.vocabulary, rank),
                "markov_w2": nn.Linear(rank, self._own_vocabulary, bias=False),
            }

    def after(self, logits: mx.array, previous: mx.array) -> mx.array:
        if "markov_head" not in self:
            return logits
        change = self.markov_head["markov_w2"](self.markov_head["markov_w1"](previous))
        return logits + self.among_all(change, missing=0.0)


def _is_causal(config: Config) -> bool | None:
    """Whether slots see only earlier slots; None if the checkpoint does not say."""
    nested = config.get("dflash_config") or {}
    for settings in (nested, config, settings_of(config)):  # the nested setting counts
        for name in ("causal", "is_causal", "dflash_query_causal"):
            if settings.get(name) is not None:
                return bool(settings[name])
    return None


def _layers_read(settings: Config) -> list[int]:
    """The target's layers whose outputs are read.

    z-lab's and DeepSpec's checkpoints have their ids. speculators has the ids of the layers that
    these states enter, as vLLM reads them.
    """
    if (entered := settings.get("aux_hidden_state_layer_ids")) is not None:
        return [layer - 1 for layer in entered]
    return list(settings["target_layer_ids"])


def _attend(
    attention: Any,
    x: mx.array,
    caches: Sequence[Any],
    views: Sequence[tuple[int, mx.array | None]],
) -> mx.array:
    """The output of a layer's attention over blocks, (sequences, slots, width).

    The blocks' own keys and values do not stay in the caches.

    Args:
        attention: the layer's attention, a module of mlx-lm.
        x: its input, (sequences, slots, width).
        caches: the layer's cache of each sequence.
        views: the positions that each sequence's slots attend to, from :meth:`DFlash._view`.
    """
    keys, values = _keys_and_values(attention, x)
    queries = _of_heads(attention.q_norm, attention.q_proj(x), attention.n_heads)
    outputs = []
    for s, (cache, (start, visible)) in enumerate(zip(caches, views, strict=True)):
        its_queries = attention.rope(queries[s : s + 1], offset=cache.offset)
        its_keys = attention.rope(keys[s : s + 1], offset=cache.offset)
        # The block is written after the context in the cache and cut off again. Concatenating them
        # would copy the context.
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
    """Keys before RoPE, and values, each (sequences, heads, rows, width of a head)."""
    keys = _of_heads(attention.k_norm, attention.k_proj(x), attention.n_kv_heads)
    return keys, _of_heads(lambda values: values, attention.v_proj(x), attention.n_kv_heads)


def _of_heads(norm: Any, x: mx.array, heads: int) -> mx.array:
    return norm(x.reshape(*x.shape[:2], heads, -1)).transpose(0, 2, 1, 3)
