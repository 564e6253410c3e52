"""A model that is served, with what its generations share."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ..corpus import MAX_TOKENS
from ..engine.positions import context_length
from ..generation.decoder import Decoder
from ..generation.drafting import Auto
from ..generation.options import GenerationOptions, MakeDrafter
from .admission import Memory
from .errors import ApiError
from .prefix_cache import PrefixCache

# Of partitions, and of the tokens that each remembers: some 100 MB in all.
_MOST_APART = 32
_TOKENS_APART = MAX_TOKENS // 4


@dataclass
class ServedModel:
    """A model that is served.

    Each partition, such as a client's key, drafts from its own answers alone, and learns from its
    own alone where drafts are right: otherwise the drafts that are accepted, and how fast an
    answer comes, would tell one what another was answered. Where there are many partitions, those
    that were not used for longest are forgotten.

    Attributes:
        name: what requests call it.
        decoder: loaded, with its costs known.
        cache: of prefixes.
        memory: what caches take.
        options: defaults of its generations; a request's own override them.
        template_arguments: defaults for its chat template; a request's own override them.
        owner: the partition that the decoder's own memory belongs to. The others have one each,
            in the process alone.
        path: where it was loaded from, as the user wrote it: requests may call it that, too.
        created: when it was loaded, in seconds since 1970.
    """

    name: str
    decoder: Decoder
    cache: PrefixCache
    memory: Memory
    options: GenerationOptions = field(default_factory=GenerationOptions)
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    owner: str = field(default="", repr=False)
    path: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _apart: OrderedDict[str, Decoder] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )
    """By partition, the last used last."""

    @property
    def context_length(self) -> int | None:
        """In tokens, where the model states it."""
        return context_length(self.decoder.model)

    @cached_property
    def special_tokens(self) -> list[int]:
        """Those that XTC never drops: line breaks and ends."""
        tokenizer = self.decoder.tokenizer
        return [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]

    @property
    def predicts(self) -> bool:
        """Whether its drafts can come from a text that a client expects."""
        return isinstance(self.decoder.drafting, Auto)

    def check_fits(self, n_prompt: int, max_tokens: int, param: str) -> None:
        """Refuse a request that can never run, whatever else does.

        Args:
            n_prompt: tokens of the prompt.
            max_tokens: that the answer may have.
            param: where the body has the prompt.

        Raises:
            ApiError: 400, the context would be too long; 413, its caches would not fit into memory.
        """
        longest = self.context_length
        if longest is not None and n_prompt + max_tokens > longest:
            raise ApiError(
                f"the model's context has {longest} tokens; the prompt has {n_prompt} and the "
                f"answer may have {max_tokens}: shorten the prompt or ask for fewer",
                param=param,
                code="context_length_exceeded",
            )
        needed = self.memory.bytes_for(n_prompt + max_tokens)
        if needed > self.memory.limit:
            raise ApiError(
                f"the caches of {n_prompt} prompt tokens and {max_tokens} more need "
                f"{needed >> 20} MiB, and {self.memory.limit >> 20} MiB are there for them: "
                "shorten the prompt or ask for fewer tokens",
                status=413,
                code="out_of_memory",
            )

    def make_drafter(self, prediction: Sequence[int], partition: str) -> MakeDrafter:
        """Return what makes the drafter of one generation; called in the worker's thread alone.

        Args:
            prediction: token ids that the output is expected to follow.
            partition: whose answers it drafts from, and adds its own to.
        """
        decoder = self._decoder_of(partition)
        drafting = decoder.drafting
        if isinstance(drafting, Auto):
            drafting = replace(drafting, prediction=prediction)
        return partial(drafting.make, decoder)

    def _decoder_of(self, partition: str) -> Decoder:
        if partition == self.owner:
            return self.decoder
        own = self._apart.pop(partition, None) or self.decoder.apart(_TOKENS_APART)
        self._apart[partition] = own
        while len(self._apart) > _MOST_APART:
            self._apart.popitem(last=False)
        return own
