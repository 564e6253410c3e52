"""Run a server at a free local port, in the test's own process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from openai import OpenAI
from starlette.types import ASGIApp

import mlxspec
from mlxspec.engine.params import CacheOptions
from mlxspec.server.app import create_app
from mlxspec.server.catalog import Catalog, Entry
from mlxspec.server.connections import HttpServer
from mlxspec.server.memory_budget import ServerMemory
from mlxspec.server.served_model import Need, ServedModel
from mlxspec.server.worker import Worker
from tests.support.chat_tokenizer import CHATML, chat_tokenizer, with_tools
from tests.support.demo import FLAT, given_costs, stand_in_decoder
from tests.support.random_models import random_model


@dataclass
class Running:
    """A running server.

    Attributes:
        address: its root URL, without a trailing slash.
        worker: its worker.
        decoder: the decoder of its model, to generate without the server.
        app: its ASGI application.
    """

    address: str
    worker: Worker
    decoder: mlxspec.Decoder
    app: ASGIApp

    def client(self, **options: Any) -> OpenAI:
        """Return an OpenAI client that does not retry."""
        given = {"api_key": "none", "max_retries": 0, **options}
        return OpenAI(base_url=f"{self.address}/v1", **given)


def served(name: str = "small", **options: Any) -> ServedModel:
    """Return the small model that repeats itself, ready to be served."""
    decoder = stand_in_decoder(mlxspec.AutoDecoder, memory_tokens=0)
    decoder.costs = given_costs(FLAT)
    return ServedModel(name, decoder, CacheOptions(**options))


def served_with_tools() -> ServedModel:
    """Return the same model with a chat template that takes tools; it never calls any."""
    model = served()
    model.decoder.tokenizer = with_tools(model.decoder.tokenizer, "json_tools", CHATML)
    return model


def served_random(
    markers: Sequence[str], name: str = "random", parser: str = "json_tools"
) -> ServedModel:
    """Return a byte-level model with random weights.

    Its outputs are meaningful only under a constraint.

    Args:
        markers: the tokens besides the bytes; with ``<think>`` it reasons.
        name: the model's name in requests.
        parser: as for :func:`tests.support.chat_tokenizer.chat_tokenizer`.
    """
    tokenizer = chat_tokenizer(parser, markers=markers)
    model = random_model("llama", vocab_size=len(tokenizer) + 6)
    decoder = mlxspec.AutoDecoder(model, tokenizer, memory_tokens=0)
    decoder.costs = given_costs(FLAT)
    return ServedModel(name, decoder)


def memory_with_room(model: ServedModel, nbytes: int) -> ServerMemory:
    """Return a server's memory in which this model leaves ``nbytes`` free."""
    memory = ServerMemory()
    memory.add(model)
    return ServerMemory(memory.bound_for(Need(nbytes)))


@contextmanager
def running_server(
    model: ServedModel | None = None,
    limits: Mapping[str, Any] | None = None,
    send_buffer: int | None = None,
    patience: float = 300.0,
    memory: ServerMemory | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Run a server until the end of the block.

    Args:
        model: the model to serve.
        limits: options of its worker.
        send_buffer: bytes of unread data that the system buffers for a client.
        patience: seconds for which a client may read nothing.
        memory: its memory limit.
        options: as for :func:`mlxspec.server.app.create_app`.
    """
    model = model or served()
    worker = Worker(memory=memory, **(limits or {}))
    loader = SimpleNamespace(
        load=lambda entry, on_read: model,
        find=tuple,
        refresh=lambda entry: None,
        save=lambda entry: None,
    )
    catalog = Catalog(worker, loader, [Entry(model.name, keep_alive=None)])
    app = create_app(catalog, **options)
    server = HttpServer(app, grace=1.0, patience=patience)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if send_buffer:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        while not server.started or catalog.starting:
            time.sleep(0.01)
        yield Running(f"http://127.0.0.1:{port}", worker, model.decoder, app)
    finally:
        server.should_exit = True
        thread.join(10)
        catalog.close()
        worker.stop()
