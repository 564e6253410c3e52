"""Access control: the checks before any endpoint runs.

A web page can make the user's browser send requests to a server on loopback. Two checks keep such
pages out: the Host header must name this server (against DNS rebinding), and an Origin header, if
there is one, must name it too, or be one that the operator allows. CORS headers are sent only to
those.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .body import ApiError, shown

_OPEN = ("/", "/health", "/ready")
"""Paths that need no key: the status page, which contains no data, and the health checks."""

_HOST = re.compile(r"(\[[^\[\]]*\]|[^:]*)(?::[0-9]*)?")


class AuthMiddleware:
    """ASGI middleware: refuses requests that are not meant for this server, or have no key.

    Args:
        hosts: the names of this server that requests may use, without port; None for any.
        keys: the accepted API keys; if empty, requests need no key.
        origins: the origins besides the server's own that requests may have, such as
            ``app://obsidian.md``, in lower case.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str] | None = None,
        keys: Sequence[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._keys = [key.encode() for key in keys]
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        Request(scope).state.key = self._checked(scope)
        await self._app(scope, receive, send)

    def _checked(self, scope: Scope) -> str:
        """Check a request; return its key if there are several, and else ""."""
        headers = Headers(scope=scope)
        host = host_name(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            raise ApiError(
                f"the Host header {shown(host)} does not name this server: use the address that "
                "the server prints, or allow the name with --allowed-host",
                status=403,
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        address = headers.get("host", "").lower()
        if (
            origin is not None
            and origin.lower() not in self._origins
            and origin.partition("://")[2].lower() != address
        ):
            raise ApiError(
                f"pages and programs of the origin {shown(origin)} may not use this server: use "
                "its own page, or allow the origin with --allow-origin",
                status=403,
                code="origin_not_allowed",
            )
        if not self._keys or scope["path"] in _OPEN:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            key = headers.get("x-api-key", "")
        given = key.strip().encode()
        # All keys are compared, each in constant time, so that timing reveals none of them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise ApiError(
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return given.decode() if len(self._keys) > 1 else ""


def host_name(host: str) -> str:
    """The name in a Host header, without the port; IPv6 addresses keep their brackets."""
    parts = _HOST.fullmatch(host)
    return (parts[1] if parts else host).lower()
