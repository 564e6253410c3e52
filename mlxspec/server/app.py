"""The endpoints: OpenAI's, and those that tell how the server is doing."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from importlib.resources import files
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..generation.options import GenerationOptions
from ..loading.model import encode_prompt
from .errors import ApiError
from .events import Event
from .gate import Gate, json_body
from .openai import ChatAnswer, CompletionAnswer, model_entry
from .prompts import chat_prompt, completion_prompt
from .requests import (
    Request as ApiRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from .status import status_of
from .worker import Answer, GenerationRequest, ServedModel, Worker

_log = logging.getLogger("mlxspec.server")

_LIFE_SIGN = 10.0  # seconds of silence in a stream before a comment says that all is well
_SILENCE = 60.0  # before an answer that is no stream begins with spaces, for the same purpose


def create_app(
    worker: Worker,
    *,
    max_tokens: int = 8192,
    hosts: Collection[str] | None = None,
    keys: Sequence[str] = (),
) -> Starlette:
    """The ASGI application.

    Args:
        worker: started by the caller, who also stops it.
        max_tokens: of requests that do not say, as far as the context has room.
        hosts, keys: as for :class:`mlxspec.server.gate.Gate`.
    """
    api = _Api(worker, max_tokens)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.complete, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/tokenize", api.tokenize, methods=["POST"]),
        Route("/v1/detokenize", api.detokenize, methods=["POST"]),
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/metrics", api.metrics),
        Route("/status", api.status),
        Route("/", api.page),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Gate, hosts=hosts, keys=keys)],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            Exception: _server_error,
        },
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "there is no such path", 405: f"{request.method} is not for this path"}
    message = f"{request.url.path}: {what.get(error.status_code, error.detail)}"
    told = ApiError(message, status=error.status_code, headers=dict(error.headers or {}))
    return JSONResponse(told.body, told.status, told.headers)


async def _server_error(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError("the server has failed; its log says how", status=500).body, 500)


class AnswerMaker(Protocol):
    """Makes an answer's JSON from events."""

    @property
    def complete(self) -> bool:
        """Whether nothing that may still come belongs to the answer."""

    def feed(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Take events; returns the chunks of a streamed answer."""

    def whole(self) -> dict[str, Any]:
        """The answer of what has been fed."""


class _Api:
    def __init__(self, worker: Worker, max_tokens: int) -> None:
        self._worker = worker
        self._max_tokens = max_tokens
        self._default = next(iter(worker.models.values()))
        # A tokenizer serves one thread at a time.
        self._tokenizing = {name: asyncio.Lock() for name in worker.models}
        self._started = time.time()

    def _served(self, name: str | None) -> ServedModel:
        if name is None:
            return self._default
        served = self._worker.models.get(name)
        if served is None:
            known = ", ".join(self._worker.models)
            raise ApiError(
                f"there is no model {name!r} here: ask for {known}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return served

    async def _tokenized(self, served: ServedModel, make: Callable[..., Any], *args: Any) -> Any:
        async with self._tokenizing[served.name]:
            return await run_in_threadpool(make, *args)
