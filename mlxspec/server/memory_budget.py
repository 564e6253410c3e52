"""The memory of a server: one bound for all its models, and admission of requests under it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from ..engine.grammar import Vocabulary
from ..engine.machine import free_memory, least_free_memory, whole_memory
from ..engine.target import together
from .api_body import ApiBody
from .body import ApiError
from .served_model import Need, ServedModel

_RESERVE = 0.1  # share of the memory beside the weights, for joint steps and freed buffers
_FAR = 1 << 20  # tokens; longer than any window
_CACHE_SHARE = 0.5  # share of the room that idle entries of the prefix caches may take
_LOOK = 1.0  # seconds between checks of the system's memory


class ServerMemory:
    """The memory of a server, which all its models share.

    Weights, compiled constraints and the memories of earlier answers come first. The rest, less a
    reserve, is the :attr:`room`. It holds the buffers of a forward, reservations (such as the
    caches of running requests), and idle entries of the prefix caches, which are evicted for
    reservations.

    Figures may be read in any thread. The methods that change something may be called only in the
    worker's thread or, before it runs, in the thread that starts it.

    Args:
        bound: the most bytes in total; by default, all that the machine has.
    """

    def __init__(self, bound: int | None = None) -> None:
        self._bound = whole_memory() if bound is None else min(bound, whole_memory())
        self._models: dict[str, ServedModel] = {}
        self._reserved: dict[object, Need] = {}
        self._limit, self._next_look = self._bound, 0.0

    # --- figures ---

    @property
    def limit(self) -> int:
        """The most bytes in total now: other programs may leave less than the bound."""
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + _LOOK
            held = mx.get_active_memory() + mx.get_cache_memory()
            self._limit = min(self._bound, held + free_memory())
        return self._limit

    @property
    def parts(self) -> dict[str, int]:
        """The bytes in use or reserved, by purpose."""
        models = self._models.copy().values()
        return {
            **self._lasting,
            "forward": self._forward(),
            "requests": self.reserved,
            "prefixes": sum(model.cache.nbytes for model in models),
        }

    @property
    def _lasting(self) -> dict[str, int]:
        """The parts that requests do not change."""
        models = [*self._models.copy().values()]
        indexes = {id(index): index for model in models for index in model.answer_indexes}
        kept = (Vocabulary.kept_on(model.decoder.tokenizer) for model in models)
        return {
            "weights": sum(model.memory.weights for model in models),
            "answers": sum(index.nbytes for index in indexes.values()),
            "constraints": sum(vocabulary.nbytes for vocabulary in kept if vocabulary),
        }

    @property
    def room(self) -> int:
        """The bytes that the weights, the memories of earlier answers and the reserve leave."""
        return max(0, int((self.limit - sum(self._lasting.values())) * (1 - _RESERVE)))

    @property
    def reserved(self) -> int:
        """The reserved bytes, without those of forwards."""
        return sum(need.caches for need in self._reserved.copy().values())

    def most_idle(self, beside: int = 0) -> int:
        """How many bytes the idle entries of the prefix caches may take: half of the room.

        If the entry that was used last is larger, it may take more.

        Args:
            beside: the bytes of the weights of a model that is not counted yet.
        """
        left = max(0, self.room - beside * (1 - _RESERVE) - self._forward())
        return int(left * _CACHE_SHARE)

    def _forward(self, *more: Need) -> int:
        """The bytes of the largest forward that may run."""
        needs = [*self._reserved.copy().values(), *more]
        steps = (model.memory.step_bytes() for model in self._models.copy().values())
        return max([*(need.forward for need in needs), *steps, 0])

    def fits(self, need: Need) -> bool:
        """Whether a need could be reserved now, with idle entries evicted if necessary."""
        return self.reserved + need.caches + self._forward(need) <= self.room

    def ever_fits(self, need: Need, beside: int = 0) -> bool:
        """Whether a need could be reserved if nothing else were reserved.

        Args:
            beside: the bytes of weights that are about to be loaded; negative for weights that are
                about to be unloaded.
        """
        return need.caches + need.forward <= self.room - beside * (1 - _RESERVE)

    def bound_for(self, need: Need) -> int:
        """The smallest bound with room for a need and the models."""
        room = (need.caches + need.forward) / (1 - _RESERVE)
        return sum(self._lasting.values()) + math.ceil(room)

    def max_tokens_for(
        self, served: ServedModel, n_prompt: int, body: ApiBody, default: int
    ) -> int:
        """The most tokens of an answer: the requested number, or as many as fit if those are fewer.

        Clients ask for what the largest models can write.

        Args:
            default: the number for a body that requests none.

        Raises:
            ApiError: 400, the prompt fills the context; 413, its caches would not fit into memory
                even if no other request ran.
        """
        longest, needs = served.context_length or math.inf, served.memory.needs
        if n_prompt >= longest:
            raise ApiError(
                # Claude Code parses both numbers to shorten the conversation.
                f"the prompt is too long: {n_prompt} tokens > {longest - 1}, since the model's "
                f"context has {longest} and an answer needs at least one: shorten the prompt",
                param=body.param,
                code="context_length_exceeded",
            )
        wanted = int(min(body.max_tokens or default, longest - n_prompt))
        while wanted > 1 and not self.ever_fits(needs(n_prompt + wanted)):
            wanted //= 2
        need = needs(n_prompt + wanted)
        if not self.ever_fits(need):
            raise self.refusal(n_prompt, wanted, need)
        return wanted

    def refusal(self, n_prompt: int, max_tokens: int, need: Need) -> ApiError:
        """The error for a request that would not fit into memory even if no other request ran."""
        needed = in_words(need.caches + need.forward + (1 << 20))
        return ApiError(
            f"{n_prompt} prompt tokens and {max_tokens} answer tokens need {needed} of memory, but "
            f"the server's models leave {in_words(self.room)}: shorten the prompt or ask "
            "for fewer tokens",
            status=413,
            code="out_of_memory",
        )

    def spare_positions(self, served: ServedModel) -> int:
        """How many positions of a model's caches fit into the spare half of the reserve."""
        each = (served.memory.bytes_for(2 * _FAR) - served.memory.bytes_for(_FAR)) // _FAR
        return self._spare // max(1, each)

    @property
    def _spare(self) -> int:
        """Half of the reserve. Joint steps' slots may take one half, freed buffers the other."""
        return int(self.room * _RESERVE / 2)

    # --- changes ---

    def add(self, served: ServedModel) -> None:
        """Count a loaded model; this ends the reservation under its name."""
        self._models[served.name] = served
        self.release(served.name)
        loaded = served.decoder.loaded
        if loaded.leader:  # each rank holds a part of it on its own machine
            held = mx.get_active_memory() + mx.get_cache_memory()
            self._bound = min(self._bound, held + together(least_free_memory, loaded))
        self.make_room()

    def remove(self, served: ServedModel) -> None:
        """Stop counting a model and its idle entries."""
        del self._models[served.name]

    def reserve(self, owner: object, need: Need) -> None:
        """Reserve memory, evicting idle entries if necessary.

        Args:
            owner: a request, or the name of a model that is being loaded; :meth:`release` takes it
                to end the reservation.
        """
        self._reserved[owner] = need
        self.make_room()

    def release(self, owner: object) -> None:
        """End a reservation, if there is one."""
        self._reserved.pop(owner, None)

    def make_room(self) -> None:
        """Evict idle entries of all models, the least recently used first, until everything fits.

        MLX may keep freed buffers for later arrays, up to their part of the reserve.
        """
        mx.set_cache_limit(self._spare)
        self._evict(self.room - self._forward() - self.reserved)
        self._evict(self.most_idle(), kept=1)

    def _evict(self, max_bytes: int, kept: int = 0) -> None:
        """Evict idle entries until they take at most ``max_bytes``, or only ``kept`` entries are
        left.
        """
        caches = [model.cache for model in self._models.values()]
        over = sum(cache.nbytes for cache in caches) - max(0, max_bytes)
        while over > 0 and sum(cache.entries for cache in caches) > kept:
            over -= min(caches, key=lambda cache: cache.oldest).make_room(1)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context in which MLX observes the bound."""
        before = mx.set_memory_limit(self._bound), mx.set_cache_limit(self._spare)
        try:
            yield
        finally:
            mx.set_memory_limit(before[0])
            mx.set_cache_limit(before[1])


def in_words(nbytes: int) -> str:
    """A readable size in the units of ``--memory-limit``, rounded down."""
    mebibytes = nbytes >> 20
    return f"{mebibytes / 1024:,.1f} GiB" if mebibytes >= 10_000 else f"{mebibytes:,} MiB"
