"""From a checked body to the response, by way of the worker's queue, for every API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.grammar import Grammar, Vocabulary
from ..engine.params import SamplingParams
from ..errors import MlxspecError, OptionError
from ..generation.options import GenerationOptions, prompt_ids
from .answer import Answer
from .answering import Silence, answered
from .body import read_body
from .errors import ApiError
from .fields import shown
from .gate import body_of
from .prompts import (
    ChatPrompt,
    Prompt,
    chat_prompt,
    check_length,
    compiled_constraint,
    completion_prompts,
    is_constrained,
)
from .requests import ChatRequest, CompletionRequest, Request
from .served_model import ServedModel
from .served_request import EventStream, ServedRequest
from .worker import Worker

_COMPILING = 4  # requests whose constraints are compiled at a time
_LARGE = 1 << 20  # bytes of a body that others wait for

_Parsed = TypeVar("_Parsed")


class Generating:
    """Turns checked bodies into generations, and these into responses.

    Args:
        worker: runs them.
        max_tokens: of requests that do not say, as far as the context has room.
        silence: when keep-alives are sent.

    Attributes:
        models: by their names.
    """

    def __init__(self, worker: Worker, max_tokens: int, silence: Silence) -> None:
        self._worker = worker
        self._max_tokens = max_tokens
        self._silence = silence
        self.models = worker.models
        # Large bodies are read one at a time: each may take a second and some 100 MB.
        self._reading = asyncio.Lock()
        self._default = next(iter(worker.models.values()))
        # A tokenizer serves one thread at a time.
        self._tokenizing = {name: asyncio.Lock() for name in worker.models}
        # So that a few slow ones hold up no others, and many do not take all threads.
        self._compiling = asyncio.Semaphore(_COMPILING)

    def served(self, name: str | None) -> ServedModel:
        """The model of this name, or the default for None.

        Raises:
            ApiError: 404, there is none.
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

    async def read(self, request: HttpRequest, parse: Callable[[Any], _Parsed]) -> _Parsed:
        """Read a body and parse its JSON, in a thread beside the event loop.

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
        """Call a function that uses a model's tokenizer, in a thread beside the event loop."""
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

    async def completion_prompts(
        self, served: ServedModel, body: CompletionRequest
    ) -> list[Prompt]:
        """The prompts of a request for completions.

        Raises:
            ApiError: as :func:`mlxspec.server.prompts.completion_prompts`, or one is too long.
        """
        decoder = served.decoder
        prompts: list[Prompt] = await self.tokenized(
            *(served, completion_prompts, body, decoder.tokenizer, decoder.vocab_size),
            served.context_length,
        )
        return prompts

    async def respond(
        self,
        request: HttpRequest,
        served: ServedModel,
        body: Request,
        prompts: Sequence[Prompt],
        answer: Answer,
    ) -> Response:
        """Queue ``n`` generations of each prompt, and answer with what comes of them.

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
        stream = await self._submitted(served, body, prompts, request.state.partition)
        return await answered(request, stream, answer, body.stream, self._silence)

    async def _submitted(
        self, served: ServedModel, body: Request, prompts: Sequence[Prompt], partition: str
    ) -> EventStream:
        """Queue ``n`` generations of each prompt, with the prefixes and answers of a partition."""
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
        samplings = await run_in_threadpool(_samplings, served, body)
        requests: list[ServedRequest] = []
        shared = {"prediction": prediction, "top_logprobs": body.logprobs, "partition": partition}
        for prompt in prompts:
            max_tokens = self._max_tokens_of(served, len(prompt.tokens), body)
            served.check_fits(len(prompt.tokens), max_tokens, body.param)
            grammar = await self._grammar(served, body, prompt)
            options: list[GenerationOptions] = [
                {
                    "sampling": sampling,
                    "constraint": grammar,
                    "stop": (*body.stop, *prompt.stop),
                    "stop_tokens": (*body.stop_token_ids, *prompt.stop_tokens),
                }
                for sampling in samplings
            ]
            args = served, prompt.tokens, max_tokens, options, len(requests), shared
            requests += await run_in_threadpool(_choices, *args)
        return self._worker.submit(served, requests)

    async def _grammar(self, served: ServedModel, body: Request, prompt: Prompt) -> Grammar | None:
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

    def _max_tokens_of(self, served: ServedModel, n_prompt: int, body: Request) -> int:
        """How many tokens an output may have: what the request asks for, or as many as fit."""
        longest, memory = served.context_length, served.memory
        if longest is not None and n_prompt >= longest:
            raise ApiError(
                # Claude Code reads both numbers out of it, and shortens the conversation.
                f"the prompt is too long: {n_prompt} tokens > {longest}, which is the model's "
                "context: shorten it",
                param=body.param,
                code="context_length_exceeded",
            )
        if body.max_tokens is not None and not body.cuts_max_tokens:
            return body.max_tokens
        room = self._max_tokens if body.max_tokens is None else body.max_tokens
        if longest is not None:
            room = min(room, longest - n_prompt)
        while room > 1 and memory.bytes_for(n_prompt + room) > memory.limit:
            room //= 2
        return room


def _samplings(served: ServedModel, body: Request) -> list[SamplingParams]:
    """The sampling parameters of each of a prompt's choices."""
    vocab_size, special = served.decoder.vocab_size, served.special_tokens
    return [body.sampling.params(vocab_size, choice, special) for choice in range(body.n)]


def _choices(
    served: ServedModel,
    prompt: Sequence[int],
    max_tokens: int,
    options: Sequence[GenerationOptions],
    first: int,
    shared: Mapping[str, Any],
) -> list[ServedRequest]:
    """The requests for a prompt's choices, of which the first has the index ``first``.

    Raises:
        ApiError: a token or an option is out of range.
    """
    decoder, longest = served.decoder, served.context_length
    try:
        # One tuple for all of them, by which the log knows that they share it.
        tokens = tuple(prompt_ids(prompt, decoder.tokenizer, decoder.vocab_size, longest))
        return [
            ServedRequest(served, tokens, max_tokens, one, index=index, **shared)
            for index, one in enumerate(options, start=first)
        ]
    except MlxspecError as error:
        raise ApiError(str(error)) from error
