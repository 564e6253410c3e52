"""With a trained head the output equals plain decoding, however good its drafts are."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxspec
from mlxspec.corpus.answer_index import AnswerIndex
from mlxspec.drafting.heads import HeadExperience
from mlxspec.engine.heads import HeadDrafts, TrainedHead
from mlxspec.engine.sampling import SamplingParams
from mlxspec.generation.drafter_factories import Auto
from mlxspec.generation.scheduler import Scheduler
from mlxspec.server.prefix_cache import PrefixCache
from tests.generation.test_session import next_prompt, turns
from tests.support import heads
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import FLAT, demo, endless_tokenizer, given_costs
from tests.support.examples import LONG, examples
from tests.support.harness import assert_same_output
from tests.support.llamas import repetitive_llama
from tests.support.schedulers import submit
from tests.support.threads import each_in_a_new_thread

TOKENS = 40 if LONG else 16
TEMPERATURES = (0.0, 0.7, 1.3)
RIGHT = {"random": None, "trained": 0.8, "lying": 0.0}
"""The chance that a draft token is right if those before are; None keeps the head's own drafts."""


# By kind, the target and the function that makes a random head for it.
KINDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "EAGLE-3": ("llama3", heads.eagle3),
    "MTP": ("qwen3_5", heads.qwen_mtp),
    "MTP of experts": ("qwen3_next", heads.qwen_mtp),
    "Gemma's assistant": ("gemma4", heads.gemma4_assistant),
    "DFlash": ("qwen3", heads.dflash),
    "DSpark": ("qwen3", heads.dspark),
}


@cache
def target(kind: str) -> nn.Module:
    return ARCHITECTURES[KINDS[kind][0]].model()


class Instructed(TrainedHead):
    """A head that runs normally but drafts given tokens.

    Args:
        kind: the kind of head.
        right: as in ``RIGHT``.
        model: the target; by default the kind's.
    """

    def __init__(self, kind: str, right: float | None, model: nn.Module | None = None) -> None:
        model = model or target(kind)
        super().__init__(KINDS[kind][1](model)[1], model)
        self.right, self.random = right, random.Random(4)
        self.contexts: list[list[int]] = []
        self.drafted = 0
        # So that it runs even if it is rarely right.
        self.experience = HeadExperience(1e-6, 1e-6, self.head.most)

    def draft(
        self, members: Sequence[HeadDrafts], depth: int
    ) -> list[tuple[list[int], list[float]]]:
        drafts = super().draft(members, depth)
        self.drafted += len(drafts)
        if self.right is None:
            return [(tokens, [0.9] * depth) for tokens, _ in drafts]
        return [(self.dictated(member, depth), [0.9] * depth) for member in members]

    def dictated(self, member: HeadDrafts, depth: int) -> list[int]:
        start = member.target.length + 1
        known = (own for own in self.contexts if own[start - 1 : start] == [member.last])
        true = next(known, [])[start : start + depth]
        true += [0] * (depth - len(true))
        assert self.right is not None
        return [t if self.random.random() < self.right else (t + 1) % 64 for t in true]


@pytest.fixture(
    params=[pytest.param(kind, marks=[pytest.mark.slow] * bool(n)) for n, kind in enumerate(KINDS)]
)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


def prompts(count: int, length: int = 12) -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(64) for _ in range(length + n)] for n in range(count)]


def decoder_of(trained: TrainedHead) -> mlxspec.Decoder:
    decoder = mlxspec.Decoder(trained.new_model(), endless_tokenizer(), Auto())
    decoder.costs = given_costs(FLAT)
    return decoder


def assert_same(kind: str, right: float | None, temp: float, count: int, texts: bool) -> None:
    trained = Instructed(kind, right)
    plain = mlxspec.Decoder(target(kind), endless_tokenizer())
    options = {"temp": temp, "seed": 7}
    own = [prompt * 3 if texts else prompt for prompt in prompts(count)]
    expected = [[r.token for r in plain.stream(prompt, TOKENS, **options)] for prompt in own]
    trained.contexts = [a + b for a, b in zip(own, expected, strict=True)]
    scheduler = Scheduler(decoder_of(trained), stall=float("inf"))
    found: list[list[mlxspec.GenerationResponse]] = [[] for _ in own]
    for prompt, responses in zip(own, found, strict=True):
        submit(scheduler, prompt, responses.append, TOKENS, **options)
    scheduler.run()
    for prompt, before, responses in zip(own, expected, found, strict=True):
        tokens = [response.token for response in responses]
        params = SamplingParams(temp=temp, seed=7)
        assert_same_output(target(kind), prompt, before, tokens, params)
    assert trained.drafted > 0
    if right:
        accepted = sum(responses[-1].stats.accepted for responses in found)
        assert accepted > TOKENS * count / 4


@pytest.mark.parametrize(
    ("right", "temp"),
    product(RIGHT, TEMPERATURES) if LONG else zip(RIGHT, TEMPERATURES, strict=True),
)
def test_one_sequence(kind: str, right: str, temp: float) -> None:
    assert_same(kind, RIGHT[right], temp, 1, texts=False)


@pytest.mark.nightly(keep=6)
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 8] if LONG else [3])
@pytest.mark.parametrize("right", RIGHT)
def test_joint_steps_with_text(kind: str, right: str, count: int) -> None:
    for temp in TEMPERATURES if LONG else [0.7]:
        assert_same(kind, RIGHT[right], temp, count, texts=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(500 if LONG else 8))
def test_schedules(number: int) -> None:
    """Run requests that join, pause and leave at any time, each with its own sampling."""
    pick = random.Random(number)
    kind = pick.choice([*KINDS])
    trained = Instructed(kind, pick.choice([*RIGHT.values()]))
    plain = mlxspec.Decoder(target(kind), endless_tokenizer())
    scheduler = Scheduler(decoder_of(trained), stall=float("inf"))
    runs = []
    for _ in range(pick.randint(1, 8)):
        prompt = [pick.randrange(64) for _ in range(pick.randint(1, 30))] * pick.randint(1, 3)
        options = {"temp": pick.choice(TEMPERATURES), "seed": pick.randrange(99)}
        options |= pick.choice([{}, {"top_p": 0.8}, {"top_k": 9}, {"repetition_penalty": 1.2}])
        count = pick.randint(1, TOKENS)
        expected = [r.token for r in plain.stream(prompt, count, **options)]
        trained.contexts.append(prompt + expected)
        runs.append((prompt, options, expected, count, list[mlxspec.GenerationResponse]()))
    waiting, running = list(runs), []
    while waiting or running:
        if waiting and pick.random() < 0.4:
            prompt, options, _, count, responses = waiting.pop()
            running.append(submit(scheduler, prompt, responses.append, count, **options))
        for request in running:
            if pick.random() < 0.02:
                scheduler.cancel(request)
        if not scheduler.turn():
            running = [request for request in running if not request.done]
    for prompt, options, expected, _, responses in runs:
        tokens = [response.token for response in responses]
        params = SamplingParams(**options)
        assert_same_output(target(kind), prompt, expected[: len(tokens)], tokens, params)


# --- conversations ---


@cache
def plain_decoder(kind: str) -> mlxspec.Decoder:
    return mlxspec.Decoder(target(kind), endless_tokenizer())


class Conversation:
    """Turns of a decoder with a mostly right head, each compared with plain decoding.

    Attributes:
        context: the last turn's tokens, which end with ``answer`` tokens of its answer.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.trained = kind, Instructed(kind, 0.8)
        self.decoder = decoder_of(self.trained)
        self.context: list[int] = []
        self.answer = 0

    def turn(self, prompt: list[int], n: int, taken: int | None = None, **options: Any) -> Any:
        """Take some tokens of an answer; return the last response."""
        sampling: dict[str, Any] = {"temp": 0.7, "seed": 7}
        plain = plain_decoder(self.kind).stream(prompt, n, **sampling)
        expected = [response.token for response in plain]
        self.trained.contexts = [prompt + expected]
        stream = self.decoder.stream(prompt, n, **sampling, **options)
        responses = list(islice(stream, taken))
        stream.close()
        found = [response.token for response in responses]
        before = expected[: len(found)]
        model, params = plain_decoder(self.kind).model, SamplingParams(temp=0.7, seed=7)
        assert_same_output(model, prompt, before, found, params)
        self.context, self.answer = prompt + found, len(found)
        return responses[-1]


@settings(max_examples=examples(2))
@given(st.lists(st.tuples(turns, st.sampled_from(["", "fork", "file"])), min_size=4, max_size=7))
def check_conversation(kind: str, path: Path, happened: Sequence[Any]) -> None:
    talk, session = Conversation(kind), mlxspec.Session()
    for (change, share, message, n, taken), after in happened:
        prompt = next_prompt(talk.context, talk.answer, change, share, message)
        talk.turn(prompt, 3 * n, taken, session=session)
        assert session.tokens == talk.context[: len(session.tokens)]
        reach = session.reusable_prefix(round(share * session.length))
        if after == "fork" and reach:
            session = session.fork(reach)
        if after == "file":
            session.save(path)
            session = mlxspec.Session.load(path)
    assert talk.trained.drafted > 0


@pytest.mark.slow
def test_whatever_happens_to_a_conversation(kind: str, tmp_path: Path) -> None:
    check_conversation(kind, tmp_path / "c.safetensors")


@pytest.mark.slow
def test_a_head_goes_on_in_another_thread(kind: str) -> None:
    talk, session = Conversation(kind), mlxspec.Session()
    (first,) = prompts(1, 40)
    for prompt, n in ((first, 1), (first, 3), (first[:9], 5), ([*first, 3], 9)):
        thread = threading.Thread(target=talk.turn, args=(prompt, n), kwargs={"session": session})
        thread.start()
        thread.join()
        assert talk.context[: len(prompt)] == prompt
        assert talk.answer == n
    assert talk.trained.drafted > 0


@pytest.mark.slow
def test_each_step_may_run_in_another_thread(kind: str) -> None:
    trained, (prompt,) = Instructed(kind, 0.5), prompts(1, 40)
    expected = [r.token for r in plain_decoder(kind).stream(prompt, TOKENS)]
    trained.contexts = [prompt + expected]
    stream = decoder_of(trained).stream(prompt, TOKENS)
    assert [response.token for response in each_in_a_new_thread(stream)] == expected
    assert trained.drafted > 0


@pytest.mark.slow
def test_a_servers_prefixes_have_their_heads(kind: str) -> None:
    talk = Conversation(kind)
    system = prompts(1, 40)[0]
    prefixes = PrefixCache(talk.decoder.model)
    for turn in range(5):
        context = system if turn % 2 else talk.context or system
        prompt = [*context, turn, 5, turn]
        session, drafted = prefixes.lend(prompt), talk.trained.drafted
        response = talk.turn(prompt, 12, session=session)
        assert response.reused_tokens >= len(context) - 17 or not turn
        assert talk.trained.drafted > drafted
        prefixes.give_back(session)
    assert prefixes.forks


# --- other cases ---


ALSO: dict[str, tuple[dict[str, Any], Callable[[list[int]], Auto]]] = {
    "a constraint": (
        {"constraint": mlxspec.Constraint.regex("[^aeiou]*")},
        lambda expected: Auto(),
    ),
    "processors": (
        {"logit_bias": {775: -3.0}, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        lambda expected: Auto(),
    ),
    "a prediction": ({}, lambda expected: Auto(prediction=[*expected[:9], 8, *expected[20:]])),
    "a memory": ({}, lambda expected: Auto(memory=AnswerIndex(1000))),
}


@pytest.mark.slow
@pytest.mark.parametrize("also", ALSO)
def test_a_head_beside(also: str) -> None:
    options, drafting = ALSO[also]
    trained = Instructed("EAGLE-3", 0.8, repetitive_llama())
    plain = mlxspec.Decoder(repetitive_llama(), demo().tokenizer)
    for temp in (0.0, 0.9):
        options |= {"temp": temp, "seed": 5}
        expected = [r.token for r in plain.stream("Name a colour:", TOKENS, **options)]
        prompt = plain.tokenizer.encode("Name a colour:")
        trained.contexts, trained.drafted = [prompt + expected], 0
        decoder = mlxspec.Decoder(trained.new_model(), plain.tokenizer, drafting(expected))
        decoder.costs = given_costs(FLAT)
        for _ in range(2):
            responses = list(decoder.stream(prompt, TOKENS, **options))
            assert [response.token for response in responses] == expected
        assert trained.drafted > 0
