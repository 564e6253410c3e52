"""Who may talk to the server: the checks that come before any endpoint.

An open web page can make the browser send requests to a server on loopback. It is
kept out by the Host header, which has to name this server (DNS rebinding), and by the Origin
header, which has to be this server's own. There are no CORS headers.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable, Collection, Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .body import ApiError, error_response, shown

MOST_BYTES = 32 * 2**20
"""Of a request's body."""

_SILENCE = 30.0  # seconds without a byte, after which the rest of a body is not waited for
_LEAST_RATE = 1000.0  # bytes a second that have to come on average

_OPEN = ("/", "/health", "/ready")
"""Paths without a key: the page, which shows nothing by itself, and whether the server lives."""


_HOST = re.compile(r"(\[[^\[\]]*\]|[^:]*)(?::[0-9]*)?")


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a server that is bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


OnRefusal = Callable[[str, ApiError], object]


class AuthMiddleware:
    """ASGI middleware: refuses requests that are not meant for this server, or have no key.

    Args:
        app: gets the others.
        hosts: names by which this server may be called, without port; None for any.
        keys: a request must have one of them; without keys anyone may send requests.
        on_refusal: called with the path and the error of each request that is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str] | None = None,
        keys: Sequence[str] = (),
        on_refusal: OnRefusal = lambda path, error: None,
    ) -> None:
        self._app = app
        self._on_refusal = on_refusal
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope.setdefault("state", {})["partition"] = self._checked(scope)
        except ApiError as error:
            self._on_refusal(scope["path"], error)
            response = error_response(error, scope["path"])
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _checked(self, scope: Scope) -> str:
        """Check a request, and return its key, or "" if it has none.

        Raises:
            ApiError: the request is refused, with status 400, 401, 403 or 413.
        """
        headers = Headers(scope=scope)
        host = host_name(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            raise ApiError(
                f"the request is for the host {shown(host)}, which is not this server: "
                "call it by the address that it prints, or allow the name with --allowed-host",
                status=403,
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        own = headers.get("host", "").lower()
        if origin is not None and origin.partition("://")[2].lower() != own:
            raise ApiError(
                "the request comes from a web page of another server, which may not use this one",
                status=403,
                code="origin_not_allowed",
            )
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal() or len(length) > 20:
            raise ApiError("the header Content-Length must be a number")
        if int(length) > MOST_BYTES:
            raise too_long()
        if not self._keys or scope["path"] in _OPEN:
            return ""
        given = _key_of(headers)
        # All are compared, each in constant time: the time does not depend on them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise ApiError(
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return given.decode()


def host_name(host: str) -> str:
    """The name in a Host header, without port; IPv6 addresses with their brackets."""
    parts = _HOST.fullmatch(host)
    return (parts[1] if parts else host).lower()


def _key_of(headers: Headers) -> bytes:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        key = headers.get("x-api-key", "")
    return key.strip().encode()


def too_long() -> ApiError:
    """The error for a body that is too long."""
    return ApiError(
        f"the body has more than {MOST_BYTES >> 20} MiB: send less",
        status=413,
        code="request_too_large",
    )


async def body_of(request: Request) -> bytes:
    """A request's body.

    Raises:
        ApiError: it is too long or too slow, or the client has left before its end.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise ApiError(
            f"the body is encoded as {shown(encoding)}: send it as it is, without Content-Encoding",
            status=415,
        )
    parts, length = [], 0
    try:
        async with asyncio.timeout(_SILENCE) as limit:
            begun = asyncio.get_running_loop().time()
            async for part in request.stream():
                length += len(part)
                if length > MOST_BYTES:
                    raise too_long()
                parts.append(part)
                # A part may be late, but all of them together may not come too slowly.
                slowly = begun + length / _LEAST_RATE
                limit.reschedule(min(asyncio.get_running_loop().time(), slowly) + _SILENCE)
    except TimeoutError:
        raise ApiError(
            f"the body has stopped after {length:,} bytes, or comes too slowly: send it again",
            status=408,
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:  # the answer has no reader
        raise ApiError("the client has left before the end of its body", status=499) from None
    return b"".join(parts)
