"""The endpoints of OpenAI's API for chats and completions, and of what goes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..fields import Fields
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

_Parsed = TypeVar("_Parsed")


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
        body = await self._generating.read(request, parse_chat)
        served = self._generating.served(body.model)
        prompt = await self._generating.chat_prompt(served, body)
        answer = ChatAnswer(body, served.name, served.decoder.tokenizer, prompt.format)
        return await self._generating.respond(request, served, body, [prompt], answer)

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``"""
        body = await self._generating.read(request, parse_completion)
        served = self._generating.served(body.model)
        prompts = await self._generating.completion_prompts(served, body)
        answer = await self._generating.tokenized(  # which may echo token ids as a text
            served, CompletionAnswer, body, served.name, served.decoder.tokenizer
        )
        return await self._generating.respond(request, served, body, prompts, answer)

    async def models(self, request: Request) -> Response:
        """``/v1/models``"""
        return JSONResponse(models_answer([*map(_entry, self._generating.models.values())]))

    async def model(self, request: Request) -> Response:
        """``/v1/models/NAME``"""
        return JSONResponse(_entry(self._generating.served(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        """``/v1/tokenize``"""
        body, model = await self._generating.read(request, _with_model(parse_tokenize))
        served = self._generating.served(model)
        if body.chat:
            tokens = (await self._generating.chat_prompt(served, body.chat)).tokens
        else:
            assert body.text is not None
            special = body.add_special_tokens
            tokens = await self._generating.ids(served, body.text, "prompt", special)
        return JSONResponse(tokenize_answer(tokens, served.context_length))

    async def detokenize(self, request: Request) -> Response:
        """``/v1/detokenize``"""
        tokens, model = await self._generating.read(request, _with_model(parse_detokenize))
        served = self._generating.served(model)
        return JSONResponse(await self._generating.tokenized(served, _detokenized, served, tokens))


def _with_model(parse: Callable[[Any], _Parsed]) -> Callable[[Any], tuple[_Parsed, str | None]]:
    """What also reads the model that a body asks for."""
    return lambda body: (parse(body), Fields(body).text("model"))


def _detokenized(served: ServedModel, tokens: Sequence[int]) -> dict[str, Any]:
    check_ids(tokens, served.decoder.vocab_size, "tokens")
    return detokenize_answer(served.decoder.tokenizer, tokens)


def _entry(served: ServedModel) -> dict[str, Any]:
    return model_entry(served.name, served.created, served.context_length)
