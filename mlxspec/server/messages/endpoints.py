"""The endpoints of the Messages API."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import new_request_id
from ..generating import Generating
from ..served_model import ServedModel
from .answer import MessagesAnswer, messages_headers
from .requests import MessagesRequest, parse_messages


class MessagesEndpoints:
    """Answers requests to these paths.

    Args:
        generating: makes generations of requests, and responses of them.

    Attributes:
        routes: the paths, and what answers them.
    """

    def __init__(self, generating: Generating) -> None:
        self._generating = generating
        self.routes = [
            Route("/v1/messages", self.message, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def message(self, request: Request) -> Response:
        """``/v1/messages``"""
        body = await self._generating.read(request, parse_messages)
        served = self._served_for(body)
        prompt = await self._generating.chat_prompt(served, body)
        answer = MessagesAnswer(body, served.name, prompt.format)
        return await self._generating.respond(request, served, body, [prompt], answer)

    async def count_tokens(self, request: Request) -> Response:
        """``/v1/messages/count_tokens``"""
        body = await self._generating.read(request, partial(parse_messages, to_count=True))
        served = self._served_for(body)
        count = len((await self._generating.chat_prompt(served, body)).tokens)
        headers = messages_headers(served.name, new_request_id())
        return JSONResponse({"input_tokens": count}, headers=headers)

    def _served_for(self, body: MessagesRequest) -> ServedModel:
        """The model of a request; the default one stands in for those of Anthropic."""
        name = body.model
        if name and name.startswith("claude-") and name not in self._generating.models:
            name = None
        return self._generating.served(name)
