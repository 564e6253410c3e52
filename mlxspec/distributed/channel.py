"""Messages between rank 0 and the others, and the notice that one of them is gone."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from queue import SimpleQueue
from signal import SIGTERM
from typing import Any

from .launch import end_with, supervisor_descriptor

Message = list[Any]
"""A name and its arguments; anything that JSON holds."""

_END = "end"
_RECEIVED_AT_ONCE = 1 << 16  # bytes
_SECONDS_OF_GRACE = 0.5
_SECONDS_SILENT, _SECONDS_BETWEEN_PROBES, _PROBES = 5, 2, 3


class Channel:
    """Connections to other ranks, one JSON line a message.

    A thread listens all the time. When a rank is gone without a farewell, when this process is
    told to end by SIGTERM, or when its supervisor is gone, it writes one line and ends the
    process. To be made in the main thread.

    Args:
        rank: of this process.
        peers: a connected socket per other rank: all of them at rank 0, rank 0 at the others.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = dict(peers)
        self._unfinished = dict.fromkeys(self._peers, b"")
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._sending = threading.RLock()
        self._closing = False
        self._status: int | None = None
        """The exit status that the farewell named."""
        for connection in self._peers.values():
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _probe_when_silent(connection)
        self._told_to_end = False
        self._signals = _sigterm_descriptor()
        self._supervisor = supervisor_descriptor()
        threading.Thread(target=self._listen, name="mlxspec-ranks", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Tell all peers something; nothing more after the farewell."""
        if self._closing:
            return
        line = json.dumps(message).encode() + b"\n"
        # A generation that nobody closed ends wherever it is collected as garbage: in the middle
        # of another message, or in another thread.
        with self._sending:
            for rank, connection in self._peers.items():
                try:
                    connection.sendall(line)
                except OSError:
                    self._lost(rank)

    def receive(self) -> Message:
        """Wait for the next message."""
        return self._messages.get()

    def close(self, status: int) -> None:
        """Bid farewell: when this process has ended, so do the peers, with this exit status.

        Until then they take part in what is still on its way.
        """
        self.send(_END, status)
        self._closing = True

    def wait_for_bad_news(self, seconds: float = 3.0) -> None:
        """Give the thread time to notice that a rank is gone, where MLX has complained first.

        Does not return if one is.
        """
        time.sleep(seconds)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ, self._heed_signals)
            if self._supervisor is not None:
                selector.register(self._supervisor, selectors.EVENT_READ, self._orphaned)
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, partial(self._read, rank))
            while not (self._told_to_end or self._closing):
                for key, _ in selector.select():
                    key.data()
            if self._told_to_end:
                # Who has started the ranks ends those that are left when one has died: that one
                # is what the user should hear of.
                for key, _ in selector.select(_SECONDS_OF_GRACE):
                    key.data()
                end_with(f"Error: rank {self._rank} was told to end (SIGTERM)", 128 + SIGTERM)

    def _read(self, rank: int) -> None:
        """Take what has arrived from a rank."""
        try:
            received = self._peers[rank].recv(_RECEIVED_AT_ONCE)
        except OSError:
            received = b""
        if not received:
            self._lost(rank)
        *lines, self._unfinished[rank] = (self._unfinished[rank] + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message[0] == _END:
                self._status = message[1]
            else:
                self._messages.put(message)

    def _heed_signals(self) -> None:
        self._told_to_end |= SIGTERM in os.read(self._signals, 64)

    def _orphaned(self) -> None:
        end_with(f"Error: the process that started rank {self._rank} is gone")

    def _lost(self, rank: int) -> None:
        if self._status is not None:
            os._exit(self._status)  # wherever the main thread is: it has nothing to finish
        if not self._closing:
            end_with(f"Error: rank {rank} is gone, so rank {self._rank} ends, too")


def _probe_when_silent(connection: socket.socket) -> None:
    """Notice within seconds that a host has lost power or network, which closes nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, _SECONDS_SILENT)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SECONDS_SILENT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SECONDS_BETWEEN_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def _sigterm_descriptor() -> int:
    """A descriptor that gets a byte at SIGTERM, even while the main thread waits inside MLX.

    There Python's own handlers do not run.
    """
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(SIGTERM, lambda *_: None)
    return signals
