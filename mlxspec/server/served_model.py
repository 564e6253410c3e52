"""A served model: its memory, its prefix cache, and the decoders of its clients."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..corpus import MAX_TOKENS, Memory
from ..drafting.drafter import Drafter
from ..engine.model_sizes import context_length
from ..generation.decoder import Decoder
from ..generation.drafting import Auto
from ..generation.options import GenerationOptions
from ..generation.session import Session
from .body import ApiError
from .memory import CacheMemory, Need, ServerMemory, in_words
from .prefix_cache import PrefixCache
from .requests import ApiRequest

# The most partitions with a memory, and the tokens that each remembers: about 100 MB in all.
_MOST_APART = 32
_TOKENS_APART = MAX_TOKENS // 4


def never_fits(n_prompt: int, max_tokens: int, need: Need, memory: ServerMemory) -> ApiError:
    """The error for a request that does not fit into memory, even if nothing else ran."""
    needed = in_words(need.caches + need.forward + (1 << 20))
    return ApiError(
        f"{n_prompt} prompt tokens and {max_tokens} answer tokens need {needed} of memory, but "
        f"beside its models the server has {in_words(memory.room)}: shorten the prompt or ask for "
        "fewer tokens",
        status=413,
        code="out_of_memory",
    )


@dataclass
class ServedModel:
    """A served model.

    Each partition, such as a client's key, drafts from its own answers only. It also learns from
    them only how likely drafts are right. Otherwise accepted drafts, and the speed of answers,
    would reveal one client's answers to another. The least recently used partitions are forgotten.

    Attributes:
        name: the model's name in requests.
        decoder: the decoder, with its model loaded and its costs known.
        cache: the prefix cache.
        memory: what its caches and forwards take.
        options: default generation options, overridden by a request's.
        template_arguments: default arguments of the chat template, overridden by a request's.
        owner: the partition that uses the decoder's own memory. The others have memories of their
            own, in the process only.
        path: the path from which the user loaded it, another name for it in requests.
        created: when it was loaded, in seconds since 1970.
    """

    name: str
    decoder: Decoder
    cache: PrefixCache
    memory: CacheMemory
    options: GenerationOptions = field(default_factory=GenerationOptions)
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    owner: str = field(default="", repr=False)
    path: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _apart: OrderedDict[str, Decoder] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )
    """The decoders of other partitions, the least recently used first."""

    @property
    def context_length(self) -> int | None:
        """The context length in tokens; None if the model does not state it."""
        return context_length(self.decoder.model)

    @property
    def memories(self) -> list[Memory]:
        """The memories that all partitions draft from."""
        decoders = [self.decoder, *self._apart.copy().values()]
        found = (getattr(decoder.drafting, "memory", None) for decoder in decoders)
        return [memory for memory in found if memory]

    @cached_property
    def special_tokens(self) -> list[int]:
        """The tokens that XTC never drops: line breaks and end tokens."""
        tokenizer = self.decoder.tokenizer
        return [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]

    @property
    def predicts(self) -> bool:
        """Whether it drafts from clients' predictions."""
        return isinstance(self.decoder.drafting, Auto)

    def max_tokens_for(
        self, n_prompt: int, body: ApiRequest, default: int, memory: ServerMemory
    ) -> int:
        """The most tokens of an answer: what the request asks for, or as many as fit.

        Args:
            n_prompt: the number of tokens of the prompt.
            body: the request.
            default: the number of tokens if the request has none.
            memory: the server's.

        Raises:
            ApiError: 400, prompt and answer exceed the context; 413, their caches would not fit
                into memory even if nothing else ran.
        """
        longest, needs, wanted = self.context_length, self.memory.needs, body.max_tokens
        if longest is not None and n_prompt >= longest:
            raise ApiError(
                # Claude Code parses both numbers, and shortens the conversation.
                f"the prompt is too long: {n_prompt} tokens > {longest}, which is the model's "
                "context: shorten it",
                param=body.param,
                code="context_length_exceeded",
            )
        if wanted is None or body.cuts_max_tokens:
            wanted = wanted or default
            if longest is not None:
                wanted = min(wanted, longest - n_prompt)
            while wanted > 1 and not memory.ever_fits(needs(n_prompt + wanted)):
                wanted //= 2
        elif longest is not None and n_prompt + wanted > longest:
            raise ApiError(
                f"the model's context has {longest} tokens; the prompt has {n_prompt} and the "
                f"answer may have {wanted}: shorten the prompt or ask for fewer",
                param=body.param,
                code="context_length_exceeded",
            )
        need = needs(n_prompt + wanted)
        if not memory.ever_fits(need):
            raise never_fits(n_prompt, wanted, need, memory)
        return wanted

    def make_drafter(
        self, prediction: Sequence[int], partition: str, session: Session | None
    ) -> Drafter:
        """The drafter of one generation; called only in the worker's thread.

        Args:
            prediction: token ids that the client expects as output.
            partition: the partition whose answers it drafts from, and adds its own to.
            session: the generation's session.
        """
        decoder = self._decoder_of(partition)
        drafting = decoder.drafting
        if isinstance(drafting, Auto):
            drafting = replace(drafting, prediction=prediction)
        return drafting.make(decoder, session)

    def _decoder_of(self, partition: str) -> Decoder:
        if partition == self.owner:
            return self.decoder
        own = self._apart.pop(partition, None) or self.decoder.apart(_TOKENS_APART)
        self._apart[partition] = own
        while len(self._apart) > _MOST_APART:
            self._apart.popitem(last=False)
        return own
