"""Generations consumed by asyncio tasks."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

import mlxspec
from mlxspec import AutoDecoder, Decoder, DraftTree, PromptLookupDecoder, Session
from mlxspec.drafting.drafter import NoDraft
from mlxspec.generation import asynchronous, thread_end
from mlxspec.generation.request import Request, State
from mlxspec.generation.scheduler import Scheduler
from tests.support.brake import wait_until
from tests.support.demo import FLAT, demo, given_costs, stand_in_decoder
from tests.support.drop_in import REPEAT

PROMPTS = [REPEAT, "The history of the", "one two three four one two three four one two"]


def new_decoder(kind: type[Decoder] = AutoDecoder, **options: object) -> Decoder:
    decoder = stand_in_decoder(kind, **options)
    if isinstance(decoder, AutoDecoder):
        decoder.costs = given_costs(FLAT)
    return decoder


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return new_decoder()


def written(decoder: Decoder, prompt: Any, count: int = 24, **options: Any) -> list[int]:
    return [response.token for response in decoder.stream(prompt, count, **options)]


async def collected(decoder: Decoder, prompt: Any, count: int = 24, **options: Any) -> list[int]:
    return [response.token async for response in decoder.astream(prompt, count, **options)]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("options", [{}, {"temp": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_what_comes_is_what_stream_gives(decoder: Decoder, prompt: str, options: dict) -> None:
    assert asyncio.run(collected(decoder, prompt, **options)) == written(decoder, prompt, **options)


def test_the_responses_are_those_of_stream(decoder: Decoder) -> None:
    async def main() -> list[mlxspec.GenerationResponse]:
        return [response async for response in decoder.astream(REPEAT, 40)]

    responses, others = asyncio.run(main()), list(decoder.stream(REPEAT, 40))
    assert "".join(r.text for r in responses) == "".join(r.text for r in others)
    assert [r.finish_reason for r in responses] == [r.finish_reason for r in others]
    assert any(response.from_draft for response in responses)


def test_several_at_once_share_steps_and_write_what_each_writes_alone(decoder: Decoder) -> None:
    together: list[int] = []

    class Watching(asynchronous.Scheduler):
        def _step(self, requests: list[Any], hurried: bool) -> Any:
            together.append(len(requests))
            return super()._step(requests, hurried)

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(collected(decoder, prompt) for prompt in PROMPTS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asynchronous, "Scheduler", Watching)
        assert asyncio.run(main()) == [written(decoder, prompt) for prompt in PROMPTS]
    assert max(together) == len(PROMPTS)


def test_a_decoder_serves_several_event_loops(decoder: Decoder) -> None:
    expected = written(decoder, REPEAT)
    found: list[list[int]] = []

    def run() -> None:
        found.append(asyncio.run(collected(decoder, REPEAT)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 2


@pytest.mark.slow
def test_a_decoders_way_to_draft_can_be_chosen() -> None:
    decoder = new_decoder(PromptLookupDecoder)
    assert isinstance(decoder, PromptLookupDecoder)

    async def drafted(n_draft: int) -> int:
        *_, last = [r async for r in decoder.astream(REPEAT, 24, n_draft=n_draft)]
        return last.stats.drafted

    assert asyncio.run(drafted(0)) == 0
    assert asyncio.run(drafted(5)) > 0


def test_the_event_loop_goes_on_meanwhile(decoder: Decoder) -> None:
    """However long a step takes: here each step waits for another task of the loop."""
    ticks, at_steps = 0, []

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.0005)

    def slow(tokens: mx.array, logits: mx.array) -> mx.array:
        before, patience = ticks, time.monotonic() + 10
        while ticks < before + 3 and time.monotonic() < patience:
            time.sleep(0.001)
        at_steps.append(ticks)
        return logits

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        await collected(decoder, REPEAT, 5, logits_processors=[slow])
        ticking.cancel()

    asyncio.run(main())
    assert all(later >= before + 3 for before, later in pairwise(at_steps))
    assert len(at_steps) >= 5


def running(decoder: Decoder) -> list[Request]:
    """Return the decoder's unfinished requests."""
    schedulers = [one for one in gc.get_objects() if type(one) is Scheduler]
    return [one for each in schedulers for one in each._running if one.decoder is decoder]


@pytest.mark.parametrize("how", ["aclose", "aclosing", "cancel"])
def test_one_that_is_left_early_ends_and_gives_its_session_back(decoder: Decoder, how: str) -> None:
    prompt = decoder.tokenizer.encode(REPEAT)
    session = Session()

    async def take(taken: list[int]) -> None:
        stream = decoder.astream(prompt, 2000, session=session)
        async with aclosing(stream):
            async for response in stream:
                taken.append(response.token)
                if how == "aclosing" and len(taken) == 5:
                    return
                if how == "aclose" and len(taken) == 5:
                    await stream.aclose()
                await asyncio.sleep(0)

    async def main() -> list[int]:
        taken: list[int] = []
        task = asyncio.create_task(take(taken))
        if how == "cancel":
            while len(taken) < 5:
                await asyncio.sleep(0.001)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not running(decoder)
        return taken

    taken = asyncio.run(main())
    assert 5 <= len(taken) < 2000
    context = prompt + taken
    assert session.tokens[: len(context) - 1] == context[:-1]
    # The caches are right: the next turn equals that of a new session.
    turn = [*context, *prompt[1:4]]
    *_, last = decoder.stream(turn, 8, session=session)
    assert last.reused_tokens >= len(context) - 1
    assert session.tokens[: len(turn)] == turn
    assert written(decoder, turn, 8, session=session) == written(decoder, turn, 8)


def test_one_that_a_break_leaves_ends_soon(decoder: Decoder) -> None:
    async def main() -> None:
        async for _ in decoder.astream(REPEAT, 2000):
            break
        for _ in range(2000):
            if not running(decoder):
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it goes on")

    asyncio.run(main())


@pytest.mark.parametrize("count", range(1, 9))
def test_one_can_be_left_at_any_token(decoder: Decoder, count: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), aclosing(decoder.astream(REPEAT, 8)) as stream:
            for _ in range(count):
                await anext(stream)

    asyncio.run(main())
    assert not running(decoder)


def test_the_end_of_one_is_not_the_end_of_another(decoder: Decoder) -> None:
    async def main() -> list[int]:
        other = asyncio.create_task(collected(decoder, PROMPTS[1], 60))
        async with aclosing(decoder.astream(REPEAT, 2000)) as stream:
            await anext(stream)
        return await other

    assert asyncio.run(main()) == written(decoder, PROMPTS[1], 60)


def test_one_whose_event_loop_is_closed_ends_before_the_next_begins(decoder: Decoder) -> None:
    loop, session = asyncio.new_event_loop(), mlxspec.Session()
    responses = decoder.astream(REPEAT, 2000, session=session)
    loop.run_until_complete(anext(responses))
    (left,) = running(decoder)
    wait_until(lambda: left.state is State.PAUSED)
    loop.close()  # unlike asyncio.run, without closing the generator
    next_one = asyncio.run(collected(decoder, REPEAT, session=session))
    assert next_one == written(decoder, REPEAT)
    assert left.done
    assert not asynchronous._streams


@pytest.mark.slow
def test_a_generation_that_is_not_read_pauses(decoder: Decoder) -> None:
    async def main() -> tuple[int, list[int]]:
        stream = decoder.astream(REPEAT, 2000)
        taken = [(await anext(stream)).token]
        (only,) = running(decoder)
        while only.state is not State.PAUSED:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        waiting = only.unread
        async for response in stream:  # and it continues
            taken.append(response.token)
            if len(taken) == 200:
                break
        await stream.aclose()
        return waiting, taken

    waiting, taken = asyncio.run(main())
    assert asynchronous._AHEAD <= waiting < 2 * asynchronous._AHEAD  # with the last step's tokens
    assert taken == written(decoder, REPEAT, 200)


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("", {}, mlxspec.PromptError),
        ([{"role": "user"}], {}, mlxspec.PromptError),
        ("text", {"max_tokens": 0}, mlxspec.OptionError),
        ("text", {"temp": -1.0}, mlxspec.OptionError),
        ("text", {"tmep": 1.0}, TypeError),
        ("text", {"prompt_cache": []}, mlxspec.OptionError),
    ],
    ids=str,
)
def test_wrong_input_is_refused_with_the_first_response(
    decoder: Decoder, prompt: Any, options: dict, error: type[Exception]
) -> None:
    async def main() -> None:
        await anext(decoder.astream(prompt, **options))

    with pytest.raises(error):
        asyncio.run(main())
    assert not running(decoder)
    assert asyncio.run(collected(decoder, REPEAT, 3)) == written(decoder, REPEAT, 3)


class Failing(mlxspec.Drafter):
    """A drafter that fails in the third step."""

    def __init__(self) -> None:
        self.steps = 0

    def propose(self, max_depth: int) -> DraftTree:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("no more ideas")
        return DraftTree.chain(self.last, [])

    def begin(self, prompt: Sequence[int]) -> None:
        self.last = prompt[-1]

    def observe(self, step: mlxspec.VerifiedStep) -> None:
        self.last = step.tokens[-1]


@pytest.mark.slow
def test_what_a_generation_raises_is_raised_where_it_is_read() -> None:
    drafters = iter([Failing(), NoDraft()])
    decoder = new_decoder(Decoder, drafter=lambda: next(drafters))
    taken: list[int] = []

    async def fail() -> None:
        async for response in decoder.astream(REPEAT):
            taken.append(response.token)

    async def main() -> list[Any]:
        both = fail(), collected(decoder, PROMPTS[1])
        return await asyncio.gather(*both, return_exceptions=True)

    error, other = asyncio.run(main())
    assert isinstance(error, RuntimeError)
    assert str(error) == "no more ideas"
    plain = new_decoder(Decoder)
    assert taken == written(plain, REPEAT)[:2]
    assert other == written(plain, PROMPTS[1])


def test_a_fault_of_the_model_reaches_all_and_ends_none_of_the_later_ones(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, hurried: bool = False) -> bool:
        raise MemoryError("full")

    async def main() -> list[Any]:
        both = (collected(decoder, prompt) for prompt in PROMPTS[:2])
        return await asyncio.gather(*both, return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(asynchronous.Scheduler, "turn", fail)
        assert [type(error) for error in asyncio.run(main())] == [MemoryError] * 2
    assert asyncio.run(collected(decoder, REPEAT)) == written(decoder, REPEAT)


def test_progress_is_reported_in_the_event_loop(decoder: Decoder) -> None:
    progress: list[tuple[int, int]] = []
    threads = set()

    def report(done: int, total: int) -> None:
        progress.append((done, total))
        threads.add(threading.current_thread())

    prompt = decoder.tokenizer.encode(REPEAT) * 3
    asyncio.run(collected(decoder, prompt, 2, on_progress=report, prefill_step_size=16))
    total = len(prompt) - 1
    assert progress[0] == (0, total)
    assert progress[-1] == (total, total)
    assert len(progress) > 2
    assert progress == sorted(progress)
    assert threads == {threading.current_thread()}


@pytest.mark.slow
def test_the_process_waits_for_a_thread_that_ran_commands_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_end, "_other_threads", False)
    thread = asynchronous.SchedulerThread("test")
    thread.call(mx.eval).result(10)
    assert thread_end._other_threads
    thread.end(RuntimeError("the end"))
    thread.join()


def test_the_thread_keeps_no_decoder() -> None:
    decoder = new_decoder()
    asyncio.run(collected(decoder, REPEAT, 3))
    gone = weakref.ref(decoder)
    del decoder
    end = time.monotonic() + 10
    while gone() and time.monotonic() < end:
        gc.collect()  # at first the thread may still hold a reference
    assert gone() is None


PROGRAM = """
import asyncio, sys
import mlxspec
from mlxspec.generation import thread_end

thread_end._PATIENCE = 3600  # so that a thread that only waits for commands is not waited for

async def main():
    decoder = mlxspec.PromptLookupDecoder("demo")
    stream = decoder.astream("one two three one two", 2000)
    await anext(stream)
    if sys.argv[1] == "interrupted":
        raise KeyboardInterrupt
    return stream

try:
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(main()) if sys.argv[1] == "left" else asyncio.run(main())
except KeyboardInterrupt:
    pass
"""


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["ended", "interrupted", "left"])
def test_a_process_ends_well_in_the_middle_of_a_generation(how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
def test_messages_and_the_bundled_model() -> None:
    decoder = AutoDecoder(demo().model, demo().tokenizer)
    decoder.costs = given_costs(FLAT)
    messages = [{"role": "user", "content": 'Repeat the following phrase 2 times: "A day.".'}]
    assert asyncio.run(collected(decoder, messages)) == written(decoder, messages)
