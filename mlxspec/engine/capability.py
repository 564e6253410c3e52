"""Finds out what a model can verify by running a few small forwards, whatever its architecture.

:func:`examine` asks three questions. What do the caches allow (:func:`cache_capability`)? Do rows
give the same result in one forward as in separate forwards, at every position
(:func:`chain_capability`)? Does a branching step give the same result as its branches alone?
:func:`examine_joint` finds out how several sequences can share a forward. Results count as the
same if the logits differ by no more than rounding (:func:`rounding_noise`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
)

from ..drafting.tree import DraftTree
from ..errors import OptionError
from ..terminal import one_line
from .caches import TreeRows, TreeSteps, for_steps, is_trimmable, parts
from .joint import Joint, JointMode
from .model_sizes import context_length, crossings, named_positions, sparse_crossing
from .params import CacheOptions
from .patches import finite, forward_at, install
from .target import Capability, Target, target_for, together

if TYPE_CHECKING:
    from .loaded_model import LoadedModel

_PREFIX = (3, 1, 4)  # the tokens before a trial step
_ROWS_DIFFER = "several rows in one forward give different logits than in separate forwards"

# Lower and upper bounds of the change in logits that is taken for rounding when several rows run
# together, as a share of the logits' spread.
_LEAST_ROUNDING = 1e-4
_MOST_ROUNDING_FLOAT32, _MOST_ROUNDING_HALF = 1e-3, 3e-2


def examine(loaded: LoadedModel, capability: Capability) -> tuple[Capability, str]:
    """Find out which drafts the model verifies correctly.

    Args:
        capability: from :func:`chain_capability`.

    Returns:
        the model's capability, and the reason why it has no richer one.
    """
    if capability is Capability.PLAIN:
        return capability, _ROWS_DIFFER
    caches = parts(map(for_steps, make_prompt_cache(loaded.model)))
    if capability is Capability.REPLAY:
        names = _names(cache for cache in caches if not is_trimmable(cache))
        reason = f"{names} cannot be trimmed, so states are computed again after a rejection"
    elif cache_capability(caches) is Capability.CHAIN:
        names = _names(cache for cache in caches if not isinstance(cache, TreeSteps))
        reason = f"{names} can be trimmed, but takes no tree mask"
    elif (position := _first_failing(loaded, tree_agrees)) is not None:
        reason = f"branching steps differ from separate branches at position {position}"
    else:
        capability, reason = Capability.TREE, "branching steps equal separate branches"
    return capability, reason


def _names(caches: Iterable[Any]) -> str:
    return ", ".join(sorted({type(cache).__name__ for cache in caches}))


# --- what the caches allow ---


def cache_capability(caches: Iterable[Any]) -> Capability:
    """The richest capability that caches allow. The model may still fail to verify trees.

    Args:
        caches: from mlx-lm's ``make_prompt_cache``.
    """
    all_parts = parts(map(for_steps, caches))
    if not all(map(is_trimmable, all_parts)):
        return Capability.REPLAY
    trees = all(isinstance(cache, TreeSteps) for cache in all_parts)
    return Capability.TREE if trees else Capability.CHAIN


def capability_with(caches: Iterable[Any], capability: Capability) -> Capability:
    """What a model can verify with a caller's caches, which may be of other kinds than its own.

    Args:
        caches: the caller's, of mlx-lm's classes.
        capability: the model's capability with the caches that mlx-lm makes for it.
    """
    return max(cache_capability(caches), capability, key=list(Capability).index)  # the lesser


def check_quantization(model: nn.Module, options: CacheOptions) -> None:
    """Refuse options that cannot quantise the model's cache, before a generation needs it.

    The graphs of two small forwards are built, but never evaluated.

    Raises:
        OptionError: mlx-lm cannot quantise this model's cache, at least not with these options.
    """
    if options.kv_bits is None:
        return
    cache = make_prompt_cache(model, options.max_kv_size)
    token = mx.array([[0]])
    try:
        model(token, cache=cache)
        maybe_quantize_kv_cache(cache, 0, options.kv_group_size, options.kv_bits)
        model(token, cache=cache)
    except (NotImplementedError, ValueError, TypeError, AttributeError) as error:
        raise OptionError(
            f"kv_bits {options.kv_bits} with kv_group_size {options.kv_group_size} does not suit "
            f"this model's cache ({one_line(error)}): leave out kv_bits, or "
            "max_kv_size, or choose another kv_group_size"
        ) from error


# --- a step of several rows, some rejected ---


def chain_capability(loaded: LoadedModel) -> Capability:
    """Find out which unbranched drafts the model verifies.

    It is PLAIN even if running rows together changes logits only at some positions, as with a RoPE
    of the type dynamic NTK.
    """
    capability = capability_with(make_prompt_cache(loaded.model), Capability.CHAIN)
    if not _verifies_chains(loaded, capability) or _rows_differ_somewhere(loaded):
        capability = Capability.PLAIN
    return capability


def _verifies_chains(loaded: LoadedModel, capability: Capability) -> bool:
    """Whether a partly rejected step and the step after it give the logits of single tokens."""
    draft, kept, after = (1, 5, 2, 6), 2, (7, 2, 1)

    def run(target: Target, tokens: tuple[int, ...], keep: int) -> mx.array:
        tree = DraftTree.chain(tokens[0], tokens[1:])
        rows = finite(target.forward(mx.array(tokens), tree))[:keep]
        target.commit(range(keep))
        return rows

    drafted, single = (target_for(loaded, capability) for _ in range(2))
    drafted.prefill(_PREFIX)
    single.prefill(_PREFIX)
    first = run(drafted, draft, kept)
    several = mx.concatenate([first, run(drafted, after, len(after))])
    one_by_one = mx.concatenate([run(single, (token,), 1) for token in (*draft[:kept], *after)])

    # The mean, since rounding in half precision can route a row to other experts.
    difference = mx.mean(mx.abs(several - one_by_one).astype(mx.float32))
    return cast(bool, (difference <= _most_rounding(one_by_one)).item())


def _most_rounding(values: mx.array) -> mx.array:
    """The most that rounding may change these logits, which are in the model's data type."""
    share = _MOST_ROUNDING_FLOAT32 if values.dtype == mx.float32 else _MOST_ROUNDING_HALF
    return share * (mx.max(values) - mx.min(values)).astype(mx.float32)


# --- trial steps far inside a context ---


class _ShiftedCache(ConcatenateKVCache):
    """A cache whose offset may exceed the number of its entries.

    It allows trials far inside a context without memory for all that comes before.
    """

    offset: int
    rows: TreeRows | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        offset = self.offset + keys.shape[2]
        entries = super().update_and_fetch(keys, values)
        self.offset = offset
        return entries

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        held = 0 if self.keys is None else self.keys.shape[2]
        if self.rows is not None:
            return self.rows.mask(held, window_size)
        return create_attention_mask(N, held, return_array, window_size)


def _trial_caches(model: nn.Module) -> list[Any]:
    """New caches for a model, whose offset :func:`_context` can set."""

    def on_trial(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(on_trial, cache.caches))
        return _ShiftedCache() if isinstance(cache, KVCache | RotatingKVCache) else cache

    return [on_trial(cache) for cache in make_prompt_cache(model)]


def _context(model: nn.Module, length: int, prefix: tuple[int, ...] = _PREFIX) -> list[Any]:
    """Trial caches at the end of a context of ``length`` positions.

    Usually only their offset is set. Near the length where sparse attention begins to leave entries
    out, the caches are filled with random entries for it to choose from.

    Args:
        model: the target.
        length: at least the prefix's length.
        prefix: the context's last tokens.
    """
    caches = _trial_caches(model)
    logits(model, prefix, caches)
    before, sparse = length - len(prefix), sparse_crossing(model)
    fill = sparse is not None and abs(sparse - length) <= _ROWS
    for part in parts(caches):
        if isinstance(part, _ShiftedCache):
            part.offset += before
            if fill and part.keys is not None:
                part.keys, part.values = _filled(part.keys, before), _filled(part.values, before)
    return caches


def _filled(array: Any, before: int) -> mx.array:
    shape = (*array.shape[:2], before, array.shape[3])
    noise = mx.random.normal(shape, array.dtype, key=mx.random.key(0))
    return mx.concatenate([noise, array], axis=2)


def logits(model: nn.Module, tokens: tuple[int, ...], caches: list[Any]) -> mx.array:
    """The model's logits in float32, (len(tokens), vocabulary).

    They are evaluated immediately: in a pipeline over several machines, each has its own graph, and
    MLX could run the forwards of one evaluation in different orders.
    """
    result = finite(model(mx.array(tokens)[None], cache=caches)[0].astype(mx.float32))
    mx.eval(result)
    return result


# --- where a rule for positions changes ---

_WITH_POSITIONS = (KVCache, RotatingKVCache)
_ROWS = 8  # rows of a trial step: the effect of a small change of a rule adds up over rows
_SAMPLES = 3  # tries with different tokens: rounding can route rows to other experts


def _rows_differ_somewhere(loaded: LoadedModel) -> bool:
    """Whether rows give other logits in one forward than alone, at some position in a context.

    Trial steps straddle the positions that the model's configuration names.
    """
    model = loaded.model
    kinds = {type(cache) for cache in parts(make_prompt_cache(model))}
    with_positions = {kind for kind in kinds if issubclass(kind, _WITH_POSITIONS)}
    if not with_positions or not all(issubclass(k, ArraysCache) for k in kinds - with_positions):
        return False  # no positions, or caches whose offset cannot be set
    noise = together(rounding_noise, loaded)
    end = context_length(model) or math.inf
    return any(
        not any(
            together(rows_agree, loaded, middle - _ROWS // 2, noise, n) for n in range(_SAMPLES)
        )
        for middle in sorted(named_positions(model))
        if middle < end
    )


def rows_agree(loaded: LoadedModel, start: int, noise: float, sample: int) -> bool:
    """Whether a step gives the same logits if its first and its last row run alone.

    Args:
        start: the position of the step's first row.
        noise: from :func:`rounding_noise`.
        sample: selects the step's tokens; 0 or more.
    """
    model = loaded.model
    at_once = _context(model, start)
    apart = copy.deepcopy(at_once)
    tokens = tuple((sample + 1) * (2 * row + 1) % 11 for row in range(_ROWS))
    wide = logits(model, tokens, at_once)
    pieces = tokens[:1], tokens[1:-1], tokens[-1:]
    split = mx.concatenate([logits(model, piece, apart) for piece in pieces])
    return _agrees(wide, split, noise)


def _first_failing(loaded: LoadedModel, agrees: Callable[..., bool], *args: Any) -> int | None:
    """The first position at which a trial step fails.

    Steps are tried at the beginning of a context and across all :func:`crossings`. That also
    reveals models that scale positions outside RoPE modules.

    Args:
        agrees: :func:`tree_agrees` or :func:`joint_agrees`.
        args: further arguments of ``agrees``.

    Returns:
        None if no step fails.
    """
    noise = together(rounding_noise, loaded)
    # A step that starts two below a crossing has positions on both sides of it.
    for start in (len(_PREFIX), *(position - 2 for position in crossings(loaded.model))):
        if not together(agrees, loaded, start, noise, *args):
            return start - len(_PREFIX)
    return None


# --- branching steps ---

_ROOT, _BRANCHES = 1, ((5, 2, 6), (7, 2, 1))
_DEPTH = len(_BRANCHES[0])


def rounding_noise(loaded: LoadedModel) -> float:
    """How far rounding makes logits differ between rows of one forward and of separate forwards.

    The result has an upper bound. A larger difference is a fault of the model, not rounding, and
    must not hide other faults.
    """
    model, tokens = loaded.model, (*_PREFIX, 1, 5, 2, 6)
    at_once, one_by_one = _trial_caches(model), _trial_caches(model)
    rows = finite(model(mx.array(tokens)[None], cache=at_once)[0])
    singles = mx.concatenate([logits(model, (token,), one_by_one) for token in tokens])
    difference = mx.max(mx.abs(rows.astype(mx.float32) - singles))
    return cast(float, mx.minimum(difference, _most_rounding(rows)).item())


def tree_agrees(loaded: LoadedModel, start: int, noise: float) -> bool:
    """Whether a branching step at this position gives the same logits as its branches alone."""
    model, tree = loaded.model, DraftTree.from_branches(_ROOT, _BRANCHES)
    before = _context(model, start)
    caches = copy.deepcopy(before)
    rows = TreeRows(tree)
    for part in parts(caches):
        part.rows = rows
    install(model)
    tokens = mx.array(tree.tokens)[None]
    try:
        actual = forward_at(model, tokens, caches, rows.depths)[0]
    except (TypeError, ValueError):
        return False  # a RoPE that accepts only one integer offset
    actual = finite(actual.astype(mx.float32))
    agreed = []  # tried to the end: if one machine stopped early, the others would wait for it
    for index, branch in enumerate(_BRANCHES):
        nodes = mx.array([0, *range(1 + index * _DEPTH, 1 + (index + 1) * _DEPTH)])
        expected = logits(model, (_ROOT, *branch), copy.deepcopy(before))
        agreed.append(_agrees(actual[nodes], expected, noise))
    return all(agreed)


def _agrees(actual: mx.array, expected: mx.array, noise: float) -> bool:
    """Whether two arrays of logits, (rows, vocabulary), differ by no more than rounding."""
    spread = mx.max(expected) - mx.min(expected)
    error = mx.max(mx.abs(actual - expected))
    return cast(bool, (error <= 4 * noise + _LEAST_ROUNDING * spread).item())


# --- several sequences in one forward ---

_PREFIXES = (_PREFIX, (2, 7, 5), (6, 2, 3))
_JOINT_STEPS = (((1, 5, 2, 6), (7,), (2, 1)), ((3,), (4, 1), (5,)))
"""The tokens of each trial step, for each sequence."""


def examine_joint(loaded: LoadedModel, capability: Capability) -> tuple[JointMode, str]:
    """Find out, by small forwards, how several sequences can share one forward of the model.

    Joint forwards of sequences with different numbers of rows are compared with separate forwards,
    at the beginning of a context and across all crossings.

    Args:
        capability: from :func:`examine` or :func:`chain_capability`. With PLAIN, even the rows of
            one sequence affect each other, so nothing is tried.

    Returns:
        the cheapest mode that gives each sequence the logits of a forward of its own, and the
        reason for this mode.
    """
    if loaded.is_pipeline:
        return JointMode.ALONE, "its layers are on several machines"
    if capability is Capability.PLAIN:
        return JointMode.ALONE, _ROWS_DIFFER
    caches = parts(map(for_steps, make_prompt_cache(loaded.model)))
    joins = (TreeSteps, ArraysCache)
    if others := [cache for cache in caches if not isinstance(cache, joins)]:
        return JointMode.ALONE, f"{_names(others)} accepts only one sequence"
    position = _first_failing(loaded, joint_agrees, JointMode.SPLIT.value)
    if position is None:
        return JointMode.SPLIT, "a joint forward gives each sequence the same result as alone"
    if _first_failing(loaded, joint_agrees, JointMode.BLOCK.value) is None:
        reason = f"a joint forward needs the mask to equal separate forwards at position {position}"
        return JointMode.BLOCK, reason
    reason = f"a joint forward differs from separate forwards at position {position}"
    return JointMode.ALONE, reason


def joint_agrees(loaded: LoadedModel, start: int, noise: float, mode: str) -> bool:
    """Whether a joint forward gives each sequence the same logits as its own forward.

    Args:
        start: the position of the first sequence's first row; the others start lower.
        noise: from :func:`rounding_noise`.
        mode: how to join the sequences, a :class:`JointMode`'s value.
    """
    at = [start, len(_PREFIX), max(len(_PREFIX), start // 2)]
    apart = [
        _context(loaded.model, position, prefix)
        for position, prefix in zip(at, _PREFIXES, strict=True)
    ]
    # All rows are kept, so it does not matter whether the caches can be cut.
    targets = [Target(loaded, Capability.CHAIN, cache=copy.deepcopy(caches)) for caches in apart]
    joint = Joint(loaded, JointMode(mode))
    recurrent = any(isinstance(part, ArraysCache) for part in parts(apart[0]))
    # Damage to a recurrent state shows only in the next step.
    agreed = []  # tried to the end, as in tree_agrees
    for rows in _JOINT_STEPS if recurrent else _JOINT_STEPS[:1]:
        expected = [logits(loaded.model, *arguments) for arguments in zip(rows, apart, strict=True)]
        trees = [DraftTree.chain(tokens[0], tokens[1:]) for tokens in rows]
        try:
            actual, spans = joint.forward([*zip(targets, map(mx.array, rows), trees, strict=True)])
            actual = finite(actual.astype(mx.float32))
            mx.eval(actual)
        except (AttributeError, IndexError, TypeError, ValueError):
            return False  # the model uses keys, masks or positions in an unsupported way
        agreed += [
            _agrees(actual[span], alone, noise) for span, alone in zip(spans, expected, strict=True)
        ]
        for target, tree in zip(targets, trees, strict=True):
            target.commit_moved(range(len(tree)))
    return all(agreed)
