"""Heads that draft a whole block of tokens in one forward: DFlash and DSpark.

A block is the last token followed by mask tokens. Its slots see each other and the verified
positions before it, whose keys and values come from the target's hidden states. Formulas and names
of tensors: https://github.com/z-lab/dflash (DFlash) and https://github.com/deepseek-ai/DeepSpec
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

from . import Config, Head, settings_of


class DFlash(Head):
    """Slot i of a block predicts the i-th token after the last one; slot 0 predicts nothing.

    A block has only as many slots as its depth needs. Since slots see each other, a shorter block
    changes the logits of its slots. Heads are trained on whole blocks, but other engines also draft
    shorter ones in this way. The caches hold only verified positions.

    Raises:
        LoadError: the head was made for another target.
    """

    title = "DFlash"
    _first = 1  # the slot that predicts the next token

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__(config, target_config)
        settings = settings_of(config)
        self.width = settings["hidden_size"]
        self.most = settings["block_size"] - self._first
        self._mask_token = settings["mask_token_id"]
        count = settings["num_hidden_layers"]
        kinds = settings.get("layer_types") or [""] * count
        self._is_sliding = [kind == "sliding_attention" for kind in kinds]
        self._window = settings["sliding_window"] if any(self._is_sliding) else 0
        # If the checkpoint does not say, slots of sliding layers do not see later slots.
        causal = settings.get("is_causal", settings.get("causal"))
        self._causal = {kind: kind if causal is None else bool(causal) for kind in (False, True)}
        # The layers are Qwen 3's.
        args = ModelArgs.from_dict(
            {
                "head_dim": self.width // settings["num_attention_heads"],
                **settings,
                "model_type": "qwen3",
                "vocab_size": 0,
                "tie_word_embeddings": True,
            }
        )
        self.layers = [TransformerBlock(args) for _ in range(count)]
        self.reads = tuple(settings["target_layer_ids"])
        self.fc = nn.Linear(len(self.reads) * self.width, self.width, bias=False)
        self.hidden_norm = nn.RMSNorm(self.width, args.rms_norm_eps)
        self.norm = nn.RMSNorm(self.width, args.rms_norm_eps)

    @staticmethod
    def sanitize(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """A checkpoint's weights under the module's names, without unused ones.

        The embedding and the output layer are copies of the target's. The confidence head is not
        needed: probabilities come from the logits and from observed steps.
        """
        unused = ("embed_tokens.", "lm_head.", "confidence_head.")
        names = {name.removeprefix("model."): name for name in weights}
        return {new: weights[old] for new, old in names.items() if not new.startswith(unused)}

    def named_tokens(self) -> mx.array:
        return mx.array([self._mask_token])

    def features(self, states: Sequence[mx.array]) -> mx.array:
        return self.hidden_norm(self.fc(mx.concatenate(list(states), axis=-1)))

    def make_cache(self) -> list[Any]:
        """One cache per layer of the head.

        Sliding layers also keep all entries: a rotating cache cannot be cut back, since it has lost
        the older entries that the window would then reach.
        """
        return [KVCache() for _ in self.layers]

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
                lack, (1, rows, ``width``). They are appended.
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
            features: for each sequence, (1, rows, ``width``).
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
        """The positions that the slots of a sequence's block see in a kind of layer.

        Args:
            sliding: whether the layer has the window.
            context: the number of verified positions before the block.
            slots: the number of the block's slots.

        Returns:
            the first verified position that any slot sees, and a mask of the positions from there
            on, (slots, positions); None if all slots see all of them.
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

    With a ``markov_rank`` of 0, as in DeepSpec's own DFlash checkpoints, they do not.
    """

    title = "DSpark"
    _first = 0

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__(config, target_config)
        settings = settings_of(config)
        self.most -= bool(settings.get("dspark_bonus_anchor"))  # block_size counts the last token
        if rank := settings.get("markov_rank"):
            self.markov_head = {
                "markov_w1": nn.Embedding(self.vocabulary, rank),
                "markov_w2": nn.Linear(rank, self.vocabulary, bias=False),
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
    """One layer's attention over blocks, whose own keys and values do not stay in the caches.

    Args:
        attention: mlx-lm's module.
        x: (sequences, slots, width).
        caches: the layer's cache of each sequence.
        views: the positions that each sequence's slots see, from :meth:`DFlash._view`.
    """
    keys, values = _keys_and_values(attention, x)
    queries = _of_heads(attention.q_norm, attention.q_proj(x), attention.n_heads)
    outputs = []
    for s, (cache, (start, visible)) in enumerate(zip(caches, views, strict=True)):
        its_queries = attention.rope(queries[s : s + 1], offset=cache.offset)
        its_keys = attention.rope(keys[s : s + 1], offset=cache.offset)
        # Written after the context in the cache, and cut off again, so that the context is not
        # copied.
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
