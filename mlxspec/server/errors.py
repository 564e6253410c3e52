"""Errors as OpenAI's and Anthropic's APIs report them."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.responses import JSONResponse

from ..errors import MlxspecError, printable


class ApiError(MlxspecError):
    """A request that gets an error in place of an answer.

    Args:
        message: says what is wrong and what to do about it. Where it repeats too much of the
            request, its middle is left out.
        status: of HTTP, 400 to 599.
        param: the field of the body that is wrong, in OpenAI's notation: ``messages[2].role``.
        code: a word for programs, such as ``context_length_exceeded``.
        headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = str(self)
        self.status = status
        self.param = param if param is None else printable(param)
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON, in OpenAI's form."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, _type_of(self.status)),
                "param": self.param,
                "code": self.code,
            }
        }

    def messages_body(self, request_id: str) -> dict[str, Any]:
        """The answer's JSON, in Anthropic's form."""
        kind = _MESSAGES_TYPES.get(self.status, "api_error" if self.status >= 500 else _INVALID)
        told: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code == NO_THREADS:  # at which clients send the whole conversation
            told["details"] = {"error_code": self.code, "unsupported": []}
        return {"type": "error", "error": told, "request_id": request_id}


def error_response(error: ApiError, path: str) -> JSONResponse:
    """The response with an error, in the form of the API that the request's path is of."""
    if not f"{path}/".startswith("/v1/messages/"):
        return JSONResponse(error.body, error.status, error.headers)
    request_id = new_request_id()
    headers = {**error.headers, "request-id": request_id}
    return JSONResponse(error.messages_body(request_id), error.status, headers)


def new_request_id() -> str:
    """An id by which Anthropic's clients name a request."""
    return f"req_{uuid.uuid4().hex}"


NO_THREADS = "thread_unsupported_request"
"""Anthropic's code for requests whose conversations the server would have to keep."""

_INVALID = "invalid_request_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {429: "rate_limit_error"}
_MESSAGES_TYPES = _TYPES | {413: "request_too_large"}


def _type_of(status: int) -> str:
    return "server_error" if status >= 500 else _INVALID
