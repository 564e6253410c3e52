"""What steps of a model cost on this machine: the key of its measurements, and keeping them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from ..drafting.costs import KnownTime, LiveCosts, context_range
from ..drafting.kept import CostCache, CostKey, KnownRange, Ranges
from ..drafting.measurement import QUICK, MeasurementPlan, RowsTime, ShareDone, is_whole, noise
from .calibration import calibrate
from .capability import chain_capability
from .model_sizes import context_length
from .target import Capability

_log = logging.getLogger(__name__)


def machine_identity() -> dict[str, str | int | float | None]:
    """Chip, device and libraries; no name of host or user."""
    device = mx.default_device()
    info = mx.device_info(device)
    identity: dict[str, str | int | float | None] = {
        "chip": str(info["device_name"]),
        "device": device.type.name,
        "mlx": version("mlx"),
    }
    if device.type == mx.cpu:
        identity |= {"cores": _usable_cores(), "blas": global_blas()}
    else:
        # Chips of one name differ in the number of cores, and that goes with the memory.
        identity["memory"] = int(info.get("memory_size", 0))
    return identity


def model_identity(model: nn.Module) -> dict[str, str | int | float | None]:
    """Kind and size for people, and a digest of configuration, shapes and data types.

    The shapes of packed weights and their scales tell the bits and group size of a quantisation.
    A fine-tuned model has the identity of its base model, and the same speed.
    """
    weights = tree_flatten(model.parameters())
    digest = hashlib.sha256(type(model).__module__.encode())
    digest.update(json.dumps(_configuration(model), sort_keys=True, default=repr).encode())
    for name, weight in sorted(weights):
        digest.update(f"{name} {weight.shape} {weight.dtype}\n".encode())
    parameters = get_total_parameters(model)
    nbytes = sum(weight.nbytes for _, weight in weights)
    return {
        "type": str(getattr(model, "model_type", type(model).__name__)),
        "parameters": parameters,
        "bits_per_weight": round(8 * nbytes / parameters, 2),
        "digest": digest.hexdigest()[:32],
    }


def global_blas() -> str:
    """The library whose BLAS takes precedence over that of MLX's CPU wheel; "own" without one.

    MLX's symbols resolve to the first library that was loaded globally. Its T(M)/T(1) is quite
    another curve (see :mod:`mlxspec.process`).
    """
    if sys.platform != "linux":
        return "own"
    everything = ctypes.CDLL(None)
    try:
        address = ctypes.cast(everything.cblas_sgemm, ctypes.c_void_p)
    except AttributeError:
        return "own"
    found = _SymbolInfo()
    everything.dladdr(address, ctypes.byref(found))
    return os.path.basename(found.file_name or b"unknown").decode(errors="replace")


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _configuration(model: nn.Module) -> Any:
    args = getattr(model, "args", None)
    return asdict(args) if is_dataclass(args) and not isinstance(args, type) else repr(args)


_STEPS_WORTH_SAVING = 32
_SECONDS_BETWEEN_SAVES = 30.0
_BUSY = 0.4  # relative uncertainty of a time that was measured on a busy machine


def cost_key(model: nn.Module) -> CostKey:
    """The key under which step times of this model on this machine are kept."""
    return CostKey(machine_identity(), model_identity(model))


def costs_for(
    model: nn.Module, *, cache: CostCache | None = None, on_progress: ShareDone | None = None
) -> KeptCosts:
    """What steps of a model cost on this machine.

    A measurement that tells too little is not kept. Then costs begin with what rows usually cost,
    real steps correct them, and the next process measures again.

    Args:
        model: an mlx-lm model.
        cache: where measured times are kept; in the user's cache directory by default.
        on_progress: called with the share done, 0 to 1, during a first measurement, which takes
            less than 3 seconds.
    """
    cache = cache or CostCache()
    key = cost_key(model)
    ranges = {
        end: known for end, known in cache.read(key).items() if _is_enough(known.times, model)
    }
    if ranges:
        _log.info("step times are known from %s", cache.directory / key.file_name)
        return KeptCosts(cache, key, ranges)
    started = time.perf_counter()
    times = calibrate(model, QUICK, on_progress=on_progress)
    seconds = time.perf_counter() - started
    _log.info("measured step times in %.1f s: %s", seconds, _in_words(times))
    end, known = context_range(QUICK.context), known_range(times, QUICK, "quick")
    problem = noise(times)
    if problem is None and not _is_enough(known.times, model):
        problem = "there was no time for steps over 2, 4 and 8 rows"
    if problem is None:
        cache.update(key, {end: known})
    else:
        plain = replace(known.times[0], uncertainty=_BUSY)
        known = KnownRange.now([plain], "steps")
        _log.warning(
            "step times were measured while the machine was busy, or it is slow for this model "
            "(%s): drafts begin with usual costs, which real steps correct; the next start "
            "measures again",
            problem,
        )
    return KeptCosts(cache, key, {end: known})


_SHORTEST_CONTEXT = 64  # tokens; no more steps than fit there can be measured


def _is_enough(times: Sequence[KnownTime], model: nn.Module) -> bool:
    """Whether times tell what drafts cost, or as much as the model has room for."""
    if (context_length(model) or _SHORTEST_CONTEXT) < _SHORTEST_CONTEXT:
        return True
    if len(times) == 1:
        return chain_capability(model) is Capability.PLAIN
    return is_whole(times)


def _in_words(times: list[RowsTime]) -> str:
    return ", ".join(f"T({time.rows}) {1000 * time.seconds:.1f} ms" for time in times)


def known_range(
    times: list[RowsTime], plan: MeasurementPlan, source: str, name: str = ""
) -> KnownRange:
    """A measurement as the cache keeps it; ``name`` is what the user calls the model."""
    return KnownRange.now([time.known(plan.least_uncertainty) for time in times], source, name)


class KeptCosts(LiveCosts):
    """Costs whose corrections by real steps are kept for the next process.

    Args:
        cache: where they are kept.
        key: from :func:`cost_key`.
        ranges: what is known so far, at least one range.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        cache: CostCache,
        key: CostKey,
        ranges: Ranges,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__({end: known.times for end, known in ranges.items()})
        self._cache = cache
        self._key = key
        self._sources = {end: known.source for end, known in ranges.items()}
        self._clock = clock
        self._next_save = clock()

    def _begun_with(self, known: Mapping[int, list[KnownTime]], count: int) -> LiveCosts:
        """What an earlier process has learned of steps of ``count`` sequences comes first."""
        key = self._key.of_sequences(count)
        begun = {end: KnownRange.now(times, "steps") for end, times in known.items()}
        return KeptCosts(self._cache, key, self._cache.read(key) or begun, self._clock)

    def end(self) -> None:
        """Save what was learned after a generation, if there is enough and the last save is not
        recent."""
        if self.unsaved_steps < _STEPS_WORTH_SAVING or self._clock() < self._next_save:
            return
        self._next_save = self._clock() + _SECONDS_BETWEEN_SAVES
        self._cache.update(
            self._key, {end: self._range(end, times) for end, times in self.changes().items()}
        )

    def _range(self, end: int, times: list[KnownTime]) -> KnownRange:
        return KnownRange.now(times, self._sources.get(end, "steps"))
