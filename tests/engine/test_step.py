"""The step: the cache after it, the end of the output, and interrupts."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlxspec
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.joint import Joint
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.sampling import Chooser, SamplingParams
from mlxspec.engine.step import Sequence, joint_step
from mlxspec.engine.target import Target
from tests.support.drafters import HostileDrafter, Oracle
from tests.support.harness import decode, joint_mode, new_target, plain, run

BOS = 1
PROMPT = [BOS, 300, 301, 302]


def assert_holds_exactly(target: Target, context: list[int]) -> None:
    """Assert that the cache equals a fresh prefill of the context without its last token."""
    fresh = make_prompt_cache(target.model)
    target.model(mx.array(context[:-1])[None], cache=fresh)
    assert target.length == len(context) - 1
    for held, expected in zip(target.cache, fresh, strict=True):
        assert held.offset == expected.offset == len(context) - 1
        for ours, theirs in zip(held.keys_and_values(), expected.keys_and_values(), strict=True):
            assert mx.max(mx.abs(ours - theirs)).item() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_after_every_step_the_cache_holds_the_context_without_its_last_token(
    model: nn.Module, seed: int
) -> None:
    truth = plain(model, PROMPT, max_tokens=40)
    drafter = HostileDrafter(truth, 512, BOS, seed)
    target = new_target(model)
    context, moved = PROMPT.copy(), 0
    for step in decode(
        target, PROMPT, drafter, Chooser(SamplingParams()), max_tokens=40, ends=lambda _: False
    ):
        context += step.tokens
        accepted = step.accepted
        moved += accepted != tuple(range(1, len(accepted) + 1))
        assert_holds_exactly(target, context)
    assert moved > 0  # some accepted rows had to be compacted


def test_the_time_of_a_drafter_is_separate_where_it_delays_the_forward(
    model: nn.Module,
) -> None:
    class Slow(PromptLookupDrafter):
        def propose(self, max_depth: int) -> DraftTree:
            time.sleep(0.01)
            return super().propose(max_depth)

        def observe(self, step: VerifiedStep) -> None:
            time.sleep(0.01)
            super().observe(step)

    steps = decode(
        *(new_target(model), PROMPT, Slow(), Chooser(SamplingParams())),
        max_tokens=4,
        ends=lambda _: False,
    )
    first, *others = steps
    on_gpu = mx.default_device().type == mx.gpu
    assert first.blocking_seconds >= (0 if on_gpu else 0.01)
    for step in others:
        assert (0 if on_gpu else 0.02) <= step.blocking_seconds < step.seconds


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 31])
def test_max_tokens_is_never_overshot(model: nn.Module, max_tokens: int) -> None:
    truth = plain(model, PROMPT, max_tokens=40)
    for drafter in (NoDraft(), PromptLookupDrafter(50), HostileDrafter(truth, 512, BOS, 3)):
        outcome = run(model, PROMPT, drafter, max_tokens=max_tokens)
        assert outcome.tokens == truth[:max_tokens]
        assert_holds_exactly(outcome.target, PROMPT + outcome.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [0, 1, 5, 19])
@pytest.mark.parametrize("drafter_class", [Oracle, lambda truth: NoDraft()])
def test_a_stop_token_inside_an_accepted_draft_ends_the_output_there(
    model: nn.Module, stop_at: int, drafter_class: type
) -> None:
    truth = plain(model, PROMPT, max_tokens=40)
    stop_at = next(i for i in range(stop_at, 40) if truth[i] not in truth[:i])
    outcome = run(model, PROMPT, drafter_class(truth), max_tokens=40, stop_tokens={truth[stop_at]})
    assert outcome.tokens == truth[: stop_at + 1]
    assert_holds_exactly(outcome.target, PROMPT + outcome.tokens)


def test_an_accepted_draft_of_n_tokens_gives_n_plus_one(model: nn.Module) -> None:
    truth = plain(model, PROMPT, max_tokens=40)
    outcome = run(model, PROMPT, Oracle(truth), max_tokens=40)
    assert outcome.tokens == truth
    assert outcome.steps == 1
    assert outcome.accepted == 39


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [NoDraft(), PromptLookupDrafter()])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_closed_generation_leaves_the_cache_usable(
    model: nn.Module, drafter: Drafter, steps: int
) -> None:
    truth = plain(model, PROMPT, max_tokens=30)
    target = new_target(model)
    chooser = Chooser(SamplingParams())
    generation = decode(target, PROMPT, drafter, chooser, max_tokens=30, ends=lambda _: False)
    tokens = [t for step in itertools.islice(generation, steps) for t in step.tokens]
    generation.close()
    if steps:
        assert_holds_exactly(target, PROMPT + tokens)
    assert run(model, PROMPT, drafter, max_tokens=30).tokens == truth


@pytest.mark.parametrize("drafter", [NoDraft(), Oracle([])])
def test_an_interrupt_inside_a_forward_leaves_every_layer_at_the_same_length(
    model: nn.Module, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = new_target(model)
    chooser = Chooser(SamplingParams())
    generation = decode(target, PROMPT, drafter, chooser, max_tokens=60, ends=lambda _: False)
    tokens = [t for step in itertools.islice(generation, 3) for t in step.tokens]
    attention = type(model.layers[-1].self_attn)
    ordinary, interrupted = attention.__call__, model.layers[-1].self_attn

    def interrupt(self: nn.Module, *args: object, **kwargs: object) -> mx.array:
        if self is interrupted:
            raise KeyboardInterrupt
        return ordinary(self, *args, **kwargs)

    monkeypatch.setattr(attention, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(generation)
    monkeypatch.undo()
    assert {cache.offset for cache in target.cache} == {len(PROMPT) + len(tokens) - 1}
    assert_holds_exactly(target, PROMPT + tokens)


def test_an_interrupt_during_the_prefill_ends_the_drafter_and_keeps_whole_chunks(
    model: nn.Module,
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    drafter, target = Oracle([]), new_target(model)
    chooser = Chooser(SamplingParams())
    with pytest.raises(KeyboardInterrupt):
        next(
            decode(
                target,
                PROMPT,
                drafter,
                chooser,
                max_tokens=9,
                ends=lambda _: False,
                on_progress=interrupt,
            )
        )
    assert drafter.ended
    assert {cache.offset for cache in target.cache} == {target.length} == {0}


def test_an_error_in_the_drafter_ends_it_and_leaves_the_cache_usable(
    model: nn.Module,
) -> None:
    class Broken(Oracle):
        def propose(self, max_depth: int) -> DraftTree:
            raise RuntimeError("no idea")

    drafter, target = Broken([]), new_target(model)
    with pytest.raises(RuntimeError, match="no idea"):
        next(
            decode(
                target,
                PROMPT,
                drafter,
                Chooser(SamplingParams()),
                max_tokens=9,
                ends=lambda _: False,
            )
        )
    assert drafter.ended
    assert_holds_exactly(target, PROMPT)


def test_a_step_returns_choice_and_argmax_per_node(model: nn.Module) -> None:
    """Each node's choice and argmax equal those of its path decoded as a chain."""
    params = SamplingParams(temp=1.0, seed=11)
    truth = plain(model, PROMPT, max_tokens=30, params=params)
    drafter = HostileDrafter(truth, 512, BOS, seed=5)
    context = PROMPT.copy()
    chooser = Chooser(params)
    for step in decode(
        new_target(model), PROMPT, drafter, chooser, max_tokens=30, ends=lambda _: False
    ):
        tree, choices = step.tree, step.choices
        for node in range(len(tree)):
            path: list[int] = []
            ancestor = node
            while ancestor > 0:
                path.insert(0, tree.tokens[ancestor])
                ancestor = tree.parents[ancestor]
            logits = model(mx.array(context + path)[None])[0, -1:]
            choice, logprobs = chooser.choose(logits, [len(context) + len(path)])
            assert choices[node] == choice.item()
            assert step.argmaxes[node] == mx.argmax(logprobs).item()
        context += step.tokens


def test_a_drafter_may_do_as_it_likes_with_the_prompt_it_is_given(model: nn.Module) -> None:
    class Greedy(Oracle):
        def begin(self, prompt: list[int]) -> None:
            super().begin(prompt)
            self.context = prompt

        def observe(self, step: VerifiedStep) -> None:
            super().observe(step)
            self.context += step.tokens

    class Destructive(Oracle):
        def begin(self, prompt: list[int]) -> None:
            super().begin(prompt)
            prompt.clear()

    truth = plain(model, PROMPT, max_tokens=30)
    for drafter in (Greedy(truth), Destructive(truth)):
        outcome = run(model, PROMPT, drafter, max_tokens=30)
        assert outcome.tokens == truth
        assert_holds_exactly(outcome.target, PROMPT + truth)


@pytest.mark.slow
def test_tree_steps_in_two_threads_leave_the_model_as_it_is(model: nn.Module) -> None:
    truth = plain(model, PROMPT, max_tokens=10)
    outputs: list[list[int]] = []

    def generate(first_seed: int) -> None:
        for seed in range(first_seed, first_seed + 12):
            drafter = HostileDrafter(truth, 512, BOS, seed)
            outputs.append(run(model, PROMPT, drafter, max_tokens=10).tokens)

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in (0, 100)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert outputs == [truth] * 24
    assert {type(layer.self_attn.rope) for layer in model.layers} == {nn.RoPE}


class Moody(Oracle):
    """Drafts occasionally, and lets the loop run ahead in between."""

    pipelined = True

    def __init__(self, truth: list[int]) -> None:
        super().__init__(truth)
        self.offered = 0

    def propose(self, max_depth: int) -> DraftTree:
        draft = super().propose(min(max_depth, 3 if self._emitted % 7 > 4 else 0))
        self.offered += len(draft) > 1
        return draft


@pytest.mark.slow
def test_a_drafter_may_enter_and_leave_the_pipeline(model: nn.Module) -> None:
    """No work is lost: each forward's rows are verified, and the cache stays exact."""
    truth = plain(model, PROMPT, max_tokens=60)
    drafter, target, kinds = Moody(truth), new_target(model), []
    context, dispatched = PROMPT.copy(), False
    for step in decode(
        target,
        PROMPT,
        drafter,
        Chooser(SamplingParams()),
        max_tokens=60,
        ends=lambda _: False,
    ):
        kinds.append((step.rows, step.pipelined))
        assert step.pipelined == dispatched
        dispatched = step.ahead
        context += step.tokens
        ahead = target.length - (len(context) - 1)
        assert ahead in (0, 1)
        if not ahead:
            assert_holds_exactly(target, context)
    assert context[len(PROMPT) :] == truth
    assert_holds_exactly(target, context)
    assert {(1, True), (1, False), (4, False)} <= set(kinds)
    assert (4, True) not in kinds


class Slow(NoDraft):
    """A drafter that takes 3 seconds to observe a step."""

    now = 0.0

    def observe(self, step: VerifiedStep) -> None:
        super().observe(step)
        Slow.now += 3.0


def test_what_a_drafter_takes_counts_for_the_next_step_and_the_consumer_for_none(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=lambda: Slow.now)
    monkeypatch.setattr("mlxspec.engine.step.time", clock)
    seconds = []
    for step in decode(
        new_target(model),
        PROMPT,
        Slow(),
        Chooser(SamplingParams()),
        max_tokens=3,
        ends=lambda _: False,
    ):
        seconds.append(step.seconds)
        Slow.now += 50.0
    assert seconds == [0.0, 3.0, 3.0]


class Quiet(RuntimeError):
    """A falsy exception, like one with a length of 0."""

    def __bool__(self) -> bool:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["propose", "pipelined", "choose", "observe", "end"])
def test_a_fault_in_any_phase_is_one_sequences_alone(model: nn.Module, phase: str) -> None:
    class Broken(NoDraft):
        steps = 0

        def propose(self, max_depth: int) -> DraftTree:
            self.fail_in("propose")
            return super().propose(max_depth)

        @property
        def pipelined(self) -> bool:  # type: ignore[override]
            self.fail_in("pipelined")
            return True

        def observe(self, step: VerifiedStep) -> None:
            super().observe(step)
            self.fail_in("observe")
            self.steps += 1

        def fail_in(self, where: str) -> None:
            if where == phase and self.steps == 3:
                raise Quiet(where)

    def processor(context: mx.array, logits: mx.array) -> mx.array:
        if phase == "choose" and len(context) == len(PROMPT) + 3:
            raise Quiet("choose")
        return logits

    def ends(token: int) -> bool:
        if phase == "end" and len(broken.prompt) + 4 == broken.length + 1:
            raise Quiet("end")
        return False

    truth = plain(model, PROMPT, max_tokens=12)
    params = SamplingParams(logits_processors=[mlxspec.pure(processor)])
    broken = Sequence(
        *(new_target(model), PROMPT, Broken(), Chooser(params)), max_tokens=12, ends=ends
    )
    others = [
        Sequence(
            *(new_target(model), PROMPT, NoDraft(), Chooser(SamplingParams())),
            max_tokens=12,
            ends=lambda token: False,
        )
        for _ in range(2)
    ]
    for sequence in (broken, *others):
        sequence.begin()
    joint, running = Joint(LoadedModel(model), joint_mode(model)), [others[0], broken, others[1]]
    tokens: dict[Sequence, list[int]] = {sequence: [] for sequence in running}
    while running:
        for sequence, outcome in zip(running.copy(), joint_step(running, joint), strict=True):
            if isinstance(outcome, Quiet):
                assert sequence is broken
                assert str(outcome) == phase
            else:
                assert isinstance(outcome, VerifiedStep)
                tokens[sequence] += outcome.tokens
            if sequence.finished or isinstance(outcome, Quiet):
                running.remove(sequence)
                sequence.close()
    assert broken.error is not None
    written = tokens.pop(broken)
    assert 2 <= len(written) < 5
    assert written == truth[: len(written)]
    assert [*tokens.values()] == [truth, truth]
    assert_holds_exactly(broken.target, PROMPT + truth[: broken.length - len(PROMPT)])
