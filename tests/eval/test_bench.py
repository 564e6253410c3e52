"""Turns, their order and their times; conversations; comparison with plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

import mlxspec
from mlxspec.engine.sampling import SamplingParams
from mlxspec.errors import OptionError, PromptError
from mlxspec.eval.backends import CONTESTANTS, PLAIN, chosen_names, play
from mlxspec.eval.bench import Measurement
from mlxspec.eval.bench_prompts import BenchPrompt, bundled_prompts
from mlxspec.generation.decoders import AutoDecoder
from mlxspec.plan.live_costs import LiveCosts
from mlxspec.plan.live_curve import KnownTime
from tests.support.scripted_backends import ManualClock, Scripted
from tests.support.scripted_model import write_scripted_model

ROUND = ("one", " two", " three", " four", "\n")
QUESTION = BenchPrompt("say", ({"role": "user", "content": "one two"},))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A model that says the same over and over, and its tokenizer."""
    return mlxspec.load(write_scripted_model(tmp_path_factory.mktemp("bench") / "endless", ROUND))


def measurement(model: tuple, *names: str, **options: object) -> Measurement:
    settings = {"max_tokens": 12, "repeats": 2, "sampling": SamplingParams()} | options
    return Measurement(*model, names, **settings)


def test_every_contestant_gives_plain_decoding_s_output(endless: tuple) -> None:
    names = chosen_names(None)
    assert set(names) == set(CONTESTANTS)
    (measured,) = measurement(endless, *names).run([QUESTION])
    outputs = {turn.tokens for turns in measured.turns.values() for turn in turns}
    assert len(outputs) == 1
    assert measured.turns[PLAIN][0].text == "one two three four\none two three four\none two"
    assert measured.differences == {key: [] for key in names}


def test_every_contestant_gives_the_same_sample_but_mlx_lm(endless: tuple) -> None:
    names = chosen_names(None)
    sampling = SamplingParams(temp=1.5, seed=3)
    (measured,) = measurement(endless, *names, sampling=sampling).run([QUESTION])
    assert measured.differences.pop("mlx-lm") is None
    assert all(differences == [] for differences in measured.differences.values())


def test_lookup_s_steps_are_reported(endless: tuple) -> None:
    (measured,) = measurement(endless, "plain", "lookup").run([QUESTION])
    plain, lookup = (measured.turns[name][0].stats for name in ("plain", "lookup"))
    assert plain is not None
    assert plain.tokens_per_step == 1
    assert lookup is not None
    assert lookup.tokens_per_step > 1


def test_times_are_taken_from_the_end_of_the_prefill(
    endless: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    seconds = {"plain": [9, 2, 4], "other": [9, 1, 1]}
    for name in seconds:
        scripted = Scripted(clock, [3, 4, 5, 6], seconds[name])
        monkeypatch.setitem(CONTESTANTS, name, lambda model, tokenizer, s=scripted: s)
    (measured,) = measurement(endless, "plain", "other", clock=clock).run([QUESTION])
    plain = measured.turns["plain"]
    assert [turn.seconds for turn in plain] == pytest.approx([2, 4])  # the 9 warmed up
    assert [turn.prefill_seconds for turn in plain] == pytest.approx([20, 40])
    assert [turn.rate for turn in plain] == pytest.approx([2, 1])


def test_everyone_has_one_turn_a_round_in_changing_order(
    endless: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, log, members = ManualClock(), [], {}
    for name in ("plain", "b", "c"):
        members[name] = Scripted(clock, [3], [1] * 4, log=log)
        monkeypatch.setitem(CONTESTANTS, name, lambda model, tokenizer, s=members[name]: s)
    run = measurement(endless, *members, clock=clock, repeats=3)
    shares: list[float] = []
    list(run.run([QUESTION], shares.append))
    order = [next(name for name in members if members[name] is who) for who in log]
    warm_up, rest = order[:3], order[3:]
    assert warm_up == ["plain", "b", "c"]
    assert rest == ["plain", "b", "c", "plain", "c", "b", "c", "plain", "b"]
    assert shares == pytest.approx([turn / 12 for turn in range(1, 13)])


def test_only_the_first_prompt_warms_up(endless: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []
    scripted = Scripted(ManualClock(), [3], [1] * 3, log=log)
    monkeypatch.setitem(CONTESTANTS, "plain", lambda model, tokenizer: scripted)
    list(measurement(endless, "plain", repeats=1).run([QUESTION, QUESTION]))
    assert len(log) == 3


def test_mlx_lm_s_prefill_ends_before_its_first_token_is_computed(endless: tuple) -> None:
    reports: list[tuple[int, int]] = []
    contestant = CONTESTANTS["mlx-lm"](*endless)
    responses = contestant.stream(
        [1, 3, 4], 2, SamplingParams(), lambda done, total: reports.append((done, total))
    )
    next(responses)
    assert reports[-1] == (2, 3)  # its report of all three comes behind the first token


def test_a_wrong_output_is_found_in_whichever_turn(
    endless: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(model: object, tokenizer: object) -> Scripted:
        return Scripted(ManualClock(), [3, 4, 5, 3], [1] * 3)

    monkeypatch.setitem(CONTESTANTS, "forgetful", forgetful)
    (measured,) = measurement(endless, "plain", "forgetful", max_tokens=4).run([QUESTION])
    (difference,) = measured.differences["forgetful"]
    assert difference.index == 3
    assert difference.margin > 0.1  # the model is sure of its next token
    assert not difference.near_tie


def test_an_output_that_ends_early_is_no_near_tie(
    endless: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        CONTESTANTS, "short", lambda model, tokenizer: Scripted(ManualClock(), [3, 4], [1] * 3)
    )
    (measured,) = measurement(endless, "plain", "short", max_tokens=4).run([QUESTION])
    (difference,) = measured.differences["short"]
    assert (difference.index, difference.near_tie) == (2, False)


def test_follow_ups_are_asked_after_plain_decoding_s_answer(endless: tuple) -> None:
    prompt = BenchPrompt("talk", QUESTION.messages, ("three",), references=("a", "b"))
    first, second = measurement(endless, "plain", max_tokens=3, repeats=1).run([prompt])
    assert second.messages == [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": "three"},
    ]
    assert (first.reference, second.reference) == ("a", "b")


def test_a_question_goes_into_the_chat_template_and_a_raw_text_does_not(endless: tuple) -> None:
    raw = BenchPrompt("raw", QUESTION.messages, raw=True)
    templated, continued = measurement(endless, "plain", repeats=1).run([QUESTION, raw])
    assert templated.prompt_tokens == 4  # [INST] one two [/INST]
    assert continued.prompt_tokens == 3  # BOS one two


def test_without_a_chat_template_the_texts_follow_each_other(tmp_path: Path) -> None:
    model = mlxspec.load(write_scripted_model(tmp_path / "base", ROUND, template=False))
    (measured,) = measurement(model, "plain", repeats=1).run([QUESTION])
    assert measured.prompt_tokens == 3  # BOS and two words


def test_a_prompt_beyond_the_context_is_left_out_and_counted() -> None:
    model = mlxspec.load("demo")
    longest = model[0].args.max_position_embeddings
    long = BenchPrompt("long", ({"role": "user", "content": "word " * longest},))
    run = measurement(model, "plain", max_tokens=1, repeats=1)
    assert len(list(run.run([long, bundled_prompts()[-1]]))) == 1
    assert run.skipped == 1


def test_a_conversation_that_the_template_refuses_is_an_error(endless: tuple) -> None:
    _, tokenizer = endless
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(PromptError, match=r"'say'.*roles must alternate"):
            list(measurement(endless, "plain").run([QUESTION]))
    finally:
        tokenizer.chat_template = template


def test_an_unknown_contestant_is_named_with_the_known_ones() -> None:
    assert chosen_names(" lookup,plain") == ["plain", "lookup"]
    with pytest.raises(OptionError, match="'warp': choose among plain, mlx-lm, lookup"):
        chosen_names("lookup,warp")


class FlatCosts(LiveCosts):
    """Knows that every step costs the same, and learns nothing else."""

    def __init__(self) -> None:
        super().__init__({1024: [KnownTime(1, 1.0, 0.01), KnownTime(64, 1.0, 0.01)]})

    def record(self, rows: int, seconds: float, pipelined: bool) -> None: ...
    def save(self) -> None: ...


def test_auto_s_prediction_is_its_tokens_over_the_expected_cost_of_its_steps(
    endless: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoDecoder, "costs", FlatCosts())
    run = measurement(endless, "plain", "auto", max_tokens=40, repeats=1)
    (measured,) = run.run([QUESTION])
    (turn,) = measured.turns["auto"]
    assert turn.stats is not None
    assert turn.stats.tokens_per_step > 1.5
    # A step costs 1, or 1.02 where a plain one waited for its token.
    assert turn.stats.tokens_per_step / 1.02 <= turn.predicted_speed
    assert turn.predicted_speed <= turn.stats.tokens_per_step
    assert measured.turns["plain"][0].predicted_speed is None


def test_auto_does_not_remember_its_earlier_turns(
    endless: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoDecoder, "costs", FlatCosts())
    contestant = CONTESTANTS["auto"](*endless)
    first, again = (
        play(contestant, [1, 3, 4], 40, SamplingParams(), ManualClock()) for _ in range(2)
    )
    assert first.stats == again.stats
