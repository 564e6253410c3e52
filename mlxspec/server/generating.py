"""From a checked body to the response, by way of the worker's queue, for every API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.grammar import Grammar, Vocabulary
from ..errors import OptionError
from ..generation.options import GenerationOptions
from .answer import Answer
from .answering import Silence, answered
from .errors import ApiError
from .fields import shown
from .prompts import (
    ChatPrompt,
    Prompt,
    chat_prompt,
    compiled_constraint,
    completion_prompts,
    is_constrained,
)
from .requests import ChatRequest, CompletionRequest, Request
from .served_model import ServedModel
from .tickets import EventStream, GenerationRequest
from .worker import Worker


class Generating:
    """Makes generations of requests.

    Args:
        worker: runs them.
        max_tokens: of requests that do not say, as far as the context has room.
        silence: how long clients hear nothing.

    Attributes:
        models: by their names.
    """

    def __init__(self, worker: Worker, max_tokens: int, silence: Silence) -> None:
        self._worker = worker
        self._max_tokens = max_tokens
        self._silence = silence
        self.models = worker.models
        self._default = next(iter(worker.models.values()))
        # A tokenizer serves one thread at a time.
        self._tokenizing = {name: asyncio.Lock() for name in worker.models}
        # However many schemas come, one at a time takes its second.
        self._compiling = asyncio.Lock()

    def served(self, name: str | None) -> ServedModel:
        """The model of this name, or the default for None.

        Raises:
            ApiError: 404, there is none.
        """
        if name is None:
            return self._default
        served = self.models.get(name)
        if served is None:
            known = ", ".join(self.models)
            raise ApiError(
                f"there is no model {shown(name)} here: ask for {known}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return served

    def check_length(self, served: ServedModel, param: str, *texts: object) -> None:
        """Refuse what cannot fit into the context, before it takes long to tokenize it.

        Raises:
            ApiError: the texts are too long together.
        """
        length, most = sum(len(str(text)) for text in texts), served.most_characters
        if most is not None and length > most:
            raise ApiError(
                f"the prompt is too long: {param} has {length:,} characters, more than the model's "
                f"context of {served.context_length:,} tokens can hold: shorten it",
                param=param,
                code="context_length_exceeded",
            )

    async def tokenized(self, served: ServedModel, make: Callable[..., Any], *args: Any) -> Any:
        """What a function makes with a model's tokenizer, in a thread beside the event loop."""
        async with self._tokenizing[served.name]:
            return await run_in_threadpool(make, *args)

    async def chat_prompt(self, served: ServedModel, body: ChatRequest) -> ChatPrompt:
        """A conversation as the model is given it.

        Raises:
            ApiError: it is too long, or the model's template does not take it.
        """
        contents = (message["content"] for message in body.messages)
        self.check_length(served, body.param, *contents)
        self.check_length(served, "tools", *body.tools)
        tokenizer = served.decoder.tokenizer
        arguments = {**served.template_arguments, **body.template_kwargs}
        body = replace(body, template_kwargs=arguments)
        prompt: ChatPrompt = await self.tokenized(served, chat_prompt, body, tokenizer)
        return prompt

    async def completion_prompts(
        self, served: ServedModel, body: CompletionRequest
    ) -> list[Prompt]:
        """The prompts of a request for completions.

        Raises:
            ApiError: as :func:`mlxspec.server.prompts.completion_prompts`, or one is too long.
        """
        for prompt in body.prompts:
            if isinstance(prompt, str):
                self.check_length(served, "prompt", prompt)
        self.check_length(served, "suffix", body.suffix)
        decoder = served.decoder
        prompts: list[Prompt] = await self.tokenized(
            served, completion_prompts, body, decoder.tokenizer, decoder.vocab_size
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
        """Queue ``n`` generations of each prompt, which may use the prefixes of a partition."""
        decoder = served.decoder
        prediction: tuple[int, ...] = ()
        if body.prediction:
            if not served.predicts:
                raise ApiError(
                    f"prediction: {served.name} is served with one kind of drafts, which are not "
                    "from what clients expect; leave it out, or serve it without --decoder",
                    param="prediction",
                )
            self.check_length(served, "prediction", body.prediction)
            encode = partial(decoder.tokenizer.encode, add_special_tokens=False)
            expected = await self.tokenized(served, encode, body.prediction)
            prediction = tuple(expected[: served.context_length])  # no output is longer
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            tokens = tuple(prompt.tokens)  # one for all choices
            max_tokens = self._max_tokens_of(served, len(tokens), body)
            grammar = await self._grammar(served, body, prompt)
            for choice in range(body.n):
                sampling = body.sampling.params(decoder.vocab_size, choice, served.special_tokens)
                options: GenerationOptions = {
                    "sampling": sampling,
                    "constraint": grammar,
                    "stop": (*body.stop, *prompt.stop),
                    "stop_tokens": (*body.stop_token_ids, *prompt.stop_tokens),
                }
                requests.append(
                    GenerationRequest(
                        tokens,
                        max_tokens,
                        options,
                        len(requests),
                        prediction,
                        body.logprobs,
                        partition,
                        body.param,
                    )
                )
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
        """How many tokens an output may have; a request that does not say takes what there is."""
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
