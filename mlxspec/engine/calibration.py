"""Measures a model's step times, and the memory of its forwards."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import abc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ..drafting.accept import VerifiedStep
from ..drafting.cost_file import Calibration, CostFile
from ..drafting.costs import LONG_CONTEXT, LiveCosts
from ..drafting.drafter import Drafter
from ..drafting.measurement import (
    FIRST_LONG_CONTEXT,
    FIRST_USE,
    MeasurementPlan,
    measure,
    noise,
)
from ..drafting.tree import DraftTree
from ..errors import OptionError
from .caches import parts
from .machine import machine_identity, model_identity, whole_memory
from .model_sizes import cache_kinds, context_length
from .params import SamplingParams
from .patches import split_attention
from .sampling import Chooser
from .step import Sequence, joint_step
from .target import Target, target_for

if TYPE_CHECKING:
    from .loaded_model import LoadedModel

_log = logging.getLogger(__name__)


# --- the memory of a forward ---


_TRIED = 32  # rows of the forwards whose memory is measured
_BEHIND = 512  # positions that the caches of the last forward hold in addition


def forward_memory(loaded: LoadedModel, max_kv_size: int | None) -> tuple[int, float]:
    """Measure the memory that a forward takes besides the caches.

    Returns:
        the bytes for each row, and the bytes for each pair of a row and a position before it, in
        which attention that is not fused stores its scores.
    """
    caches = make_prompt_cache(loaded.model, max_kv_size)
    seen = loaded.trained_head.new_cache(0) if loaded.trained_head else None

    def taken() -> int:
        mx.synchronize()
        mx.reset_peak_memory()
        before, tokens = mx.get_active_memory(), mx.array([0] * _TRIED)
        loaded.model(tokens[None], cache=caches)
        if seen:
            seen.note(tokens)
            seen.keep(seen.length, range(_TRIED))
            seen.see()
        mx.eval([cache.state for cache in caches], seen.arrays if seen else [])
        mx.synchronize()
        return mx.get_peak_memory() - before

    taken()  # also allocates the caches
    short = taken()
    if not all(type(cache) in _FILLABLE for cache in parts(caches)):
        return short // _TRIED, 0.0
    _repeat(caches, 2 * _TRIED, _BEHIND)
    taken()  # the caches grow
    return short // _TRIED, max(0, taken() - short) / (_TRIED * _BEHIND)


# --- measuring ---

_UNENDING = 1 << 30  # tokens
_SHORT_CONTEXT = 64  # tokens before the measured steps
_LONG_CONTEXTS = 1000, 8000
_SHARE_OF_MEMORY = 1 / 16  # the share that the caches of a measurement may take


def measured_contexts(loaded: LoadedModel) -> list[int]:
    """The context lengths at which step times are measured: 64, 1000 and 8000 tokens.

    If the model or the memory does not allow 8000, the length is halved until they do. If it falls
    below 500, or if only a prompt can fill the caches, the only length is 64. For a model whose
    context is shorter than 256, the first length is a quarter of its context instead of 64.
    """
    window, (middle, long) = context_length(loaded.model) or _UNENDING, _LONG_CONTEXTS
    short = max(1, min(_SHORT_CONTEXT, window // 4))
    if not _can_be_filled(loaded):
        return [short]
    kinds = cache_kinds(loaded)
    position = sum(kind.count * (kind.bytes_per_position or 0) for kind in kinds)
    in_memory = int(whole_memory() * _SHARE_OF_MEMORY) // max(position, 1)
    limit = min(window // 2, in_memory)
    while long > limit:
        long //= 2
    if long < LONG_CONTEXT:
        return [short]
    return [short, *[middle] * (long > middle), long]


def check_context(model: nn.Module, plan: MeasurementPlan, context: int) -> None:
    """Raise OptionError unless steps can be measured after ``context`` tokens."""
    longest = max(1, (context_length(model) or _UNENDING) - plan.room)
    if not 1 <= context <= longest:
        raise OptionError(f"a context of {context} tokens: choose 1 to {longest} for this model")


def calibrate(
    loaded: LoadedModel,
    plan: MeasurementPlan,
    *,
    context: int,
    name: str = "",
    on_progress: abc.Callable[[float], None] | None = None,
) -> Calibration:
    """Measure how long plain and drafted steps of a model take.

    Afterwards the model's attention is split if that was faster in this measurement; see
    :func:`mlxspec.engine.patches.split_attention`.

    Args:
        plan: which steps to measure, and for how long; see
            :data:`mlxspec.drafting.measurement.FIRST_USE`.
        context: the number of tokens before the first step. If the model's context is too short for
            all steps, there is only one round of steps.
        name: the model's name as the user gave it.
        on_progress: called with the fraction of the steps that is done, 0 to 1.

    Returns:
        a time for each number of rows; only the plain step's if the model cannot verify drafts.
    """
    started = time.perf_counter()
    window = context_length(loaded.model) or _UNENDING
    if context + plan.room > window:
        plan = replace(plan, rounds=1)
    with wired_limit(loaded.model, [generation_stream]):
        steps = ModelSteps(loaded, context)
        # The context grows by one token per step, and the widest step must fit at its end.
        room = max(1, min(1 + steps.target.max_depth, window - context - plan.tokens))
        split = None
        splits = context >= LONG_CONTEXT and room >= _SPLIT_ROWS
        if splits and mx.default_device().type == mx.gpu:
            split = steps.splits_attention(started + plan.seconds / 2)
        times = measure(
            steps.plain, steps.drafted, plan, room, started, time.perf_counter, on_progress
        )
    return Calibration(times, plan.source, name=name, split=split)


_SPLIT_ROWS = 12  # more than any fused attention takes, but few enough to be fast
_SPLIT_GAIN = 0.95  # of the time of unsplit attention; smaller gains may be noise
_SPLIT_TRIES = 3  # the first try of each kind also compiles kernels

_SEED = 16  # tokens that run as a prompt, whose entries then fill the caches
_FILLABLE = KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache


def _can_be_filled(loaded: LoadedModel) -> bool:
    """Whether :func:`_repeat` can fill all of a model's caches."""
    caches = parts(make_prompt_cache(loaded.model))
    return loaded.leader is None and all(type(cache) in _FILLABLE for cache in caches)


def _repeat(caches: abc.Sequence[Any], length: int, count: int) -> None:
    """Append ``count`` positions to caches by repeating their first ``length`` positions."""
    for cache in parts(caches):
        if not isinstance(cache, ArraysCache):
            keys, values = cache.keys[..., :length, :], cache.values[..., :length, :]
            taken = mx.arange(count) % keys.shape[2]
            cache.update_and_fetch(keys[..., taken, :], values[..., taken, :])


class ModelSteps:
    """Runs steps of a model to time them.

    The tokens are random: in a mixture of experts, repeated tokens would use the same experts, and
    wide steps would look cheap.

    Args:
        context: the number of tokens before the first step.

    Attributes:
        target: the model with these tokens in its caches.
    """

    def __init__(self, loaded: LoadedModel, context: int) -> None:
        self._loaded = loaded
        self._drafter = _RandomChains(loaded.vocab_size)
        self.target: Target = target_for(loaded, loaded.chain_capability)
        seed = min(context - 1, _SEED) if _can_be_filled(loaded) else context - 1
        with mx.stream(generation_stream):
            self.target.prefill(self._drafter.tokens(seed))
            if context - 1 > seed:
                # Attention takes the same time whatever the keys, and a real prompt of this length
                # would take long to run.
                _repeat(self.target.cache, seed, context - 1 - seed)
                self.target.begin_at(context - 1)
        self._sequence = Sequence(
            self.target,
            self._drafter.tokens(1),
            self._drafter,
            Chooser(SamplingParams()),
            max_tokens=_UNENDING,
            ends=lambda token: False,
        )
        self._sequence.begin()
        self._step(1, pipelined=False)

    def splits_attention(self, end: float) -> bool | None:
        """Whether wide drafts are faster if their attention is split; if so, it stays split.

        Returns:
            None if there was no time to find out; attention is then not split.
        """
        seconds: dict[int | None, list[float]] = {None: [], 0: []}
        for least in (None, 0) * _SPLIT_TRIES:
            if time.perf_counter() < end:
                split_attention(self._loaded, least)
                seconds[least].append(self.drafted(_SPLIT_ROWS))
        known = len(seconds[0]) > 1
        pays = known and min(seconds[0][1:]) < _SPLIT_GAIN * min(seconds[None][1:])
        split_attention(self._loaded, 0 if pays else None)
        return pays if known else None

    def plain(self, tokens: int) -> list[float]:
        """The seconds of each of ``tokens`` pipelined plain steps."""
        measured: list[float] = []
        while len(measured) < tokens:
            seconds, verified = self._step(1, pipelined=True)
            if verified.pipelined:
                measured.append(seconds)
        return measured

    def drafted(self, rows: int) -> float:
        """The seconds of one whole drafted step: proposal, forward, reading, acceptance, commit."""
        while True:  # a plain step that was dispatched earlier comes first
            seconds, verified = self._step(rows, pipelined=False)
            if verified.rows == rows:
                return seconds

    def _step(self, rows: int, pipelined: bool) -> tuple[float, VerifiedStep]:
        """Run a step of so many rows; return its seconds and its result."""
        self._drafter.pipelined, self._drafter.rows = pipelined, rows
        started = time.perf_counter()
        (outcome,) = joint_step([self._sequence])
        seconds = time.perf_counter() - started
        if isinstance(outcome, Exception):
            raise outcome
        return seconds, outcome


class _RandomChains(Drafter):
    """Drafts chains of random tokens that make a step of ``rows`` rows."""

    branching = False

    def __init__(self, vocab_size: int) -> None:
        self.pipelined = False
        self.rows = 1
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._last = 0

    def tokens(self, count: int) -> list[int]:
        """``count`` random tokens."""
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def begin(self, prompt: abc.Sequence[int]) -> None:
        self._last = prompt[-1]

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._last, self.tokens(self.rows - 1))

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]


# --- the costs of a model ---


def cost_file(model: nn.Module) -> CostFile:
    """The file that keeps the step times of this model on this machine."""
    return CostFile(machine_identity(), model_identity(model))


def costs_for(loaded: LoadedModel) -> LiveCosts:
    """The costs of a model's steps on this machine.

    If they are not known yet, plain steps are measured, which takes as long as seven of them. The
    costs of drafts then begin with typical ones. All steps correct the costs, and the next process
    begins with these.
    """
    file = cost_file(loaded.model)
    if calibrations := file.read():
        _log.info("step times are known from %s", file.path)
    else:
        short = measured_contexts(loaded)[0]
        calibrations = {short: _measured(loaded, FIRST_USE, short)}
        file.update(calibrations)
    split_attention(loaded, split_length(calibrations))
    return LiveCosts(calibrations, file)


def with_long_context(loaded: LoadedModel, costs: LiveCosts) -> LiveCosts:
    """The costs, with times after a long context if these can be measured, in about a second.

    Args:
        costs: the model's costs.
    """
    costs.wants_long_context, costs.tried_long_context = False, True
    *_, context = measured_contexts(loaded)
    if context < LONG_CONTEXT:
        return costs
    known = _measured(loaded, FIRST_LONG_CONTEXT, context)
    if len(known.times) == 1 or noise(known.times):
        return costs
    calibrations = costs.known() | {context: known}
    if costs.file:
        costs.file.update(calibrations)
    split_attention(loaded, split_length(calibrations))
    return LiveCosts(calibrations, costs.file)


def _measured(loaded: LoadedModel, plan: MeasurementPlan, context: int) -> Calibration:
    known = calibrate(loaded, plan, context=context)
    mx.clear_cache()
    words = ", ".join(f"T({t.rows}) {1000 * t.seconds:.1f} ms" for t in known.times)
    _log.info("measured step times after %d tokens: %s", context, words)
    return known


def split_length(calibrations: abc.Mapping[int, Calibration]) -> int | None:
    """The context length from which attention is split; None for never.

    It is the geometric mean of the last measured length at which unsplit attention was faster, and
    the first after it at which split attention was.
    """
    measured_whole = (context for context, known in calibrations.items() if known.split is False)
    whole = max(measured_whole, default=_SHORT_CONTEXT)
    split = [context for context, known in calibrations.items() if known.split and context > whole]
    return math.isqrt(whole * min(split)) if split else None
