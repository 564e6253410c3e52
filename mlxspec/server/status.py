"""The routes of the server's health, metrics and status, and its status page."""

from __future__ import annotations

import time
from functools import partial
from importlib.resources import files
from typing import Any

import mlx.core as mx
from prometheus_client import Gauge, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from ..generation.request import State
from .catalog import Catalog
from .served_model import ServedModel
from .worker import Worker

_PAGE = (files("mlxspec.server") / "page.html").read_text(encoding="utf-8")
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


def status_routes(catalog: Catalog) -> list[Route]:
    """The routes of health, metrics and status."""
    worker = catalog.worker
    _add_gauges(worker)

    # Requests are accepted while models are loading, so a check of health must not end the server.
    async def health(request: Request) -> Response:
        status = "not ready" if worker.ending else "loading" if catalog.starting else "ok"
        return JSONResponse({"status": status}, 503 if worker.ending else 200)

    async def ready(request: Request) -> Response:
        response = await health(request)
        response.status_code = 503 if catalog.starting else response.status_code
        return response

    async def metrics(request: Request) -> Response:
        return Response(
            generate_latest(worker.metrics.registry), media_type="text/plain; version=0.0.4"
        )

    async def status(request: Request) -> Response:
        return JSONResponse(status_of(catalog))

    async def page(request: Request) -> Response:
        return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)

    endpoints = {"health": health, "ready": ready, "metrics": metrics, "status": status, "": page}
    return [Route(f"/{name}", endpoint) for name, endpoint in endpoints.items()]


_WIDEST = 32  # the most rows in the cost curve that the status page shows
_CACHE_FIGURES = ("entries", "hits", "misses", "forks", "evictions")


def status_of(catalog: Catalog) -> dict[str, Any]:
    """The figures of the status page, as JSON."""
    worker = catalog.worker
    metrics, now = worker.metrics, time.perf_counter()
    return {
        "version": __version__,
        "ready": not (worker.ending or catalog.starting),
        "requests": [request.figures() for request in worker.requests.copy()],
        "recent": [figures | {"ended": now - figures["ended"]} for figures in worker.recent.copy()],
        "totals": metrics.totals,
        "sources": metrics.sources,
        "models": [
            {
                "name": served.name,
                "context_length": served.context_length,
                "cost_curve": None if worker.ending else _curve(served),
                "cache": {"bytes": served.cache.nbytes, "max_bytes": worker.memory.most_idle()}
                | {name: getattr(served.cache, name) for name in _CACHE_FIGURES},
            }
            for served in worker.models.values()
        ],
        "available": [{"name": entry.name, "state": entry.state} for entry in catalog.entries],
        "memory": {
            "active": mx.get_active_memory(),
            "cache": mx.get_cache_memory(),
            "peak": mx.get_peak_memory(),
            "limit": worker.memory.limit,
            "parts": worker.memory.parts,
        },
        "history": metrics.history,
    }


def _curve(served: ServedModel) -> list[list[float]] | None:
    """Pairs of a number of rows and T(rows)/T(1); None while no costs are known."""
    costs = vars(served.decoder).get("costs")  # reading the property could measure them now
    if costs is None:
        return None
    curve = costs.curve
    return [[rows, curve(rows)] for rows in range(1, _WIDEST + 1)]


def _add_gauges(worker: Worker) -> None:
    """Add gauges of the server's current state to the Prometheus metrics."""

    def gauge(name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"mlxspec_{name}", help, labels, registry=worker.metrics.registry)

    def count(*states: State) -> int:
        return sum(request.state in states for request in worker.requests.copy())

    for states in ((State.WAITING,), (State.PREFILL,), (State.DECODE, State.PAUSED)):
        now = gauge(f"{states[0]}_generations", f"Generations that are {states[0]} now.")
        now.set_function(partial(count, *states))
    memory = worker.memory
    gauge("memory_bytes", "Memory that MLX uses.").set_function(mx.get_active_memory)
    gauge("memory_limit_bytes", "The current memory bound.").set_function(lambda: memory.limit)
    parts = gauge("memory_part_bytes", "Memory in use or reserved.", "part")
    for part in memory.parts:
        parts.labels(part).set_function(partial(lambda name: memory.parts[name], part))
