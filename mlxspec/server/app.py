"""The endpoints: OpenAI's, Anthropic's, and those that tell how the server is doing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from .answering import FAILED, Silence, answered, is_answered
from .errors import ApiError, error_response, new_request_id
from .fields import shown
from .gate import Gate, OnRefusal, json_body
from .generating import Generating
from .messages_answer import MessagesAnswer, messages_headers
from .messages_requests import MessagesRequest, parse_messages
from .openai import (
    ChatAnswer,
    CompletionAnswer,
    detokenize_answer,
    model_entry,
    models_answer,
    tokenize_answer,
)
from .requests import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from .response_store import ResponseStore, StoredResponse
from .responses_answer import ResponsesAnswer, input_items_answer
from .responses_requests import Earlier, ResponsesRequest, parse_responses
from .served_model import ServedModel
from .status import Gauges, status_of
from .worker import Worker


def create_app(
    worker: Worker,
    *,
    max_tokens: int = 8192,
    hosts: Collection[str] | None = None,
    keys: Sequence[str] = (),
    silence: Silence = Silence(),  # noqa: B008  # a constant
    on_refusal: OnRefusal = lambda path, error: None,
) -> Starlette:
    """The ASGI application.

    Args:
        worker: started by the caller, who also stops it.
        max_tokens: of requests that do not say, as far as the context has room.
        hosts, keys, on_refusal: as for :class:`mlxspec.server.gate.Gate`.
        silence: how long clients hear nothing.
    """
    api = _Api(worker, max_tokens, silence)
    worker.records.metrics.registry.register(Gauges(worker))

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if not is_answered(request):  # else the generation's end tells of it
            on_refusal(request.url.path, error)
        return error_response(error, request.url.path)

    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.complete, methods=["POST"]),
        Route("/v1/responses", api.respond, methods=["POST"]),
        Route("/v1/responses/input_tokens", api.count_input, methods=["POST"]),
        Route("/v1/responses/{id}", api.response),
        Route("/v1/responses/{id}", api.delete_response, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", api.cancel_response, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", api.input_items),
        Route("/v1/messages", api.message, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
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
        middleware=[Middleware(Gate, hosts=hosts, keys=keys, on_refusal=on_refusal)],
        exception_handlers={
            ApiError: api_error,
            HTTPException: _http_error,
            Exception: _server_error,
        },
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, status = request.url.path, error.status_code
    what = {404: "there is no such path", 405: f"{request.method} is not for this path"}
    message = f"{path}: {what.get(status, error.detail)}"
    for start, purpose in _NOT_OURS.items():
        if path == start or path.startswith(f"{start}/"):
            message = (
                f"{path}: this server writes texts with a language model, and has no {purpose}: "
                "ask another server for them"
            )
            status = 404
    told = ApiError(message, status=status, headers=dict(error.headers or {}))
    return error_response(told, path)


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
"""Beginnings of OpenAI's and others' paths that clients try, and what is not to be had there."""


async def _server_error(request: Request, error: Exception) -> Response:
    # Starlette raises the error again, at which uvicorn closes the connection.
    failed = ApiError(FAILED.message, status=FAILED.status, headers={"Connection": "close"})
    return error_response(failed, request.url.path)


class _Api:
    def __init__(self, worker: Worker, max_tokens: int, silence: Silence) -> None:
        self._worker = worker
        self._generating = Generating(worker, max_tokens)
        self._silence = silence
        self._responses = ResponseStore()

    # --- generating ---

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``"""
        body = parse_chat(await json_body(request))
        served = self._generating.served(body.model)
        prompt = await self._generating.chat_prompt(served, body)
        answer = ChatAnswer(body, served.name, served.decoder.tokenizer, prompt.format)
        partition = request.state.partition
        stream = await self._generating.submitted(served, body, [prompt], partition, "messages")
        return await answered(request, stream, answer, body.stream, self._silence)

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``"""
        body = parse_completion(await json_body(request))
        served = self._generating.served(body.model)
        prompts = await self._generating.completion_prompts(served, body)
        answer = CompletionAnswer(body, served.name, served.decoder.tokenizer)
        partition = request.state.partition
        stream = await self._generating.submitted(served, body, prompts, partition, "prompt")
        return await answered(request, stream, answer, body.stream, self._silence)

    # --- responses ---

    async def respond(self, request: Request) -> Response:
        """``/v1/responses``"""
        body = await self._responses_request(request)
        served = self._generating.served(body.model)
        prompt = await self._generating.chat_prompt(served, body)
        partition = request.state.partition
        keep = partial(self._responses.put, partition)
        tokenizer = served.decoder.tokenizer
        answer = ResponsesAnswer(body, served.name, tokenizer, prompt.format, keep)
        stream = await self._generating.submitted(served, body, [prompt], partition, body.param)
        return await answered(request, stream, answer, body.stream, self._silence)

    async def count_input(self, request: Request) -> Response:
        """``/v1/responses/input_tokens``"""
        body = await self._responses_request(request)
        served = self._generating.served(body.model)
        count = len((await self._generating.chat_prompt(served, body)).tokens)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def response(self, request: Request) -> Response:
        """``/v1/responses/ID``"""
        if request.query_params.get("stream") == "true":
            raise ApiError(
                "stream: a kept response is told as a whole; leave it out", param="stream"
            )
        return JSONResponse(self._kept(request).response)

    async def delete_response(self, request: Request) -> Response:
        """``DELETE /v1/responses/ID``"""
        response_id = self._kept(request).response["id"]
        self._responses.delete(request.state.partition, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(self, request: Request) -> Response:
        """``/v1/responses/ID/cancel``"""
        self._kept(request)
        raise ApiError(
            "a response ends when its client leaves, since none is made in the background: "
            "close the connection",
        )

    async def input_items(self, request: Request) -> Response:
        """``/v1/responses/ID/input_items``"""
        return JSONResponse(input_items_answer(self._kept(request).given, request.query_params))

    async def _responses_request(self, request: Request) -> ResponsesRequest:
        partition = request.state.partition
        earlier = Earlier(
            partial(self._responses.response, partition), partial(self._responses.item, partition)
        )
        return parse_responses(await json_body(request), earlier)

    def _kept(self, request: Request) -> StoredResponse:
        """The response of the path.

        Raises:
            ApiError: 404, there is none.
        """
        response_id = request.path_params["id"]
        found = self._responses.response(request.state.partition, response_id)
        if found is None:
            raise ApiError(
                f"there is no response {shown(response_id)} here, or no longer: make it again",
                status=404,
                param="response_id",
            )
        return found

    # --- messages ---

    async def message(self, request: Request) -> Response:
        """``/v1/messages``"""
        body = parse_messages(await json_body(request))
        served = self._served_for(body)
        prompt = await self._generating.chat_prompt(served, body)
        answer = MessagesAnswer(body, served.name, prompt.format)
        partition = request.state.partition
        stream = await self._generating.submitted(served, body, [prompt], partition, "messages")
        return await answered(request, stream, answer, body.stream, self._silence)

    async def count_tokens(self, request: Request) -> Response:
        """``/v1/messages/count_tokens``"""
        body = parse_messages(await json_body(request), to_count=True)
        served = self._served_for(body)
        count = len((await self._generating.chat_prompt(served, body)).tokens)
        headers = messages_headers(served.name, new_request_id())
        return JSONResponse({"input_tokens": count}, headers=headers)

    def _served_for(self, body: MessagesRequest) -> ServedModel:
        """The model of a request; the default one stands in for those of Anthropic."""
        name = body.model
        if name and name.startswith("claude-") and name not in self._worker.models:
            name = None
        return self._generating.served(name)

    # --- telling ---

    async def models(self, request: Request) -> Response:
        """``/v1/models``"""
        return JSONResponse(models_answer([*map(_entry, self._worker.models.values())]))

    async def model(self, request: Request) -> Response:
        """``/v1/models/NAME``"""
        return JSONResponse(_entry(self._generating.served(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        """``/v1/tokenize``"""
        content = await json_body(request)
        body = parse_tokenize(content)
        served = self._generating.served(_model_of(content))
        tokenizer = served.decoder.tokenizer
        if body.chat:
            tokens = (await self._generating.chat_prompt(served, body.chat)).tokens
        else:
            self._generating.check_length(served, "prompt", body.text)
            encode = partial(tokenizer.encode, add_special_tokens=body.add_special_tokens)
            tokens = await self._generating.tokenized(served, encode, body.text)
        return JSONResponse(tokenize_answer(tokens, served.context_length))

    async def detokenize(self, request: Request) -> Response:
        """``/v1/detokenize``"""
        content = await json_body(request)
        tokens = parse_detokenize(content)
        served = self._generating.served(_model_of(content))
        wrong = next((token for token in tokens if token >= served.decoder.vocab_size), None)
        if wrong is not None:
            raise ApiError(
                f"tokens has the id {wrong}: the model's are 0 to {served.decoder.vocab_size - 1}",
                param="tokens",
            )
        tokenizer = served.decoder.tokenizer
        return JSONResponse(
            await self._generating.tokenized(served, detokenize_answer, tokenizer, tokens)
        )

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


def _model_of(body: Any) -> str | None:
    """The model that a checked body asks for."""
    name = body.get("model")
    if name is None or isinstance(name, str):
        return name
    raise ApiError("model is no string: send the name of a model", param="model")


def _entry(served: ServedModel) -> dict[str, Any]:
    return model_entry(served.name, served.created, served.context_length)


def _state(good: bool, word: str, other: str) -> Response:
    return JSONResponse({"status": word if good else other}, 200 if good else 503)
