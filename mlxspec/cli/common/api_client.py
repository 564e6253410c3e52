"""A client of ``mlxspec serve``: lists its models and streams answers from one of them."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any

from ...engine.params import CacheOptions
from ...errors import OptionError, PromptError
from ...models.model_files import given_name
from .generation import API_KEY, DraftingOptions, GenerationSettings, room_for, without_first_space

if TYPE_CHECKING:
    from ...generation.response import GenerationResponse
    from ...models.chat_template import Messages

_SILENCE = 300.0  # seconds without data; a server sends keep-alives, but not as it loads a model


class ApiClient:
    """Sends requests to a server, with the API key from the environment if it is set.

    Args:
        address: the server's URL, as the server prints it; ``http://`` may be left out.

    Attributes:
        address: the URL without a slash or ``/v1`` at the end.
    """

    def __init__(self, address: str) -> None:
        if "://" not in address:
            address = f"http://{address}"
        self.address = address.rstrip("/").removesuffix("/v1")
        # The server is on this machine or in its network, which a proxy may not reach.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def models(self, first: str | None = None) -> dict[str, int | None]:
        """The server's models: their names in requests, and their context lengths, if known.

        Args:
            first: the model to list first; None keeps the server's order.

        Raises:
            OptionError: no mlxspec server answers, or it has no such model.
            PromptError: the server reports an error.
        """
        try:
            listed = self.ask("/v1/models")["data"]
            models = {model["id"]: model.get("context_length") for model in listed}
            name = first or next(iter(models))
        except (AttributeError, LookupError, TypeError, StopIteration) as error:
            raise OptionError(
                f"--server {self.address} sent no list of models: give the address of an mlxspec "
                "server, or start one with 'mlxspec serve'"
            ) from error
        name = name if name in models else given_name(name)
        if name not in models:
            raise OptionError(f"--model is {name}: choose one of the server's: {', '.join(models)}")
        return {name: models[name], **models}

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request, a POST if it has a body, and parse the JSON answer.

        Raises:
            OptionError: no mlxspec server answers.
            PromptError: the server reports an error.
        """
        with self._open(path, body) as answer:
            return json.loads(answer.read())

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request and parse the events of its answer; errors are as for :meth:`ask`."""
        with self._open(path, body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    @contextmanager
    def _open(self, path: str, body: dict[str, Any] | None) -> Iterator[HTTPResponse]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.address + path, data, headers)
            with self._opener.open(request, timeout=_SILENCE) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            try:
                message = json.loads(error.read())["error"]["message"]
            except (OSError, ValueError, LookupError, TypeError, HTTPException):
                message = error
            remedy = f"; set {API_KEY} to the server's key" if error.code == 401 else ""
            raise PromptError(f"--server {self.address}: {message}{remedy}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise OptionError(
                f"--server {self.address}: {getattr(error, 'reason', error)}; start a server with "
                "'mlxspec serve', or give the address that it prints"
            ) from error


# --- answers ---

_FORBIDS = -100.0  # the least bias that the API takes; JSON has no -inf
_NOT_SENT = {"temp", "min_tokens_to_keep", "logits_processors", "sampler", "xtc_special_tokens"}
_ONLY_LOCAL = DraftingOptions(), CacheOptions(), None  # the values of options not given


class RemoteModel:
    """A server's model, used for a chat.

    Args:
        address: the server's URL, as the server prints it; ``http://`` may be left out.
        generation: which model to use.

    Attributes:
        name: the model's name.
        context_length: the model's context length in tokens; None if unknown.

    Raises:
        OptionError: the server does not answer or has no such model, or an option is given that
            only ``mlxspec serve`` accepts.
    """

    def __init__(
        self, address: str, generation: GenerationSettings, template_arguments: Mapping[str, Any]
    ) -> None:
        if (generation.drafting, generation.caches, generation.adapter_path) != _ONLY_LOCAL:
            raise OptionError(
                "options for drafts, caches and adapters have no effect with --server: leave them "
                "out"
            )
        if any(isinstance(token, str) for token in generation.stop_tokens):
            raise OptionError("--stop-token: give the token's id with --server")
        self._client = ApiClient(address)
        self._template_arguments = template_arguments
        self.switch(generation.model)

    def switch(self, name: str | None) -> None:
        """Switch to another of the server's models.

        Raises:
            OptionError: the server has no such model.
        """
        self.name, self.context_length = next(iter(self._client.models(name).items()))

    def others(self) -> list[str]:
        """The names of all models on the server, including the current one."""
        return [*self._client.models()]

    def tokenize(self, messages: Messages) -> list[int]:
        """The tokens of a conversation in the model's chat template."""
        body = {
            "model": self.name,
            "messages": messages,
            "chat_template_kwargs": self._template_arguments,
        }
        return [*self._client.ask("/v1/tokenize", body)["tokens"]]

    def stream(
        self, generation: GenerationSettings, tokens: Sequence[int], on_progress: object
    ) -> Generator[GenerationResponse, None, None]:
        """Generate an answer, and yield responses, which may have several tokens each.

        The last response has the figures and no text.

        Args:
            on_progress: not called, since the server reports no progress.
        """
        import mlx.core as mx

        from ...generation.response import GenerationResponse, SpeculationStats

        params = vars(generation.sampling)
        biases = generation.sampling.logit_bias or {}
        body = {
            **{name: value for name, value in params.items() if name not in _NOT_SENT},
            "logit_bias": {token: max(bias, _FORBIDS) for token, bias in biases.items()} or None,
            "temperature": generation.sampling.temp,
            "model": self.name,
            "prompt": list(tokens),
            "max_tokens": room_for(self.context_length, len(tokens), generation.max_tokens),
            "stop": generation.stop,
            "stop_token_ids": generation.stop_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "mlxspec": {"drafts": True},
        }
        last = GenerationResponse("", -1, mx.array([]), False, len(tokens), 0.0, 0, 0.0, 0.0)
        begun, trimmed = 0.0, without_first_space(True)
        for chunk in self._client.events("/v1/completions", body):
            if "error" in chunk:
                raise PromptError(f"the server says: {chunk['error'].get('message')}")
            for choice in chunk["choices"]:
                begun = begun or time.perf_counter()
                last.finish_reason = choice["finish_reason"] or last.finish_reason
                for text, accepted in choice.get("mlxspec", {}).get("drafts", ()):
                    yield trimmed(replace(last, text=text, from_draft=accepted))
            if usage := chunk.get("usage"):
                generated, details = usage["completion_tokens"], usage["completion_tokens_details"]
                accepted = details["accepted_prediction_tokens"]
                drafted = accepted + details["rejected_prediction_tokens"]
                steps = max(1, generated - accepted)
                last.stats = SpeculationStats(steps, steps + drafted, drafted, accepted, generated)
                last.generation_tokens = generated
                last.generation_tps = generated / (time.perf_counter() - begun)
                last.reused_tokens = usage["prompt_tokens_details"]["cached_tokens"]
                yield last
