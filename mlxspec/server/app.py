"""The application: its routes and errors, and the status that it shows."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

import mlx.core as mx
from prometheus_client import Gauge
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from ..errors import printable
from ..generation.request import State
from .answer import FAILED, KeepAlive, is_answered
from .auth import AuthMiddleware, OnRefusal
from .body import ApiError, error_response
from .endpoints import Endpoints
from .prefix_cache import PrefixCache
from .worker import Worker


def create_app(
    worker: Worker,
    *,
    max_tokens: int = 8192,
    hosts: Collection[str] | None = None,
    keys: Sequence[str] = (),
    keep_alive: KeepAlive = KeepAlive(),  # noqa: B008  # a constant
    on_refusal: OnRefusal = lambda path, error: None,
) -> Starlette:
    """The ASGI application.

    Args:
        worker: started by the caller, who also stops it.
        max_tokens: the default of requests, within the context's room.
        hosts, keys, on_refusal: as for :class:`mlxspec.server.auth.AuthMiddleware`.
        keep_alive: when keep-alives are sent.
    """
    _add_gauges(worker)

    async def refused(request: Request, error: Exception) -> Response:
        refusal = error if isinstance(error, ApiError) else _wrong_path(request, error)
        if not is_answered(request):  # else the log has the end of the generation
            on_refusal(request.url.path, refusal)
        return error_response(refusal, request.url.path)

    routes = [*Endpoints(worker, max_tokens, keep_alive).routes, *_status_routes(worker)]
    return Starlette(
        routes=routes,
        middleware=[Middleware(AuthMiddleware, hosts=hosts, keys=keys, on_refusal=on_refusal)],
        exception_handlers={
            ApiError: refused,
            HTTPException: refused,
            Exception: _server_error,
        },
    )


def _wrong_path(request: Request, error: Exception) -> ApiError:
    assert isinstance(error, HTTPException)
    path, status = printable(request.url.path), error.status_code
    what = {404: "this server has no such path", 405: f"{request.method} is not for this path"}
    headers = dict(error.headers or {})
    return ApiError(f"{path}: {what.get(status, error.detail)}", status=status, headers=headers)


async def _server_error(request: Request, error: Exception) -> Response:
    # Starlette raises the error again, at which uvicorn closes the connection.
    failed = ApiError(FAILED.message, status=FAILED.status, headers={"Connection": "close"})
    return error_response(failed, request.url.path)


def _status_routes(worker: Worker) -> list[Route]:
    """The endpoints of health, metrics and status."""

    async def health(request: Request) -> Response:
        return _state(worker.alive, "ok", "the worker has failed")

    async def ready(request: Request) -> Response:
        return _state(worker.ready.is_set(), "ready", "not ready")

    async def metrics(request: Request) -> Response:
        return Response(worker.records.metrics.text(), media_type="text/plain; version=0.0.4")

    async def status(request: Request) -> Response:
        return JSONResponse(status_of(worker))

    async def page(request: Request) -> Response:
        return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/status", status),
        Route("/", page),
    ]


_PAGE = (files("mlxspec.server") / "page.html").read_text(encoding="utf-8")
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


def _state(good: bool, word: str, other: str) -> Response:
    return JSONResponse({"status": word if good else other}, 200 if good else 503)


# --- status ---

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
    """Pairs of rows and a step's time relative to one row; None if not measured."""
    decoder = worker.models[name].decoder
    if not decoder.plans or not worker.ready.is_set():
        return None
    curve = decoder.costs.curve
    return [[rows, curve(rows)] for rows in range(1, _WIDEST + 1)]


def _add_gauges(worker: Worker) -> None:
    """What is the case at the moment, for Prometheus."""

    def gauge(name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"mlxspec_{name}", help, labels, registry=worker.records.metrics.registry)

    def count(*states: State) -> int:
        return sum(one.state in states for one in worker.records.requests.copy())

    for states in ((State.WAITING,), (State.PREFILL,), (State.DECODE, State.PAUSED)):
        state = states[0]
        now = gauge(f"{state}_generations", f"Generations now: {state}.")
        now.set_function(partial(count, *states))
    kept = gauge("cache_bytes", "Bytes of kept prefixes.", "model")
    for served in worker.models.values():
        kept.labels(served.name).set_function(partial(getattr, served.cache, "nbytes"))
    gauge("memory_bytes", "Memory that MLX uses.").set_function(mx.get_active_memory)
