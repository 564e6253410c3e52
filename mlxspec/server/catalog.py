"""The models that requests may name: those that are loaded, and those that load on demand.

Everything here runs in the event loop, except that a separate thread loads and unloads models, one
at a time. Only the worker's thread runs models, even for their first steps.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import MlxspecError
from ..models.model import OnRead
from .body import ApiError, shown
from .served_model import Need, ServedModel
from .worker import Worker

_log = logging.getLogger("mlxspec.server")

KEEP_ALIVE = 600.0
"""Seconds without a request after which a model that was loaded on demand is unloaded."""

_NAMED = 5  # the most models that an error names
_CHECK = 1.0  # seconds between checks for models that have been idle too long
_LOOK = 5.0  # the least seconds between two scans of the disk for models


@dataclass(eq=False)
class Entry:
    """A model that requests may name.

    Attributes:
        name: its unique name in requests and answers.
        path: what it is loaded from.
        others: more names, which several models may share.
        nbytes: the bytes of its weights in memory, if known.
        context_length: in tokens; None if unknown.
        keep_alive: the seconds without a request after which it is unloaded; None if it stays
            loaded, even when another model needs the room.
        served: the loaded model; None while it is not loaded.
        state: "loaded", "loading", "unloading" or "not-loaded".
        used: when it was last used, by the catalog's clock.
    """

    name: str
    path: str = ""
    others: frozenset[str] = frozenset()
    nbytes: int = 0
    context_length: int | None = None
    keep_alive: float | None = KEEP_ALIVE
    served: ServedModel | None = field(default=None, repr=False)
    state: str = "not-loaded"
    used: float = 0.0
    users: int = 0
    """The number of requests that use the loaded model."""
    waiting: int = 0
    """The number of requests that wait for the model to load."""
    loading: asyncio.Task[ApiError | None] | None = field(default=None, repr=False)

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, and no request uses it or waits for it."""
        return self.state == "loaded" and not self.users + self.waiting

    @property
    def is_unused(self) -> bool:
        """Whether it is neither loaded nor to be loaded."""
        return self.state == "not-loaded" and not self.waiting and not self.loading


class ModelLoader(Protocol):
    """Loads a catalog's models. All but ``save`` may raise :class:`MlxspecError`."""

    def load(self, entry: Entry, on_read: OnRead) -> ServedModel:
        """Load a model, running at most a few forwards; called in any thread."""

    def find(self) -> Iterable[Entry]:
        """Find models that can be loaded later; called in any thread."""

    def refresh(self, entry: Entry) -> None:
        """Read the sizes of a model again before it is loaded, since its files may have been
        replaced; called in any thread.
        """

    def save(self, entry: Entry) -> None:
        """Save what a model has learned, once no request uses it any more."""


@dataclass(eq=False)
class Catalog:
    """The models that requests may name; loads and unloads them.

    A request loads its model if necessary. If there is no room, models that no request uses are
    unloaded, the least recently used first. If all are in use, the least recently used model takes
    no more requests, and is unloaded when those that use it have ended. Requests that name it
    meanwhile wait, and then load it again.

    Args:
        default: the name of the model for requests without one; by default the first entry's.
        log: called in any thread with a record of each load and unload.
        on_start: called in the event loop once the initial models are loaded, or with the error of
            the first that cannot be.
        clock: returns the time in seconds.

    Attributes:
        starting: whether initial models are still to be loaded.
        ending: whether the server is shutting down, so that no load goes on.
    """

    worker: Worker
    loader: ModelLoader
    at_start: Sequence[Entry]
    _: KW_ONLY
    default: str | None = None
    log: Callable[[dict[str, Any]], object] = lambda record: None
    on_start: Callable[[Exception | None], object] = lambda error: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._entries = {entry.name: entry for entry in self.at_start}
        self.starting = bool(self._entries)
        self.default = self.default or next(iter(self._entries), None)
        self._looked = self.clock()
        self._looking: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "mlxspec models")
        self._moving = asyncio.Lock()
        """Held while a model is loaded or unloaded."""
        self._left = asyncio.Event()
        """Set when a request stops using its model, or waiting for it."""
        self.ending = False
        self._add(self.loader.find())

    @property
    def entries(self) -> list[Entry]:
        """All models, those loaded at the start first."""
        return [*self._entries.values()]

    async def start(self) -> None:
        """Load the initial models.

        Raises:
            MlxspecError: a model cannot be loaded, or does not fit into memory.
        """
        for entry in self.at_start:
            if failure := await self._loaded(entry):
                raise failure.__cause__ or failure
        self.starting = False

    # --- names ---

    async def look(self) -> None:
        """Find models that were added on disk, and forget those that were removed."""
        if not self._looking and self.clock() - self._looked >= _LOOK:
            self._looked = self.clock()
            self._looking = asyncio.create_task(self._scan())
        if self._looking:
            await asyncio.shield(self._looking)

    async def _scan(self) -> None:
        try:
            # The start has reported lasting errors; others come from files that vanish meanwhile.
            with suppress(MlxspecError, OSError):
                self._add(await asyncio.to_thread(self.loader.find))
        finally:
            self._looking = None

    def _add(self, entries: Iterable[Entry]) -> None:
        new = {entry.name: entry for entry in entries}
        for name, entry in [*self._entries.items()]:
            if entry.is_unused and entry not in self.at_start and name not in new:
                del self._entries[name]
        of_start = {entry.path for entry in self.at_start}
        for name, entry in new.items():
            known = self._entries.get(name)
            replaces = known is None or (known.is_unused and known not in self.at_start)
            if entry.path in of_start or not replaces:
                continue
            if known is None:
                self._entries[name] = entry
            else:  # its files may have been replaced; a request may already have the entry
                known.path, known.others = entry.path, entry.others
                known.nbytes, known.context_length = entry.nbytes, entry.context_length

    async def named(self, name: str | None, strict: bool = True) -> Entry:
        """The model for requests with this name.

        Requests without a name get the default model. Unless ``strict``, so do unknown names that
        begin with "claude-", or all unknown names if there is only one model.

        Raises:
            ApiError: 404, no model has this name; 400, several do.
        """
        entry = self._known(name)
        if not entry:
            await self.look()
            entry = self._known(name)
        if not entry and (name is None or not strict):
            if name is None or name.startswith("claude-"):
                entry = self._known(self.default)
            if not entry and len(self._entries) == 1:
                (entry,) = self.entries
        if not entry:
            which = f"the model {shown(name)} is not served here" if name else "no model is named"
            some = " or ".join([*self._entries][:_NAMED])
            instead = f"use {some}, or another that /v1/models lists"
            if not some:
                instead = "no models were found; download one, and see 'mlxspec models'"
            raise ApiError(f"{which}: {instead}", status=404, param="model", code="model_not_found")
        return entry

    def _known(self, name: str | None) -> Entry | None:
        """The model with this name; None if there is none."""
        if name is None:
            return None
        if name in self._entries:
            return self._entries[name]
        matching = [entry for entry in self.entries if name in (entry.path, *entry.others)]
        if len(matching) > 1:
            raise ApiError(
                f"the model name {shown(name)} means "
                f"{' or '.join(entry.name for entry in matching)}: name one of them",
                param="model",
                code="model_ambiguous",
            )
        return matching[0] if matching else None

    # --- use ---

    async def use(self, entry: Entry, uses: ExitStack) -> ServedModel:
        """Load a model if necessary; it stays loaded until ``uses`` is closed.

        Raises:
            ApiError: 413, it does not fit into memory; 500, it cannot be loaded.
        """
        entry.waiting += 1
        try:
            while entry.served is None or entry.state != "loaded":
                if failure := await self._loaded(entry):
                    raise failure
        finally:
            entry.waiting -= 1
            self._left.set()  # a load may wait for this, even if the request was cancelled
        entry.users += 1
        uses.callback(self._leave, entry)
        return entry.served

    def _leave(self, entry: Entry) -> None:
        entry.users -= 1
        entry.used = self.clock()
        self._left.set()

    @asynccontextmanager
    async def running(self, app: object) -> AsyncIterator[None]:
        """While an ASGI application runs, load the initial models, unload idle ones, and make room
        for other programs.
        """
        tasks = [asyncio.create_task(run()) for run in (self._start, self._watch)]
        yield
        for task in tasks:
            task.cancel()

    async def _start(self) -> None:
        error = None
        try:
            await self.start()
        except Exception as failure:
            error = failure
        self.on_start(error)

    async def _watch(self) -> None:
        while not self.worker.ending:
            self.worker.call(self.worker.memory.make_room)  # for other programs
            await asyncio.sleep(_CHECK)
            await self.unload_idle()

    async def unload_idle(self) -> None:
        """Unload the models that have been idle for their ``keep_alive``."""
        async with self._moving:
            for entry in self.entries:
                seconds = math.inf if entry.keep_alive is None else entry.keep_alive
                if entry.is_idle and self.clock() - entry.used >= seconds:
                    await self._unload(entry, f"idle for {seconds:g} s")

    # --- loading and unloading ---

    async def _loaded(self, entry: Entry) -> ApiError | None:
        """Load a model, or wait for its load; return what :meth:`_load` returns."""
        entry.loading = entry.loading or asyncio.create_task(self._load(entry))
        # If this request ends, the load continues for others.
        return await asyncio.shield(entry.loading)

    async def _load(self, entry: Entry) -> ApiError | None:
        """Load a model; if that fails, return the error for the requests that wait for it."""
        try:
            async with self._moving:
                await asyncio.to_thread(self.loader.refresh, entry)
                await self._make_room(entry)
                begun = self.clock()
                self.log({"outcome": "loading", "model": entry.name, "bytes": entry.nbytes or None})
                await self._in_thread(self._read, entry)
                seconds = round(entry.used - begun, 3)
                self.log({"outcome": "loaded", "model": entry.name, "seconds": seconds})
                return None
        except Exception as error:
            failure = self._failed(entry, error)
        finally:
            entry.loading = None
            entry.state = "loaded" if entry.served else "not-loaded"
        # Outside the except block, so that the exception does not keep the loaded parts alive.
        await self._in_thread(self._give_up, entry)
        return failure

    def _failed(self, entry: Entry, error: Exception) -> ApiError:
        """The error that clients get if a model cannot be loaded."""
        if not isinstance(error, MlxspecError | OSError):
            _log.error("the model %s has failed to load", entry.name, exc_info=error)
        line = str(error) or type(error).__name__
        self.log({"outcome": "not loaded", "model": entry.name, "error": line})
        status, code = 500, "model_not_loaded"
        if isinstance(error, ApiError):
            status, code = error.status, error.code or code
        line = f"the model {entry.name} cannot be loaded: {line}"
        failure = ApiError(line, status=status, param="model", code=code)
        failure.__cause__ = error.with_traceback(None)  # its frames would keep the loaded parts
        return failure

    async def _make_room(self, entry: Entry) -> None:
        """Unload other models until this one fits."""
        memory = self.worker.memory
        while True:
            self._left.clear()
            in_use = any(model.users + model.waiting for model in self.entries if model.served)
            if await asyncio.wrap_future(self.worker.call(self._reserves, entry)):
                return
            others = [
                model for model in self.entries if model.served and model.keep_alive is not None
            ]
            room = memory.room + sum(model.nbytes for model in others)
            if entry.nbytes > room or not (others or in_use):
                left = max(0, room - memory.parts["forward"])
                raise ApiError(
                    f"the weights of {entry.name} need {entry.nbytes >> 20} MiB, but only "
                    f"{left >> 20} MiB are left of {memory.limit >> 20} MiB: use a smaller model, "
                    "or allow the server more memory with --memory-limit",
                    status=413,
                    param="model",
                    code="out_of_memory",
                )
            if free := [model for model in others if not model.waiting]:
                oldest = min(free, key=lambda model: (model.users > 0, model.used))
                await self._unload(oldest, f"room for {entry.name}")
            else:
                await self._left.wait()

    async def make_room_for(self, need: Need) -> None:
        """Unload idle models, the least recently used first, until a request would fit.

        If it would not fit even without all of them, none is unloaded.
        """
        fits = self.worker.memory.ever_fits
        loads = any(entry.loading for entry in self.entries)
        if fits(need) or loads or self._moving.locked():  # a load may wait for this request
            return
        async with self._moving:
            idle = [
                model for model in self.entries if model.is_idle and model.keep_alive is not None
            ]
            if fits(need, beside=-sum(model.nbytes for model in idle)):
                for model in sorted(idle, key=lambda model: model.used):
                    if not fits(need):
                        await self._unload(model, "room for a request")

    async def _unload(self, entry: Entry, reason: str) -> None:
        """Unload a model once no request uses it."""
        entry.state = "unloading"
        while entry.users:
            self._left.clear()
            await self._left.wait()
        await self._in_thread(self._close, entry)
        self._left.set()
        self.log({"outcome": "unloaded", "model": entry.name, "reason": reason})

    # --- in the worker's thread ---

    def _reserves(self, entry: Entry) -> bool:
        """Reserve memory for a model's weights, if every request will still fit beside them."""
        memory = self.worker.memory
        needs = (request.need for request in self.worker.requests.copy())
        keep = all(memory.ever_fits(need, beside=entry.nbytes) for need in needs)
        if fits := keep and memory.fits(Need(entry.nbytes)):
            memory.reserve(entry.name, Need(entry.nbytes))
        return fits

    # --- in the thread that loads and unloads ---

    async def _in_thread(self, function: Callable[[Entry], object], entry: Entry) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function, entry)

    def _read(self, entry: Entry) -> None:
        """Read a model's weights in this thread, and run its first steps in the worker's."""

        def on_read(nbytes: int) -> None:
            if self.ending:
                raise ApiError("the server is shutting down", status=503)

        entry.state = "loading"
        served = self.loader.load(entry, on_read)
        on_read(0)  # the server may be shutting down
        self.worker.call(self.worker.open, served).result()
        entry.nbytes = entry.nbytes or served.memory.weights
        entry.context_length = entry.context_length or served.context_length
        entry.used = self.clock()
        entry.served, entry.state = served, "loaded"
        if gc.get_freeze_count():
            gc.freeze()  # as the server does at its start

    def _give_up(self, entry: Entry) -> None:
        """Free the memory of a model that could not be loaded."""
        with suppress(ApiError):  # the server is shutting down
            self.worker.call(self.worker.memory.release, entry.name).result()
        _free()

    def _close(self, entry: Entry) -> None:
        """Remove a model from the worker, and free its memory."""
        assert entry.served
        try:
            self.worker.call(self.worker.leave, entry.served).result()
            self.loader.save(entry)
        except Exception as error:  # even so, the room is free, and a load may wait for it
            if not self.ending:
                _log.error("the model %s could not be closed", entry.name, exc_info=error)
        entry.served = None
        _free()
        entry.state = "not-loaded"

    def close(self) -> None:
        """End the thread; a model that is still loading is abandoned."""
        self.ending = True
        self._thread.shutdown(cancel_futures=True)


def _free() -> None:
    """Free the memory of unused objects."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    mx.clear_cache()


def keeping_models(app: ASGIApp) -> ASGIApp:
    """ASGI middleware: a request's models stay loaded until its response has been sent.

    The request's state holds an exit stack, ``uses``, for :meth:`Catalog.use` and for whatever else
    ends with the request.
    """

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as uses:
            scope.setdefault("state", {})["uses"] = uses
            await app(scope, receive, send)

    return served
