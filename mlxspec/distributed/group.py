"""A group of ranks: rank 0 comes out of it as the leader, the others follow it to the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from ..drafting.drafter import DraftTree
from ..engine.capability import chunk_error, rounding_noise, row_error, tree_agrees
from ..engine.params import CacheOptions
from ..engine.target import Capability, Target
from ..errors import DistributedError, MlxspecError
from ..process import INTERRUPTED
from .channel import Channel, meet
from .launch import end_with
from .leader import Leader
from .sharding import is_known, load_shard, share, wait_for_all

TOGETHER: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (chunk_error, rounding_noise, row_error, tree_agrees)
}
"""What :meth:`.leader.Leader.run` may call at every rank."""

_FORWARDS_BETWEEN_CLEARING = 256  # as in the decoding loop: outgrown buffers go to the system
_SECONDS_TO_NOTICE = 3.0  # that a rank is gone, where MLX has complained first


@contextmanager
def taking_part() -> Iterator[Leader | None]:
    """Form the group of the ranks that ``mlx.launch`` has started.

    Only rank 0 comes out of this; the others follow it until the process ends. When rank 0 ends
    they end as well, with its exit status.

    Yields:
        the leader, or None in a group of one.

    Raises:
        DistributedError: the ranks do not find each other.
    """
    try:
        group = mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        raise DistributedError(f"the ranks do not find each other: {error}") from error
    if group.size() == 1:
        yield None
        return
    if group.rank() > 0:
        _follow_to_the_end(group)
    channel = meet(group)
    status = 1
    try:
        yield Leader(group, channel)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        raise
    except KeyboardInterrupt:
        status = INTERRUPTED
        raise
    except RuntimeError:
        time.sleep(_SECONDS_TO_NOTICE)
        raise
    finally:
        # A forward may still be under way in which the followers take part.
        mx.synchronize(generation_stream)
        channel.close(status)


def _follow_to_the_end(group: mx.distributed.Group) -> None:
    """Follow rank 0 until the process ends, by its word or with one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it, too, and says what it means
    channel = None
    try:
        channel = meet(group)
        _follow(group, channel)
    except Exception as error:
        if channel:
            time.sleep(_SECONDS_TO_NOTICE)  # rank 0 may be in the same trouble, and say so
        reason = "" if isinstance(error, MlxspecError) else f"{type(error).__name__}: "
        end_with(f"Error: rank {group.rank()}: {reason}{error}")


def _follow(group: mx.distributed.Group, channel: Channel) -> None:
    """Do on this rank's part of the model what the leader tells, until the process ends.

    Raises:
        LoadError: this rank cannot load its part of the model.
    """
    targets: dict[int, Target] = {}
    forwards = count(1)
    with ExitStack() as wired, mx.stream(generation_stream):
        while True:
            match channel.receive():
                case ["load", name]:
                    model, _ = load_shard(name, group)
                    wired.enter_context(wired_limit(model, [generation_stream]))
                    wait_for_all()
                case ["run", name, *args]:
                    TOGETHER[name](model, *args)
                case ["open", number, capability, vocab_size, options]:
                    targets[number] = Target(
                        model, Capability(capability), vocab_size, CacheOptions(**options)
                    )
                case ["close", number]:
                    del targets[number]
                case ["forward", number, tokens, parents]:
                    tree = DraftTree(tuple(tokens), tuple(parents))
                    rows = mx.array(tree.tokens) if is_known(tree) else share(None)
                    # The other ranks need its values; nobody here reads the logits.
                    mx.async_eval(targets[number].forward(rows, tree))
                    if next(forwards) % _FORWARDS_BETWEEN_CLEARING == 0:
                        mx.clear_cache()
                # A generation that was never closed and ends as garbage may cut a target back
                # that has been closed already.
                case [method, number, *args] if number in targets:
                    getattr(targets[number], method)(*args)
