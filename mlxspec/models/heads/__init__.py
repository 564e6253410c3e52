"""Trained heads: small modules that draft from the target's hidden states.

Every kind of head is a :class:`Head`. Those of :mod:`.chains` draft one token after the other,
those of :mod:`.blocks` several at once. :mod:`.loading` finds and loads them.

In formulas, t is a token, h a hidden state of the target and i a position. A head has one entry
per *pair* (t[i + 1], h[i]), from which it predicts t[i + 2].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import LoadError, printable

Config = dict[str, Any]

NO_MODEL = (
    "a trained head, not a model; name the model that it was made for, and the head beside it: "
    "--model MODEL --head HEAD"
)
"""What is wrong with a head's folder as a model."""


def named_kind(config: Config) -> str | None:
    """The kind of head that a ``config.json`` names, known or not; None if it is no head's."""
    model_type = str(config.get("speculators_model_type") or config.get("model_type"))
    architectures, blocks = config.get("architectures"), config.get("dflash_config")
    blocks = blocks if isinstance(blocks, dict) else {}
    named = " ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    if blocks or "DFlash" in named or "DSpark" in named:
        if "DFlash2" in named or "Gemma4DSpark" in named:
            return named
        has_markov_head = config.get("markov_rank") or blocks.get("markov_rank")
        usual = "dspark" if has_markov_head or "DSpark" in named else "dflash"
        return str(blocks.get("projector_type") or usual)
    if "eagle3" in named.lower() or "draft_vocab_size" in config:
        return "eagle3"
    if model_type in ("eagle3", "dflash", "dspark") or "speculators_model_type" in config:
        return model_type
    return model_type if model_type.endswith(("_mtp", "_assistant")) else None


class Head(nn.Module):
    """A head; :meth:`bind` attaches it to its target.

    It is made of two ``config.json``: its own and its target's.

    Attributes:
        title: the kind, as messages name it.
        families: how the model types of its targets begin; empty if it fits any type.
        reads: the target's layers whose outputs it reads; layer i's output enters layer i + 1.
            Empty if it reads the states after the final norm.
        most: the most tokens that it drafts at once.
        width: of its features.
        asked: whether the user has named it; otherwise it comes with its target, and is left out
            if it cannot draft.
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

    def bind(
        self, embed: Callable[[mx.array], mx.array], output: Callable[[mx.array], mx.array]
    ) -> None:
        """Attach the head to its target.

        Args:
            embed: the target's embedding, from token ids to what enters its first layer.
            output: the target's output layer, from states after the final norm to logits.
        """
        # A dictionary, since a module would count modules among its own parameters.
        self._target = {"embed": embed, "output": output}

    def embed(self, tokens: mx.array) -> mx.array:
        """The target's embeddings of tokens."""
        return self._target["embed"](tokens)

    def features(self, states: Sequence[mx.array]) -> mx.array:
        """What the head keeps of verified rows, (rows, ``width``).

        Args:
            states: those behind each layer of ``reads``, or else those after the final norm,
                (rows, width of the target) each.
        """
        return states[0]

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches, one per layer of the head; empty if it has none of its own."""
        from mlx_lm.models.cache import KVCache  # takes a second, and finding heads needs none

        return [KVCache()]

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits over the target's vocabulary; minus infinity for tokens that it never drafts.

        Args:
            hidden: of :meth:`__call__`, (…, its width).
        """
        return self._target["output"](hidden)

    def __call__(
        self, tokens: mx.array, features: mx.array, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        """Run a head that drafts chains over pairs, and append them to its caches.

        Args:
            tokens: (1, rows), t[i + 1] of each pair.
            features: (1, rows, ``width``): those of h[i], or fed back from the previous forward.
            cache: one per layer, as from :meth:`make_cache`.

        Returns:
            what is fed back as the next forward's features, (1, rows, ``width``), and what
            :meth:`logits` takes, (1, rows, …).
        """
        raise NotImplementedError


def text_of(config: Config) -> Config:
    """The part of a configuration that describes text."""
    return config.get("text_config") or config


def check_target(needed: Config, target: Config) -> None:
    """Raise LoadError unless a target has the sizes that its head needs; None is any size."""
    for name, size in needed.items():
        if size not in (None, target.get(name)):
            raise LoadError(
                f"the head was made for a model whose {name} is {printable(size)}, but this "
                f"model's is {target.get(name)}; use a head that was made for this model"
            )


def checked_layers(layers: Sequence[int], target: Config) -> tuple[int, ...]:
    """The layers that a head reads.

    Raises:
        LoadError: the target does not have them.
    """
    count = target["num_hidden_layers"]
    if not all(0 <= layer < count for layer in layers):
        raise LoadError(
            f"the head reads the outputs of layers {', '.join(map(str, layers))}, but the model "
            f"has {count} layers; use a head that was made for this model"
        )
    return tuple(layers)


def check_ids(name: str, ids: mx.array, vocabulary: int) -> None:
    """Refuse ids outside the vocabulary: MLX would read or write outside an array."""
    if mx.any((ids < 0) | (ids >= vocabulary)).item():
        raise LoadError(
            f"the head's {name} is outside the vocabulary of {vocabulary}; download the head again"
        )
