"""How the followers find the leader: through the group that MLX has formed."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..errors import DistributedError, MlxspecError
from .channel import Channel
from .follower import Follower
from .launch import end_with
from .leader import Leader

_SECONDS = 60.0
_SECONDS_TO_GREET = 5.0
_LONGEST_INVITATION = 1024  # bytes
_LOOPBACK = "127.0.0.1"


def meet(group: mx.distributed.Group) -> Channel:
    """Connect rank 0 with each of the others.

    Rank 0 listens at a port that the system gives it, and tells the others its addresses, the
    port and a secret by an all-reduce. Who does not know the secret is turned away.

    Raises:
        DistributedError: a rank cannot be reached.
    """
    rank, size = group.rank(), group.size()
    if rank == 0:
        addresses = _own_addresses()
        only_here = addresses == [_LOOPBACK]
        with socket.create_server((_LOOPBACK if only_here else "", 0), backlog=size) as listener:
            secret = secrets.token_hex(16)
            _broadcast(json.dumps([addresses, listener.getsockname()[1], secret]))
            return Channel(rank, _accept(listener, secret, size - 1))
    addresses, port, secret = json.loads(_broadcast(""))
    connection = _connect(addresses, port)
    connection.sendall(json.dumps([secret, rank]).encode() + b"\n")
    return Channel(rank, {0: connection})


def _own_addresses() -> list[str]:
    """Where rank 0 may be reached, the fastest network first.

    ``mlx.launch`` gives the ring back end a file with every rank's addresses, JACCL one address.
    In a ring of cables not every host has a cable to rank 0, so its name comes last.
    """
    file = os.environ.get("MLX_HOSTFILE")
    if file:
        with open(file, encoding="utf-8") as stream:
            hosts = json.load(stream)
        found = [[address.rpartition(":")[0] for address in host] for host in hosts]
        if all(address == _LOOPBACK for host in found for address in host):
            return [_LOOPBACK]
        return [*dict.fromkeys(found[0]), socket.gethostname()]
    coordinator = os.environ.get("MLX_JACCL_COORDINATOR", "").rpartition(":")[0]
    return [address for address in (coordinator, socket.gethostname()) if address]


def _broadcast(text: str) -> str:
    """Rank 0's text, at every rank; the others pass an empty one."""
    padded = text.encode().ljust(_LONGEST_INVITATION, b" ") if text else bytes(_LONGEST_INVITATION)
    summed = mx.distributed.all_sum(mx.array(list(padded), mx.int32), stream=mx.cpu)
    return bytes(cast(list[int], summed.tolist())).decode()


def _accept(listener: socket.socket, secret: str, count: int) -> dict[int, socket.socket]:
    """Wait for so many ranks."""
    peers: dict[int, socket.socket] = {}
    until = time.monotonic() + _SECONDS
    while len(peers) < count:
        listener.settimeout(max(0.01, until - time.monotonic()))
        try:
            connection = listener.accept()[0]
        except TimeoutError:
            missing = ", ".join(str(r) for r in range(1, count + 1) if r not in peers)
            raise DistributedError(
                f"rank {missing} has not connected to rank 0: allow connections between the "
                "hosts in their firewalls"
            ) from None
        greeting = _greeting(connection)
        if greeting and hmac.compare_digest(str(greeting[0]), secret):
            peers[int(greeting[1])] = connection
        else:
            connection.close()
    return peers


def _greeting(connection: socket.socket) -> list[Any] | None:
    """What a stranger says first."""
    connection.settimeout(_SECONDS_TO_GREET)
    received = b""
    try:
        while not received.endswith(b"\n") and len(received) < _LONGEST_INVITATION:
            part = connection.recv(_LONGEST_INVITATION)
            if not part:
                return None
            received += part
        greeting = json.loads(received)
    except (OSError, ValueError):
        return None
    return greeting if isinstance(greeting, list) and len(greeting) == 2 else None


def _connect(addresses: Sequence[str], port: int) -> socket.socket:
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=_SECONDS_TO_GREET)
        except OSError:
            continue
    raise DistributedError(
        f"rank 0 cannot be reached at {' or '.join(addresses)}, port {port}: allow connections "
        "between the hosts in their firewalls"
    )


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
