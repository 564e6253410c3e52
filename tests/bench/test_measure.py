"""Measured runs: order, times, conversations, and the comparison with plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import mlxspec
from mlxspec.bench.measure import (
    BACKENDS,
    MLX_LM,
    PLAIN,
    MakeStream,
    MeasuredPrompt,
    Stream,
    measure,
    run,
)
from mlxspec.bench.prompts import BenchPrompt, bundled_prompts
from mlxspec.drafting.cost_file import Calibration, StepTime
from mlxspec.drafting.costs import LiveCosts
from mlxspec.engine.sampling import SamplingParams
from mlxspec.errors import PromptError
from mlxspec.generation.decoder import Decoder
from tests.support.scripted_backends import ManualClock, Scripted
from tests.support.scripted_model import write_scripted_model

ROUND = ("one", " two", " three", " four", "\n")
QUESTION = BenchPrompt("say", ({"role": "user", "content": "one two"},))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A model that repeats its output, and its tokenizer."""
    return mlxspec.load(write_scripted_model(tmp_path_factory.mktemp("bench") / "endless", ROUND))


def measured_with(
    model: tuple,
    *names: str,
    prompts: Sequence[BenchPrompt] = (QUESTION,),
    others: dict[str, MakeStream] | None = None,
    **options: object,
) -> list[MeasuredPrompt]:
    """Measure prompts with the given backends."""
    backends = {name: BACKENDS[name] for name in names} | (others or {})
    settings = {"max_tokens": 12, "repeats": 2, "sampling": SamplingParams()} | options
    return list(measure(*model, backends, prompts, **settings))


@pytest.mark.slow
def test_every_backend_gives_plain_decoding_s_output(endless: tuple) -> None:
    (measured,) = measured_with(endless, *BACKENDS)
    outputs = {run.tokens for runs in measured.runs.values() for run in runs}
    assert len(outputs) == 1
    assert measured.runs[PLAIN][0].text == "one two three four\none two three four\none two"
    assert measured.differences == {key: [] for key in BACKENDS}


@pytest.mark.slow
def test_every_backend_gives_the_same_sample_but_mlx_lm(endless: tuple) -> None:
    names = [name for name in BACKENDS if name != MLX_LM]
    sampling = SamplingParams(temp=1.5, seed=3)
    (measured,) = measured_with(endless, *names, sampling=sampling)
    assert all(differences == [] for differences in measured.differences.values())
    decoder, messages = Decoder(*endless), [*QUESTION.messages]
    sampled = [response.token for response in decoder.stream(messages, 12, sampling=sampling)]
    assert list(measured.runs[PLAIN][0].tokens) == sampled
    assert sampled != [response.token for response in decoder.stream(messages, 12)]


def test_lookup_s_steps_are_reported(endless: tuple) -> None:
    (measured,) = measured_with(endless, "plain", "prompt-lookup")
    plain, lookup = (measured.runs[name][0].stats for name in ("plain", "prompt-lookup"))
    assert plain is not None
    assert plain.tokens_per_step == 1
    assert lookup is not None
    assert lookup.tokens_per_step > 1


def test_times_are_taken_from_the_end_of_the_prefill(
    endless: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    monkeypatch.setattr("mlxspec.bench.measure.perf_counter", clock)
    seconds = {"plain": [9, 2, 4], "other": [9, 1, 1]}
    others = {name: Scripted(clock, [3, 4, 5, 6], seconds[name]) for name in seconds}
    (measured,) = measured_with(endless, others=others)
    plain = measured.runs["plain"]
    assert [run.seconds for run in plain] == pytest.approx([2, 4])  # the 9 warmed up
    assert [run.prefill_seconds for run in plain] == pytest.approx([20, 40])
    assert [run.rate for run in plain] == pytest.approx([2, 1])


def test_every_backend_has_one_run_a_round_in_changing_order(endless: tuple) -> None:
    clock, log = ManualClock(), []
    others = {name: Scripted(clock, [3], [1] * 4, log) for name in ("plain", "b", "c")}
    measured_with(endless, others=others, repeats=3)
    order = [next(name for name in others if others[name] is which) for which in log]
    warm_up, rest = order[:3], order[3:]
    assert warm_up == ["plain", "b", "c"]
    assert rest == ["plain", "b", "c", "plain", "c", "b", "c", "plain", "b"]


def test_only_the_first_prompt_warms_up(endless: tuple) -> None:
    log: list[object] = []
    others = {"plain": Scripted(ManualClock(), [3], [1] * 3, log)}
    measured_with(endless, others=others, repeats=1, prompts=[QUESTION, QUESTION])
    assert len(log) == 3


def test_every_answer_is_reported_and_ctrl_c_keeps_the_first_prompt_s_complete_repeats(
    endless: tuple,
) -> None:
    others = {name: Scripted(ManualClock(), [3], [1] * 9) for name in ("plain", "b")}
    seen: list[int] = []

    def on_answer() -> None:
        seen.append(len(seen))
        if len(seen) == 7:
            raise KeyboardInterrupt

    settings = {"max_tokens": 1, "repeats": 3, "sampling": SamplingParams()}
    answers = measure(*endless, others, [QUESTION], **settings, on_answer=on_answer)
    measured = next(answers)
    # Two answers are the warm-up; the third repeat lacks one.
    assert {name: len(runs) for name, runs in measured.runs.items()} == {"plain": 2, "b": 2}
    with pytest.raises(KeyboardInterrupt):
        next(answers)


def test_mlx_lm_s_prefill_ends_before_its_first_token_is_computed(endless: tuple) -> None:
    reports: list[tuple[int, int]] = []
    responses = BACKENDS["mlx-lm"](*endless)(
        [1, 3, 4],
        max_tokens=2,
        sampling=SamplingParams(),
        on_progress=lambda done, total: reports.append((done, total)),
    )
    next(responses)
    assert reports[-1] == (2, 3)  # it reports all three after the first token


def test_a_wrong_output_is_found(endless: tuple) -> None:
    others = {"forgetful": Scripted(ManualClock(), [3, 4, 5, 3], [1] * 3)}
    (measured,) = measured_with(endless, "plain", others=others, max_tokens=4)
    (difference,) = measured.differences["forgetful"]
    assert difference.index == 3
    assert difference.margin > 0.1  # the model is sure of its next token
    assert not difference.near_tie


def test_an_output_that_ends_early_is_no_near_tie(endless: tuple) -> None:
    others = {"short": Scripted(ManualClock(), [3, 4], [1] * 3)}
    (measured,) = measured_with(endless, "plain", others=others, max_tokens=4)
    (difference,) = measured.differences["short"]
    assert (difference.index, difference.near_tie) == (2, False)


def test_follow_ups_are_asked_after_plain_decoding_s_answer(endless: tuple) -> None:
    prompt = BenchPrompt("talk", QUESTION.messages, ("three",))
    answer = {"role": "assistant", "content": "one two three"}
    whole = BenchPrompt("talk", (*QUESTION.messages, answer, {"role": "user", "content": "three"}))
    asked: list[list[int]] = []
    others = {"plain": recording(BACKENDS["plain"], asked)}
    settings = {"max_tokens": 3, "repeats": 1, "others": others}
    assert len(measured_with(endless, prompts=[prompt], **settings)) == 2
    measured_with(endless, prompts=[whole], **settings)
    assert asked[2] == asked[4]  # the first prompt of each run also serves as the warm-up


def recording(make: MakeStream, asked: list[list[int]]) -> MakeStream:
    """Return a backend that records its prompts."""

    def make_stream(model: object, tokenizer: object) -> Stream:
        stream = make(model, tokenizer)  # type: ignore[arg-type]
        return lambda prompt, **options: asked.append(prompt) or stream(prompt, **options)

    return make_stream


def test_a_question_goes_into_the_chat_template_and_a_raw_text_does_not(endless: tuple) -> None:
    raw = BenchPrompt("raw", QUESTION.messages, raw=True)
    asked: list[list[int]] = []
    others = {"plain": recording(BACKENDS["plain"], asked)}
    measured_with(endless, prompts=[QUESTION, raw], others=others, repeats=1)
    assert [len(prompt) for prompt in asked[1:]] == [4, 3]  # [INST] one two [/INST]; BOS one two


def test_without_a_chat_template_the_texts_follow_each_other(tmp_path: Path) -> None:
    model = mlxspec.load(write_scripted_model(tmp_path / "base", ROUND, template=False))
    asked: list[list[int]] = []
    measured_with(model, others={"plain": recording(BACKENDS["plain"], asked)}, repeats=1)
    assert len(asked[0]) == 3  # BOS and two words


@pytest.mark.slow
def test_a_prompt_beyond_the_context_is_left_out() -> None:
    model = mlxspec.load("demo")
    longest = model[0].args.max_position_embeddings
    long = BenchPrompt("long", ({"role": "user", "content": "word " * longest},))
    prompts = [long, bundled_prompts()[-1]]
    assert len(measured_with(model, "plain", prompts=prompts, max_tokens=1, repeats=1)) == 1


def test_a_conversation_that_the_template_refuses_is_an_error(endless: tuple) -> None:
    _, tokenizer = endless
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(PromptError, match="roles must alternate"):
            list(measured_with(endless, "plain"))
    finally:
        tokenizer.chat_template = template


class FlatCosts(LiveCosts):
    """Costs at which every step takes the same time; they never change."""

    def __init__(self) -> None:
        times = [StepTime(1, 1.0, 0.01), StepTime(64, 1.0, 0.01)]
        super().__init__({1024: Calibration(times)})

    def _record(self, rows: int, seconds: float, pipelined: bool) -> None: ...


def test_auto_does_not_remember_its_earlier_runs(
    endless: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "costs", FlatCosts())
    stream = BACKENDS["auto"](*endless)
    first, again = (run(stream, [1, 3, 4], 40, SamplingParams()) for _ in range(2))
    assert first.stats == again.stats
