"""Sessions, which keep a conversation's KV cache between turns."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..corpus.suffix_index import common_length
from ..engine.caches import (
    are_quantized,
    can_be_cut,
    first_positions,
    for_steps,
    held_arrays,
    parts,
)
from ..engine.capability import capability_with
from ..engine.loaded_model import LoadedModel
from ..engine.params import CacheOptions
from ..engine.prompt_cache import (
    as_mlx_lms,
    check_fits,
    load_prompt_cache,
    save_prompt_cache,
    tokens_in,
)
from ..engine.target import Capability, Target, target_for
from ..errors import FileError, OptionError

MARKS = 2
"""A cache that cannot be cut can be rewound to the ends of this many prefills; each end takes a
copy of the cache's state.
"""

_TRIMMABLE = {Capability.TREE, Capability.CHAIN}


class Session:
    """A conversation's KV cache, kept between turns.

    Pass the whole conversation at every turn. The model runs only what follows the longest common
    prefix with the last turn::

        session = mlxspec.Session()
        messages = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = "".join(r.text for r in decoder.stream(messages, session=session))
            messages.append({"role": "assistant", "content": answer})

    The conversation may also be edited, trimmed or regenerated. Some caches cannot be trimmed to
    the common prefix (state-space models, windows that have moved). They are rewound to the end of
    one of the last two prompts, or start again from nothing. A session also starts again with
    another model or other cache options.

    :meth:`save` writes the cache to a file. :meth:`load` continues from such a file, or from a
    document cached by ``mlxspec cache-prompt``.

    As with mlx-lm, the contents of a quantised cache depend on the conversation's turns: a single
    prefill would start to quantise at another position. Turns also matter for models whose results
    depend on the chunks of the prompt, as ``mlxspec inspect`` shows. With ``max_kv_size``, they
    matter because the rows of a later turn see the first positions, which the cache keeps but
    mlx-lm's mask hides.

    Args:
        cache: mlx-lm's caches to begin with, from :func:`mlxspec.load_prompt_cache`; the session
            does not change them.
        tokens: the tokens in these caches.
    """

    def __init__(self, cache: Sequence[Any] = (), tokens: Sequence[int] = ()) -> None:
        self.mark_at = 0
        """A length to which the cache can be rewound after the next prompt."""
        self._given = copy.deepcopy([*cache])  # MLX copies on write
        """mlx-lm's caches, until the first generation turns them into a target."""
        self._tokens = list(tokens)
        self._target: Target | None = None
        self._lent: tuple[Target, Sequence[int]] | None = None
        """The target and the prompt of the generation that is using the session, if any."""
        self._in_use = threading.Lock()

    @classmethod
    def load(cls, file_name: str | os.PathLike[str]) -> Session:
        """Begin a session with the cache in a file.

        Raises:
            FileError: the file cannot be read or, like mlx-lm's files, does not list the cache's
                tokens. For such a file, pass the result of :func:`mlxspec.load_prompt_cache` as
                ``prompt_cache`` instead.
        """
        cache, metadata = load_prompt_cache(file_name, return_metadata=True)
        tokens = tokens_in(metadata, cache)
        if not tokens:
            raise FileError(
                f"{file_name} does not list its cache's tokens: load it with load_prompt_cache and "
                "pass it as prompt_cache"
            )
        return cls(cache, tokens)

    def reusable_prefix(self, length: int) -> int:
        """How many of the first ``length`` tokens another session can begin with.

        While the session is in use, only the prompt's tokens that have run count. Then, this may be
        called only in the generation's thread, between two steps or two chunks of the prompt.
        """
        if self._lent:
            target, prompt = self._lent
            return target.reusable_prefix(min(length, len(prompt)))
        if length >= len(self._tokens):
            return len(self._tokens)
        if self._target:
            return self._target.reusable_prefix(length)
        held = parts(map(for_steps, self._given))
        return length if all(can_be_cut(cache, length) for cache in held) else 0

    def fork(self, length: int, room: int = 0) -> Session:
        """A new session that begins with a copy of the first tokens.

        Args:
            length: a result of :meth:`reusable_prefix`, at least 1. The same restrictions apply to
                this call.
            room: the number of tokens for which the copy allocates memory.
        """
        with mx.stream(generation_stream):
            target, tokens = self._lent or (self._target, self._tokens)
            session = Session(tokens=tokens[:length])
            if target:
                session._target = target.fork(length, room)
            else:
                held = map(for_steps, self._given)
                session._given = [first_positions(cache, length, room) for cache in held]
                mx.eval(held_arrays(parts(session._given)))
            return session

    @property
    def length(self) -> int:
        """How many tokens the cache holds now, even while the session is in use."""
        return self._lent[0].length if self._lent else len(self._tokens)

    @property
    def quantized(self) -> bool:
        """Whether the cache is quantised now, even while the session is in use."""
        target = self._lent[0] if self._lent else self._target
        return are_quantized(target.cache if target else self._given)

    @property
    def nbytes(self) -> int:
        """The bytes of MLX arrays that the session keeps between two generations."""
        target = self._target
        held = target.all_arrays if target else held_arrays(parts(self._given))
        return sum(array.nbytes for array in {id(array): array for array in held}.values())

    def save(
        self, file_name: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Save the cache as :func:`mlxspec.save_prompt_cache` does.

        Raises:
            OptionError: the session holds nothing yet, a generation is using it, its model is
                split over several machines, or nothing could read the model's kind of cache.
            FileError: the file cannot be written; an existing file is unchanged.
        """
        self._begin_use()
        try:
            target = self._target
            if target is None and not self._given:
                raise OptionError("session has no cache to save: finish a generation first")
            if target and target.loaded.leader:
                raise OptionError("session cannot be saved: its model is split over machines")
            with mx.stream(generation_stream):
                cache = [as_mlx_lms(layer) for layer in target.cache] if target else self._given
                save_prompt_cache(file_name, cache, metadata, tokens=self._tokens)
        finally:
            self._in_use.release()

    def _begin_use(self) -> None:
        """Reserve the session, so that any other use of it raises an error."""
        if not self._in_use.acquire(blocking=False):
            raise OptionError("session is generating: close that generation before the next one")

    @property
    def tokens(self) -> list[int]:
        """The tokens that the cache holds."""
        return self._tokens.copy()

    def take(
        self,
        prompt: Sequence[int],
        loaded: LoadedModel,
        capability: Capability,
        options: CacheOptions,
    ) -> Target:
        """Lend the caches to a generation, holding as much of its prompt as possible.

        Args:
            prompt: the token ids of the whole conversation.
            loaded, capability, options: as for :class:`mlxspec.engine.target.Target`.

        Raises:
            OptionError: another generation is using the session, or it begins with a cache from a
                file and the model is split over several machines.
            FileError: the session's initial cache was made by another model.
        """
        self._begin_use()
        try:
            with mx.stream(generation_stream):
                target = self._target_for(prompt, loaded, capability, options)
            target.mark_at, self.mark_at = self.mark_at, 0
            self._lent = target, prompt
        except BaseException:
            self._lent = None
            self._in_use.release()
            raise
        return target

    def _target_for(
        self,
        prompt: Sequence[int],
        loaded: LoadedModel,
        capability: Capability,
        options: CacheOptions,
    ) -> Target:
        """Take the target out of the session, or make a new one.

        If this turn fails, the session is empty, and its next turn starts from nothing.
        """
        if self._given:
            check_fits(self._given, loaded.model, "the session's cache")
        target, self._target = self._target, None
        given, self._given = self._given, []
        tokens, self._tokens = self._tokens, []
        if given:
            able = capability_with(given, capability)
            target = target_for(loaded, able, options, given, MARKS)
            target.begin_at(len(tokens))
        if target and _serves(target, loaded, capability, options):
            # The prompt's last token belongs to the first step.
            common = min(common_length(tokens, [*prompt]), len(prompt) - 1)
            with suppress(ValueError):
                target.rewind(common)
                return target
        return target_for(loaded, capability, options, marks=MARKS)

    def give_back(self, prompt: Sequence[int], context: Sequence[int]) -> None:
        """Keep an ended generation's context, as far as it was read; nothing if it is empty."""
        if self._lent is None or self._lent[1] is not prompt:
            return
        (target, _), self._lent = self._lent, None
        try:
            with suppress(ValueError), mx.stream(generation_stream):
                if not context:
                    return
                target.truncate(min(target.length, len(context)))
                self._target, self._tokens = target, list(context[: target.length])
        finally:
            self._in_use.release()


def _serves(
    target: Target, loaded: LoadedModel, capability: Capability, options: CacheOptions
) -> bool:
    """Whether a target can continue with this model and these options."""
    if {target.capability, capability} <= _TRIMMABLE:
        target.capability = capability  # depends on whether this turn's drafts may branch
    same = target.model is loaded.model and target.options == options
    return same and target.capability is capability
