"""The models that a chat talks to: one in this process, or one of a running server."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from rich.console import Console

from ...engine.model_sizes import context_length
from ...engine.params import CacheOptions, SamplingParams
from ...errors import OptionError, PromptError
from ...generation.response import GenerationResponse, SpeculationStats
from ...models.chat_template import Messages
from ...models.model_files import find_directory
from ..common.api_client import ApiClient
from ..common.generation import DraftingOptions, Generation
from ..common.model_choice import known_names, model_or_default, resolved
from ..common.prompt import in_template
from ..memory import Memories

if TYPE_CHECKING:
    from ...generation.decoder import Decoder


class LocalModel:
    """A loaded model.

    When another one takes its place it leaves the memory first, since both may not fit into it.
    Should the other turn out to be of no use, this one is loaded again for the next answer.

    Args:
        generation: which model, how to draft and how to sample.
        console: where bars show how far loading is.
        memories: have the earlier answers that are drafted from.
        template_arguments: what the model's chat template is given besides messages.
        adapted: the generation that the adapters were given for, where that is an earlier one.

    Raises:
        MlxspecError: it cannot be loaded, or has no chat template.
    """

    def __init__(
        self,
        generation: Generation,
        console: Console,
        memories: Memories,
        template_arguments: Mapping[str, Any] | None = None,
        adapted: Generation | None = None,
    ) -> None:
        self._generation = generation
        self._adapted = adapted or generation
        self._template_arguments = dict(template_arguments or {})
        self._console = console
        self._memories = memories
        self._loaded: Decoder | None = None
        self._decoder()

    @property
    def name(self) -> str:
        return model_or_default(self._generation.model)

    @property
    def context_length(self) -> int | None:
        return context_length(self._decoder().model)

    @property
    def predicted_cost(self) -> float:
        return self._decoder().predicted_cost

    def tokenize(self, messages: Messages) -> list[int]:
        tokenizer = self._decoder().tokenizer
        tokens: list[int] = in_template(messages, tokenizer, **self._template_arguments)
        return tokens

    def stream(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        session: Any = None,
        on_progress: Any = None,
        **sampling: Any,
    ) -> Generator[GenerationResponse, None, None]:
        asked = self._generation
        asked = replace(asked, sampling=replace(asked.sampling, **sampling))
        return asked.stream(
            *(self._decoder(), tokens, max_tokens),
            templated=True,
            session=session,
            on_progress=on_progress,
        )

    def others(self) -> list[str]:
        return [*known_names()]

    def find(self, name: str) -> None:
        find_directory(resolved(name), None)  # which downloads it

    def switched(self, name: str) -> LocalModel:
        name = resolved(name)
        self.close()
        adapted = self._adapted
        is_adapted = name == model_or_default(adapted.model)
        adapters = adapted.adapter_path if is_adapted else None  # which no other model takes
        asked = replace(self._generation, model=name, adapter_path=adapters)
        return LocalModel(asked, self._console, self._memories, self._template_arguments, adapted)

    def close(self) -> None:
        """Give the model's memory back."""
        self._loaded = None
        gc.collect()  # decoders may be part of cycles
        mx.clear_cache()

    def _decoder(self) -> Decoder:
        if self._loaded is None:
            decoder = self._generation.load(self._console, self._memories)
            if not decoder.tokenizer.has_chat_template:
                raise OptionError(
                    "this model's tokenizer has no chat template: choose a model that was trained "
                    "to chat, or 'mlxspec generate --raw'"
                )
            self._loaded = decoder
        return self._loaded


_RENAMED = {"temp": "temperature"}
_OURS = {"min_tokens_to_keep", "logits_processors", "sampler", "xtc_special_tokens"}


class RemoteModel:
    """A model of a server.

    Args:
        address: of the server, as it prints it.
        generation: which of its models, and how to sample.
        template_arguments: what the model's chat template is given besides messages.

    Attributes:
        name: the model's.
        context_length: in tokens, where it is known.

    Raises:
        OptionError: the server does not answer, has no such model, or options are given that
            only a server can be started with.
    """

    predicted_cost = 0.0
    """Servers do not report it."""

    def __init__(
        self,
        address: str,
        generation: Generation,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if generation.adapter_path is not None:
            raise OptionError("--adapter-path is for 'mlxspec serve': leave it out with --server")
        if generation.drafting != DraftingOptions() or generation.caches != CacheOptions():
            raise OptionError(
                "how to draft and what caches hold is for 'mlxspec serve': leave these options "
                "out with --server"
            )
        if generation.sampling.min_tokens_to_keep != SamplingParams().min_tokens_to_keep:
            raise OptionError("--min-tokens-to-keep: no server takes it; leave it out")
        self._client = ApiClient(address)
        self._address = address
        self._generation = generation
        self._template_arguments = dict(template_arguments or {})
        model, *_ = self._client.models(generation.model)
        self.name = model.name
        self.context_length = model.context_length

    def tokenize(self, messages: Messages) -> list[int]:
        """A conversation's tokens, in the model's chat template."""
        body = {
            "model": self.name,
            "messages": messages,
            "chat_template_kwargs": self._template_arguments,
        }
        return [*self._client.ask("/v1/tokenize", body)["tokens"]]

    def others(self) -> list[str]:
        """The server's models."""
        return [model.name for model in self._client.models()]

    def find(self, name: str) -> None:
        """Find out whether the server has a model.

        Raises:
            OptionError: it has not.
        """
        self._client.models(name)

    def switched(self, name: str) -> RemoteModel:
        """Another model of the server."""
        asked = replace(self._generation, model=name)
        return RemoteModel(self._address, asked, self._template_arguments)

    def close(self) -> None:
        """Nothing: each request ends by itself."""

    def stream(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        session: Any = None,
        on_progress: Any = None,
        **sampling: Any,
    ) -> Generator[GenerationResponse, None, None]:
        """Generate, as :meth:`mlxspec.Decoder.stream` does; a response may have several tokens.

        The figures are in the last response, which has no text.

        Args:
            tokens: the prompt.
            max_tokens: how many to generate at most.
            session, on_progress: unused; the server has them itself.
            sampling: how to sample this time, where not as always.
        """
        ends, params = self._generation.ends, replace(self._generation.sampling, **sampling)
        body = {
            **{
                _RENAMED.get(name, name): value
                for name, value in vars(params).items()
                if name not in _OURS
            },
            "model": self.name,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "stop": ends.stop,
            "stop_token_ids": ends.stop_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "mlxspec": {"drafts": True},
        }
        started, begun = time.perf_counter(), None
        reason, count = None, 0
        with closing(self._client.open("/v1/completions", body)) as answer:
            for chunk in _events(answer):
                if "error" in chunk:
                    raise PromptError(f"the server: {chunk['error'].get('message')}")
                for choice in chunk["choices"]:
                    begun = begun or time.perf_counter()
                    reason = choice["finish_reason"] or reason
                    for text, accepted in choice.get("mlxspec", {}).get("drafts", ()):
                        count += 1
                        if count == 1:  # the space that the tokenizer has put there
                            text = text.removeprefix(" ")
                        speed = count / max(time.perf_counter() - begun, 1e-6)
                        yield _response(text, accepted, count, len(tokens), speed)
                if usage := chunk.get("usage"):
                    yield _last(usage, reason, started, begun or started)


def _events(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The chunks of server-sent events.

    Raises:
        PromptError: the server has gone.
    """
    try:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
    except (OSError, ValueError, HTTPException) as error:  # in the middle of a line, too
        raise PromptError(f"the server has gone: {error}") from error


def _response(
    text: str, accepted: bool, count: int, prompt_tokens: int, speed: float
) -> GenerationResponse:
    """A response on the way, whose figures are those of texts, which stand for tokens."""
    return GenerationResponse(
        text=text,
        token=-1,
        logprobs=mx.array([]),
        from_draft=accepted,
        prompt_tokens=prompt_tokens,
        prompt_tps=0.0,
        generation_tokens=count,
        generation_tps=speed,
        peak_memory=0.0,
        stats=SpeculationStats(steps=count, rows=count, emitted=count),
    )


def _last(
    usage: dict[str, Any], reason: str | None, started: float, begun: float
) -> GenerationResponse:
    """The response with the figures."""
    prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    drafted = accepted + details["rejected_prediction_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    ended = time.perf_counter()
    steps = max(1, generated - accepted)
    speed = generated / max(ended - begun, 1e-6)
    response = _response("", False, generated, prompt, speed)
    response.reused_tokens = cached
    response.prompt_tps = (prompt - cached) / (begun - started) if begun > started else 0.0
    response.finish_reason = reason
    response.stats = SpeculationStats(steps, steps + drafted, drafted, accepted, generated)
    return response
