"""Rank 0: does everything, and tells the others of each forward before it runs it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..drafting.drafter import DraftTree
from ..engine.params import CacheOptions
from ..engine.target import Capability, Target
from ..errors import OptionError
from .channel import Channel
from .launch import uninterrupted
from .sharding import is_known, load_shard, share, wait_for_all

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Result = TypeVar("Result")


class Leader:
    """Rank 0's end of the channel, which the models that it loads carry as ``leader``.

    Args:
        group: the ranks.
        channel: to all of them.
    """

    def __init__(self, group: mx.distributed.Group, channel: Channel) -> None:
        self.group = group
        self._channel = channel
        self._numbers = count()
        self._closed: list[int] = []

    def load(self, path_or_repo: str | Path) -> tuple[nn.Module, TokenizerWrapper]:
        """Load a model split over all ranks, each of which loads its own part.

        Raises:
            LoadError: as :func:`.sharding.load_shard`.
        """
        self._channel.send("load", str(path_or_repo))
        model, tokenizer = load_shard(path_or_repo, self.group)
        wait_for_all()
        model.leader = self
        return model, tokenizer

    def target(
        self,
        model: nn.Module,
        capability: Capability,
        vocab_size: int,
        options: CacheOptions | None = None,
        cache: Sequence[Any] | None = None,
    ) -> LeadingTarget:
        """A target that every rank has on its part; the arguments are those of :class:`Target`.

        Raises:
            OptionError: caches are lent, which hold a whole model's keys and values.
        """
        if cache is not None:
            raise OptionError(
                "a prompt cache is not split over several machines as the model is: leave it out, "
                "or run without mlx.launch"
            )
        number = next(self._numbers)
        options = options or CacheOptions()
        self.tell("open", number, capability.value, vocab_size, asdict(options))
        target = LeadingTarget(self, number, model, capability, vocab_size, options)
        weakref.finalize(target, self._closed.append, number)
        return target

    def run(self, function: Callable[..., Result], model: nn.Module, *args: Any) -> Result:
        """Call a function of :data:`.group.TOGETHER` with the model, at every rank."""
        with uninterrupted(), mx.stream(generation_stream):
            self.tell("run", function.__name__, *args)
            return function(model, *args)

    def tell(self, *message: Any) -> None:
        """Tell the followers what to do."""
        while self._closed:
            self._channel.send("close", self._closed.pop())
        self._channel.send(*message)


class LeadingTarget(Target):
    """A target of which the followers repeat every forward and every change of the cache.

    Interrupts wait until what the followers were told is done here, too.
    """

    def __init__(self, leader: Leader, number: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._leader = leader
        self._number = number
        self._told = False

    @contextmanager
    def _telling(self, method: str, *args: Any) -> Iterator[None]:
        """Tell the followers of a call, unless it is part of one that they repeat already."""
        if self._told:
            yield
            return
        with uninterrupted(), mx.stream(generation_stream):
            self._leader.tell(method, self._number, *args)
            self._told = True
            try:
                yield
            finally:
                self._told = False

    def prefill(self, tokens: Sequence[int], *args: Any, **options: Any) -> None:
        """As :meth:`Target.prefill`, of which the followers are told chunk by chunk."""
        super().prefill(tokens, *args, **options)
        self._leader.tell("prefill", self._number, [])  # caches change for steps at its end

    def _prefill_chunk(self, tokens: Sequence[int], ends: bool = True) -> None:
        with self._telling("_prefill_chunk", list(tokens), ends):
            super()._prefill_chunk(tokens, ends)

    def forward(self, tokens: mx.array, tree: DraftTree) -> mx.array:
        """As :meth:`Target.forward`, and dispatched: the other ranks wait for its values."""
        with self._telling("forward", tree.tokens, tree.parents):
            if not is_known(tree):
                tokens = share(tokens)
            logits = super().forward(tokens, tree)
            mx.async_eval(logits)
        return logits

    def commit_moved(self, rows: Sequence[int]) -> None:
        """As :meth:`Target.commit_moved`; the followers move theirs, too."""
        with self._telling("commit", list(rows)):
            super().commit_moved(rows)

    def truncate(self, length: int) -> None:
        """As :meth:`Target.truncate`."""
        with self._telling("truncate", length):
            super().truncate(length)

    def flush_pending(self) -> None:
        """As :meth:`Target.flush_pending`."""
        with self._telling("flush_pending"):
            super().flush_pending()
