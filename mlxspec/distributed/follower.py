"""The other ranks: each repeats what rank 0 tells, on its own part of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from ..draft.tree import DraftTree
from ..engine.capability import rounding_noise, row_error, tree_agrees
from ..engine.params import CacheOptions
from ..engine.target import Capability, Target
from .channel import Channel
from .leader import is_known, share, wait_for_all
from .sharding import load_shard

TOGETHER: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (rounding_noise, row_error, tree_agrees)
}
"""What :meth:`.leader.Leader.run` may call at every rank."""

_FORWARDS_BETWEEN_CLEARING = 256  # as the decoding loop: outgrown buffers go back to the system


class Follower:
    """Repeats what the leader does.

    Args:
        group: the ranks.
        channel: to rank 0.
    """

    def __init__(self, group: mx.distributed.Group, channel: Channel) -> None:
        self._group = group
        self._channel = channel
        self._targets: dict[int, Target] = {}
        self._model: nn.Module
        self._forwards = 0

    def follow(self) -> None:
        """Do what the leader tells, until the process ends: by its farewell, or by its death.

        A target may be cut back when it has been let go already, by a generation that was never
        closed and ends as garbage.

        Raises:
            LoadError: this rank cannot load its part of the model.
        """
        with ExitStack() as wired, mx.stream(generation_stream):
            while True:
                name, *args = self._channel.receive()
                if name == "load":
                    self._model, _ = load_shard(args[0], self._group)
                    wired.enter_context(wired_limit(self._model, [generation_stream]))
                    wait_for_all()
                elif name == "run":
                    TOGETHER[args[0]](self._model, *args[1:])
                elif name == "open":
                    self._open(*args)
                elif name == "close":
                    del self._targets[args[0]]
                elif name == "forward":
                    self._forward(*args)
                elif args[0] in self._targets:
                    getattr(self._targets[args[0]], name)(*args[1:])

    def _open(
        self,
        number: int,
        capability: str,
        vocab_size: int,
        options: dict[str, Any],
    ) -> None:
        self._targets[number] = Target(
            self._model, Capability(capability), vocab_size, CacheOptions(**options)
        )

    def _forward(self, number: int, tokens: list[int], parents: list[int]) -> None:
        """Run a forward for the sake of the others; nobody here reads its logits."""
        tree = DraftTree(tuple(tokens), tuple(parents))
        rows = mx.array(tree.tokens) if is_known(tree) else share(None)
        mx.async_eval(self._targets[number].forward(rows, tree))
        self._forwards += 1
        if self._forwards % _FORWARDS_BETWEEN_CLEARING == 0:
            mx.clear_cache()
