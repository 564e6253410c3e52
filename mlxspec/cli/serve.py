"""``mlxspec serve``: serves models with OpenAI's and Anthropic's APIs, and logs requests."""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import click
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..distributed import leading
from ..engine.params import CacheOptions, SamplingParams
from ..errors import OptionError, printable
from ..files import is_ours_alone
from ..process import give_back_large_blocks
from .common.generation import API_KEY, DraftingOptions, Ends, Generation
from .common.model_choice import model_argument, model_or_default, note_which_model
from .common.notes import note
from .common.options import (
    ADAPTERS,
    ADAPTERS_HELP,
    NAME,
    check_least,
    color_option,
    command,
    option_field,
    options_of,
)
from .common.output import counted, error_console, shown
from .common.prompt import template_option
from .memory import Memories

if TYPE_CHECKING:
    from ..distributed.ranks import Leader
    from ..generation.options import GenerationOptions
    from ..server.body import ApiError
    from ..server.memory import ServerMemory
    from ..server.served_model import ServedModel
    from ..server.worker import ServedRequest, Worker

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_MOST_PORT = 65535


def _size(text: str) -> int:
    """Parse a number of bytes: 8G, 512M, 1.5 GiB."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise click.BadParameter(f"{text!r} is not a size: write it as 512M or 8G")
    number, unit = found.groups()
    return int(float(number) * 1024 ** " KMGT".index(unit.upper() or " "))


_address_option = partial(option_field, group="Models and address")
_request_option = partial(option_field, group="Requests")


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen, how many requests to run, and what to print."""

    adapter_path: str | None = _address_option(ADAPTERS, ADAPTERS_HELP, type=NAME)
    host: str = _address_option("--host HOST", "The address to listen on.", default="127.0.0.1")
    port: int = _address_option("--port N", "The port; 0 takes a free one.", default=8080)
    allowed_hosts: tuple[str, ...] = _address_option(
        "--allowed-host NAME",
        "Also answer requests to this host name; repeatable.",
        multiple=True,
    )
    api_key_file: Path | None = _address_option(  # noqa: RUF009
        "--api-key-file FILE",
        f"Require one of the keys in this file, one per line, or the key in {API_KEY}.",
    )
    strict_model_names: bool = _request_option(
        "--strict-model-names",
        "Refuse requests for other models. By default an only model answers them.",
        default=False,
    )
    concurrency: int = _request_option(
        "--concurrency N", "Generate for N requests per model at once.", default=8
    )
    queue: int = _request_option(
        "--queue N", "Let N more requests wait; others get status 429.", default=128
    )
    max_tokens: int = _request_option(
        "--max-tokens N", "Generate at most N tokens if a request sets no limit.", default=8192
    )
    stall: float = _request_option(
        "--stall SECONDS",
        "The longest wait between two tokens of an answer while other prompts run.",
        default=0.15,
    )
    grace: float = _request_option(
        "--grace SECONDS",
        "The time for running requests to end after Ctrl-C or SIGTERM.",
        default=10.0,
    )
    memory: int | None = option_field(
        "--memory SIZE",
        "The most memory of all models with their caches, such as 12G; requests wait for it.  "
        "[default: what the machine has]",
        type=_size,
        group="Memory",
    )
    cache_bytes: int | None = option_field(
        "--cache-bytes SIZE",
        "Of it, what caches of earlier prompts take, such as 8G.  [default: half, beside weights]",
        type=_size,
        group="Memory",
    )
    cache_dir: Path | None = option_field(  # noqa: RUF009
        "--cache-dir DIR",
        "Keep these caches in DIR between runs; only you may have write access to it.",
        group="Memory",
    )
    quiet: bool = option_field(
        "-q --quiet", "Do not print a line for each request.", default=False, group="Output"
    )
    log_json: bool = option_field(
        "--log-json",
        "Print these lines as JSON to standard output.",
        default=False,
        group="Output",
    )

    def check(self, models: int) -> None:
        """Check the options, given the number of models.

        Raises:
            OptionError: one has a wrong value.
        """
        check_least(1, concurrency=self.concurrency, max_tokens=self.max_tokens)
        check_least(0, queue=self.queue, port=self.port)
        if not self.stall > 0:
            raise OptionError(f"--stall is {self.stall:g}: give a number of seconds above 0")
        if not 0 <= self.grace < math.inf:
            raise OptionError(
                f"--grace is {self.grace:g}: give a finite number of seconds, 0 or more"
            )
        if self.port > _MOST_PORT:
            raise OptionError(f"--port is {self.port}: give at most {_MOST_PORT}")
        if self.adapter_path is not None and models > 1:
            raise OptionError("--adapter-path needs exactly one --model")


def serve_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument and the options of ``serve`` to a command."""
    for add in (
        color_option("Output", "Colour the panel and the lines."),
        options_of(CacheOptions, "caches", "Memory"),
        options_of(DraftingOptions, "drafting", "Drafting"),
        template_option("Requests"),
        options_of(ServeOptions, "options"),
        model_argument(several=True),
    ):
        function = add(function)
    return function


def checked(
    models: tuple[str, ...], options: ServeOptions, drafting: DraftingOptions, key: str
) -> tuple[list[str], set[str] | None]:
    """Check what was given, as far as that takes no model.

    Args:
        models, options, drafting: what :func:`serve_options` parsed.
        key: a key beside those in the file of ``options``; empty for none.

    Returns:
        the keys, and the host names that requests may use for the server, or None for any.

    Raises:
        OptionError: a value is wrong, or the server would be open to other machines.
    """
    options.check(len(models))
    if drafting.head is not None and len(models) > 1:
        raise OptionError("--head needs exactly one --model")
    keys = _keys(options.api_key_file, key)
    return keys, _hosts(options.host, options.allowed_hosts, keys)


@command("serve")
@serve_options
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

    Several requests are answered at once, all with drafts: one forward verifies the rows of all of
    them. A prompt that begins like an earlier one reuses its cache.

    \b
    Examples:
      mlxspec serve mlx-community/Mistral-7B-Instruct-v0.3-4bit
      export OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none
      curl $OPENAI_BASE_URL/chat/completions -H 'Content-Type: application/json' \\
          -d '{"messages": [{"role": "user", "content": "Name a river."}]}'

    Open the address in a browser to see the requests and what drafts gain. Other machines can
    connect with --host 0.0.0.0, which needs a key. Ctrl-C or SIGTERM gives running requests --grace
    seconds to end; press Ctrl-C again to end them at once.
    """
    asked = [
        Generation(
            *(name, options.max_tokens, drafting, Ends(), SamplingParams(), caches),
            adapter_path=options.adapter_path,
        )
        for name in models or (None,)
    ]
    with leading() as leader:
        if leader and options.cache_dir:
            raise OptionError(
                "--cache-dir: the caches of a split model are on several machines; leave it out, "
                "or run without mlx.launch"
            )
        keys, hosts = checked(models, options, drafting, os.environ.get(API_KEY, ""))
        console = error_console(color)
        _run(asked, options, hosts, keys, chat_template_config or {}, console, leader)


def _run(
    asked: list[Generation],
    options: ServeOptions,
    hosts: set[str] | None,
    keys: list[str],
    template: Mapping[str, Any],
    console: Console,
    leader: Leader | None = None,
) -> None:
    """Load the models and serve them until Ctrl-C or SIGTERM.

    With a ``leader``, the models are split over its ranks.
    """
    give_back_large_blocks()
    with ExitStack() as serving:
        listening = serving.enter_context(_listening(options.host, options.port))
        from ..server.app import create_app
        from ..server.memory import ServerMemory
        from ..server.worker import Worker, WorkerLimits

        keeps = _keeps_answers(asked[0].drafting, keys)
        memories = serving.enter_context(Memories(keeps, len(asked) > 1))
        memory = ServerMemory(options.memory, options.cache_bytes)
        served = _load(asked, console, memories, memory, template, keys, leader)
        log = serving.enter_context(
            request_log(options.log_json, options.quiet, not console.no_color)
        )
        limits = WorkerLimits(options.concurrency, options.queue, options.stall)
        worker = Worker(served, limits, lambda requests: log(end_record(requests)), memory)
        _check_memory(memory, served)
        # SIGTERM acts like Ctrl-C.
        usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
        serving.callback(signal.signal, signal.SIGTERM, usual)
        if options.cache_dir and serving.enter_context(_ours_alone(options.cache_dir)):
            serving.enter_context(_kept(served, options.cache_dir))
        worker.start()
        serving.callback(worker.stop)
        worker.wait_until_ready()
        note_which_model(asked[0].model)
        if not options.quiet:
            address = f"http://{bracketed(options.host)}:{listening.getsockname()[1]}"
            console.print(_panel(address, worker, bool(keys)))
            if not options.log_json:
                memories.suggest_once()
        app = create_app(
            worker,
            max_tokens=options.max_tokens,
            hosts=hosts,
            keys=keys,
            strict_model_names=options.strict_model_names,
            on_refusal=lambda path, error: log(refusal_record(path, error)),
        )
        # Nothing that is loaded now becomes garbage. Without this, each full collection would scan
        # it, and delay every request by 100 ms.
        gc.freeze()
        _serve(app, listening, worker, options.grace, leader)


def _keys(file: Path | None, other: str) -> list[str]:
    """The valid API keys in a file and beside it, without duplicates.

    Raises:
        OptionError: the file has no key, or a key that cannot be sent in a header.
    """
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file else []
    given = [key for line in [*lines, other] if (key := line.strip())]
    keys = [*dict.fromkeys(given)]
    if file and not keys:
        raise OptionError(f"--api-key-file {shown(str(file))} has no key: write one per line")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise OptionError("a key has spaces or characters outside ASCII: choose another key")
    return keys


def _keeps_answers(drafting: DraftingOptions, keys: list[str]) -> bool:
    """Whether to keep answers between runs; with several keys, others could read them."""
    if drafting.no_memory or len(keys) < 2:
        return not drafting.no_memory
    from ..corpus import settings_in_force

    if settings_in_force(note).keeps_some:
        note(
            "kept answers are not used with several keys: each key drafts from its own answers, "
            "which are forgotten when the server ends"
        )
    return False


def _hosts(host: str, allowed: tuple[str, ...], keys: list[str]) -> set[str] | None:
    """The host names that requests may use for the server; None for any.

    Raises:
        OptionError: other machines could use it without a key, or a name has a port.
    """
    from ..server.auth import host_name, is_loopback

    for name in allowed:
        if name != host_name(name):
            raise OptionError(f"--allowed-host {shown(name)}: give the name without a port")
    if is_loopback(host):
        return {"localhost", "127.0.0.1", "[::1]", bracketed(host), *allowed}
    if not keys:
        raise OptionError(
            f"--host {host} can be reached from other machines: give a key with --api-key-file or "
            f"{API_KEY}, or listen on 127.0.0.1"
        )
    return {bracketed(host), *allowed} if allowed else None


def bracketed(host: str) -> str:
    """A host as it is written in a URL."""
    return f"[{host}]" if ":" in host else host


def _listening(host: str, port: int) -> socket.socket:
    """Open a listening socket, before the models are loaded.

    Raises:
        OptionError: it cannot listen there.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=256)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise OptionError(f"--host {host} --port {port}: {reason}; choose another one") from None
    # asyncio sets this only on its own sockets. Without it, each token and each body can wait up to
    # 40 ms for the client to acknowledge the previous packet.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _load(
    asked: list[Generation],
    console: Console,
    memories: Memories,
    memory: ServerMemory,
    template_arguments: Mapping[str, Any],
    keys: list[str],
    leader: Leader | None,
) -> list[ServedModel]:
    """Load the models.

    Requests use the last part of a directory's path as the model's name, unless another model has
    this name.

    Raises:
        OptionError: a model is named twice.
    """
    from ..models.model_files import given_name
    from ..server.memory import CacheMemory
    from ..server.prefix_cache import PrefixCache
    from ..server.served_model import ServedModel

    paths = [model_or_default(one.model) for one in asked]
    for path in paths:
        if paths.count(path) > 1:
            raise OptionError(f"{path} is named twice: name it once")
    names = [given_name(path) for path in paths]
    decoders = [one.load(console, memories, leader) for one in asked]
    result = []
    for path, name, one, decoder in zip(paths, names, asked, decoders, strict=True):
        model, caches = decoder.model, one.caches
        most, chunks_matter = memory.most_cached, decoder.chunks_matter
        draft_model = getattr(decoder.drafting, "draft_model", None)
        prefixes = PrefixCache(model, most, caches, warn=note, chunks_matter=chunks_matter)
        result.append(
            ServedModel(
                name if name and names.count(name) == 1 else path,
                *(decoder, prefixes, CacheMemory(model, caches, draft_model)),
                cast("GenerationOptions", vars(caches)),
                template_arguments,
                owner=keys[0] if len(keys) == 1 else "",
                path=path,
            )
        )
    return result


def _check_memory(memory: ServerMemory, served: Sequence[ServedModel]) -> None:
    """Raise OptionError if a model could not answer even the shortest request."""
    from ..server.memory import in_words

    for one in served:
        need = one.memory.needs(1)
        if not memory.ever_fits(need):
            raise OptionError(
                f"{in_words(memory.limit)} of memory are too little for {shown(one.name)}: allow "
                f"at least {in_words(memory.bound_for(need) + (1 << 20))} with --memory, where "
                "the machine has them, or serve a smaller or more quantised model"
            )


@contextmanager
def _ours_alone(directory: Path) -> Iterator[bool]:
    """Lock a directory of prefixes against other servers; yield whether it can be used."""
    trouble, held = "", None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(directory, os.O_RDONLY)
        if is_ours_alone(directory):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            trouble = (
                "others may write to it; make it yours alone (chown, chmod go-w), or name another "
                "one"
            )
    except BlockingIOError:
        trouble = "another server uses it"
    except OSError as error:
        trouble = str(error.strerror)
    if trouble:
        note(f"--cache-dir {directory}: {trouble}; no caches are kept there")
    try:
        yield not trouble
    finally:
        if held is not None:
            os.close(held)


@contextmanager
def _kept(served: list[ServedModel], directory: Path) -> Iterator[None]:
    """Load the prefixes saved in a directory, and save the cached ones at the end.

    Each model has a subdirectory, even a model named ".". After an interrupt nothing is saved,
    since the worker may still be using the prefixes.
    """
    names = [quote(one.path or one.name, safe="") for one in served]
    places = [directory / (name if name.strip(".") else name.replace(".", "%2E")) for name in names]
    for one, place in zip(served, places, strict=True):
        one.cache.load(place)
    yield
    for one, place in zip(served, places, strict=True):
        one.cache.save(place)


def _panel(address: str, worker: Worker, with_key: bool) -> Panel:
    """The server's address and models, and how to use it."""
    from ..generation.drafting import Auto
    from ..models.heads.loading import NAMES
    from ..server.memory import in_words
    from ..server.prompts import why_no_tools

    rows = Table.grid(padding=(0, 2))
    rows.add_row("address", address)
    for served in worker.models.values():
        length = served.context_length
        context = f"{length:,} tokens of context" if length else "context length unknown"
        rows.add_row("model", f"{shown(served.name)}, {context}")
        if isinstance(drafting := served.decoder.drafting, Auto) and drafting.head is not None:
            rows.add_row("head", NAMES[type(drafting.head)])
        if reason := why_no_tools(served.decoder.tokenizer):
            rows.add_row("tools", f"not supported, since {reason}")
    limit, weights = worker.memory.limit, worker.memory.parts["weights"]
    rows.add_row("memory", f"at most {in_words(limit)}, with {in_words(weights)} of weights")
    key = "KEY" if with_key else "none"
    client = Text(f"export OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={key}", style="bold")
    return Panel(
        Group(rows, "", "Configure a client like this, or with mlxspec connect:", client),
        title="mlxspec serve",
        expand=False,
        border_style="dim",
        subtitle="Ctrl-C ends it",
    )


_LAST_ERRORS = 2.0  # seconds for clients to take the error if a rank is gone


def _serve(
    app: Any, listening: socket.socket, worker: Worker, grace: float, leader: Leader | None
) -> None:
    """Answer requests until Ctrl-C or SIGTERM; give running ones ``grace`` seconds to end.

    The loss of a rank ends them at once, with an error.
    """
    from ..server.body import ApiError
    from ..server.connections import HttpServer

    ended = threading.Event()

    def on_exit() -> None:
        if running := len({request.stream for request in worker.requests.copy()}):
            have = f"{counted(running, 'running request')} {'has' if running == 1 else 'have'}"
            seconds = "1 second" if grace == 1 else f"{grace:g} seconds"
            note(f"{have} {seconds} to end; press Ctrl-C again to stop at once")

    server = HttpServer(app, grace=grace, on_exit=on_exit)

    def on_loss(line: str) -> None:
        worker.fail(ApiError(f"the server is ending: {line}", status=503))
        server.should_exit = True
        ended.wait(_LAST_ERRORS)

    if leader:
        leader.channel.on_loss = on_loss
    with suppress(KeyboardInterrupt):  # uvicorn raises it again once all has ended
        server.run(sockets=[listening])
    ended.set()


# --- a log line for each request ---

_LAST_LINES = 1.0  # seconds for a terminal to take the remaining lines at the end


@contextmanager
def request_log(
    as_json: bool, quiet: bool = False, color: bool = False
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that prints a request's record.

    A thread prints it, so a paused terminal (Ctrl-S) delays no request.

    Args:
        as_json: print JSON to standard output instead of readable lines to standard error.
        quiet: print nothing.
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
    """The log record of a refused request, without values from the request."""
    record = {"outcome": "refused", "path": printable(path), "status": error.status}
    return {**record, "param": error.param, "code": error.code}


def end_record(requests: Sequence[ServedRequest]) -> dict[str, Any]:
    """The log record of a request: sums over its choices, without prompts and outputs.

    Times count from the start of the first choice.
    """
    now, first = time.perf_counter(), requests[0]
    emitted = sum(request.stats.emitted for request in requests)
    steps = sum(request.stats.steps for request in requests)
    seconds = sum(request.decode_seconds for request in requests)
    plain_seconds = sum(request.plain_seconds for request in requests)
    begun = [request.first_token for request in requests if request.first_token]
    errors = [(r.outcome, r.failure.message) for r in requests if r.failure]
    # When one choice fails, the others are cancelled: its own error comes first.
    errors.sort(key=lambda error: error[0] == "cancelled")
    outcomes = dict.fromkeys(request.outcome or "" for request in requests)
    # As in the answer's usage, a prompt counts once for all of its choices, which share it.
    prompts = {id(request.prompt): len(request.prompt) for request in requests}
    cached: dict[int, int] = {}
    for request in requests:
        if (count := request.cached_tokens) is not None:
            cached[id(request.prompt)] = min(count, cached.get(id(request.prompt), count))
    return {
        "model": first.served.name,
        "outcome": errors[0][0] if errors else "/".join(outcomes),
        "choices": len(requests),
        "prompt_tokens": sum(prompts.values()),
        "cached_tokens": sum(cached.values()) if cached else None,
        "tokens": sum(request.generated for request in requests),
        "seconds": round(now - first.asked, 3),
        "first_token": round(min(begun) - first.asked, 3) if begun else None,
        "tokens_per_step": round(emitted / steps, 2) if steps else None,
        "gain": round(plain_seconds / seconds, 2) if plain_seconds and seconds else None,
        "error": errors[0][1] if errors else None,
    }


def _line(record: dict[str, Any]) -> str:
    """The line of a request, red if it was refused or failed."""
    line = f"{record['time'][11:19]}  "
    if record["outcome"] == "refused":
        what = " ".join(shown(record[name]) for name in ("code", "param") if record[name])
        line += f"{record['status']} {shown(record['path'])}  {what}".rstrip()
        return click.style(line, fg="red")
    line += f"{record['prompt_tokens']:>6} + {record['tokens']:<5} tokens"
    line += f"  {record['seconds']:6.2f} s"
    if record["tokens_per_step"]:
        line += f"  {record['tokens_per_step']:5.2f} tokens/step"
    if record["gain"]:
        line += f"  {record['gain']:.2f}x"
    if record["choices"] > 1:
        line += f"  {record['choices']} choices"
    if record["cached_tokens"]:
        line += f"  {record['cached_tokens']} cached"
    return click.style(f"{line}  {shown(record['error'])}", fg="red") if record["error"] else line
