"""Loading models on demand, and unloading them when idle or for another model."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import mlx.nn as nn
import pytest

import mlxspec
from mlxspec.engine.grammar import Vocabulary
from mlxspec.errors import LoadError
from mlxspec.models.model import OnRead
from mlxspec.server import served_model
from mlxspec.server.app import create_app
from mlxspec.server.body import ApiError
from mlxspec.server.catalog import Catalog, Entry
from mlxspec.server.memory_budget import ServerMemory
from mlxspec.server.served_model import ServedModel
from mlxspec.server.worker import Worker
from tests.support.demo import FLAT, given_costs, stand_in
from tests.support.findings import share_findings
from tests.support.llamas import repetitive_llama
from tests.support.serving import served


@pytest.fixture(autouse=True)
def own_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path))
    share_findings(tmp_path)


@pytest.fixture
def known_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix what other tests change: the memory of forwards, in which their threads would count, and
    the constraints that they have compiled for the same tokenizer.
    """
    monkeypatch.setattr(served_model, "forward_memory", lambda *_: (10_000, 1.0))
    monkeypatch.setattr(Vocabulary, "kept_on", lambda tokenizer: None)


HELLO = [{"role": "user", "content": "Hello there"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 6},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 6},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 6},
    "/v1/messages": {"messages": HELLO, "max_tokens": 6},
}


class Shelf:
    """Models that can be loaded, with a record of the loads.

    Attributes:
        entries: the catalog's entries.
        loads: the models' names, in the order of their loads.
        refreshed, saved: the names of the models that were.
        models: weak references to all loaded models.
        broken: names of models that fail to load.
    """

    def __init__(self, *entries: Entry) -> None:
        self.entries = [*entries]
        self.loads: list[str] = []
        self.refreshed: list[str] = []
        self.saved: list[str] = []
        self.models: list[weakref.ref[Any]] = []
        self.broken: set[str] = set()

    def find(self) -> Iterable[Entry]:
        return [Entry(one.name, one.path, one.others, one.nbytes, 99) for one in self.entries]

    def load(self, entry: Entry, on_read: OnRead) -> ServedModel:
        if entry.name == "first":
            return served("first")
        self.loads.append(entry.name)
        on_read(entry.nbytes)
        if entry.name in self.broken:
            raise LoadError(f"{entry.path}: truncated or damaged; fetch it again")
        model = repetitive_llama()
        self.models.append(weakref.ref(model))
        return _served(entry.name, model)

    def refresh(self, entry: Entry) -> None:
        self.refreshed.append(entry.name)

    def save(self, entry: Entry) -> None:
        self.saved.append(entry.name)


def _served(name: str, model: nn.Module) -> ServedModel:
    decoder = mlxspec.AutoDecoder(model, stand_in().tokenizer, memory_tokens=0)
    for known in ("capability", "chain_capability", "joint_mode"):
        setattr(decoder.loaded, known, getattr(stand_in().loaded, known))
    decoder.costs = given_costs(FLAT)
    return ServedModel(name, decoder)


class Server:
    """A server with a manual clock.

    Attributes:
        http: a client.
        catalog, worker: the server's parts.
        now: the clock's time.
        log: the log's records.
        refused: the paths of refused requests.
    """

    def __init__(
        self,
        shelf: Shelf,
        starting: Sequence[str] = (),
        bound: int | None = None,
        **options: Any,
    ) -> None:
        self.now = 0.0
        self.refused: list[str] = []
        self.log: list[dict[str, Any]] = []
        self.worker = Worker(memory=ServerMemory(bound))
        self.catalog = Catalog(
            self.worker,
            shelf,
            [Entry(name, keep_alive=None) for name in starting],
            log=self.log.append,
            clock=lambda: self.now,
        )
        app = create_app(
            self.catalog, on_refusal=lambda path, error: self.refused.append(path), **options
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60)

    async def ask(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return await self.http.post(path, json=PATHS[path] | fields)

    async def said(self, **fields: Any) -> str:
        answer = await self.ask(**fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.catalog.entries if entry.name == name)

    def states(self) -> dict[str, str]:
        return {entry.name: entry.state for entry in self.catalog.entries}


@asynccontextmanager
async def serving(shelf: Shelf, *starting: str, **options: Any) -> AsyncIterator[Server]:
    server = Server(shelf, starting, **options)
    try:
        await server.catalog.start()
        async with server.http:
            yield server
    finally:
        server.catalog.close()
        server.worker.stop()


def two() -> Shelf:
    return Shelf(Entry("hub/a", "/models/a"), Entry("hub/b", "/models/b"))


def test_requests_that_come_during_a_scan_wait_for_it() -> None:
    async def run() -> None:
        async with serving(shelf := two()) as server:
            shelf.entries.append(Entry("hub/new", "/models/new"))
            server.now = 60.0
            new = server.catalog.named("hub/new"), server.catalog.named("hub/new")
            assert [entry.name for entry in await asyncio.gather(*new)] == ["hub/new"] * 2

    asyncio.run(run())


def test_an_entry_that_a_request_has_stays_the_catalogs() -> None:
    async def run() -> None:
        async with serving(shelf := two()) as server:
            entry = await server.catalog.named("hub/a")
            shelf.entries[0].nbytes = 7
            server.now = 60.0
            await server.catalog.look()
            assert server.entry("hub/a") is entry
            assert entry.nbytes == 7

    asyncio.run(run())


def alone(prompt: str = "Hello", max_tokens: int = 6, **options: Any) -> str:
    """Return plain decoding's output with the same model."""
    model = served().decoder
    plain = mlxspec.Decoder(model.model, model.tokenizer)
    return "".join(response.text for response in plain.stream(prompt, max_tokens, **options))


@pytest.mark.slow
def test_first_requests_that_come_at_once_load_their_model_once() -> None:
    async def run() -> None:
        async with serving(shelf := two()) as server:
            asked = [server.ask(path, model="hub/a") for path in PATHS]
            asked += [server.ask(model="hub/a") for _ in range(3)]
            answers = await asyncio.gather(*asked)
            assert [answer.status_code for answer in answers] == [200] * 7
            assert {answer.json()["model"] for answer in answers} == {"hub/a"}
            texts = {answer.json()["choices"][0]["text"] for answer in answers[4:]}
            assert texts == {alone()}
            assert shelf.loads == ["hub/a"]
            assert server.states() == {"hub/a": "loaded", "hub/b": "not-loaded"}

    asyncio.run(run())


def test_an_idle_model_leaves_and_comes_back_with_the_same_answers() -> None:
    sampled = {"model": "hub/a", "temperature": 0.9, "seed": 4}

    async def run() -> None:
        async with serving(shelf := two()) as server:
            before = await server.said(**sampled)
            assert before == alone(temp=0.9, seed=4)
            server.now = 599.0
            await server.catalog.unload_idle()
            assert server.states()["hub/a"] == "loaded"
            await server.said(model="hub/a")
            server.now = 1198.0  # it was last used at 599
            await server.catalog.unload_idle()
            assert server.states()["hub/a"] == "loaded"
            server.now = 1199.0
            await server.catalog.unload_idle()
            assert server.states()["hub/a"] == "not-loaded"
            assert (shelf.saved, [*server.worker.models]) == (["hub/a"], [])
            assert await server.said(**sampled) == before
            assert shelf.loads == shelf.refreshed == ["hub/a"] * 2
            outcomes = [(record["outcome"], record["model"]) for record in server.log]
            coming = [("loading", "hub/a"), ("loaded", "hub/a")]
            assert outcomes == [*coming, ("unloaded", "hub/a"), *coming]
            assert server.log[2]["reason"] == "idle for 600 s"

    asyncio.run(run())


@pytest.mark.slow
def test_a_model_stays_while_a_request_uses_it() -> None:
    async def run() -> None:
        async with serving(two()) as server:
            entry = server.entry("hub/a")
            with ExitStack() as uses:
                await server.catalog.use(entry, uses)
                await server.said(model="hub/a")  # another request ends in the meantime
                server.now = 10_000.0
                await server.catalog.unload_idle()
                assert entry.state == "loaded"
            await server.catalog.unload_idle()  # its idle time starts when the last request ends
            assert entry.state == "loaded"
            server.now = 10_600.0
            await server.catalog.unload_idle()
            assert entry.state == "not-loaded"

    asyncio.run(run())


@pytest.mark.slow
def test_a_model_of_the_start_is_the_one_that_is_found_under_another_path() -> None:
    async def run() -> None:
        async with serving(Shelf(Entry("first", "/snapshots/first")), "first") as server:
            await server.http.get("/v1/models")
            assert server.entry("first") is server.catalog.at_start[0]
            await server.said(model="first")

    asyncio.run(run())


@pytest.mark.slow
def test_models_of_the_start_stay() -> None:
    async def run() -> None:
        async with serving(two(), "first") as server:
            server.now = 1e9
            await server.catalog.unload_idle()
            assert server.states()["first"] == "loaded"
            assert (await server.ask()).json()["model"] == "first"
            for model, meant in (("", "first"), ("claude-opus-5", "first"), ("hub/b", "hub/b")):
                answer = await server.ask("/v1/messages", model=model)
                assert answer.json()["model"] == meant

    asyncio.run(run())


def bound_for_one() -> tuple[int, int]:
    """Return a memory limit, and a size of weights that fits only if no other model is loaded."""
    memory = served().memory
    bound = 8 * (memory.weights + sum(memory.needs(100)))
    return bound, bound * 85 // 100


@pytest.mark.slow
@pytest.mark.usefixtures("known_memory")
def test_a_model_that_needs_the_room_takes_it_from_the_one_used_longest_ago() -> None:
    bound, nbytes = bound_for_one()

    async def run() -> None:
        shelf = Shelf(Entry("a", nbytes=nbytes), Entry("b", nbytes=nbytes))
        async with serving(shelf, bound=bound) as server:
            first = await server.said(model="a")
            assert await server.said(model="b") == first
            assert server.states() == {"a": "not-loaded", "b": "loaded"}
            assert server.log[2] | {"reason": "room for b"} == server.log[2]
            with ExitStack() as uses:
                await server.catalog.use(server.entry("b"), uses)
                waiting = asyncio.create_task(server.said(model="a"))
                late = None
                while server.entry("b").state != "unloading":
                    await asyncio.sleep(0)
                late = asyncio.create_task(server.said(model="b"))  # after the waiting request
                for _ in range(20):
                    await asyncio.sleep(0)
                assert server.entry("b").served
                assert not waiting.done()
            assert await waiting == first
            assert await late == first
            assert shelf.loads == ["a", "b", "a", "b"]
            assert server.worker.memory.reserved == 0

    asyncio.run(run())


@pytest.mark.slow
def test_an_idle_model_makes_room_for_a_request() -> None:
    async def run() -> None:
        async with serving(two()) as server:
            first = await server.said(model="hub/a")
            assert await server.said(model="hub/b") == first
            memory, model = server.worker.memory, server.worker.models["hub/b"].memory
            # A request of 400 tokens has room beside its own model, but not beside another one.
            memory._bound = memory.bound_for(model.needs(400)) - model.weights // 2
            memory._next_look = 0.0
            assert server.states() == {"hub/a": "loaded", "hub/b": "loaded"}
            prompt = [*range(300, 650)]
            endless = await server.ask(model="hub/b", prompt=prompt * 50, max_tokens=30_000)
            assert endless.status_code == 413
            assert server.states() == {"hub/a": "loaded", "hub/b": "loaded"}
            assert (
                await server.ask(model="hub/b", prompt=prompt, max_tokens=50)
            ).status_code == 200
            assert server.states() == {"hub/a": "not-loaded", "hub/b": "loaded"}

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.usefixtures("known_memory")
def test_a_model_that_never_fits_is_refused_with_the_sizes() -> None:
    bound, nbytes = bound_for_one()

    async def run() -> None:
        shelf = Shelf(Entry("a", nbytes=nbytes // 4), Entry("huge", nbytes=2 * bound))
        async with serving(shelf, bound=bound) as server:
            await server.said(model="a")
            refused = await server.ask(model="huge")
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (413, "out_of_memory")
            assert f"need {2 * bound >> 20} MiB" in error["message"]
            assert f"of {server.worker.memory.limit >> 20} MiB" in error["message"]
            assert server.states() == {"a": "loaded", "huge": "not-loaded"}
            assert shelf.loads == ["a"]

    asyncio.run(run())


@pytest.mark.slow
def test_a_load_takes_no_room_from_a_request_that_waits() -> None:
    weights = 200 << 20

    class Heavy(Shelf):
        def load(self, entry: Entry, on_read: OnRead) -> ServedModel:
            model = super().load(entry, on_read)
            model.memory.weights = weights
            return model

    async def run() -> None:
        shelf = Heavy(Entry("a", nbytes=weights), Entry("b", nbytes=weights))
        async with serving(shelf, bound=2 * weights + 40_000_000) as server:
            await server.said(model="a")
            active = server.worker.active
            asked = [server.said(model="a", max_tokens=200) for _ in range(active)]
            asked = [asyncio.create_task(one) for one in asked]
            while len(server.worker.requests) < active:
                await asyncio.sleep(0)
            # It waits for its turn and fits beside one model only.
            large = asyncio.create_task(server.ask(model="a", max_tokens=1500, stop="a"))
            while len(server.worker.requests) <= active:
                await asyncio.sleep(0)
            await server.said(model="b")
            assert (await large).status_code == 200, (await large).text
            await asyncio.gather(*asked)
            assert server.states() == {"a": "not-loaded", "b": "loaded"}

    asyncio.run(run())


@pytest.mark.slow
def test_a_load_that_fails_is_an_error_of_its_requests_alone() -> None:
    async def run() -> None:
        shelf = two()
        shelf.broken = {"hub/b"}
        async with serving(shelf) as server:
            good, *bad = await asyncio.gather(
                server.ask(model="hub/a"),
                *[server.ask(path, model="hub/b") for path in PATHS],
            )
            assert good.status_code == 200
            for refused in bad:
                message = refused.json()["error"]["message"]
                assert (refused.status_code, message.count("\n")) == (500, 0)
                assert message == (
                    "the model hub/b cannot be loaded: /models/b: truncated or damaged; fetch it "
                    "again"
                )
            outcomes = [record["outcome"] for record in server.log if record["model"] == "hub/b"]
            assert outcomes == ["loading", "not loaded"]
            assert server.worker.memory.reserved == 0
            shelf.broken = set()
            assert await server.said(model="hub/b") == good.json()["choices"][0]["text"]

    asyncio.run(run())


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_hurts_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving(two()) as server:
            first = await server.said(model="hub/a")
            with monkeypatch.context() as patch:
                patch.setattr(Worker, "open", lambda self, served: 1 / 0)
                assert (await server.ask(model="hub/b")).status_code == 500
            assert await server.said(model="hub/a") == first
            assert not server.worker.ending
            assert await server.said(model="hub/b") == first

    asyncio.run(run())


@pytest.mark.slow
def test_names_are_those_of_folders_and_aliases_in_all_apis() -> None:
    shelf = Shelf(
        Entry("hub/a", "/models/a", frozenset({"a", "fast"})),
        Entry("hub/same", "/models/hub/same", frozenset({"same"})),
        Entry("lm/same", "/models/lm/same", frozenset({"same"})),
    )

    async def run() -> None:
        async with serving(shelf) as server:
            for path in PATHS:
                for name in ("hub/a", "a", "fast", "/models/a"):
                    answer = await server.ask(path, model=name)
                    assert answer.json()["model"] == "hub/a", answer.text
                several = await server.ask(path, model="same")
                assert several.status_code == 400
                assert "means hub/same or lm/same" in several.json()["error"]["message"]
                missing = await server.ask(path, model="hub/aa")
                assert missing.status_code == 404
                assert "hub/a" in missing.json()["error"]["message"]
                assert (await server.ask(path)).status_code == 404
            assert shelf.loads == ["hub/a"]

    asyncio.run(run())


def test_an_only_model_answers_any_name_unless_names_are_strict() -> None:
    async def run() -> None:
        async with serving(Shelf(Entry("only", "/models/only"))) as server:
            for name in ("gpt-5", None):
                assert (await server.ask(model=name)).json()["model"] == "only"
            with pytest.raises(ApiError, match="use only"):
                await server.catalog.named("gpt-5")

    asyncio.run(run())


@pytest.mark.slow
def test_models_that_are_available_are_listed_with_their_state() -> None:
    async def run() -> None:
        async with serving(shelf := two(), "first") as server:
            await server.said(model="hub/b")
            listed = (await server.http.get("/v1/models")).json()["data"]
            states = {model["id"]: model["state"] for model in listed}
            assert states == {"first": "loaded", "hub/a": "not-loaded", "hub/b": "loaded"}
            assert [model["context_length"] for model in listed[1:]] == [99, 99]
            one = (await server.http.get("/v1/models/hub/a")).json()
            assert one == listed[1]
            status = (await server.http.get("/status")).json()
            assert [model["name"] for model in status["models"]] == ["first", "hub/b"]
            assert {model["name"]: model["state"] for model in status["available"]} == states
            assert 'part_bytes{part="prefixes"}' in (await server.http.get("/metrics")).text
            # Models that appear on or vanish from the disk are noticed after a while.
            shelf.entries[0] = Entry("hub/new", "/models/new")
            server.now += 60
            listed = (await server.http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["first", "hub/b", "hub/new"]

    asyncio.run(run())


class Slow(Shelf):
    """Models that wait for a signal to load.

    Attributes:
        may_load: lets them load.
    """

    def __init__(self, *entries: Entry) -> None:
        super().__init__(*entries)
        self.may_load = threading.Event()

    def load(self, entry: Entry, on_read: OnRead) -> ServedModel:
        self.may_load.wait()
        return super().load(entry, on_read)


FIRST_LINES = {
    "/v1/chat/completions": ": still working",
    "/v1/completions": ": still working",
    "/v1/responses": "event: response.created",
    "/v1/messages": "event: ping",
}
"""The start of a stream while its model is loading."""


def deltas(stream: str) -> str:
    """Return a stream's text deltas, in any of the APIs."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    texts = []
    for event in events:
        (choice,) = event.get("choices") or [{}]
        delta = event.get("delta") or choice.get("delta") or {"text": choice.get("text")}
        texts.append(delta if isinstance(delta, str) else delta.get("content") or delta.get("text"))
    return "".join(filter(None, texts))


@pytest.mark.slow
def test_requests_wait_while_the_models_of_the_start_load() -> None:
    async def run() -> None:
        shelf = Slow()
        server = Server(shelf, ["first"], keep_alive=0.01)
        starting = asyncio.create_task(server.catalog.start())
        while server.states()["first"] != "loading":
            await asyncio.sleep(0)
        health, ready = [await server.http.get(path) for path in ("/health", "/ready")]
        assert (health.status_code, health.json()) == (200, {"status": "loading"})
        assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
        assert not (await server.http.get("/status")).json()["ready"]
        (listed,) = (await server.http.get("/v1/models")).json()["data"]
        assert listed["state"] == "loading"
        whole = asyncio.create_task(server.ask())
        streams = [asyncio.create_task(server.ask(path, stream=True)) for path in PATHS]
        await asyncio.sleep(0.1)
        shelf.may_load.set()
        assert (await whole).json()["choices"][0]["text"] == alone()
        await starting
        assert (await server.http.get("/ready")).json() == {"status": "ok"}
        for path, stream in zip(PATHS, streams, strict=True):
            answer, again = await stream, await server.ask(path, stream=True)
            assert (answer.status_code, again.status_code) == (200, 200)
            assert answer.text.startswith(FIRST_LINES[path])
            assert deltas(answer.text) == deltas(again.text) != ""
            assert answer.text.count("event: response.created") == (path == "/v1/responses")
        server.catalog.close()
        server.worker.stop()

    asyncio.run(run())


@pytest.mark.slow
def test_a_stream_that_waits_in_vain_ends_with_the_error() -> None:
    async def run() -> None:
        shelf = Slow(Entry("hub/b", "/models/b"))
        shelf.broken = {"hub/b"}
        async with serving(shelf, keep_alive=0.01) as server:
            streams = [asyncio.create_task(server.ask(path, stream=True)) for path in PATHS]
            await asyncio.sleep(0.1)
            shelf.may_load.set()
            for path, stream in zip(PATHS, streams, strict=True):
                lines = [line for line in (await stream).text.splitlines() if line]
                (line,) = [line for line in lines if "truncated or damaged" in line]
                assert lines[-1] in (line, "data: [DONE]")
                assert lines[0] == FIRST_LINES[path]
            assert sorted(server.refused) == sorted(PATHS)
            assert not server.worker.requests

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.usefixtures("known_memory")
def test_a_model_whose_files_are_replaced_has_its_new_sizes() -> None:
    bound, nbytes = bound_for_one()

    class Disk(Shelf):
        def refresh(self, entry: Entry) -> None:
            if not (found := {one.name: one for one in self.find()}.get(entry.name)):
                raise ApiError(f"{entry.path} is gone", status=404, code="model_not_found")
            entry.nbytes, entry.context_length = found.nbytes, found.context_length

    async def run() -> None:
        shelf = Disk(Entry("a", "/a", nbytes=nbytes // 4), Entry("b", "/b", nbytes=nbytes // 4))
        async with serving(shelf, bound=bound) as server:
            server.catalog.refresh = shelf.refresh
            shelf.entries[0].nbytes = 2 * bound  # larger than when it was found
            refused = await server.ask(model="a")
            assert (refused.status_code, shelf.loads) == (413, [])
            assert f"need {2 * bound >> 20} MiB" in refused.json()["error"]["message"]
            await server.said(model="b")
            shelf.entries[0].nbytes = nbytes // 8  # and now smaller
            await server.said(model="a")
            assert shelf.loads == ["b", "a"]
            assert server.entry("a").nbytes == nbytes // 8
            server.now = 600.0
            await server.catalog.unload_idle()
            # A scan finds them, too, even under the path of another revision.
            shelf.entries[0] = Entry("a", "/new/a", nbytes=nbytes // 2)
            await server.http.get("/v1/models")
            assert (server.entry("a").path, server.entry("a").nbytes) == ("/new/a", nbytes // 2)
            del shelf.entries[0]
            gone = await server.ask(model="a")
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
            assert shelf.loads == ["b", "a"]

    asyncio.run(run())


@pytest.mark.slow
def test_stored_responses_outlive_their_model() -> None:
    async def run() -> None:
        async with serving(shelf := two()) as server:
            first = (await server.ask("/v1/responses", model="hub/a")).json()
            server.now = 600.0
            await server.catalog.unload_idle()
            assert server.states()["hub/a"] == "not-loaded"
            kept = (await server.http.get(f"/v1/responses/{first['id']}")).json()
            assert kept["output"] == first["output"]
            again = {"model": "hub/a", "input": "More", "previous_response_id": first["id"]}
            answer = await server.ask("/v1/responses", **again)
            assert answer.status_code == 200, answer.text
            assert shelf.loads == ["hub/a"] * 2

    asyncio.run(run())


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 10])
def test_an_unloaded_model_leaves_no_memory(times: int) -> None:
    async def run() -> None:
        async with serving(shelf := two()) as server:
            held = []
            for _ in range(times):
                await server.said(model="hub/a")
                server.now += 600
                await server.catalog.unload_idle()
                held.append(mx.get_active_memory())
            assert [model() for model in shelf.models] == [None] * times
            assert max(held) - min(held) < 4096
            assert held[-1] <= held[0] + 1024

    gc.collect()
    asyncio.run(run())
