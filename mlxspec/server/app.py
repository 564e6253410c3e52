"""The ASGI application: the routes of all three APIs."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.grammar import Grammar, Vocabulary
from ..errors import OptionError, printable
from ..generation.options import GenerationOptions
from .answer import ApiAnswer
from .api_body import ApiBody, check_ids
from .auth import AuthMiddleware
from .body import (
    MOST_BYTES,
    ApiError,
    body_of,
    decoded,
    error_response,
    parse,
    read_body,
    shown,
    stated_length,
)
from .catalog import Catalog, Entry, keeping_models
from .messages import MessagesAnswer, MessagesBody, messages_headers
from .openai import (
    ChatAnswer,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    DetokenizeBody,
    detokenized,
    parse_tokenize,
)
from .prompts import Prompt, chat_prompt, completion_prompts, text_ids
from .responses import ResponsesAnswer, ResponsesBody, ResponseStore, parse_responses
from .sending import FAILED, answered, kept_alive
from .served_model import ServedModel
from .status import status_routes
from .worker import ServedRequest


def create_app(
    catalog: Catalog,
    *,
    max_tokens: int = 8192,
    hosts: Collection[str] | None = None,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    strict_model_names: bool = False,
    keep_alive: float = 10.0,
    on_refusal: Callable[[str, ApiError], object] = lambda path, error: None,
) -> Starlette:
    """The ASGI application.

    Args:
        max_tokens: the default ``max_tokens`` of requests, limited by the context.
        hosts, keys, origins: as for :class:`mlxspec.server.auth.AuthMiddleware`.
        on_refusal: called with the path and the error of each refused request.
        strict_model_names: whether an unknown model name is always an error; see
            :meth:`.Catalog.named`.
        keep_alive: seconds without data after which a stream sends a keep-alive.
    """

    async def refused(request: Request, error: Exception) -> Response:
        refusal = error if isinstance(error, ApiError) else _wrong_path(request, error)
        # Requests whose generations have begun are logged when these end.
        if not getattr(request.state, "answered", False):
            on_refusal(request.url.path, refusal)
        return error_response(refusal, request.url.path)

    endpoints = Endpoints(catalog, max_tokens, keep_alive, strict_model_names, on_refusal)
    guarded = Mount(
        "",
        routes=[*endpoints.routes(), *status_routes(catalog)],
        middleware=[
            Middleware(AuthMiddleware, hosts=hosts, keys=keys, origins=origins),
            Middleware(keeping_models),
        ],
    )
    outer = [Middleware(_with_single_slashes)]
    if origins:
        sharing = Middleware(
            _Sharing,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,  # Chrome asks whether a page may use a server on loopback
        )
        outer.insert(0, sharing)
    return Starlette(
        routes=[guarded],
        middleware=outer,
        lifespan=catalog.running,
        exception_handlers={ApiError: refused, HTTPException: refused, Exception: _server_error},
    )


class _Sharing(CORSMiddleware):
    """CORS headers for allowed origins; :class:`AuthMiddleware` refuses others, with a reason."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = scope["type"] == "http" and Headers(scope=scope).get("origin")
        allowed = origin and self.is_allowed_origin(origin)
        await (super().__call__ if allowed else self.app)(scope, receive, send)


_SLASHES = re.compile(r"(?<!^/v1/models)//+")


def _with_single_slashes(app: ASGIApp) -> ASGIApp:
    """ASGI middleware: accepts the paths of clients whose base URL ends with a slash.

    A model's name, which may be a path, stays as it is.
    """

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": _SLASHES.sub("/", scope["path"])}
        await app(scope, receive, send)

    return served


def _wrong_path(request: Request, error: Exception) -> ApiError:
    assert isinstance(error, HTTPException)
    path, headers = printable(request.url.path), dict(error.headers or {})
    message = f"this server has no such path: use {_PATHS}"
    if error.status_code == 405:
        allowed = " or ".join(sorted(headers["Allow"].split(", ")))
        message = f"this server allows no {request.method} here: send {allowed}"
    return ApiError(f"{path}: {message}", status=error.status_code, headers=headers)


_PATHS = "/v1/chat/completions, /v1/completions, /v1/messages or /v1/responses"


async def _server_error(request: Request, error: Exception) -> Response:
    # Starlette raises the error again, and uvicorn then closes the connection.
    failed = ApiError(FAILED.message, status=FAILED.status, headers={"Connection": "close"})
    return error_response(failed, request.url.path)


# --- the three APIs ---

_COMPILING = 4  # the most constraints that are compiled at the same time
_SLOW = 1 << 18  # bytes; only one larger body at a time is parsed, since that delays the event loop
# Bodies that are being read, or wait to be parsed, must not fill the memory: by their size in
# bytes, the most at the same time. Others are not read meanwhile.
_BODIES = {1 << 16: 1 << 16, 1 << 20: 128, MOST_BYTES: 4}
_ARRIVAL = 30.0  # seconds in which a body should arrive; then it gives way if no place is free

_Result = TypeVar("_Result")
_Chat = TypeVar("_Chat", bound=ApiBody)


async def _held(lock: asyncio.Lock | asyncio.Semaphore, make: Callable[[], _Result]) -> _Result:
    """Call a function in a thread, and hold a lock until it returns.

    If the client leaves, the thread goes on, and so does the lock.
    """

    async def run() -> _Result:
        async with lock:
            return await run_in_threadpool(make)

    return await asyncio.shield(asyncio.create_task(run()))


async def _arrived(request: Request, others_wait: Callable[[], bool]) -> bytearray:
    """Read a body. Raises ApiError if it arrives slowly, and others wait for its place."""
    reading = asyncio.create_task(body_of(request))
    try:
        while not (await asyncio.wait({reading}, timeout=_ARRIVAL))[0]:
            if others_wait():
                raise ApiError(
                    "the body arrives too slowly, and others wait for it: send it again",
                    status=408,
                    headers={"Connection": "close"},
                )
        return reading.result()
    finally:
        reading.cancel()


@dataclass
class Endpoints:
    """The endpoints of the three APIs.

    Attributes:
        catalog: the models that requests may name, with the worker that runs them.
        max_tokens: the default ``max_tokens`` of requests, limited by the context.
        keep_alive: seconds without data after which a stream sends a keep-alive.
        strict: whether an unknown model name is always an error.
        on_refusal: called with the path and the error of each request that is refused after its
            stream has begun.
    """

    catalog: Catalog
    max_tokens: int
    keep_alive: float
    strict: bool = False
    on_refusal: Callable[[str, ApiError], object] = lambda path, error: None

    def __post_init__(self) -> None:
        self._worker = self.catalog.worker
        self._created = int(time.time())
        # Only one thread at a time may use a tokenizer.
        self._tokenizing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Slow work must not occupy all threads.
        self._compiling = asyncio.Semaphore(_COMPILING)
        self._parsing = asyncio.Lock()
        self._bodies = {size: asyncio.Semaphore(limit) for size, limit in _BODIES.items()}
        self._sent = Counter[int]()  # bodies of each size that are being read or wait to be read
        self._responses = ResponseStore()

    def routes(self) -> list[Route]:
        """The routes of all endpoints."""
        post = ["POST"]
        return [
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/completions", self.complete, methods=post),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.show_model),
            Route("/v1/tokenize", self.tokenize, methods=post),
            Route("/v1/detokenize", self.detokenize, methods=post),
            Route("/v1/responses", self.create_response, methods=post),
            Route("/v1/responses/input_tokens", self.count_input, methods=post),
            Route("/v1/responses/{id}", self.stored_response, methods=["GET", "DELETE"]),
            Route("/v1/messages", self.message, methods=post),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=post),
        ]

    # --- OpenAI's API ---

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``"""
        body = await self.read(request, partial(parse, ChatBody))
        return await self._answer(request, body, partial(ChatAnswer, body), self._chat_prompts)

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``"""
        body = await self.read(request, partial(parse, CompletionBody))
        return await self._answer(request, body, partial(CompletionAnswer, body), self._prompts)

    async def list_models(self, request: Request) -> Response:
        """``/v1/models``"""
        await self.catalog.look()
        entries = [*map(self._entry, self.catalog.entries)]
        return JSONResponse({"object": "list", "data": entries})

    async def show_model(self, request: Request) -> Response:
        """``/v1/models/NAME``"""
        return JSONResponse(self._entry(await self.catalog.named(request.path_params["name"])))

    def _entry(self, entry: Entry) -> dict[str, Any]:
        """A model as JSON, with its context length under both names that clients use."""
        fields = {"id": entry.name, "object": "model", "created": self._created}
        fields |= {"owned_by": "mlxspec", "state": entry.state}
        if (length := entry.context_length) is None:
            return fields
        return fields | {"context_length": length, "max_model_len": length}

    async def tokenize(self, request: Request) -> Response:
        """``/v1/tokenize``"""
        body = await self.read(request, parse_tokenize)
        served = await self._served(request, body.model)
        if isinstance(body, ChatBody):
            tokens = (await self._chat_prompt(served, body)).tokens
        else:
            tokens = await self._ids(served, body.prompt, "prompt", body.add_special_tokens)
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": served.context_length}
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """``/v1/detokenize``"""
        body = await self.read(request, partial(parse, DetokenizeBody))
        served = await self._served(request, body.model)
        check_ids(body.tokens, served.decoder.loaded.vocab_size, "tokens")
        make = partial(detokenized, served.decoder.tokenizer, body.tokens)
        return JSONResponse({"prompt": await self._tokenized(served, make)})

    # --- OpenAI's Responses API ---

    async def create_response(self, request: Request) -> Response:
        """``/v1/responses``"""
        body = await self.read(request, self._response_parser(request))
        keep = partial(self._responses.put, request.state.key)
        make = partial(ResponsesAnswer, body, keep=keep)
        return await self._answer(request, body, make, self._chat_prompts)

    async def count_input(self, request: Request) -> Response:
        """``/v1/responses/input_tokens``"""
        _, _, prompt = await self._read_chat(request, self._response_parser(request))
        count = len(prompt.tokens)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def stored_response(self, request: Request) -> Response:
        """``/v1/responses/ID``, to show or to delete it"""
        response = self._stored(request)
        if request.method != "DELETE":
            return JSONResponse(response)
        self._responses.delete(request.state.key, response["id"])
        return JSONResponse({"id": response["id"], "object": "response", "deleted": True})

    def _response_parser(self, request: Request) -> Callable[[Any], ResponsesBody]:
        find = partial(self._responses.response, request.state.key)
        return partial(parse_responses, find=find)

    def _stored(self, request: Request) -> dict[str, Any]:
        """The stored response that the path names."""
        response_id = request.path_params["id"]
        stored = self._responses.response(request.state.key, response_id)
        if stored is None:
            raise ApiError(
                f"no response {shown(response_id)} is stored: create it again",
                status=404,
                param="response_id",
            )
        return stored[0]

    # --- Anthropic's Messages API ---

    async def message(self, request: Request) -> Response:
        """``/v1/messages``"""
        body = await self.read(request, partial(parse, MessagesBody))
        return await self._answer(request, body, partial(MessagesAnswer, body), self._chat_prompts)

    async def count_tokens(self, request: Request) -> Response:
        """``/v1/messages/count_tokens``"""
        _, served, prompt = await self._read_chat(request, partial(parse, MessagesBody))
        headers = messages_headers(served.name)
        return JSONResponse({"input_tokens": len(prompt.tokens)}, headers=headers)

    # --- from a body to a response ---

    async def read(self, request: Request, parse: Callable[[Any], _Result]) -> _Result:
        """Read a body and parse its JSON, in a thread outside the event loop.

        Raises:
            ApiError: the body is not JSON, is too large or has an unknown encoding, or ``parse``
                refuses it.
        """
        length = stated_length(request)
        size = next(size for size in _BODIES if length <= size)
        self._sent[size] += 1
        try:
            async with self._bodies[size]:
                data = await _arrived(request, lambda: self._sent[size] > _BODIES[size])
                slow = len(data) > _SLOW or "content-encoding" in request.headers
                async with self._parsing if slow else nullcontext():
                    return await run_in_threadpool(lambda: parse(read_body(decoded(request, data))))
        finally:
            self._sent[size] -= 1

    async def _read_chat(
        self, request: Request, parse: Callable[[Any], _Chat]
    ) -> tuple[_Chat, ServedModel, Prompt]:
        """Read a conversation; return it with its model and its prompt."""
        body = await self.read(request, parse)
        served = await self._served(request, body.model)
        return body, served, await self._chat_prompt(served, body)

    async def _answer(
        self,
        request: Request,
        body: _Chat,
        make_answer: Callable[[str], ApiAnswer],
        read_prompts: Callable[[ServedModel, _Chat], Awaitable[list[Prompt]]],
    ) -> Response:
        """Respond to a body once its model is loaded; a stream is kept alive until then.

        Args:
            make_answer: makes the answer, given the model's name.
        """
        entry = await self.catalog.named(body.model or None, self.strict)
        answer = make_answer(entry.name)

        async def respond() -> Response:
            served = await self.catalog.use(entry, request.state.uses)
            prompts = await read_prompts(served, body)
            read = partial(answer.read_with, served.decoder.tokenizer, prompts[0].format)
            await self._tokenized(served, read)
            return await self._respond(request, served, body, prompts, answer)

        if not body.stream or entry.state == "loaded":
            return await respond()

        on_refusal = partial(self.on_refusal, request.url.path)
        return await kept_alive(request, respond(), answer, self.keep_alive, on_refusal)

    async def _chat_prompts(self, served: ServedModel, body: ApiBody) -> list[Prompt]:
        return [await self._chat_prompt(served, body)]

    async def _prompts(self, served: ServedModel, body: CompletionBody) -> list[Prompt]:
        tokenizer, longest = served.decoder.tokenizer, served.context_length
        return await self._tokenized(served, partial(completion_prompts, body, tokenizer, longest))

    async def _served(self, request: Request, name: str | None) -> ServedModel:
        """The model that answers a request for this name, loaded until the response is sent.

        Raises as :meth:`.Catalog.named` and :meth:`.Catalog.use` do.
        """
        entry = await self.catalog.named(name or None, self.strict)
        return await self.catalog.use(entry, request.state.uses)

    async def _tokenized(self, served: ServedModel, make: Callable[[], _Result]) -> _Result:
        """Call a function that uses a model's tokenizer, in a thread outside the event loop."""
        return await _held(self._tokenizing[served.name], make)

    async def _chat_prompt(self, served: ServedModel, body: ApiBody) -> Prompt:
        longest, arguments = served.context_length, served.template_arguments
        make = partial(chat_prompt, body, served.decoder.tokenizer, longest, arguments)
        return await self._tokenized(served, make)

    async def _ids(
        self, served: ServedModel, text: str, param: str, special: bool = False
    ) -> list[int]:
        tokenizer, longest = served.decoder.tokenizer, served.context_length
        return await self._tokenized(
            served, partial(text_ids, text, param, tokenizer, longest, special)
        )

    async def _respond(
        self,
        request: Request,
        served: ServedModel,
        body: ApiBody,
        prompts: Sequence[Prompt],
        answer: ApiAnswer,
    ) -> Response:
        """Queue ``n`` generations for each prompt, and answer with their results."""
        self._worker.check_queue(served, len(prompts) * body.n)  # before any request is made
        prediction: Sequence[int] = ()
        if text := body.prediction.content:  # a hint, which not all kinds of drafting use
            expected = await self._ids(served, text, "prediction")
            prediction = expected[: served.context_length]  # no output can be longer
        make = partial(
            ServedRequest,
            served,
            prediction=prediction,
            top_logprobs=body.top,
            key=request.state.key,
        )
        requests: list[ServedRequest] = []
        for prompt in prompts:
            requests += await self._choices(served, body, prompt, make)
        stream = self._worker.submit(served, requests)
        return await answered(request, stream, answer, body.stream, self.keep_alive)

    async def _choices(
        self,
        served: ServedModel,
        body: ApiBody,
        prompt: Prompt,
        make: Callable[..., ServedRequest],
    ) -> list[ServedRequest]:
        """The requests for a prompt's choices, which ``make`` makes."""
        tokens = tuple(prompt.tokens)  # all choices share it
        sent = {"logit_bias": body.logit_bias, "stop_token_ids": body.stop_token_ids}
        for param, ids in {body.param: tokens, **sent}.items():
            check_ids(ids, served.decoder.loaded.vocab_size, param, served.decoder.tokenizer)
        if not tokens:
            raise ApiError(f"{body.param} has no tokens: send a text.", param=body.param)
        for answer in (body.max_tokens or 1, 1):  # the second if the first could never fit
            length = len(tokens) + answer
            length = min(length, served.context_length or length)
            await self.catalog.make_room_for(served.memory.needs(length))
        max_tokens = self._worker.memory.max_tokens_for(served, len(tokens), body, self.max_tokens)
        grammar = await self._grammar(served, body, prompt)

        def made(choice: int) -> ServedRequest:
            options: GenerationOptions = {
                "constraint": grammar,
                "stop": body.stop,
                "stop_tokens": (*body.stop_token_ids, *prompt.stop_tokens),
                "sampling": body.sampling(choice, served.special_tokens),
            }
            return make(tokens, max_tokens, options)

        try:
            return await run_in_threadpool(lambda: [*map(made, range(body.n))])
        except OptionError as error:
            raise ApiError(str(error)) from error

    async def _grammar(self, served: ServedModel, body: ApiBody, prompt: Prompt) -> Grammar | None:
        """The compiled constraint of an answer; None if it has none."""
        if prompt.constraint is None:
            return None
        vocabulary, decoder = None, served.decoder
        try:
            make = partial(Vocabulary.of, decoder.tokenizer, decoder.loaded.vocab_size)
            vocabulary = await self._tokenized(served, make)
            return await _held(self._compiling, partial(Grammar, prompt.constraint, vocabulary))
        except OptionError as error:
            if vocabulary is None and not body.constraint and not body.forced_tool:
                return None  # tools work without it, though their schemas are not enforced
            param = body.format_param if body.constraint else "tools"
            raise ApiError(f"{param}: {error}.", param=param) from error
