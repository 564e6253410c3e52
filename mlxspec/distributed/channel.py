"""Connections between rank 0 and the other ranks: setup, messages, and detection of a loss."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn, cast

import mlx.core as mx

from ..errors import MlxspecError
from .launch import end_with

Message = list[Any]
"""A name and its arguments, which are JSON values."""

_END = "end"
_BEAT = "beat"
_SECONDS_BETWEEN_BEATS = 2.0
_SECONDS_SILENT = 20.0  # a process that is stopped, swaps, or has lost power or network

_SECONDS_TO_MEET = 60.0
_SECONDS_TO_GREET = 5.0
_MAX_INVITATION = 1024  # bytes
_LOOPBACK = "127.0.0.1"
_FIREWALLS = "allow connections between the hosts in their firewalls"


def meet(group: mx.distributed.Group) -> Channel:
    """Connect rank 0 with every other rank.

    Rank 0 listens at a free port. It sends its addresses, the port and a secret to the other ranks
    by an all-reduce. Connections without the secret are refused.

    Raises:
        MlxspecError: a rank cannot be reached.
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
    """The addresses of rank 0, the fastest network first.

    ``mlx.launch`` gives the ring back end a file with every rank's addresses, and JACCL one
    address. In a ring of cables, not every host is connected to rank 0, so rank 0's host
    name comes last.
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
    """Send rank 0's text to every rank; the others pass an empty text."""
    padded = text.encode().ljust(_MAX_INVITATION, b" ") if text else bytes(_MAX_INVITATION)
    summed = mx.distributed.all_sum(mx.array(list(padded), mx.int32), stream=mx.cpu)
    return bytes(cast(list[int], summed.tolist())).decode()


def _accept(listener: socket.socket, secret: str, count: int) -> dict[int, socket.socket]:
    """Wait until ``count`` ranks have connected."""
    peers: dict[int, socket.socket] = {}
    until = time.monotonic() + _SECONDS_TO_MEET
    while len(peers) < count:
        listener.settimeout(max(0.01, until - time.monotonic()))
        try:
            connection = listener.accept()[0]
        except TimeoutError:
            missing = ", ".join(str(r) for r in range(1, count + 1) if r not in peers)
            raise MlxspecError(
                f"rank {missing} has not connected to rank 0: {_FIREWALLS}"
            ) from None
        rank = _greeted(connection, secret)
        if rank is None:
            connection.close()
        else:
            peers[rank] = connection
    return peers


def _greeted(connection: socket.socket, secret: str) -> int | None:
    """The rank that a new connection's first line states; None if its secret is wrong."""
    connection.settimeout(_SECONDS_TO_GREET)
    try:
        with connection.makefile("rb") as stream:
            greeting, rank = json.loads(stream.readline(_MAX_INVITATION))
        known = hmac.compare_digest(str(greeting).encode(), secret.encode())
        return int(rank) if known else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _connect(addresses: Sequence[str], port: int) -> socket.socket:
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=_SECONDS_TO_GREET)
        except OSError:
            continue
    raise MlxspecError(
        f"rank 0 cannot be reached at {' or '.join(addresses)}, port {port}: {_FIREWALLS}"
    )


class Channel:
    """Connections to other ranks, with one JSON line per message.

    A thread listens to each rank. If the rank is gone without a farewell, or not even its beats
    come, the thread writes an error line and ends the process.

    Args:
        rank: the rank of this process.
        peers: connected sockets by rank: all other ranks at rank 0, only rank 0 elsewhere.

    Attributes:
        on_loss: called with the error line before the process ends, in any thread; the main thread
            may be waiting inside MLX for good.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = dict(peers)
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._sending = threading.RLock()
        self._losing = threading.Lock()
        self._closing = threading.Event()
        self._may_end = False
        self.on_loss: Callable[[str], object] = lambda line: None
        for peer, connection in self._peers.items():
            connection.settimeout(_SECONDS_SILENT)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._listen, args=(peer, connection), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send a message to all peers; nothing is sent after the farewell."""
        if self._closing.is_set():
            return
        line = json.dumps(message, default=list).encode() + b"\n"  # JSON has no ranges
        # A generation that was never closed ends when it is garbage-collected. That may be in the
        # middle of another message, or in another thread.
        with self._sending:
            for connection in self._peers.values():
                with suppress(OSError):  # the thread that listens to it acts
                    connection.sendall(line)

    def receive(self) -> Message:
        """Wait for the next message."""
        return self._messages.get()

    def close(self) -> None:
        """Send the farewell: once this process has ended, the peers end with status 0.

        Until then they take part in running forwards.
        """
        self.send(_END)
        self._closing.set()

    def _beat(self) -> None:
        while not self._closing.wait(_SECONDS_BETWEEN_BEATS):
            self.send(_BEAT)

    def _listen(self, rank: int, connection: socket.socket) -> None:
        """Receive a rank's messages until it is gone."""
        what = "is gone"
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    if message[0] == _END:
                        self._may_end = True
                    elif message[0] != _BEAT:
                        self._messages.put(message)
        except TimeoutError:
            what = f"has been silent for {_SECONDS_SILENT:g} seconds"
        except OSError:
            pass
        self._lose(f"rank {rank} {what}")

    def _lose(self, what: str) -> None:
        """End this process because of what has happened to a rank."""
        if self._may_end:
            os._exit(0)  # wherever the main thread is: it has nothing to finish
        if not self._closing.is_set():
            self.end(f"Error: {what}, so rank {self._rank} ends, too")

    def end(self, line: str) -> NoReturn:
        """End this process with an error line. If it is rank 0, the others then end without one."""
        self._losing.acquire()  # for good: only one rank is named
        self.on_loss(line)
        if self._rank == 0:
            self.send(_END)
        end_with(line)
