"""Connections between rank 0 and the other ranks: setup, messages, and detection of lost ranks."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn, cast

import mlx.core as mx

from ..errors import MlxspecError
from .launch import end_with

_END, _BEAT = b"end", b"beat"
_SECONDS_BETWEEN_BEATS = 2.0
_SECONDS_SILENT = 20.0  # then a rank is lost: it hangs, swaps, or has no power or network

_SECONDS_TO_CONNECT = 5.0
_MAX_INVITATION = 1024  # bytes
_LOOPBACK = "127.0.0.1"


def meet(group: mx.distributed.Group) -> Channel:
    """Connect rank 0 with every other rank.

    Rank 0 listens on a free port. It sends its addresses, the port and a secret to the other ranks
    by an all-reduce. Connections without the secret are refused.

    Raises:
        MlxspecError: rank 0 cannot be reached; ``mlx.launch`` then ends all ranks.
    """
    rank, size = group.rank(), group.size()
    if rank == 0:
        addresses = _own_addresses()
        host = _LOOPBACK if addresses[0] == _LOOPBACK else ""
        with socket.create_server((host, 0), backlog=size) as listener:
            secret = secrets.token_hex(16)
            _broadcast(json.dumps([addresses, listener.getsockname()[1], secret]))
            return Channel(rank, _accept(listener, secret, size - 1))
    addresses, port, secret = json.loads(_broadcast(""))
    connection = _connect(addresses, port)
    connection.sendall(f"{secret} {rank}\n".encode())
    return Channel(rank, {0: connection})


def ring_addresses() -> list[list[str]]:
    """The addresses of each rank, from the file that ``mlx.launch`` gives the ring back end.

    Other back ends have no such file, and get an empty list.

    Raises:
        MlxspecError: with this file MLX would crash, wait for ever, or use other ports.
    """
    if not (file := os.environ.get("MLX_HOSTFILE")):
        return []
    try:
        ranks: list[list[str]] = json.loads(Path(file).read_text("utf-8-sig") or "[]")
        every = [address for addresses in ranks for address in addresses]
        ports = [int(address.rpartition(":")[2]) for address in every]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise MlxspecError(
            f"{file}: not a list of each rank's addresses ({error}); start the ranks with "
            "mlx.launch, or correct MLX_HOSTFILE"
        ) from error
    if len(ranks) < 2:
        raise MlxspecError("there is only one rank: give mlx.launch -n 2 or more, or two hosts")
    for port in ports:
        if not 0 < port < 1 << 16:
            raise MlxspecError(
                f"{port} is not a port, which is at most 65535: give mlx.launch a lower "
                "--starting-port"
            )
    if same := {address for address in every if every.count(address) > 1}:
        raise MlxspecError(
            f"several ranks have the address {min(same)}: give each its own host or port"
        )
    return ranks


def _own_addresses() -> list[str]:
    """The addresses of rank 0, the fastest network first.

    ``mlx.launch`` gives the ring back end a file with every rank's addresses, and JACCL a single
    address. In a ring of cables, not every host is connected to rank 0, so rank 0's host name comes
    last.
    """
    addresses = next(iter(ring_addresses()), [os.environ.get("MLX_JACCL_COORDINATOR", "")])
    hosts = (address.rpartition(":")[0] for address in addresses)
    return [*filter(None, dict.fromkeys(hosts)), socket.gethostname()]


def _broadcast(text: str) -> str:
    """Return rank 0's text on every rank; the other ranks pass an empty text."""
    padded = text.encode().ljust(_MAX_INVITATION, b" ") if text else bytes(_MAX_INVITATION)
    summed = mx.distributed.all_sum(mx.array(list(padded), mx.int32), stream=mx.cpu)
    return bytes(cast(list[int], summed.tolist())).decode()


def _accept(listener: socket.socket, secret: str, count: int) -> dict[int, socket.socket]:
    """Wait until ``count`` ranks have connected."""
    ranks = {f"{secret} {rank}\n".encode(): rank for rank in range(1, count + 1)}
    peers: dict[int, socket.socket] = {}
    while len(peers) < count:
        connection, _ = listener.accept()
        connection.settimeout(_SECONDS_TO_CONNECT)
        greeting = b""
        with suppress(OSError), connection.makefile("rb") as stream:
            greeting = stream.readline(_MAX_INVITATION)
        if rank := ranks.get(greeting):
            peers[rank] = connection
        else:
            connection.close()
    return peers


def _connect(addresses: Sequence[str], port: int) -> socket.socket:
    for address in addresses:
        with suppress(OSError):
            return socket.create_connection((address, port), timeout=_SECONDS_TO_CONNECT)
    raise MlxspecError(
        f"rank 0 cannot be reached at {' or '.join(addresses)}, port {port}: allow connections "
        "between the hosts in their firewalls"
    )


class Channel:
    """Connections to other ranks.

    A thread listens to each rank. If the rank disconnects without a farewell, or its heartbeats
    stop, the thread writes an error line and ends the process.

    Args:
        peers: connected sockets by rank: rank 0 has all other ranks, the others only rank 0.

    Attributes:
        on_loss: called with the error line before the process ends, in any thread, since the main
            thread may be stuck inside MLX.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._peers: list[Connection] = []
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        # Reentrant, since a generation that was never closed ends when it is garbage-collected,
        # which may happen in the sending thread.
        self._sending = threading.RLock()
        self._closing = threading.Event()
        self._ending = threading.Lock()
        self._may_end = False
        self.on_loss: Callable[[str], object] = lambda line: None
        for peer, connected in peers.items():
            connected.settimeout(None)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(connected.detach())
            self._peers.append(connection)
            threading.Thread(target=self._listen, args=(peer, connection), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message to all peers; nothing is sent after the farewell."""
        if not self._closing.is_set():
            with self._sending:
                for connection in self._peers:
                    with suppress(OSError):  # the thread that listens to it reacts
                        connection.send_bytes(message)

    def receive(self) -> bytes:
        """Wait for the next message."""
        return self._messages.get()

    def close(self) -> None:
        """Send the farewell: once this process has ended, the peers end with status 0.

        Until then, they still take part in forwards that have begun.
        """
        self.send(_END)
        self._closing.set()

    def _beat(self) -> None:
        while not self._closing.wait(_SECONDS_BETWEEN_BEATS):
            self.send(_BEAT)

    def _listen(self, rank: int, connection: Connection) -> None:
        """Receive a rank's messages until it disconnects."""
        what = "is gone"
        with suppress(OSError, EOFError):
            while connection.poll(_SECONDS_SILENT):
                message = connection.recv_bytes()
                if message == _END:
                    self._may_end = True
                elif message != _BEAT:
                    self._messages.put(message)
            what = f"has been silent for {_SECONDS_SILENT:g} seconds"
        if self._may_end:
            os._exit(0)  # whatever the main thread is doing, it has nothing to finish
        if not self._closing.is_set():
            self.end(f"Error: rank {rank} {what}, so rank {self._rank} ends, too")

    def end(self, line: str) -> NoReturn:
        """End this process with an error line. If it is rank 0, the others end silently."""
        self._ending.acquire()  # never released, so that only one rank is named
        self.on_loss(line)
        if self._rank == 0:
            self.send(_END)
        end_with(line)
