"""A model of this process, as a chat uses it."""

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from rich.console import Console

from ..engine.model_sizes import context_length
from ..errors import OptionError
from ..generation.response import GenerationResponse
from ..models.chat_template import Messages
from ..models.detokenizer import detokenizer_of
from ..models.model_files import find_directory
from .generating import Generation
from .memory import Memories
from .model_choice import known_names, model_or_default, resolved
from .prompts import in_template

if TYPE_CHECKING:
    from ..generation.decoder import Decoder


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
    def trims_first_space(self) -> bool:
        return detokenizer_of(self._decoder().tokenizer).prefix_space

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
            self._decoder(), tokens, max_tokens, session=session, on_progress=on_progress
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
