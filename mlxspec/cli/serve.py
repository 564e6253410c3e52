"""``mlxspec serve``: serves models with OpenAI's and Anthropic's APIs, and logs requests."""

from __future__ import annotations

import fcntl
import gc
import ipaddress
import json
import math
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
from rich.console import Console
from rich.table import Table

from ..distributed import leading
from ..engine.params import CacheOptions, SamplingParams
from ..errors import OptionError, printable
from ..files import is_ours_alone
from ..models.model_files import local_path
from ..process import INTERRUPTED, give_back_large_blocks
from ..terminal import one_line
from .common.generation import API_KEY, PARAMETERS, DraftingOptions, GenerationSettings
from .common.model_choice import (
    DIRECTORY,
    default_model,
    model_argument,
    model_or_default,
    note_if_demo,
)
from .common.notes import note
from .common.options import (
    ADAPTERS,
    COUNT,
    NAME,
    check_one,
    color_option,
    command,
    option_field,
    options_of,
)
from .common.output import counted, error_console
from .common.prompt import template_option
from .memory import Memories
from .settings import load_aliases

if TYPE_CHECKING:
    from ..distributed.ranks import Leader
    from ..models.model import OnRead
    from ..server.body import ApiError
    from ..server.catalog import Catalog, Entry
    from ..server.memory_budget import ServerMemory
    from ..server.served_model import ServedModel
    from ..server.worker import ServedRequest

ALL = "all"
"""The value of ``--models`` that stands for all models that 'mlxspec models' lists."""

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _size(text: str) -> int:
    """Parse a number of bytes: 8G, 512M, 1.5 GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise click.BadParameter(f"{text!r} is not a size: write it as 512M or 8G")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._~-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


def _origin(text: str) -> str:
    """Parse an origin as browsers send it: scheme, host and port, in lower case, or file://."""
    origin = text.strip().lower()
    if origin != "file://" and not _ORIGIN.fullmatch(origin):
        raise click.BadParameter(
            f"{text!r} is not an origin: write it as app://obsidian.md or http://localhost:3000, "
            "without a path"
        )
    return origin


def _duration(text: str) -> float:
    """Parse a number of seconds: 30s, 10m, 2h; a negative number means for ever."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if not match:
        raise click.BadParameter(f"{text!r} is not a time: write it as 30s, 10m or 2h, or -1")
    seconds = float(match[1]) * _SECONDS[match[2]]
    return seconds if seconds >= 0 else math.inf


_address_option = partial(option_field, group="Models and address")
_request_option = partial(option_field, group="Requests")


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen, how many requests to run, and what to print.

    Raises:
        OptionError: options contradict each other, or a directory of ``--models`` does not exist.
    """

    available: tuple[str, ...] = _address_option(
        "--models DIR",
        "Also load other models when a request names them: the models in DIR, or with 'all' those "
        "that 'mlxspec models' lists; repeatable.",
        multiple=True,
        type=NAME,
    )
    keep_alive: float | None = _address_option(
        "--keep-alive TIME",
        "Unload models that no request has used for TIME, such as 30s, 10m or 2h; -1 keeps them "
        "loaded.  [default: 10m; MODEL stays loaded]",
        type=_duration,
    )
    adapter_path: str | None = _address_option(*ADAPTERS, type=NAME)
    host: str = _address_option("--host HOST", "The address to listen on.", default="127.0.0.1")
    port: int = _address_option(
        "--port N", "The port; 0 for any free port.", default=8080, type=click.IntRange(0, 65535)
    )
    allowed_hosts: tuple[str, ...] = _address_option(
        "--allowed-host NAME", "Also answer requests to this host name; repeatable.", multiple=True
    )
    allowed_origins: tuple[str, ...] = _address_option(
        "--allow-origin ORIGIN",
        "Also answer requests from this origin, such as app://obsidian.md, tauri://localhost, "
        "chrome-extension://ID or file://; repeatable.",
        multiple=True,
        type=_origin,
    )
    api_key_file: Path | None = _address_option(  # noqa: RUF009
        "--api-key-file FILE",
        f"Require one of the keys in this file, one per line, or the key in {API_KEY}.",
    )
    strict_model_names: bool = _request_option(
        "--strict-model-names",
        "Refuse requests for unknown models. By default, a server's only model answers them.",
        default=False,
    )
    concurrency: int = _request_option(
        "--concurrency N", "Answer at most N requests per model at once.", default=8, type=COUNT
    )
    max_tokens: int = _request_option(
        "--max-tokens N",
        "Generate at most N tokens if a request sets no limit.",
        default=8192,
        type=COUNT,
    )
    memory_limit: int | None = option_field(
        "--memory-limit SIZE",
        "The most memory for all models and their caches, such as 12G. Requests wait until their "
        "caches fit.  [default: what MLX recommends for the GPU; on a CPU, all memory]",
        type=_size,
        group="Memory",
    )
    cache_dir: Path | None = option_field(  # noqa: RUF009
        "--cache-dir DIR",
        "Keep the caches of earlier prompts in DIR between runs. Only you may have write access to "
        "DIR.",
        group="Memory",
    )
    quiet: bool = option_field(
        "-q --quiet", "Do not print a line for each request.", default=False, group="Output"
    )
    log_json: bool = option_field(
        "--log-json",
        "Print request lines as JSON to standard output.",
        default=False,
        group="Output",
    )

    def __post_init__(self) -> None:
        check_one(quiet=self.quiet, log_json=self.log_json)
        for name in self.available:
            if name != ALL and not local_path(name).is_dir():
                raise OptionError(
                    f"--models {one_line(name)}: no such directory; name one with models, or use "
                    "--models all"
                )


@command("serve")
@model_argument(several=True)
@options_of(ServeOptions, "options")
@template_option("Requests")
@options_of(DraftingOptions, "drafting", "Drafting", leave_out=PARAMETERS)
@options_of(CacheOptions, "caches", "Memory")
@color_option("Output", "Colour the lines for requests.")
def serve_command(
    *,
    models: tuple[str, ...],
    options: ServeOptions,
    chat_template_config: Mapping[str, Any] | None,
    drafting: DraftingOptions,
    caches: CacheOptions,
    color: bool | None,
) -> None:
    """Serve models with OpenAI's and Anthropic's APIs.

    Several requests are answered at once, with drafts; with most models they share each forward.
    A prompt that begins like an earlier one reuses that prompt's cache.

    \b
    Examples:
      mlxspec serve mlx-community/Mistral-7B-Instruct-v0.3-4bit
      export OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none
      curl $OPENAI_BASE_URL/chat/completions -H 'Content-Type: application/json' \\
          -d '{"messages": [{"role": "user", "content": "Name a river."}]}'
      mlxspec serve --models all --keep-alive 30m

    Open the address in a browser to see the requests and how much drafts gain. Other machines can
    connect with --host 0.0.0.0, which needs a key. Ctrl-C or SIGTERM gives running requests ten
    seconds to end; press Ctrl-C again to end them at once.
    """
    adapters = options.adapter_path
    generation = GenerationSettings(
        None, options.max_tokens, drafting, SamplingParams(), caches, adapter_path=adapters
    )
    with leading() as leader:
        if leader and (options.available or options.keep_alive is not None or options.cache_dir):
            raise OptionError(
                "--models, --keep-alive and --cache-dir need models on one machine: leave them "
                "out, or run without mlx.launch"
            )
        of_one_model = adapters, drafting.head, drafting.draft_model
        if options.available and not models and any(value is not None for value in of_one_model):
            raise OptionError(
                "--adapter-path, --head and --draft-model apply only to MODEL, which is missing: "
                "name one"
            )
        keys = _keys(options.api_key_file, os.environ.get(API_KEY, ""))
        hosts = _hosts(options.host, options.allowed_hosts, keys)
        names = models or (() if options.available else (None,))
        loader = _Loader(names, generation, options, chat_template_config or {}, keys, leader)
        _run(loader, hosts, error_console(color))


def _run(loader: _Loader, hosts: set[str] | None, console: Console) -> None:
    """Load the models, and serve them until Ctrl-C or SIGTERM."""
    options = loader.options
    give_back_large_blocks()
    with ExitStack() as serving:
        listening = serving.enter_context(_listening(options.host, options.port))
        from ..server.app import create_app
        from ..server.catalog import Catalog
        from ..server.worker import Worker

        serving.enter_context(loader.memories)
        if options.cache_dir:
            serving.callback(os.close, _locked(options.cache_dir))
        quiet, color = options.quiet, not console.no_color
        log = serving.enter_context(request_log(options.log_json, quiet, color))
        worker = Worker(
            active=options.concurrency,
            on_end=lambda request: log(end_record(request)),
            memory=loader.server_memory,
        )
        entries = loader.entries()
        default = None if entries else default_model()
        catalog = Catalog(worker, loader, entries, default=default, log=log)
        # SIGTERM acts like Ctrl-C.
        usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
        serving.callback(signal.signal, signal.SIGTERM, usual)
        # A thread that is loading a model cannot be interrupted inside a library.
        late = threading.Timer(_LAST_LINES, os._exit, (INTERRUPTED,))
        late.daemon = True
        serving.callback(late.cancel)
        serving.callback(worker.stop)
        serving.callback(catalog.close)
        app = create_app(
            catalog,
            max_tokens=options.max_tokens,
            hosts=hosts,
            keys=loader.keys,
            origins=options.allowed_origins,
            strict_model_names=options.strict_model_names,
            on_refusal=lambda path, error: log(refusal_record(path, error)),
        )
        try:
            _serve(app, listening, catalog, loader, console)
        except KeyboardInterrupt:
            late.start()
            raise
        # After an error nothing is saved, since the worker may still be using the prefixes.
        catalog.close()
        worker.stop()
        for entry in catalog.entries:
            loader.save(entry)


def _keys(file: Path | None, other: str) -> list[str]:
    """The distinct API keys: those in ``file``, and ``other`` unless it is empty."""
    lines = file.read_text(encoding="utf-8-sig", errors="replace").splitlines() if file else []
    keys = [*dict.fromkeys(key for line in [*lines, other] if (key := line.strip()))]
    if file and not keys:
        raise OptionError(f"--api-key-file {one_line(str(file))} has no key: write one per line")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise OptionError("a key has spaces or non-ASCII characters: choose another key")
    return keys


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def _hosts(host: str, allowed: tuple[str, ...], keys: list[str]) -> set[str] | None:
    """The host names that requests may use for the server; None for any."""
    from ..server.auth import host_name

    names = {name if name[:1] == "[" else bracketed(name) for name in map(host_name, allowed)}
    if _is_loopback(host):
        return {*map(bracketed, (*_LOOPBACK, host)), *names}
    if not keys:
        raise OptionError(
            f"--host {host} can be reached from other machines: give a key with --api-key-file or "
            f"{API_KEY}, or listen on 127.0.0.1"
        )
    return {bracketed(host), *names} if names else None


def bracketed(host: str) -> str:
    """A host as written in a URL."""
    return f"[{host}]" if ":" in host else host


def _listening(host: str, port: int) -> socket.socket:
    """Open a listening socket, before the models are loaded."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=256)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise OptionError(f"--host {host} --port {port}: {reason}; choose another one") from None
    # asyncio sets this only on sockets that it opens itself. Without it, each token and each body
    # can wait up to 40 ms until the client acknowledges the previous packet.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


@dataclass
class _Loader:
    """Loads a server's models: some at the start, others when requests need them.

    Attributes:
        names: the models to load at the start; None stands for the default model.
        generation: the options for the models loaded at the start.
        options: the server's options.
        template: default arguments of the chat template.
        keys: the valid API keys; with several, each has its own memory of answers.
        leader: splits the models over its ranks; None for one process.
        memories: hold the earlier answers to draft from.
        paths: the paths of the models loaded at the start.
    """

    names: Sequence[str | None]
    generation: GenerationSettings
    options: ServeOptions
    template: Mapping[str, Any]
    keys: Sequence[str]
    leader: Leader | None

    def __post_init__(self) -> None:
        # With several keys, drafts from kept answers could show users what others have written.
        self.memories = Memories(
            not self.generation.drafting.no_saved_answers and len(self.keys) < 2
        )
        self.paths = [*dict.fromkeys(map(model_or_default, self.names))]
        self._left_out: set[Path] = set()

    @cached_property
    def server_memory(self) -> ServerMemory:
        """The server's memory, in bytes."""
        from ..server.memory_budget import ServerMemory

        return ServerMemory(self.options.memory_limit)

    def entries(self) -> list[Entry]:
        """The models to load at the start, which stay loaded unless --keep-alive is given."""
        from ..models.model_files import given_name
        from ..server.catalog import Entry

        given = [given_name(path) for path in self.paths]
        entries = []
        for name, path in zip(given, self.paths, strict=True):
            # The last part of a directory's path, unless it is ambiguous.
            name = name if name and given.count(name) == 1 else path
            others = _other_names(name, path)
            entries.append(Entry(name, path, others, keep_alive=self.options.keep_alive))
        return entries

    def find(self) -> list[Entry]:
        """The models that can be loaded later; of models with the same name, only the first."""
        from ..engine.model_sizes import stated_context_length
        from ..models.model_files import read_config
        from ..models.on_machine import model_files
        from ..server.catalog import KEEP_ALIVE, Entry

        ours = {local_path(path).resolve() for path in self.paths}
        entries: dict[str, Entry] = {}
        seconds = self.options.keep_alive
        for source in self.options.available:
            for name, directory in _found(source):
                if name in entries or directory.resolve() in ours:
                    continue
                files = model_files(directory)
                if files.trouble:
                    # The note appears once per directory. With 'all', 'mlxspec models' has it.
                    if source != ALL and directory not in self._left_out:
                        self._left_out.add(directory)
                        note(f"{one_line(str(directory))} is skipped: {files.trouble}")
                    continue
                entries[name] = Entry(
                    name,
                    # Absolute, since a relative path could name a Hub repository once the directory
                    # is gone.
                    str(directory.absolute()),
                    _other_names(name, str(directory)),
                    nbytes=files.memory_bytes,
                    context_length=stated_context_length(read_config(directory)),
                    keep_alive=KEEP_ALIVE if seconds is None else seconds,
                )
        return [*entries.values()]

    def refresh(self, entry: Entry) -> None:
        """Read a model's sizes from its files.

        Raises:
            ApiError: 404, its directory is gone.
        """
        from ..engine.model_sizes import stated_context_length
        from ..models.model_files import read_config
        from ..models.on_machine import model_files
        from ..server.body import ApiError

        directory = local_path(entry.path)
        if entry.path in self.paths and not (entry.nbytes and directory.is_dir()):
            return  # its first load, or a repository on the Hub
        if not directory.is_dir():
            raise ApiError(
                f"{one_line(str(directory))} is gone: use another model that /v1/models lists",
                status=404,
                code="model_not_found",
            )
        entry.nbytes = model_files(directory).memory_bytes
        entry.context_length = stated_context_length(read_config(directory))

    def load(self, entry: Entry, on_read: OnRead) -> ServedModel:
        """Load a model; its steps have not been measured yet."""
        from ..server.served_model import ServedModel

        is_named = entry.path in self.paths
        settings = self.generation.for_model(entry.path, is_named)
        decoder = settings.load(None, self.memories, self.leader, on_read)
        _ = decoder.loaded.capability  # if this takes forwards, other models can answer meanwhile
        on_read(0)  # the server may be shutting down
        served = ServedModel(entry.name, decoder, settings.caches, self.template)
        if place := self._place(entry):
            max_bytes = self.server_memory.most_idle(served.memory.weights)
            served.cache.load(place, max_bytes // max(1, len(self.paths)))
        return served

    def save(self, entry: Entry) -> None:
        """Save a model's cached prefixes, if it is loaded and prefixes are kept on disk."""
        if entry.served and (place := self._place(entry)):
            entry.served.cache.save(place)

    def _place(self, entry: Entry) -> Path | None:
        """The directory of a model's prefixes, if they are kept on disk."""
        if not self.options.cache_dir:
            return None
        # The suffix is needed because a path may be "..".
        return self.options.cache_dir / f"{quote(entry.path, safe='')}.prefixes"


def _found(source: str) -> Iterator[tuple[str, Path]]:
    """The names and directories of the models that a value of ``--models`` selects."""
    from ..models.model_files import DEMO, DEMO_DIRECTORY, given_name
    from ..models.on_machine import cached_repositories, lm_studio_folder, models_in

    if source != ALL:
        yield from models_in(local_path(source))
        return
    yield from cached_repositories()
    yield from models_in(lm_studio_folder())
    for name in (*load_aliases().values(), model_or_default(None), DIRECTORY):
        if local_path(name).is_dir():
            yield given_name(name), local_path(name)
    yield DEMO, DEMO_DIRECTORY


def _other_names(name: str, path: str) -> frozenset[str]:
    """Names by which requests can also name a model: the last part, its path, its aliases."""
    aliases = load_aliases()
    same = {name, path, os.path.realpath(local_path(path))}
    named = {
        alias
        for alias, model in aliases.items()
        if same & {model, os.path.realpath(local_path(model))}
    }
    return frozenset({name.rpartition("/")[2], *named, *same})


def _locked(directory: Path) -> int:
    """Lock a directory of prefixes against other servers, until the descriptor is closed.

    Raises:
        OptionError: another server uses it, or other users may write to it.
        OSError: it cannot be made or opened.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours_alone(directory):
        raise OptionError(
            f"--cache-dir {directory}: others may write to it; change owner or mode (chown, chmod "
            "go-w), or name another directory"
        )
    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OptionError(
            f"--cache-dir {directory}: another server uses it; name another directory"
        ) from None
    return held


def _about(host: str, listening: socket.socket, catalog: Catalog, with_key: bool) -> Table:
    """The server's address and models, and how to use it."""
    from ..server.memory_budget import in_words
    from ..server.prompts import why_no_tools

    worker, address = catalog.worker, f"http://{bracketed(host)}:{listening.getsockname()[1]}"
    rows = Table.grid(padding=(0, 2))
    rows.add_row("address", address)
    for served in worker.models.values():
        length = served.context_length
        context = f"{length:,} tokens of context" if length else "context length unknown"
        rows.add_row("model", f"{one_line(served.name)}, {context}")
        if trained := served.decoder.loaded.trained_head:
            rows.add_row("head", trained.head.title)
        if reason := why_no_tools(served.decoder.tokenizer):
            rows.add_row("tools", f"not supported, since {reason}")
    if others := sum(not entry.served for entry in catalog.entries):
        rows.add_row("on demand", f"{counted(others, 'model')}, which /v1/models lists")
    limit, weights = worker.memory.limit, worker.memory.parts["weights"]
    rows.add_row("memory", f"at most {in_words(limit)}, including {in_words(weights)} of weights")
    key = "KEY" if with_key else "none"
    rows.add_row("clients", f"export OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={key}")
    rows.add_row("", "or mlxspec connect; Ctrl-C ends the server")
    return rows


_GRACE = 10.0  # seconds for running requests to end after the first signal
_LAST_ERRORS = 2.0  # seconds in which clients can receive the error if a rank is lost


def _serve(
    app: Any, listening: socket.socket, catalog: Catalog, loader: _Loader, console: Console
) -> None:
    """Load the initial models and answer requests until Ctrl-C or SIGTERM; then give running ones
    time to end.

    If a rank is lost, running requests end at once with an error.

    Raises:
        KeyboardInterrupt: a signal came before the models were loaded; the process must end.
        MlxspecError: a model cannot be loaded.
    """
    from ..server.body import ApiError
    from ..server.connections import HttpServer

    worker, ended, options = catalog.worker, threading.Event(), loader.options
    failures: list[Exception] = []

    def on_start(error: Exception | None) -> None:
        if error:
            failures.append(error)
            server.should_exit = True
            return
        if loader.names:
            note_if_demo(loader.names[0])
        if not options.quiet:
            console.print(_about(options.host, listening, catalog, bool(loader.keys)))
        if not (options.quiet or options.log_json):
            loader.memories.suggest_once()

    def on_exit() -> None:
        if catalog.starting:
            server.force_exit = True
        elif worker.requests or any(entry.waiting for entry in catalog.entries):
            note(f"{_GRACE:g} s for running requests to end; press Ctrl-C again to stop at once")

    ending = "the server is shutting down"

    def on_end() -> None:
        catalog.ending = True  # requests that wait for a load get this error, too
        worker.fail(ApiError(ending, status=503))

    server = HttpServer(
        app,
        grace=_GRACE,
        on_exit=on_exit,
        on_end=on_end,
    )

    def on_loss(line: str) -> None:
        worker.fail(ApiError(f"{ending}: {line.removeprefix('Error: ')}", status=503))
        server.should_exit = True
        ended.wait(_LAST_ERRORS)

    catalog.on_start = on_start
    if loader.leader:
        loader.leader.channel.on_loss = on_loss
    # The objects that exist now never become garbage. Without this call, each full collection would
    # scan them, which delays every request by 100 ms.
    gc.freeze()
    # The event loop waits this long for each of its system calls while another thread computes.
    sys.setswitchinterval(0.001)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
        server.run(sockets=[listening])
    ended.set()
    if failures:
        raise failures[0]
    if catalog.starting and not worker.ending:  # a lost rank ends the process with its own line
        raise KeyboardInterrupt


# --- a log line for each request ---

_LAST_LINES = 1.0  # seconds for a terminal to print the remaining lines at the end


@contextmanager
def request_log(
    as_json: bool, quiet: bool = False, color: bool = False
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that logs a request's record.

    A thread prints the records, so a paused terminal (Ctrl-S) delays no request.

    Args:
        as_json: print JSON to standard output instead of readable lines to standard error.
        color: print failures in red.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def run() -> None:
        with suppress(OSError):  # the reader is gone
            while line := lines.get():
                click.echo(line, err=not as_json, color=color)

    def add(record: dict[str, Any]) -> None:
        if not quiet and thread.is_alive():
            record = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **record}
            lines.put(json.dumps(record) if as_json else _line(record))

    thread = threading.Thread(target=run, name="mlxspec log", daemon=True)
    thread.start()
    try:
        yield add
    finally:
        lines.put(None)
        thread.join(_LAST_LINES)


def refusal_record(path: str, error: ApiError) -> dict[str, Any]:
    """The log record of a refused request, without any of its values."""
    record = {"outcome": "refused", "path": printable(path), "status": error.status}
    return {**record, "param": error.param, "code": error.code}


_LOGGED = (
    *("prompt_tokens", "cached_tokens", "tokens", "seconds", "first_token", "tokens_per_step"),
    "gain",
)


def end_record(request: ServedRequest) -> dict[str, Any]:
    """The log record of an ended answer, without prompt or text."""
    figures = request.figures()
    record = {"model": figures["model"], "outcome": request.outcome}
    record |= {name: figures[name] for name in _LOGGED}
    return record | {"error": str(request.error) if request.error else None}


def _line(record: dict[str, Any]) -> str:
    """A record in logfmt, red if it has an error."""
    fields = (
        f"{name}={one_line(str(value))}"
        for name, value in record.items()
        if value is not None and name not in ("time", "outcome")
    )
    line = "  ".join([record["time"][11:19], record["outcome"], *fields])
    is_error = record["outcome"] == "refused" or record.get("error")
    return click.style(line, fg="red") if is_error else line
