"""The application: its routes and errors, and the status that it shows."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from importlib.resources import files
from typing import Any

import mlx.core as mx
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
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
    silence: KeepAlive = KeepAlive(),  # noqa: B008  # a constant
    on_refusal: OnRefusal = lambda path, error: None,
) -> Starlette:
    """The ASGI application.

    Args:
        worker: started by the caller, who also stops it.
        max_tokens: of requests that do not say, as far as the context has room.
        hosts, keys, on_refusal: as for :class:`mlxspec.server.auth.AuthMiddleware`.
        silence: when keep-alives are sent.
    """
    worker.records.metrics.registry.register(Gauges(worker))

    async def refused(request: Request, error: Exception) -> Response:
        refusal = error if isinstance(error, ApiError) else _wrong_path(request, error)
        if not is_answered(request):  # else the log has the end of the generation
            on_refusal(request.url.path, refusal)
        return error_response(refusal, request.url.path)

    routes = [*Endpoints(worker, max_tokens, silence).routes, *_StatusRoutes(worker).routes]
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
    what = {404: "there is no such path", 405: f"{request.method} is not for this path"}
    message, headers = f"{path}: {what.get(status, error.detail)}", dict(error.headers or {})
    for start, purpose in _NOT_OURS.items():
        if path == start or path.startswith(f"{start}/"):
            message = (
                f"{path}: this server writes texts with a language model, and has no {purpose}: "
                "ask another server for them"
            )
            status, headers = 404, {}  # no other method helps
    return ApiError(message, status=status, headers=headers)


_NOT_OURS = {
    "/v1/assistants": "assistants",
    "/v1/audio": "speech or transcriptions",
    "/v1/batches": "batches",
    "/v1/containers": "containers",
    "/v1/conversations": "conversations",
    "/v1/embeddings": "embeddings",
    "/v1/evals": "evals",
    "/v1/files": "files",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/images": "images",
    "/v1/moderations": "moderations",
    "/v1/realtime": "realtime sessions",
    "/v1/rerank": "reranking",
    "/v1/responses/compact": "compacted responses",
    "/v1/threads": "threads",
    "/v1/uploads": "uploads",
    "/v1/vector_stores": "vector stores",
    "/v1/videos": "videos",
}
"""Path prefixes of OpenAI's and other APIs that clients try, and what this server lacks there."""


async def _server_error(request: Request, error: Exception) -> Response:
    # Starlette raises the error again, at which uvicorn closes the connection.
    failed = ApiError(FAILED.message, status=FAILED.status, headers={"Connection": "close"})
    return error_response(failed, request.url.path)


class _StatusRoutes:
    """The endpoints of health, metrics and status."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.routes = [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/status", self.status),
            Route("/", self.page),
        ]

    async def health(self, request: Request) -> Response:
        """``/health``: whether the worker lives."""
        return _state(self._worker.alive, "ok", "the worker has failed")

    async def ready(self, request: Request) -> Response:
        """``/ready``: whether requests are answered."""
        return _state(self._worker.ready.is_set(), "ready", "not ready")

    async def metrics(self, request: Request) -> Response:
        """``/metrics``, for Prometheus"""
        return Response(self._worker.records.metrics.text(), media_type="text/plain; version=0.0.4")

    async def status(self, request: Request) -> Response:
        """``/status``: the figures of the page"""
        return JSONResponse(status_of(self._worker))

    async def page(self, request: Request) -> Response:
        """``/``: the status page"""
        return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)


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
