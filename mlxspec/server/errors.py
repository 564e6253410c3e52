"""Errors as OpenAI's API reports them."""

from __future__ import annotations

from typing import Any

from ..errors import MlxspecError


class ApiError(MlxspecError):
    """A request that gets an error in place of an answer.

    Args:
        message: says what is wrong and what to do about it.
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
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, _type_of(self.status)),
                "param": self.param,
                "code": self.code,
            }
        }


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {429: "rate_limit_error"}


def _type_of(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"
