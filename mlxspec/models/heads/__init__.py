"""Trained heads: small modules that draft from the target's hidden states.

Every kind of head is a :class:`Head`. Heads in :mod:`.chains` draft one token after another, those
in :mod:`.blocks` several at once. :mod:`.loading` finds and loads heads.

In formulas, t is a token, h a hidden state of the target, and i a position. A head's caches have
one entry per *pair* (t[i + 1], h[i]), from which the head predicts t[i + 2].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ...errors import LoadError
from .settings import Config, settings_of, text_of

NO_MODEL = (
    "a trained head, not a model; name the model that it was made for, together with the head: "
    "--model MODEL --head HEAD"
)
"""The error if a head's folder is given as a model."""


def sizes_needed(config: Config) -> dict[str, int]:
    """The sizes that a head's target must have, if the head's ``config.json`` states them."""
    settings = settings_of(config)
    sizes = {
        "hidden_size": settings.get("backbone_hidden_size")
        or settings.get("target_hidden_size")
        or settings.get("hidden_size"),
        "vocab_size": settings.get("vocab_size"),
        "num_hidden_layers": settings.get("num_target_layers"),
    }
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def named_kind(config: Config) -> str | None:
    """The kind of head that a ``config.json`` names, which may be unsupported.

    None if it is not the ``config.json`` of a head.
    """
    settings, architectures = settings_of(config), str(config.get("architectures"))
    kind = str(config.get("speculators_model_type") or config.get("model_type"))
    if "DFlash2" in architectures or "Gemma4DSpark" in architectures:
        return architectures
    if "speculators_model_type" in config:
        return kind
    if config.get("dflash_config") or "DFlash" in architectures or "DSpark" in architectures:
        is_dspark = "DSpark" in architectures or settings.get("markov_rank")
        return str(settings.get("projector_type") or ("dspark" if is_dspark else "dflash"))
    if "eagle3" in architectures.lower() or "draft_vocab_size" in config:
        return "eagle3"
    is_head = kind in ("eagle3", "dflash", "dspark") or kind.endswith(("_mtp", "_assistant"))
    return kind if is_head else None


class Head(nn.Module):
    """A trained head; :meth:`bind` attaches it to its target.

    It is made from two configurations, as in ``config.json``: the head's and the target's. Then
    :meth:`fit` adapts it to the parts that the checkpoint has. Each kind may have its own
    embedding, ``embed_tokens``, its own output layer, ``lm_head``, and a smaller vocabulary of its
    own. In that case ``d2t`` has, for each of its ids, the difference from that id to the target's.

    Attributes:
        title: the name of this kind of head, for messages.
        families: the prefixes of its targets' model types; empty if it fits any type.
        used: the names of the settings that it reads, in addition to those of its layers.
        only: settings that it supports with one value only.
        reads: the indices of the target's layers whose outputs the head reads. Empty if it reads
            the states after the final norm.
        most: the most tokens of a draft.
        layers: its layers, with a cache each; unused by heads that override :meth:`make_cache`.
        width: the width of its features.
        vocabulary: the size of its target's vocabulary.
        requested: whether the user named the head. If not, it came with its target, and is left
            out if it cannot draft.

    Raises:
        LoadError: the head was made for a target with other sizes.
    """

    title: str
    families: tuple[str, ...] = ()
    used: frozenset[str] = frozenset()
    only: ClassVar[dict[str, Any]] = {}
    requested: bool = True
    reads: tuple[int, ...]
    most: int = 8
    layers: list[Any]
    width: int

    def __init__(self, config: Config, target_config: Config) -> None:
        super().__init__()
        self.reads = ()
        settings, target = settings_of(config), text_of(target_config)
        self.vocabulary: int = settings["vocab_size"]
        self._own_vocabulary: int = settings.get("draft_vocab_size") or self.vocabulary
        self._tied = bool(settings.get("tie_word_embeddings"))
        self._cap = settings.get("final_logit_softcapping")
        if self._own_vocabulary != self.vocabulary:
            self._add_d2t()
        for name, size in sizes_needed(config).items():
            if size != target.get(name, size):
                raise LoadError(
                    f"the head was made for a model whose {name} is {size}, but this model's is "
                    f"{target[name]}; use a head that was made for this model"
                )

    def fit(self, names: Collection[str]) -> None:
        """Add or remove the parts that only some checkpoints have.

        Args:
            names: the names of the checkpoint's tensors, after ``sanitize``.
        """
        if "embed_tokens.weight" in names:
            self.embed_tokens = nn.Embedding(self.vocabulary, self.width)
        if "lm_head.weight" in names:
            self.lm_head = nn.Linear(self.width, self._own_vocabulary, bias=False)
        elif "lm_head" in self:
            del self["lm_head"]
        if "d2t" in names:
            self._add_d2t()
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and f"{name}.bias" in names and "bias" not in module:
                module.bias = mx.zeros(module.weight.shape[0])

    def _add_d2t(self) -> None:
        self.d2t = mx.zeros(self._own_vocabulary, dtype=mx.int32)
        self.freeze(keys="d2t", recurse=False)

    def bind(
        self, embed: Callable[[mx.array], mx.array], output: Callable[[mx.array], mx.array]
    ) -> None:
        """Attach the head to its target.

        Args:
            embed: the target's embedding, from token ids to the input of its first layer.
            output: the target's output layer, from states after the final norm to logits.

        Raises:
            LoadError: the head names tokens outside the target's vocabulary.
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
        return mx.arange(len(self.d2t)) + self.d2t if "d2t" in self else mx.array([], mx.int32)

    def embed(self, tokens: mx.array) -> mx.array:
        """The embeddings of tokens: the head's own if it has one, otherwise the target's."""
        return (self.embed_tokens if "embed_tokens" in self else self._target["embed"])(tokens)

    def features(self, states: Sequence[mx.array]) -> mx.array:
        """The features that the head keeps of verified rows, (rows, ``width``).

        Args:
            states: the states after each layer of ``reads``, or those after the final norm, (rows,
                width of the target) each.
        """
        return states[0]

    def make_cache(self) -> list[Any]:
        """New mlx-lm caches, one per layer of the head; an empty list if the head needs none.

        Layers with a sliding window also keep all entries. A rotating cache cannot be trimmed,
        since it has lost the older entries that the window would then reach.
        """
        from mlx_lm.models.cache import KVCache  # takes a second, and is not needed to find heads

        return [KVCache() for _ in self.layers]

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits over the target's vocabulary; minus infinity for tokens the head never drafts.

        Args:
            hidden: from :meth:`__call__`, (…, width).
        """
        if "lm_head" in self:
            logits = self._capped(self.lm_head(hidden))
        elif self._tied and "embed_tokens" in self:
            logits = self._capped(self.embed_tokens.as_linear(hidden))
        else:
            logits = self._target["output"](hidden)
        return self.among_all(logits)

    def among_all(self, logits: mx.array, missing: float = -mx.inf) -> mx.array:
        """Values over the head's vocabulary, as values over the target's.

        Args:
            logits: (…, size of the head's vocabulary or of the target's).
            missing: the value of the tokens that the head's vocabulary lacks.
        """
        if "d2t" not in self:
            return logits
        ids = self.named_tokens()[: len(self.d2t)]
        head_logits = logits if logits.shape[-1] == len(ids) else logits[..., ids]
        scattered = mx.full((*logits.shape[:-1], self.vocabulary), missing, logits.dtype)
        scattered[..., ids] = head_logits
        return scattered

    def _capped(self, logits: mx.array) -> mx.array:
        return mx.tanh(logits / self._cap) * self._cap if self._cap else logits

    def __call__(
        self, tokens: mx.array, features: mx.array, cache: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        """Run the head over pairs, and append them to its caches (only for heads in `.chains`).

        Args:
            tokens: (1, rows), t[i + 1] of each pair.
            features: (1, rows, ``width``), the features of h[i] of each pair, or the features that
                the previous forward returned.
            cache: the caches, one per layer, as from :meth:`make_cache`.

        Returns:
            the features for the next forward, (1, rows, ``width``), and the argument for
            :meth:`logits`, (1, rows, …).
        """
        raise NotImplementedError
