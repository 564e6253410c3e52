"""How the followers find the leader: through the group that MLX has formed."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from ..errors import DistributedError
from .channel import Channel

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
