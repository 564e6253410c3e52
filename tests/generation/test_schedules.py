"""Generators, sessions and prompt caches in several threads, in any order, compared with mlx-lm.

Each step of a schedule names a thread and an operation: make, advance, close, drop or look at
something. mlx-lm runs the schedule first, in one thread. Each step must then give the same here.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec import Decoder, Session
from mlxspec.drafting.drafter import NoDraft
from mlxspec.drafting.lookahead import LookaheadDrafter
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.errors import FileError, OptionError
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import endless_tokenizer
from tests.support.drafters import PartlyRightDrafter, drafted
from tests.support.examples import examples

pytestmark = pytest.mark.slow

THREADS, CACHES, SESSIONS, VOCABULARY = 4, 2, 1, 64
DRAFTERS: tuple[Callable[[list[int], int], Any], ...] = (
    lambda truth, seed: PartlyRightDrafter(truth, VOCABULARY, seed),
    lambda truth, seed: PartlyRightDrafter(truth, VOCABULARY, seed, chains=True),
    lambda truth, seed: PromptLookupDrafter(),
    lambda truth, seed: LookaheadDrafter(3, 3, 3),
    lambda truth, seed: NoDraft(),
)


@cache
def decoder_of(name: str) -> Decoder:
    return Decoder(ARCHITECTURES[name].model(), endless_tokenizer())


@dataclass(frozen=True)
class Make:
    """Make a generator on one of the caches or sessions, or on none (place None)."""

    kind: str
    place: int | None
    prompt: tuple[int, ...]
    max_tokens: int
    drafter: int

    @property
    def resource(self) -> tuple[str, int | None]:
        return self.kind, self.place


@dataclass(frozen=True)
class Do:
    """Operate on one of the open generators; the newest is number 0."""

    what: str
    which: int
    count: int = 0


@dataclass(frozen=True)
class Look:
    """Read a cache's content, or what mlx-lm generates from it."""

    what: str
    place: int


KINDS = (
    *["make"] * 3,
    *["advance"] * 6,
    *["finish", "close", "drop", "collect", "logprobs", "offset", "content", "continue"],
)
PLACES = (*[("cache", 0)] * 3, ("cache", 1), *[("session", 0)] * 2, ("alone", None))


def step_of(
    thread: int,
    kind: str,
    place: tuple[str, int | None],
    prompt: tuple[int, ...],
    number: int,
    which: int,
) -> tuple[int, Make | Do | Look]:
    if kind == "make":
        return thread, Make(*place, prompt, 2 * number, number % len(DRAFTERS))
    if kind in ("offset", "content", "continue"):
        return thread, Look(kind, which % CACHES)
    return thread, Do(kind, which, number)


steps = st.builds(
    step_of,
    st.integers(0, THREADS - 1),
    st.sampled_from(KINDS),
    st.sampled_from(PLACES),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12).map(tuple),
    st.integers(1, 6),
    st.integers(0, 3),
)
schedules = st.lists(steps, min_size=10, max_size=40)


@dataclass
class Made:
    """A generator and its results."""

    make: Make
    generator: Generator[Any, None, None] | None
    taken: list[int] = field(default_factory=list)
    last: Any = None
    state: str = "new"  # then started, ended or kept out (another uses its cache or session)


class Side:
    """Runs a schedule's steps. mlx-lm's side and ours make generators differently."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.caches = [make_prompt_cache(model) for _ in range(CACHES)]
        self.made: list[Made] = []

    def run(self, made: Made, count: int | None) -> list[int]:
        assert made.generator is not None
        new = []
        for response in islice(made.generator, count):
            made.last = response
            new.append(response.token)
        made.taken += new
        return new

    def do(self, made: Made, step: Do) -> Any:
        if step.what == "advance":
            return self.run(made, step.count)
        if step.what == "finish":
            return self.run(made, None)
        if step.what == "logprobs":
            return None if made.last is None else np.array(made.last.logprobs)
        generator, made.generator = made.generator, None
        assert generator is not None
        if step.what == "close":
            generator.close()
        elif step.what == "collect":
            cycle: list[Any] = [generator]
            cycle.append(cycle)
            del generator, cycle
            gc.collect()
        return None

    def look(self, step: Look) -> Any:
        caches = self.caches[step.place]
        if step.what == "offset":
            return [getattr(cache, "offset", None) for cache in caches]
        if step.what == "continue":
            generated = generate_step(mx.array([1, 2]), self.model, prompt_cache=caches)
            continued = [token for token, _ in islice(generated, 2)]
            mx.eval([cache.state for cache in caches])  # mlx-lm leaves some of them lazy
            return continued
        return [
            np.array(cache.keys[..., : cache.offset, :])
            for cache in caches
            if getattr(cache, "keys", None) is not None and isinstance(cache, KVCache)
        ]


Expected = list[tuple[int, Any, Made | None, Any]]
"""Thread, step, mlx-lm's generator and the step's result, for each step that can run."""


def by_mlx_lm(side: Side, tokenizer: TokenizerWrapper, schedule: list[tuple[int, Any]]) -> Expected:
    expected: Expected = []
    running: dict[Any, Made] = {}  # the last generator started on a cache or session
    contexts: dict[Any, list[int]] = defaultdict(list)

    def find_its_place(made: Made) -> None:
        """Before an advance, check whether another generation uses the cache or session."""
        place = made.make.resource
        other = running.get(place)
        if made.make.place is None or other is made:
            return
        if other and other.state == "started":
            made.state = "kept out"
        else:
            running[place] = made

    for thread, step in schedule:
        if isinstance(step, Make):
            prompt = step.prompt
            if step.kind == "session":  # the whole conversation
                prompt = (*contexts[step.resource], *prompt)
                step = Make(step.kind, step.place, prompt, step.max_tokens, step.drafter)
            lent = side.caches[step.place or 0] if step.kind == "cache" else None
            made = Made(
                step,
                stream_generate(
                    side.model, tokenizer, list(prompt), step.max_tokens, prompt_cache=lent
                ),
            )
            side.made.append(made)
            expected.append((thread, step, made, None))
        elif isinstance(step, Look):
            other = running.get(("cache", step.place))
            lent = other is not None and other.state == "started"
            expected.append((thread, step, None, "kept out" if lent else side.look(step)))
        elif opened := [made for made in side.made if made.generator is not None]:
            made = opened[-1 - step.which % len(opened)]
            advances = step.what in ("advance", "finish")
            if advances and made.state != "ended":
                find_its_place(made)
            if advances and made.state == "kept out":
                expected.append((thread, step, made, made.state))
                made.generator, made.state = None, "ended"
                continue
            result = side.do(made, step)
            if made.generator is None or len(made.taken) == made.make.max_tokens:
                made.state = "ended"
            elif made.taken:
                made.state = "started"
            if made.make.kind == "session":
                contexts[made.make.resource] = [*made.make.prompt, *made.taken]
            expected.append((thread, step, made, result))
    return expected


class Ours(Side):
    """The side of mlxspec, whose drafters know mlx-lm's output."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.model)
        self.decoder = decoder
        self.sessions = [Session() for _ in range(SESSIONS)]

    def make(self, make: Make, theirs: Made) -> Made:
        options: dict[str, Any] = {}
        if make.kind == "cache":
            options["prompt_cache"] = self.caches[make.place or 0]
        elif make.kind == "session":
            options["session"] = self.sessions[make.place or 0]
        drafter = DRAFTERS[make.drafter](theirs.taken, len(make.prompt))
        return Made(
            make,
            drafted(
                self.decoder, list(make.prompt), drafter, max_tokens=make.max_tokens, **options
            ),
        )

    def take(
        self, step: Any, made: Made | None, expected: Any, before: Future[None] | None
    ) -> None:
        """Run a step after the previous one on the same cache or session."""
        if before is not None:
            before.result()
        if isinstance(step, Look):
            if isinstance(expected, str):
                with pytest.raises(FileError, match="in use by another generation"):
                    self.look(step)
            else:
                same(self.look(step), expected)
            return
        assert made is not None
        if isinstance(expected, str):
            with pytest.raises((OptionError, FileError)):
                self.do(made, step)
            made.generator = None
        else:
            same(self.do(made, step), expected)


def same(actual: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    elif isinstance(expected, list) and expected and isinstance(expected[0], np.ndarray):
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            same(ours, theirs)
    else:
        assert actual == expected


@pytest.mark.parametrize("at_once", [False, True], ids=["one after another", "at once"])
@pytest.mark.parametrize("name", ["llama3", "gemma3", "deepseek_v32", "qwen3_next"])
@settings(max_examples=examples(4, long=125))
@given(schedule=schedules)
def test_each_step_of_a_schedule_gives_what_mlx_lm_gives(
    name: str, at_once: bool, schedule: list[tuple[int, Any]]
) -> None:
    decoder = decoder_of(name)
    expected = by_mlx_lm(Side(decoder.model), decoder.tokenizer, schedule)
    ours = Ours(decoder)
    own: dict[int, Made] = {}
    # Steps on one cache, session or separate generator keep their order; others overlap.
    last: dict[Any, Future[None]] = {}
    with ThreadPools() as threads:
        for thread, step, theirs, result in expected:
            made = None
            if isinstance(step, Make):
                assert theirs is not None
                own[id(theirs)] = ours.make(step, theirs)
                continue
            if theirs is not None:
                made = own[id(theirs)]
            resource = made.make.resource if made else ("cache", step.place)
            if resource == ("alone", None):
                resource = ("alone", id(theirs))

            before = last.get(resource)
            last[resource] = threads.run(thread, ours.take, step, made, result, before)
            if not at_once:
                last[resource].result()
        for future in last.values():
            future.result()
    own.clear()


class ThreadPools:
    """Threads that each run their tasks in order."""

    def __enter__(self) -> ThreadPools:
        self._pools = [ThreadPoolExecutor(1) for _ in range(THREADS)]
        return self

    def run(self, thread: int, function: Callable[..., None], *args: Any) -> Future[None]:
        return self._pools[thread].submit(function, *args)

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.shutdown()
