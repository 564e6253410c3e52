"""A conversation: its messages, its file, and the model that answers, here or on a server."""

from __future__ import annotations

import gc
import json
import os
import stat
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from rich.console import Console

from ...engine.model_sizes import context_length
from ...engine.params import CacheOptions, SamplingParams
from ...engine.target import Progress
from ...errors import ChatFileError, OptionError, PromptError
from ...files import replaced
from ...generation.response import GenerationResponse, SpeculationStats
from ...generation.session import Session
from ...jsonl import conversation_of, load_json
from ...models.chat_template import Messages
from ...models.model_files import find_directory
from ..common.api_client import ApiClient
from ..common.generation import DraftingOptions, Generation, room_for
from ..common.model_choice import known_names, model_or_default, resolved
from ..common.prompt import in_template
from ..memory import Memories

if TYPE_CHECKING:
    from ...generation.decoder import Decoder
    from ...models.chat_template import Messages

_ANSWERS_SHARE = 4  # of the context a quarter is left for an answer, unless it may have less


class ChatConversation:
    """Keeps the messages within the model's context.

    Once they leave no room for an answer, the oldest turns are dropped until half of the context
    is free. So the next turns continue where this one ends, and need not process everything
    again each time.

    Args:
        model: which answers.
        max_tokens: per answer.
        system_prompt: comes before all turns.

    Attributes:
        messages: the turns so far, without the system prompt.
        unanswered: a message that got no answer, as the last thing said; it is in no turn.
        dropped: how many turns had to be left out for the last answer.

    Raises:
        OptionError: the model's chat template takes no system prompt.
    """

    def __init__(
        self, model: LocalModel | RemoteModel, max_tokens: int, system_prompt: str | None = None
    ) -> None:
        _check_template(model, system_prompt)
        self.model = model
        self.max_tokens = max_tokens
        self._system_prompt = system_prompt or None
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages: Messages = []
        self.unanswered: str | None = None
        self.session = Session()
        self.dropped = 0

    @property
    def system_prompt(self) -> str | None:
        """The system prompt, if there is one."""
        return self._system_prompt

    @system_prompt.setter
    def system_prompt(self, text: str | None) -> None:
        _check_template(self.model, text)
        self._system_prompt = text

    @property
    def n_turns(self) -> int:
        """How many messages have an answer."""
        return len(self._turns())

    @property
    def saved(self) -> SavedChat:
        """The conversation as it is saved in a file."""
        asked = [] if self.unanswered is None else [_said("user", self.unanswered)]
        return SavedChat(self.model.name, self.system_prompt, [*self.messages, *asked])

    def restore(self, chat: SavedChat) -> None:
        """Continue a saved conversation instead of this one.

        A message at its end that has no answer is :attr:`unanswered`.

        Raises:
            OptionError: the model's chat template takes no system prompt.
        """
        self.system_prompt = chat.system_prompt
        messages, self.unanswered, self.dropped = list(chat.messages), None, 0
        if messages and messages[-1]["role"] == "user":
            self.unanswered = messages.pop()["content"]
        self.messages = messages

    def switch(self, name: str) -> None:
        """Switch to another model.

        Raises:
            MlxspecError: it is not found, or cannot continue; then the model stays as it is.
        """
        self.model.find(name)
        self.session = Session()  # it would hold the old model
        other = self.model.switched(name)
        try:
            _check_template(other, self.system_prompt)
        except OptionError:
            other.close()
            raise
        self.model = other

    def answer(
        self, message: str, on_progress: Progress | None = None, **sampling: Any
    ) -> Generator[GenerationResponse, None, None]:
        """Answer a message; what has been said is kept when the generator is closed early.

        A message that got no answer at all is :attr:`unanswered`.

        Args:
            message: the user's.
            on_progress: called with how much of the prompt has run.
            sampling: how to sample this answer, where not as always.

        Raises:
            PromptError: the message alone is longer than the model's context.
        """
        self.unanswered = None
        self.messages.append(_said("user", message))
        said = ""
        try:
            tokens = self._fitting_prompt()
            responses = self.model.stream(
                tokens,
                room_for(self.model.context_length, len(tokens), self.max_tokens),
                session=self.session,
                on_progress=on_progress,
                **sampling,
            )
            try:
                for response in responses:
                    said += response.text
                    yield response
            finally:
                responses.close()
        finally:
            if said:
                self.messages.append(_said("assistant", said))
            else:
                self.messages.pop()
                self.unanswered = message

    def retry(
        self, on_progress: Progress | None = None, **sampling: Any
    ) -> Generator[GenerationResponse, None, None]:
        """Answer the last message again; arguments as for :meth:`answer`.

        The earlier answer stays if there is no other.

        Raises:
            PromptError: there is no message.
        """
        before = list(self.messages)
        had_answer = self.unanswered is None
        message = self.undo()
        try:
            yield from self.answer(message, on_progress, **sampling)
        finally:
            if had_answer and self.unanswered is not None:
                self.messages, self.unanswered = before, None

    def undo(self) -> str:
        """Take the last message back, and its answer.

        Returns:
            the message.

        Raises:
            PromptError: there is no message.
        """
        if self.unanswered is not None:
            message, self.unanswered = self.unanswered, None
            return message
        begin = self._turns()[-1:]
        if not begin:
            raise PromptError("nothing has been said yet: write a message")
        message = str(self.messages[begin[0]]["content"])
        del self.messages[begin[0] :]
        return message

    def _turns(self) -> list[int]:
        """Where the turns begin: with the user's messages."""
        return [at for at, message in enumerate(self.messages) if message["role"] == "user"]

    def _fitting_prompt(self) -> list[int]:
        """The conversation's tokens, without the oldest turns once they leave no room."""
        tokens, length = self._tokens(), self.model.context_length
        self.dropped = 0
        if length is None or len(tokens) + min(self.max_tokens, length // _ANSWERS_SHARE) <= length:
            return tokens
        while len(tokens) > length // 2 and len(turns := self._turns()) > 1:
            del self.messages[: turns[1]]
            self.dropped += 1
            tokens = self._tokens()
        return tokens

    def _tokens(self) -> list[int]:
        system = [_said("system", self.system_prompt)] if self.system_prompt else []
        return self.model.tokenize([*system, *self.messages])


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _check_template(model: LocalModel | RemoteModel, system_prompt: str | None) -> None:
    """Find out before the first turn that a template does not know system prompts.

    Raises:
        OptionError: it does not.
    """
    if system_prompt:
        try:
            model.tokenize([_said("system", system_prompt), _said("user", "?")])
        except (OptionError, PromptError) as error:
            raise OptionError(
                "this model's chat template takes no system prompt; write it into the first message"
            ) from error


_MOST_BYTES = 100_000_000
_OURS = {"model", "created", "messages"}
_SYSTEM = ("system", "developer")  # OpenAI's newer name for it


@dataclass(frozen=True)
class SavedChat:
    """A conversation in a file.

    Attributes:
        model: which model answered; "" where the file does not say.
        system_prompt: the system prompt, if there is one.
        messages: the turns of "user" and "assistant".
    """

    model: str
    system_prompt: str | None
    messages: Messages

    def write(self, path: Path) -> None:
        """Write the conversation, whole or not at all; only a saved chat is replaced.

        Raises:
            ChatFileError: something else is there, or it cannot be written.
        """
        if os.path.lexists(path) and not _is_ours(path):
            raise ChatFileError(
                f"{path}: there is a file that is not a saved chat; choose another name"
            )
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        record = {
            "model": self.model,
            "created": int(time.time()),
            "messages": [*system, *self.messages],
        }
        text = json.dumps(record, ensure_ascii=False, indent=1)
        with replaced(path, ChatFileError) as file:
            file.write(text.encode(errors="replace") + b"\n")


def read_chat(path: Path) -> SavedChat:
    """Read a saved chat, or a request of OpenAI's API.

    Raises:
        ChatFileError: it cannot be read, or cannot be continued.
    """
    try:
        return _chat_of(_json_at(path))
    except OSError as error:
        raise ChatFileError(
            f"{path}: cannot be read ({error.strerror or error}); name a saved chat"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ChatFileError(f"{path}: is not a saved chat ({error})") from error


def _is_ours(path: Path) -> bool:
    """Whether a file holds a saved chat and nothing else."""
    try:
        record = _json_at(path)
        _chat_of(record)
    except (OSError, ValueError, RecursionError):
        return False
    return set(record) == _OURS


def _json_at(path: Path) -> Any:
    """Raises OSError, ValueError or RecursionError."""
    # Opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    try:
        return load_json(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None


def _chat_of(record: Any) -> SavedChat:
    """Raises ValueError."""
    turns, _ = conversation_of(record)
    system_prompt = turns.pop(0)["content"] if turns and turns[0]["role"] in _SYSTEM else None
    for turn in turns:
        if turn["role"] not in ("user", "assistant"):
            raise ValueError(f"a message of {turn['role']!r} is not for a chat")
    if turns and turns[0]["role"] != "user":
        raise ValueError("the first turn is not the user's")
    model = record.get("model")
    return SavedChat(model if isinstance(model, str) else "", system_prompt or None, turns)


class LocalModel:
    """A loaded model.

    When another one takes its place it leaves the memory first, since both may not fit into it.
    Should the other turn out to be of no use, this one is loaded again for the next answer.

    Args:
        generation: which model, how to draft and how to sample.
        console: where bars show how far loading is.
        memories: have the earlier answers that are drafted from.
        template_arguments: what the model's chat template is given besides messages.
        adapted: the generation that the adapters were given for, if an earlier one.

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
_NOT_SENT = {"min_tokens_to_keep", "logits_processors", "sampler", "xtc_special_tokens"}


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
                if name not in _NOT_SENT
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
