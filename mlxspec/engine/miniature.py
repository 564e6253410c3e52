"""Builds a small random model that follows the same rules as a large one, to try steps on.

What a model verifies depends on its architecture's code, its configuration and its caches, not on
its weights. A miniature has the same classes and the same rules for positions, but few layers,
heads and tokens, so a forward of it takes a small part of the time of a forward of the model.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import CacheList, make_prompt_cache

from ..models.heads.settings import args_of
from .model_sizes import context_length, named_positions, sparse_crossing
from .sampling import restored_mlx_state

_log = logging.getLogger(__name__)

# --- what makes a configuration large ---

_DEPTHS = "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"
_WIDTHS = "hidden_size", "n_embd", "d_model", "model_dim"
_HEADS = "num_attention_heads", "n_head", "n_heads", "num_heads"
_KEY_HEADS = "num_key_value_heads", "n_kv_heads", "num_kv_heads"
_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
_CHOSEN = "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"
_GROUPS = "n_group", "num_expert_group"
_VOCABULARIES = "vocab_size", "vocab_size_per_layer_input", "num_vocab"
_INNER = re.compile(r"intermediate_size|ffn_hidden_size|mlp_hidden_size|ffn_dim|ff_dim")

_TOKENS = 64  # of the miniature's vocabulary; trial steps use the first few
_INNER_SIZE = 32  # features inside a feed-forward block
_LEAST_WIDTH = 64  # features between layers
_MOST_SHARE = 0.1  # of the model's bytes; a larger miniature saves too little


def miniature(model: nn.Module) -> nn.Module | None:
    """A small random model on which trial steps have the same results as on this one.

    It has the model's data type, and the layers that the model begins with, up to the last one of a
    new kind.

    Args:
        model: an mlx-lm model.

    Returns:
        None if there is none: the model's modules, caches or positions would differ.
    """
    settings = args_of(model)
    if not is_dataclass(settings):
        return None
    try:
        kinds = _layer_kinds(model, with_sizes=True)
    except (AttributeError, TypeError):
        return None
    # The last layer of a new kind, and one more, which reads what an earlier one has written.
    depth = 1 + max(kinds.index(kind) for kind in kinds)
    depth = min(len(kinds), max(2, depth))
    wanted, tokens = _rules(model), _least_vocabulary(model)
    max_bytes = max(_MOST_SHARE * _nbytes(model), _SMALL)
    for shrink in (_narrow, _flat):
        for layers in dict.fromkeys((depth, len(kinds))):
            small = copy.deepcopy(settings)
            try:
                _shrink(small, len(kinds), layers, tokens, shrink)
                candidate = _random(type(model), small, model, max_bytes)
                _as_loaded(candidate, model)
                mx.eval(candidate(mx.array([[0, 1]]), cache=make_prompt_cache(candidate)))
                if _rules(candidate) == wanted:
                    return candidate
            except Exception as error:  # a class may require any relation between its settings
                _log.debug("no miniature with %d layers: %s", layers, error)
    return None


_SMALL = 1 << 24  # bytes; a miniature of this size is always fast enough


def _nbytes(model: nn.Module) -> int:
    """The bytes of a model's weights, which need not have been evaluated."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def _shrink(
    settings: Any, layers: int, kept: int, tokens: int, shrink: Callable[[Any], None]
) -> None:
    """Make settings small, including those of a part such as ``text_config``.

    Args:
        settings: the settings of a model, which are changed.
        layers: its number of layers.
        kept: the number of layers to keep.
        tokens: the size of the vocabulary.
        shrink: changes the settings of a part further.
    """
    for part in _parts(settings):
        fields = part if isinstance(part, dict) else vars(part)
        depth = next((name for name in _DEPTHS if fields.get(name) == layers), None)
        if depth:
            fields[depth] = kept
            for name, value in fields.items():
                if isinstance(value, list | tuple | str) and len(value) == layers:
                    fields[name] = value[:kept]
        for name, value in fields.items():
            if not _is_size(value):
                continue
            if name in _VOCABULARIES:
                fields[name] = min(value, tokens)
            elif _INNER.search(name):
                fields[name] = min(value, _INNER_SIZE)
        _fewer_experts(fields)
        shrink(fields)


def _least_vocabulary(model: nn.Module) -> int:
    """How many tokens a miniature needs: phi3small refers to some by their ids."""
    ids = [
        mx.max(value)
        for module in model.modules()
        for name, value in module.items()
        if name.startswith("_") and isinstance(value, mx.array)
        if mx.issubdtype(value.dtype, mx.integer)
    ]
    return max([_TOKENS, *(1 + cast(int, highest.item()) for highest in ids)])


def _fewer_experts(fields: dict[str, Any]) -> None:
    experts, chosen, groups = (_first(fields, names) for names in (_EXPERTS, _CHOSEN, _GROUPS))
    if experts and chosen:
        group = fields[groups] if groups and _is_size(fields[groups]) else 1
        fewer = group * math.ceil(2 * fields[chosen] / group)
        fields[experts] = min(fields[experts], fewer)


def _narrow(fields: dict[str, Any]) -> None:
    """Divide the numbers of heads, and the width with them, so that a head keeps its size."""
    width, heads, key_heads = (_first(fields, names) for names in (_WIDTHS, _HEADS, _KEY_HEADS))
    if not (width and heads):
        return
    common = math.gcd(fields[heads], fields[key_heads] if key_heads else fields[heads])
    by = max(
        by
        for by in range(1, common + 1)
        if common % by == fields[width] % by == 0
        and (by == 1 or fields[width] // by >= _LEAST_WIDTH)
    )
    for name in filter(None, (width, heads, key_heads)):
        fields[name] //= by
    if _is_size(fields.get("head_dim")):  # then the width does not follow from the heads
        fields[width] = min(fields[width], _LEAST_WIDTH)


def _flat(fields: dict[str, Any]) -> None:
    """Leave the width as it is, for models whose parts need a certain one."""


def _first(fields: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if _is_size(fields.get(name))), None)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _parts(settings: Any) -> Iterator[Any]:
    """Settings, and the settings inside them."""
    yield settings
    for value in [*(settings if isinstance(settings, dict) else vars(settings)).values()]:
        if isinstance(value, dict) or is_dataclass(value):
            yield from _parts(value)


# --- random weights ---

_LIVELY = 4.0  # with MLX's small initial weights, the context would hardly matter
_LEFT_AS_THEY_ARE = "embed", "wte", "conv", "lm_head", "gate.weight"


def _random(kind: type[nn.Module], settings: Any, like: nn.Module, max_bytes: float) -> nn.Module:
    """A model of this class with random weights, in the data type of another model.

    Raises:
        ValueError: it would have more than ``max_bytes`` bytes.
    """
    with restored_mlx_state():
        mx.random.seed(0)
        candidate = kind(settings)
        candidate.eval()
        if _nbytes(candidate) > max_bytes:  # before the weights take any memory
            raise ValueError("too large")
        candidate.update(tree_map_with_path(_livelier, candidate.parameters()))
        mx.eval(candidate.parameters())
    types = {array.dtype for _, array in tree_flatten(like.parameters())}
    floats = [kind for kind in types if mx.issubdtype(kind, mx.floating)]
    if len(floats) == 1:
        candidate.set_dtype(floats[0])
    return candidate


def _as_loaded(small: nn.Module, model: nn.Module) -> None:
    """Change what loading has changed in the model: with tied embeddings, some have no output
    layer.
    """
    loaded = dict(model.named_modules())
    for path, module in small.named_modules():
        if loaded_module := loaded.get(path):
            for name in [*module.children().keys() - loaded_module.children().keys()]:
                del module[name]
            for name, value in vars(loaded_module).items():
                if isinstance(value, bool):
                    setattr(module, name, value)


def _livelier(name: str, weight: mx.array) -> mx.array:
    projects = weight.ndim >= 2 and not any(part in name for part in _LEFT_AS_THEY_ARE)
    return _LIVELY * weight if projects else weight


# --- whether it follows the same rules ---


def _rules(model: nn.Module) -> tuple[Any, ...]:
    """All that decides how a model's steps run, except for sizes."""
    layers = {id(module) for layer in model.layers for _, module in layer.named_modules()}
    others = frozenset(
        _module_kind(path, module, False)
        for path, module in _modules(model)
        if id(module) not in layers
    )
    kinds = frozenset(_layer_kinds(model, with_sizes=False))
    positions = context_length(model), frozenset(named_positions(model)), sparse_crossing(model)
    return others, kinds, positions


def _layer_kinds(model: nn.Module, with_sizes: bool) -> list[Any]:
    """What each layer is made of, and the cache that it has if there is one for each layer."""
    caches = make_prompt_cache(model)
    layers = model.layers
    each = caches if len(caches) == len(layers) else [caches] * len(layers)
    return [
        (
            frozenset(_module_kind(path, module, with_sizes) for path, module in _modules(layer)),
            _cache_kind(cache),
        )
        for layer, cache in zip(layers, each, strict=True)
    ]


def _modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module's parts with their paths; a linear layer's own parts, such as adapters, are left
    out.
    """
    modules = module.named_modules()
    linear = [f"{path}." for path, part in modules if _class_name(part) == "Linear"]
    return [(path, part) for path, part in modules if not path.startswith(tuple(linear))]


def _class_name(module: nn.Module) -> str:
    """The name of a module's class; the same for all forms of a linear layer's weights."""
    kind = type(module)
    if kind.__name__ == "Overridden":  # see HiddenStates
        (kind,) = kind.__bases__
    name = re.sub("^Quantized|^LoRA|^DoRA", "", kind.__name__)
    return "Embedding" if "Embedding" in name else name


_INDEX = re.compile(r"\b\d+\b")
_NO_RULES = "layer_idx", "layer_id", "layer_index", "idx", "mode"  # the mode of quantised weights


def _module_kind(path: str, module: nn.Module, with_sizes: bool) -> Any:
    """What a module does, in a form that can be compared."""
    kept = bool | str | None | (int | float if with_sizes or "rope" in path.lower() else bool)
    values = [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, kept) and name not in _NO_RULES and not name.startswith("_")
    ]
    values += [
        (name, value.shape)
        for name, value in module.items()
        if isinstance(value, mx.array) and (with_sizes or name.startswith("_freq"))
    ]
    return _INDEX.sub("", path), _class_name(module), frozenset(values)


def _cache_kind(cache: Any) -> Any:
    if isinstance(cache, list | tuple):
        return frozenset(map(_cache_kind, cache))
    if isinstance(cache, CacheList):
        return tuple(map(_cache_kind, cache.caches))
    sizes = ("max_size", "keep", "chunk_size")
    return type(cache).__name__, *(getattr(cache, name, None) for name in sizes)
