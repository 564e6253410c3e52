"""Trained heads: small modules that draft from the target's hidden states.

Every kind of head is a :class:`Head`. Those in :mod:`.chains` draft one token after another, those
in :mod:`.blocks` several at once. :mod:`.loading` finds and loads them.

In formulas, t is a token, h a hidden state of the target, and i a position. A head has one entry
per *pair* (t[i + 1], h[i]), from which it predicts t[i + 2].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import LoadError

Config = dict[str, Any]

NO_MODEL = (
    "a trained head, not a model; name the model that it was made for, and the head beside it: "
    "--model MODEL --head HEAD"
)
"""The error if a head's folder is given as a model."""


def text_of(config: Config) -> Config:
    """The part of a configuration that concerns text."""
    return config.get("text_config") or config


def settings_of(config: Config) -> Config:
    """A head's settings, flattened; checkpoints nest some of them."""
    settings: Config = {}
    for name in ("text_config", "transformer_layer_config", "dflash_config"):
        if isinstance(nested := config.get(name), dict):
            settings |= nested
    return settings | config


def sizes_needed(config: Config) -> dict[str, int]:
    """The sizes that a head's target must have, if the head's ``config.json`` states them."""
    settings = settings_of(config)
    sizes = {
        "hidden_size": settings.get("backbone_hidden_size") or settings.get("hidden_size"),
        "vocab_size": settings.get("vocab_size"),
        "num_hidden_layers": settings.get("num_target_layers"),
    }
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def named_kind(config: Config) -> str | None:
    """The kind of head that a ``config.json`` names, supported or not; None if it is not a
    head's.
    """
    settings, named = settings_of(config), str(config.get("architectures"))
    kind = str(config.get("speculators_model_type") or config.get("model_type"))
    if "DFlash2" in named or "Gemma4DSpark" in named:
        return named
    if config.get("dflash_config") or "DFlash" in named or "DSpark" in named:
        is_dspark = "DSpark" in named or settings.get("markov_rank")
        return str(settings.get("projector_type") or ("dspark" if is_dspark else "dflash"))
    if "eagle3" in named.lower() or "draft_vocab_size" in config:
        return "eagle3"
    is_head = "speculators_model_type" in config or kind in ("eagle3", "dflash", "dspark")
    return kind if is_head or kind.endswith(("_mtp", "_assistant")) else None


class Head(nn.Module):
    """A head; :meth:`bind` attaches it to its target.

    It is made from two ``config.json``: its own and its target's.

    Attributes:
        title: the name of the kind in messages.
        families: the beginnings of its targets' model types; empty if it fits any type.
        reads: the target's layers whose outputs it reads; layer i's output is the input of layer i
            + 1. Empty if it reads the states after the final norm.
        most: the most tokens that it drafts at once.
        width: the width of its features.
        vocabulary: the size of its target's vocabulary.
        asked: whether the user named it; otherwise it comes with its target, and is left out if it
            cannot draft.

    Raises:
        LoadError: it was made for a target with other sizes.
    """

    title: str
    families: tuple[str, ...] = ()
    asked: bool = True
    reads: tuple[int, ...]
    most: int = 8
    width: int

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__()
        self.reads = ()
        self.vocabulary: int = settings_of(config)["vocab_size"]
        target = text_of(target_config)
        for name, size in sizes_needed(config).items():
            if size != target.get(name, size):
                raise LoadError(
                    f"the head was made for a model whose {name} is {size}, but this model's is "
                    f"{target[name]}; use a head that was made for this model"
                )

    def bind(
        self, embed: Callable[[mx.array], mx.array], output: Callable[[mx.array], mx.array]
    ) -> None:
        """Attach the head to its target.

        Args:
            embed: the target's embedding, from token ids to the input of its first layer.
            output: the target's output layer, from states after the final norm to logits.

        Raises:
            LoadError: it names tokens outside the target's vocabulary.
        """
        ids = self.named_tokens()  # with ids out of range, MLX would access memory outside an array
        if mx.any((ids < 0) | (ids >= self.vocabulary)).item():
            raise LoadError(
                f"the head names tokens outside the vocabulary of {self.vocabulary}; download it "
                "again"
            )
        # In a dictionary, since an nn.Module attribute's parameters would count as the head's.
        self._target = {"embed": embed, "output": output}

    def named_tokens(self) -> mx.array:
        """The ids of target tokens that the head's own files contain, such as a mask token's."""
        return mx.array([], mx.int32)

    def embed(self, tokens: mx.array) -> mx.array:
        """The target's embeddings of tokens."""
        return self._target["embed"](tokens)

    def features(self, states: Sequence[mx.array]) -> mx.array:
        """The features of verified rows, which the head keeps, (rows, ``width``).

        Args:
            states: the states after each layer of ``reads``, or those after the final norm, (rows,
                width of the target) each.
        """
        return states[0]

    def make_cache(self) -> list[Any]:
        """New caches of mlx-lm's, one per layer of the head; empty if it has none."""
        from mlx_lm.models.cache import KVCache  # takes a second, and is not needed to find heads

        return [KVCache()]

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits over the target's vocabulary; minus infinity for tokens that it never drafts.

        Args:
            hidden: from :meth:`__call__`, (…, width).
        """
        return self._target["output"](hidden)

    def __call__(
        self, tokens: mx.array, features: mx.array, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        """Run a head that drafts chains over pairs, and append them to its caches.

        Args:
            tokens: (1, rows), t[i + 1] of each pair.
            features: (1, rows, ``width``): the features of h[i], or the previous forward's output.
            cache: one per layer, as from :meth:`make_cache`.

        Returns:
            the features for the next forward, (1, rows, ``width``), and the argument for
            :meth:`logits`, (1, rows, …).
        """
        raise NotImplementedError
