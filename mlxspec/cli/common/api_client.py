"""Asking a server of ours: requests over HTTP, and what may go wrong with them in one line."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from ...errors import OptionError, PromptError
from ...models.model_files import given_name
from .generation import API_KEY

_SILENCE = 60.0  # seconds; a server of ours says sooner that it lives


@dataclass(frozen=True)
class ModelCard:
    """A model that a server has.

    Attributes:
        name: by which requests ask for it.
        context_length: in tokens, where it is known.
    """

    name: str
    context_length: int | None = None


class ApiClient:
    """A server, which is asked with the key of the environment, if there is one.

    Args:
        address: of the server, as it prints it.

    Attributes:
        address: without a slash or ``/v1`` at the end.
    """

    def __init__(self, address: str) -> None:
        from ...server.auth import is_loopback

        self.address = address.rstrip("/").removesuffix("/v1")
        # A proxy reaches other machines, and cannot reach this one.
        here = False
        with suppress(ValueError):  # which the first request reports
            here = is_loopback(urlsplit(self.address).hostname or "")
        proxies = [urllib.request.ProxyHandler({})] if here else []
        self._opener = urllib.request.build_opener(*proxies)

    def models(self, first: str | None = None) -> list[ModelCard]:
        """The server's models.

        Args:
            first: the name of the one to begin with; None for the server's own order.

        Raises:
            OptionError: no server of ours answers, or it has no such model.
            PromptError: it says that something is wrong.
        """
        try:
            data = self.ask("/v1/models")["data"]
            models = [ModelCard(model["id"], model.get("context_length")) for model in data]
            for model in models:
                if not (
                    isinstance(model.name, str) and isinstance(model.context_length, int | None)
                ):
                    raise TypeError(model)
        except (AttributeError, LookupError, TypeError) as error:
            raise OptionError(f"--server {self.address}: no list of models; is it ours?") from error
        names = [model.name for model in models]
        if not models:
            raise OptionError(f"--server {self.address} has no model: is it ours?")
        if first is not None and first not in names and given_name(first) in names:
            first = given_name(first)
        if first not in (None, *names):
            raise OptionError(f"--model is {first}: the server has {', '.join(names)}")
        return sorted(models, key=lambda model: model.name != (first or names[0]))

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the server answers, from JSON.

        Args:
            path: below the address.
            body: of a POST request; None for a GET request.

        Raises:
            OptionError: no server of ours answers.
            PromptError: it says that something is wrong.
        """
        with closing(self.open(path, body)) as answer:
            try:
                return json.loads(answer.read())
            except (OSError, ValueError, HTTPException) as error:
                raise OptionError(f"--server {self.address}: {error}; is it ours?") from error

    def open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        """The answer to a request, before it is read; arguments and errors as for :meth:`ask`."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.address + path, data, headers)
            opened: HTTPResponse = self._opener.open(request, timeout=_SILENCE)
            return opened
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 401:
                    state = "is another one" if key else "is not set"
                    raise PromptError(
                        f"--server {self.address} asks for a key, and {API_KEY} {state}: "
                        "put the server's key there"
                    ) from error
                raise PromptError(f"the server: {_message(error)}") from error
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or reason
            raise OptionError(
                f"--server {self.address}: {reason}; start one with 'mlxspec serve', or give the "
                "address that it prints"
            ) from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (OSError, ValueError, LookupError, TypeError, HTTPException):
        return f"{error.code} {error.reason}"
