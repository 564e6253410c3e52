"""The endpoints: OpenAI's, and those that tell how the server is doing."""

from __future__ import annotations

import asyncio
import json
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..engine.grammar import Grammar, Vocabulary
from ..errors import OptionError
from ..generation.options import GenerationOptions
from .errors import ApiError
from .gate import Gate, json_body
from .openai import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    detokenize_answer,
    model_entry,
    models_answer,
    tokenize_answer,
)
from .prompts import (
    ChatPrompt,
    Prompt,
    chat_prompt,
    compiled_constraint,
    completion_prompts,
    is_constrained,
)
from .requests import ChatRequest, parse_chat, parse_completion, parse_detokenize, parse_tokenize
from .requests import Request as ApiRequest
from .status import Gauges, status_of
from .worker import EventStream, GenerationRequest, ServedModel, Worker

_log = logging.getLogger("mlxspec.server")


def create_app(
    worker: Worker,
    *,
    max_tokens: int = 8192,
    hosts: Collection[str] | None = None,
    keys: Sequence[str] = (),
    life_sign: float = 10.0,
    silence: float = 60.0,
) -> Starlette:
    """The ASGI application.

    Args:
        worker: started by the caller, who also stops it.
        max_tokens: of requests that do not say, as far as the context has room.
        hosts, keys: as for :class:`mlxspec.server.gate.Gate`.
        life_sign: seconds of silence in a stream before a comment says that all is well.
        silence: seconds before an answer that is no stream begins with spaces, which say the same.
    """
    api = _Api(worker, max_tokens, life_sign, silence)
    worker.metrics.registry.register(Gauges(worker))
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
    # Starlette raises the error again, at which uvicorn closes the connection.
    return JSONResponse(_FAILED.body, _FAILED.status, {"Connection": "close"})


_FAILED = ApiError("the server has failed; its log says how", status=500)


class _Api:
    def __init__(self, worker: Worker, max_tokens: int, life_sign: float, silence: float) -> None:
        self._worker = worker
        self._max_tokens = max_tokens
        self._life_sign = life_sign
        self._silence = silence
        self._default = next(iter(worker.models.values()))
        # A tokenizer serves one thread at a time.
        self._tokenizing = {name: asyncio.Lock() for name in worker.models}
        # However many schemas come, one at a time takes its second.
        self._compiling = asyncio.Lock()

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

    def _check_length(self, served: ServedModel, param: str, *texts: object) -> None:
        """Refuse what cannot fit into the context, before it takes long to tokenize it.

        Raises:
            ApiError: the texts are too long together.
        """
        length, most = sum(len(str(text)) for text in texts), served.most_characters
        if most is not None and length > most:
            raise ApiError(
                f"{param} has {length:,} characters, which are more than the model's context of "
                f"{served.context_length:,} tokens can hold: shorten it",
                param=param,
                code="context_length_exceeded",
            )

    async def _chat_prompt(self, served: ServedModel, body: ChatRequest) -> ChatPrompt:
        contents = (message["content"] for message in body.messages)
        self._check_length(served, "messages", *contents)
        self._check_length(served, "tools", *body.tools)
        tokenizer = served.decoder.tokenizer
        prompt: ChatPrompt = await self._tokenized(served, chat_prompt, body, tokenizer)
        return prompt

    async def _tokenized(self, served: ServedModel, make: Callable[..., Any], *args: Any) -> Any:
        async with self._tokenizing[served.name]:
            return await run_in_threadpool(make, *args)

    # --- generating ---

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``"""
        body = parse_chat(await json_body(request))
        served = self._served(body.model)
        tokenizer = served.decoder.tokenizer
        prompt = await self._chat_prompt(served, body)
        answer = ChatAnswer(body, served.name, tokenizer, prompt.format)
        stream = await self._submitted(request, served, body, [prompt])
        return await self._answered(request, body, stream, answer)

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``"""
        body = parse_completion(await json_body(request))
        served = self._served(body.model)
        tokenizer = served.decoder.tokenizer
        vocab_size = served.decoder.vocab_size
        for prompt in body.prompts:
            if isinstance(prompt, str):
                self._check_length(served, "prompt", prompt)
            elif served.context_length is not None and len(prompt) > served.context_length:
                raise ApiError(
                    f"prompt has {len(prompt):,} tokens and the model's context "
                    f"{served.context_length:,}: shorten it",
                    param="prompt",
                    code="context_length_exceeded",
                )
        self._check_length(served, "suffix", body.suffix)
        prompts = await self._tokenized(served, completion_prompts, body, tokenizer, vocab_size)
        answer = CompletionAnswer(body, served.name, tokenizer)
        stream = await self._submitted(request, served, body, prompts)
        return await self._answered(request, body, stream, answer)

    async def _submitted(
        self,
        request: Request,
        served: ServedModel,
        body: ApiRequest,
        prompts: Sequence[Prompt],
    ) -> EventStream:
        """Queue ``n`` generations of each prompt."""
        decoder = served.decoder
        prediction: tuple[int, ...] = ()
        if body.prediction:
            self._check_length(served, "prediction", body.prediction)
            encode = partial(decoder.tokenizer.encode, add_special_tokens=False)
            expected = await self._tokenized(served, encode, body.prediction)
            prediction = tuple(expected[: served.context_length])  # no output is longer
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            tokens = tuple(prompt.tokens)  # one for all choices
            grammar = await self._grammar(served, body, prompt)
            for choice in range(body.n):
                options: GenerationOptions = {
                    "sampling": body.sampling.params(
                        decoder.vocab_size, choice, served.special_tokens
                    ),
                    "constraint": grammar,
                    "stop": (*body.stop, *prompt.stop),
                    "stop_tokens": (*body.stop_token_ids, *prompt.stop_tokens),
                }
                requests.append(
                    GenerationRequest(
                        tokens,
                        self._room(served, len(prompt.tokens), body.max_tokens),
                        options,
                        len(requests),
                        prediction,
                        body.logprobs,
                        request.state.partition,
                        "messages" if isinstance(body, ChatRequest) else "prompt",
                    )
                )
        return self._worker.submit(served, requests)

    async def _grammar(
        self, served: ServedModel, body: ApiRequest, prompt: Prompt
    ) -> Grammar | None:
        """What an answer has to be, compiled."""
        if not is_constrained(body):
            return None
        decoder = served.decoder
        tokenizer = decoder.tokenizer
        try:
            vocabulary = await self._tokenized(served, Vocabulary.of, tokenizer, decoder.vocab_size)
        except OptionError as error:
            if body.constraint is None:  # calls of strict tools are as they come
                return None
            raise ApiError(f"{body.constrained_by}: {error}", param=body.constrained_by) from error
        async with self._compiling:
            return await run_in_threadpool(compiled_constraint, body, prompt, tokenizer, vocabulary)

    def _room(self, served: ServedModel, n_prompt: int, max_tokens: int | None) -> int:
        """How many tokens an output may have; a request that does not say takes what there is."""
        if max_tokens is not None:
            return max_tokens
        longest, memory = served.context_length, served.memory
        room = self._max_tokens if longest is None else min(self._max_tokens, longest - n_prompt)
        while room > 1 and memory.bytes_for(n_prompt + room) > memory.limit:
            room //= 2
        return max(1, room)

    async def _answered(
        self, request: Request, body: ApiRequest, stream: EventStream, answer: Answer
    ) -> Response:
        if body.stream:
            return _Streamed(
                _server_sent_events(stream, answer, self._life_sign),
                on_end=stream.close,
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        making = asyncio.create_task(_whole(stream, answer, self._life_sign))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({making, gone}, timeout=self._silence, return_when=FIRST_COMPLETED)
        except asyncio.CancelledError:
            making.cancel()
            raise
        finally:
            left = gone.done()
            gone.cancel()
        if making.done():
            return JSONResponse(making.result())
        if left:
            making.cancel()
            return Response(status_code=499)
        return _Streamed(
            _with_life_signs(making, self._life_sign),
            on_end=making.cancel,
            media_type="application/json",
        )

    # --- telling ---

    async def models(self, request: Request) -> Response:
        """``/v1/models``"""
        return JSONResponse(models_answer([*map(_entry, self._worker.models.values())]))

    async def model(self, request: Request) -> Response:
        """``/v1/models/NAME``"""
        return JSONResponse(_entry(self._served(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        """``/v1/tokenize``"""
        content = await json_body(request)
        body = parse_tokenize(content)
        served = self._served(_model_of(content))
        tokenizer = served.decoder.tokenizer
        if body.chat:
            tokens = (await self._chat_prompt(served, body.chat)).tokens
        else:
            self._check_length(served, "prompt", body.text)
            encode = partial(tokenizer.encode, add_special_tokens=body.add_special_tokens)
            tokens = await self._tokenized(served, encode, body.text)
        return JSONResponse(tokenize_answer(tokens, served.context_length))

    async def detokenize(self, request: Request) -> Response:
        """``/v1/detokenize``"""
        content = await json_body(request)
        tokens = parse_detokenize(content)
        served = self._served(_model_of(content))
        wrong = next((token for token in tokens if token >= served.decoder.vocab_size), None)
        if wrong is not None:
            raise ApiError(
                f"tokens has the id {wrong}: the model's are 0 to {served.decoder.vocab_size - 1}",
                param="tokens",
            )
        tokenizer = served.decoder.tokenizer
        return JSONResponse(await self._tokenized(served, detokenize_answer, tokenizer, tokens))

    async def health(self, request: Request) -> Response:
        """``/health``: whether the worker lives."""
        return _state(self._worker.alive, "ok", "the worker has failed")

    async def ready(self, request: Request) -> Response:
        """``/ready``: whether requests are answered."""
        return _state(self._worker.ready.is_set(), "ready", "not ready")

    async def metrics(self, request: Request) -> Response:
        """``/metrics``, for Prometheus"""
        return Response(self._worker.metrics.text(), media_type="text/plain; version=0.0.4")

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


class _Streamed(StreamingResponse):
    """An answer that is sent in pieces.

    Args:
        content: the pieces.
        on_end: called at its end, even if the client has gone before the first piece was made.
        options: as for ``StreamingResponse``.
    """

    def __init__(
        self, content: AsyncIterator[str], *, on_end: Callable[[], object], **options: Any
    ) -> None:
        super().__init__(content, **options)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _whole(stream: EventStream, answer: Answer, life_sign: float) -> dict[str, Any]:
    """The answer in one piece."""
    async with aclosing(stream.events(life_sign)) as happening:
        async for events in happening:
            answer.feed(events)
            stream.finish(answer.finished)
    return answer.whole()


async def _server_sent_events(
    stream: EventStream, answer: Answer, life_sign: float
) -> AsyncIterator[str]:
    """The chunks of an answer as they come; an error takes the place of what is left."""
    try:
        async with aclosing(stream.events(life_sign)) as happening:
            async for events in happening:
                if not events:
                    yield ": still working\n\n"
                for chunk in answer.feed(events):
                    yield f"data: {json.dumps(chunk)}\n\n"
                stream.finish(answer.finished)
    except Exception as error:
        yield f"data: {json.dumps(_too_late(error))}\n\n"
    yield "data: [DONE]\n\n"


async def _with_life_signs(
    making: asyncio.Task[dict[str, Any]], life_sign: float
) -> AsyncIterator[str]:
    """JSON that takes long: spaces, which belong to no value, say that all is well."""
    while not making.done():
        yield " "
        await asyncio.wait({making}, timeout=life_sign)
    try:
        yield json.dumps(making.result())
    except Exception as error:
        yield json.dumps(_too_late(error))


def _too_late(error: Exception) -> dict[str, Any]:
    """What to send for an error when it is too late for a status."""
    if isinstance(error, ApiError):
        return error.body
    _log.error("an answer has failed", exc_info=error)
    return _FAILED.body


async def _disconnected(request: Request) -> None:
    """Return once the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
