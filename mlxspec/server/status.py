"""What the status page shows: requests, what drafts earn, what steps cost, the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from .. import __version__
from ..generation.request import State
from .prefix_cache import PrefixCache
from .worker import Worker

_WIDEST = 32  # rows of the cost curve that is shown


def status_of(worker: Worker) -> dict[str, Any]:
    """All figures of the status page, as JSON."""
    metrics, now = worker.records.metrics, time.perf_counter()
    totals = metrics.totals
    return {
        "version": __version__,
        "ready": worker.ready.is_set(),
        "requests": [one.figures() for one in worker.records.requests.copy()],
        "recent": [one | {"ended": now - one["ended"]} for one in worker.records.recent.copy()],
        "totals": totals,
        "tokens_per_step": totals["generated"] / totals["steps"] if totals["steps"] else None,
        "sequences_per_forward": (
            totals["steps"] / totals["forwards"] if totals["forwards"] else None
        ),
        "sources": metrics.sources,
        "models": [
            {
                "name": served.name,
                "context_length": served.context_length,
                "cost_curve": _curve(worker, served.name),
                "cache": _cache(served.cache),
                "memory_limit": served.memory.limit,
            }
            for served in worker.models.values()
        ],
        "memory": {
            "active": mx.get_active_memory(),
            "cache": mx.get_cache_memory(),
            "peak": mx.get_peak_memory(),
        },
        "limits": worker.limits._asdict(),
        "history": metrics.history.columns(),
    }


def _cache(cache: PrefixCache) -> dict[str, int]:
    return {
        "entries": cache.entries,
        "bytes": cache.nbytes,
        "max_bytes": cache.max_bytes,
        "hits": cache.hits,
        "misses": cache.misses,
        "forks": cache.forks,
        "evictions": cache.evictions,
    }


def _curve(worker: Worker, name: str) -> list[list[float]] | None:
    """Rows and how long a step over them takes against one row; None where nobody measures."""
    decoder = worker.models[name].decoder
    if not decoder.plans or not worker.ready.is_set():
        return None
    curve = decoder.costs.curve
    return [[rows, curve(rows)] for rows in range(1, _WIDEST + 1)]


class Gauges(Collector):
    """What is the case at the moment, for Prometheus."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[GaugeMetricFamily]:
        states = [request.state for request in self._worker.records.requests.copy()]
        states = [State.DECODE if state is State.PAUSED else state for state in states]
        for state in (State.WAITING, State.PREFILL, State.DECODE):
            count = states.count(state)
            name = f"mlxspec_{state}_generations"
            yield GaugeMetricFamily(name, f"Generations now: {state}.", count)
        kept = GaugeMetricFamily("mlxspec_cache_bytes", "Bytes of kept prefixes.", labels=["model"])
        for served in self._worker.models.values():
            kept.add_metric([served.name], served.cache.nbytes)
        yield kept
        used = mx.get_active_memory()
        yield GaugeMetricFamily("mlxspec_memory_bytes", "Memory that MLX uses.", used)
