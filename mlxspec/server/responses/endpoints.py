"""The endpoints of the Responses API."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import ApiError
from ..fields import shown
from ..generating import Generating
from .answer import ResponsesAnswer, input_items_answer
from .requests import Earlier, ResponsesRequest, parse_responses
from .store import ResponseStore, StoredResponse


class ResponsesEndpoints:
    """Answers requests to these paths.

    Args:
        generating: makes generations of requests, and responses of them.

    Attributes:
        routes: the paths, and what answers them.
    """

    def __init__(self, generating: Generating) -> None:
        self._generating = generating
        self._responses = ResponseStore()
        self.routes = [
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count_input, methods=["POST"]),
            Route("/v1/responses/{id}", self.response),
            Route("/v1/responses/{id}", self.delete_response, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self.cancel_response, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", self.input_items),
        ]

    async def respond(self, request: Request) -> Response:
        """``/v1/responses``"""
        body = await self._parsed(request)
        served = self._generating.served(body.model)
        prompt = await self._generating.chat_prompt(served, body)
        keep = partial(self._responses.put, request.state.partition)
        tokenizer = served.decoder.tokenizer
        answer = ResponsesAnswer(body, served.name, tokenizer, prompt.format, keep)
        return await self._generating.respond(request, served, body, [prompt], answer)

    async def count_input(self, request: Request) -> Response:
        """``/v1/responses/input_tokens``"""
        body = await self._parsed(request)
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

    async def _parsed(self, request: Request) -> ResponsesRequest:
        partition = request.state.partition
        earlier = Earlier(
            partial(self._responses.response, partition), partial(self._responses.item, partition)
        )
        return await self._generating.read(request, partial(parse_responses, earlier=earlier))

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
