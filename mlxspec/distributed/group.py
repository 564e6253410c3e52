"""Taking part in a launch of several ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..errors import DistributedError, MlxspecError
from .ending import end_with
from .follower import Follower
from .leader import Leader
from .rendezvous import meet

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@contextmanager
def taking_part() -> Iterator[Leader | None]:
    """Form the group of the ranks that ``mlx.launch`` has started.

    Only rank 0 comes out of this; the others follow it until the process ends. At its end they
    end as well, with the exit status that rank 0 will have.

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
        _follow(group)
    channel = meet(group)
    status = 1
    try:
        yield Leader(group, channel)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        raise
    except KeyboardInterrupt:
        status = _INTERRUPTED
        raise
    except RuntimeError:
        channel.wait_for_bad_news()  # MLX may notice before we do that a rank is gone
        raise
    finally:
        # A forward may still be on its way that the followers take part in.
        mx.synchronize(generation_stream)
        channel.close(status)


def _follow(group: mx.distributed.Group) -> None:
    """Follow rank 0 until the process ends, by its word or with one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it, too, and says what it means
    name = f"Error: rank {group.rank()}"
    channel = None
    try:
        channel = meet(group)
        Follower(group, channel).follow()
    except Exception as error:
        if channel:
            channel.wait_for_bad_news()  # rank 0 may be gone, or be in the same trouble and say so
        reason = "" if isinstance(error, MlxspecError) else f"{type(error).__name__}: "
        end_with(f"{name}: {reason}{error}")
