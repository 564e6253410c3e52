"""Trained heads: small modules that draft from the target's hidden states.

Every kind of head is a :class:`Head`. A :class:`ChainHead` drafts one token after the other
(:mod:`.chains`), a :class:`BlockHead` drafts several at once (:mod:`.blocks`). :mod:`.loading`
finds and loads them.

In formulas, t is a token, h a hidden state of the target and i a position. A head has one entry
per *pair* (t[i + 1], h[i]), from which it predicts t[i + 2].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

NO_MODEL = (
    "a trained head, not a model; name the model that it was made for, and the head beside it: "
    "--model MODEL --head HEAD"
)
"""What is wrong with a head's folder as a model."""


def named_kind(config: dict[str, Any]) -> str | None:
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

    Args:
        config: its ``config.json``.
        target_config: its target's.

    Attributes:
        reads: the target's layers whose outputs it reads; layer i's output enters layer i + 1.
            Empty if it reads the states after the final norm.
        most: the most tokens that it drafts at once.
        width: of its features.
        asked: whether the user has named it; otherwise it comes with its target, and is left out
            if it cannot draft.
    """

    asked: bool = True
    reads: tuple[int, ...]
    most: int = 8
    width: int

    def __init__(self, config: dict[str, Any], target_config: dict[str, Any]) -> None:
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
        raise NotImplementedError

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits over the target's vocabulary; minus infinity for tokens that it never drafts.

        Args:
            hidden: of :meth:`__call__`, (…, its width).
        """
        raise NotImplementedError


class ChainHead(Head):
    """Drafts a chain, one token per forward."""

    def __call__(
        self, tokens: mx.array, features: mx.array, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        """Run the head over pairs, and append them to its caches.

        Args:
            tokens: (1, rows), t[i + 1] of each pair.
            features: (1, rows, ``width``): those of h[i], or fed back from the previous forward.
            cache: one per layer, as from :meth:`make_cache`.

        Returns:
            what is fed back as the next forward's features, (1, rows, ``width``), and what
            :meth:`logits` takes, (1, rows, …).
        """
        raise NotImplementedError


class BlockHead(Head):
    """Drafts a block of tokens in one forward. Its caches hold verified positions only."""

    def see(self, features: mx.array, cache: Sequence[Any]) -> None:
        """Append verified positions of one sequence to its caches.

        Args:
            features: (1, rows, ``width``).
            cache: one per layer.
        """
        raise NotImplementedError

    def __call__(
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
            features: per sequence, those of the verified positions that its caches lack,
                (1, rows, ``width``). They are appended.
            caches: per sequence, one cache per layer.

        Returns:
            what :meth:`logits` takes, (sequences, depth, …).
        """
        raise NotImplementedError

    def after(self, logits: mx.array, previous: mx.array) -> mx.array:
        """Correct a slot's logits once the token before it is drafted.

        Args:
            logits: (sequences, vocabulary).
            previous: (sequences,), the tokens before.
        """
        return logits
