"""The endpoints of OpenAI's API for chats and completions, and of what goes with them."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import ApiError
from ..gate import json_body
from ..generating import Generating
from ..requests import check_ids, parse_chat, parse_completion, parse_detokenize, parse_tokenize
from ..served_model import ServedModel
from .answer import (
    ChatAnswer,
    CompletionAnswer,
    detokenize_answer,
    model_entry,
    models_answer,
    tokenize_answer,
)


class OpenAIEndpoints:
    """Answers requests to these paths.

    Args:
        generating: makes generations of requests, and responses of them.

    Attributes:
        routes: the paths, and what answers them.
    """

    def __init__(self, generating: Generating) -> None:
        self._generating = generating
        self.routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``"""
        body = parse_chat(await json_body(request))
        served = self._generating.served(body.model)
        prompt = await self._generating.chat_prompt(served, body)
        answer = ChatAnswer(body, served.name, served.decoder.tokenizer, prompt.format)
        return await self._generating.respond(request, served, body, [prompt], answer)

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``"""
        body = parse_completion(await json_body(request))
        served = self._generating.served(body.model)
        prompts = await self._generating.completion_prompts(served, body)
        answer = CompletionAnswer(body, served.name, served.decoder.tokenizer)
        return await self._generating.respond(request, served, body, prompts, answer)

    async def models(self, request: Request) -> Response:
        """``/v1/models``"""
        return JSONResponse(models_answer([*map(_entry, self._generating.models.values())]))

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
        check_ids(tokens, served.decoder.vocab_size, "tokens")
        tokenizer = served.decoder.tokenizer
        return JSONResponse(
            await self._generating.tokenized(served, detokenize_answer, tokenizer, tokens)
        )


def _model_of(body: Any) -> str | None:
    """The model that a checked body asks for."""
    name = body.get("model")
    if name is None or isinstance(name, str):
        return name
    raise ApiError("model is no string: send the name of a model", param="model")


def _entry(served: ServedModel) -> dict[str, Any]:
    return model_entry(served.name, served.created, served.context_length)
