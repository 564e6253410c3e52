"""The endpoints of all APIs: from a body, by way of the worker's queue, to the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar, cast

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..engine.grammar import Grammar, Vocabulary
from ..errors import OptionError
from ..generation.options import GenerationOptions
from .answer import ApiAnswer, KeepAlive, answered
from .auth import body_of
from .body import ApiError, new_request_id, parse, read_body, shown
from .messages import MessagesAnswer, messages_headers, parse_messages
from .openai import (
    ChatAnswer,
    CompletionAnswer,
    DetokenizeBody,
    detokenized,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from .prompts import (
    ChatPrompt,
    Prompt,
    chat_prompt,
    check_length,
    compiled_constraint,
    completion_prompts,
    is_constrained,
)
from .requests import ApiRequest, ChatRequest, check_ids
from .responses import (
    ResponsesAnswer,
    ResponsesRequest,
    ResponseStore,
    StoredResponse,
    input_items_answer,
    parse_responses,
)
from .served_model import ServedModel
from .worker import ServedRequest, Worker

_COMPILING = 4  # requests whose constraints are compiled at a time
_LARGE = 1 << 20  # bytes of a body that others wait for

_Parsed = TypeVar("_Parsed")


class Endpoints:
    """Answers requests to the paths of the three APIs.

    Args:
        worker: runs them.
        max_tokens: the default of requests, within the context's room.
        keep_alive: when keep-alives are sent.

    Attributes:
        models: by their names.
        routes: the paths, and what answers them.
    """

    def __init__(self, worker: Worker, max_tokens: int, keep_alive: KeepAlive) -> None:
        self._worker = worker
        self._max_tokens = max_tokens
        self._keep_alive = keep_alive
        self.models = worker.models
        # Large bodies are read one at a time: each may take a second and some 100 MB.
        self._reading = asyncio.Lock()
        self._default = next(iter(worker.models.values()))
        # A tokenizer serves one thread at a time.
        self._tokenizing = {name: asyncio.Lock() for name in worker.models}
        # So that a few slow ones hold up no others, and many do not take all threads.
        self._compiling = asyncio.Semaphore(_COMPILING)
        self._responses = ResponseStore()
        post = ["POST"]
        self.routes = [
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/completions", self.complete, methods=post),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.show_model),
            Route("/v1/tokenize", self.tokenize, methods=post),
            Route("/v1/detokenize", self.detokenize, methods=post),
            Route("/v1/responses", self.create_response, methods=post),
            Route("/v1/responses/input_tokens", self.count_input, methods=post),
            Route("/v1/responses/{id}", self.show_response),
            Route("/v1/responses/{id}", self.delete_response, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self.cancel_response, methods=post),
            Route("/v1/responses/{id}/input_items", self.input_items),
            Route("/v1/messages", self.message, methods=post),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=post),
        ]

    def served(self, name: str | None) -> ServedModel:
        """The model of this name, or the default for None.

        Raises:
            ApiError: 404, it does not exist.
        """
        if name is None:
            return self._default
        by_path = (one for one in self.models.values() if one.path == name)
        served = self.models.get(name) or next(by_path, None)
        if served is None:
            known = ", ".join(self.models)
            raise ApiError(
                f"there is no model {shown(name)} here: ask for {known}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return served

    async def read(self, request: Request, parse: Callable[[Any], _Parsed]) -> _Parsed:
        """Read a body and parse its JSON, in a thread outside the event loop.

        Args:
            request: whose body it is.
            parse: makes the result of the JSON value.

        Raises:
            ApiError: the body is not JSON or is out of bounds, or ``parse`` raises it.
        """
        data = await body_of(request)
        async with self._reading if len(data) > _LARGE else nullcontext():
            return await run_in_threadpool(lambda: parse(read_body(data)))

    async def tokenized(self, served: ServedModel, make: Callable[..., Any], *args: Any) -> Any:
        """Call a function that uses a model's tokenizer, in a thread outside the event loop."""
        async with self._tokenizing[served.name]:
            return await run_in_threadpool(make, *args)

    async def ids(
        self, served: ServedModel, text: str, param: str, add_special_tokens: bool = False
    ) -> list[int]:
        """The token ids of a text.

        Raises:
            ApiError: it is too long.
        """
        tokenizer = served.decoder.tokenizer

        def encoded() -> list[int]:
            check_length(text, param, tokenizer, served.context_length)
            return cast(list[int], tokenizer.encode(text, add_special_tokens=add_special_tokens))

        ids: list[int] = await self.tokenized(served, encoded)
        return ids

    async def chat_prompt(self, served: ServedModel, body: ChatRequest) -> ChatPrompt:
        """A conversation as the model is given it.

        Raises:
            ApiError: it is too long, or the model's template does not take it.
        """
        tokenizer = served.decoder.tokenizer
        prompt: ChatPrompt = await self.tokenized(
            *(served, chat_prompt, body, tokenizer),
            *(served.context_length, served.template_arguments),
        )
        return prompt

    async def respond(
        self,
        request: Request,
        served: ServedModel,
        body: ApiRequest,
        prompts: Sequence[Prompt],
        answer: ApiAnswer,
    ) -> Response:
        """Queue ``n`` generations of each prompt, and answer with their results.

        Args:
            request: whose client waits.
            served: the model.
            body: of the request.
            prompts: made of it.
            answer: in the form of the API.

        Raises:
            ApiError: an option is out of range, a prompt is too long, the queue is full, or a
                generation has failed before anything was sent.
        """
        prediction: tuple[int, ...] = ()
        if body.prediction:
            if not served.predicts:
                raise ApiError(
                    f"prediction: {served.name} is served with one kind of drafts, which are not "
                    "from what clients expect; leave it out, or serve it without --decoder",
                    param="prediction",
                )
            expected = await self.ids(served, body.prediction, "prediction")
            prediction = tuple(expected[: served.context_length])  # no output is longer
        requests: list[ServedRequest] = []
        for prompt in prompts:
            max_tokens = served.max_tokens_for(len(prompt.tokens), body, self._max_tokens)
            grammar = await self._grammar(served, body, prompt)
            make = partial(
                _choices, served, body, prompt, grammar, partition=request.state.partition
            )
            shared = {"max_tokens": max_tokens, "first": len(requests), "prediction": prediction}
            requests += await run_in_threadpool(make, **shared)
        stream = self._worker.submit(served, requests)
        return await answered(request, stream, answer, body.stream, self._keep_alive)

    async def _grammar(
        self, served: ServedModel, body: ApiRequest, prompt: Prompt
    ) -> Grammar | None:
        """What an answer has to be, compiled."""
        if not is_constrained(body):
            return None
        decoder = served.decoder
        tokenizer = decoder.tokenizer
        try:
            vocabulary = await self.tokenized(served, Vocabulary.of, tokenizer, decoder.vocab_size)
        except OptionError as error:
            if body.constraint is None:  # calls of strict tools are as they come
                return None
            raise ApiError(f"{body.constrained_by}: {error}", param=body.constrained_by) from error
        async with self._compiling:
            return await run_in_threadpool(compiled_constraint, body, prompt, tokenizer, vocabulary)

    # --- OpenAI's API ---

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``"""
        body = await self.read(request, parse_chat)
        served = self.served(body.model)
        prompt = await self.chat_prompt(served, body)
        answer = ChatAnswer(body, served.name, served.decoder.tokenizer, prompt.format)
        return await self.respond(request, served, body, [prompt], answer)

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``"""
        body = await self.read(request, parse_completion)
        served = self.served(body.model)
        decoder, longest = served.decoder, served.context_length
        prompts: list[Prompt] = await self.tokenized(
            *(served, completion_prompts, body, decoder.tokenizer, decoder.vocab_size, longest)
        )
        answer = await self.tokenized(  # which may echo token ids as a text
            *(served, CompletionAnswer, body, served.name, decoder.tokenizer)
        )
        return await self.respond(request, served, body, prompts, answer)

    async def list_models(self, request: Request) -> Response:
        """``/v1/models``"""
        entries = [*map(_entry, self.models.values())]
        return JSONResponse({"object": "list", "data": entries})

    async def show_model(self, request: Request) -> Response:
        """``/v1/models/NAME``"""
        return JSONResponse(_entry(self.served(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        """``/v1/tokenize``"""
        body, chat = await self.read(request, parse_tokenize)
        served = self.served(body.model)
        if chat:
            tokens = (await self.chat_prompt(served, chat)).tokens
        else:
            tokens = await self.ids(served, body.text or "", "prompt", body.add_special_tokens)
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": served.context_length}
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """``/v1/detokenize``"""
        body = await self.read(request, partial(parse, DetokenizeBody))
        served = self.served(body.model)
        check_ids(body.tokens, served.decoder.vocab_size, "tokens")
        tokenizer = served.decoder.tokenizer
        text = await self.tokenized(served, detokenized, tokenizer, body.tokens)
        return JSONResponse({"prompt": text})

    # --- OpenAI's Responses API ---

    async def create_response(self, request: Request) -> Response:
        """``/v1/responses``"""
        body = await self._parsed(request)
        served = self.served(body.model)
        prompt = await self.chat_prompt(served, body)
        keep = partial(self._responses.put, request.state.partition)
        tokenizer = served.decoder.tokenizer
        answer = ResponsesAnswer(body, served.name, tokenizer, prompt.format, keep)
        return await self.respond(request, served, body, [prompt], answer)

    async def count_input(self, request: Request) -> Response:
        """``/v1/responses/input_tokens``"""
        body = await self._parsed(request)
        served = self.served(body.model)
        count = len((await self.chat_prompt(served, body)).tokens)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def show_response(self, request: Request) -> Response:
        """``/v1/responses/ID``"""
        if request.query_params.get("stream") == "true":
            raise ApiError(
                "stream: a kept response is sent as a whole; leave it out", param="stream"
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

    async def _parsed(self, request: Request) -> ResponsesRequest:
        read = partial(parse_responses, store=self._responses, partition=request.state.partition)
        return await self.read(request, read)

    def _kept(self, request: Request) -> StoredResponse:
        """The response of the path.

        Raises:
            ApiError: 404, it does not exist.
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

    # --- Anthropic's Messages API ---

    async def message(self, request: Request) -> Response:
        """``/v1/messages``"""
        body = await self.read(request, parse_messages)
        served = self._served_for(body)
        prompt = await self.chat_prompt(served, body)
        answer = MessagesAnswer(body, served.name, prompt.format)
        return await self.respond(request, served, body, [prompt], answer)

    async def count_tokens(self, request: Request) -> Response:
        """``/v1/messages/count_tokens``"""
        body = await self.read(request, partial(parse_messages, to_count=True))
        served = self._served_for(body)
        count = len((await self.chat_prompt(served, body)).tokens)
        headers = messages_headers(served.name, new_request_id())
        return JSONResponse({"input_tokens": count}, headers=headers)

    def _served_for(self, body: ChatRequest) -> ServedModel:
        """The model of a request; the default one stands in for those of Anthropic."""
        name = body.model
        if name and name.startswith("claude-") and name not in self.models:
            name = None
        return self.served(name)


def _choices(
    served: ServedModel,
    body: ApiRequest,
    prompt: Prompt,
    grammar: Grammar | None,
    *,
    max_tokens: int,
    first: int,
    prediction: Sequence[int],
    partition: str,
) -> list[ServedRequest]:
    """The requests for a prompt's choices; the first one has the index ``first``.

    Raises:
        ApiError: a token or an option is out of range.
    """
    vocab_size, tokens = served.decoder.vocab_size, tuple(prompt.tokens)
    check_ids(tokens, vocab_size, body.param)
    if not tokens:
        raise ApiError(f"{body.param} gives no token: send a text.", param=body.param)
    options: GenerationOptions = {
        "constraint": grammar,
        "stop": (*body.stop, *prompt.stop),
        "stop_tokens": (*body.stop_token_ids, *prompt.stop_tokens),
    }
    samplings = [
        body.sampling.params(vocab_size, choice, served.special_tokens) for choice in range(body.n)
    ]
    try:
        return [
            ServedRequest(
                *(served, tokens, max_tokens),
                {**options, "sampling": sampling},
                index=index,
                prediction=prediction,
                top_logprobs=body.logprobs,
                partition=partition,
            )
            for index, sampling in enumerate(samplings, start=first)
        ]
    except OptionError as error:
        raise ApiError(str(error)) from error


def _entry(served: ServedModel) -> dict[str, Any]:
    """A model of ``/v1/models``; its context has the two names that clients look for."""
    entry = {"id": served.name, "object": "model", "created": served.created}
    entry["owned_by"] = "mlxspec"
    if (length := served.context_length) is None:
        return entry
    return entry | {"context_length": length, "max_model_len": length}
