"""Turns of a conversation on one cache give the same output as on fresh caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec import Decoder, PromptLookupDecoder, Session
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.errors import OptionError
from tests.support.architectures import ARCHITECTURES
from tests.support.architectures import KINDS_OF_CACHES as KINDS
from tests.support.demo import demo
from tests.support.drafters import HostileDrafter, drafted
from tests.support.examples import examples
from tests.support.harness import assert_same_output

pytestmark = pytest.mark.slow

VOCABULARY = 64
CUTTABLE = {"plain", "sliding and full", "latent", "lists"}


@cache
def tokenizer() -> TokenizerWrapper:
    return demo().tokenizer


@cache
def decoder_of(kind: str) -> PromptLookupDecoder:
    return PromptLookupDecoder(ARCHITECTURES[KINDS[kind]].model(), tokenizer())


def fresh_output(
    model: nn.Module, prompt: Sequence[int], max_tokens: int, **options: object
) -> list[int]:
    """Return mlx-lm's output."""
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens, **options)
    return [int(token) for token, _ in steps]


def said(decoder: PromptLookupDecoder, prompt: Sequence[int], n: int, **options: object) -> list:
    return list(decoder.stream(prompt, n, **options))


tokens = st.integers(0, VOCABULARY - 1)
turns = st.tuples(
    st.sampled_from(["continue", "branch", "edit", "trim", "regenerate"]),
    st.floats(0, 1),  # the place of the cut, as a share of the conversation
    st.lists(tokens, min_size=1, max_size=40),  # the user's message
    st.integers(1, 12),  # tokens of the answer
    st.sampled_from([None, None, 1, 3]),  # the consumer closes the stream after this many
)


def next_prompt(
    context: list[int], answer: int, change: str, share: float, message: list[int]
) -> list[int]:
    """Return a turn's prompt after a context that ends with an answer of ``answer`` tokens."""
    place = int(share * max(0, len(context) - 1))
    if change == "branch":
        context = context[:place]
    elif change == "edit" and context:
        context = [*context[:place], (context[place] + 1) % VOCABULARY, *context[place + 1 :]]
    elif change == "trim":
        context = context[: place // 4] + context[place:]
    elif change == "regenerate" and context:
        return context[: len(context) - answer]
    return context + message


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(3))
@given(st.lists(turns, min_size=4, max_size=8), st.sampled_from([16, 2048]))
def test_whatever_happens_to_a_conversation_each_turn_is_as_on_a_fresh_cache(
    kind: str, conversation: list, prefill_step_size: int
) -> None:
    decoder, session = decoder_of(kind), Session()
    context: list[int] = []
    answer = 0
    for change, share, message, n, taken in conversation:
        prompt = next_prompt(context, answer, change, share, message)
        stream = decoder.stream(prompt, n, session=session, prefill_step_size=prefill_step_size)
        output = [response.token for response in islice(stream, taken)]
        stream.close()
        expected = fresh_output(decoder.model, prompt, len(output))
        assert_same_output(decoder.model, prompt, expected, output)
        context, answer = prompt + output, len(output)
        assert session.tokens == context[: len(session.tokens)]


def test_the_next_turn_may_begin_with_the_last_response() -> None:
    decoder, session = decoder_of("plain"), Session()
    first = decoder.stream([3, 4, 5], 2, session=session)
    said_first = [next(first).token, next(first).token]
    context = [3, 4, 5, *said_first, 6]
    second = [response.token for response in said(decoder, context, 3, session=session)]
    assert second == fresh_output(decoder.model, context, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_continuation_runs_nothing_again(kind: str) -> None:
    decoder, session = decoder_of(kind), Session()
    prompt = list(range(3, 40))
    first = said(decoder, prompt, 9, session=session)
    context = prompt + [response.token for response in first]
    [second] = said(decoder, [*context, 5, 6, 7], 1, session=session)
    assert first[0].reused_tokens == 0
    assert second.reused_tokens == len(context) - 1
    assert second.prompt_tokens == len(context) + 3


@pytest.mark.parametrize("kind", KINDS)
def test_another_answer_runs_only_the_end_of_the_prompt_again(kind: str) -> None:
    decoder, session = decoder_of(kind), Session()
    prompt = [token % 60 + 3 for token in range(400)]
    said(decoder, prompt, 30, session=session)
    [again] = said(decoder, prompt, 1, session=session)
    most = 1 if kind in CUTTABLE else 17
    assert len(prompt) - most <= again.reused_tokens < len(prompt)


def test_where_a_window_has_moved_on_the_last_prompt_is_returned_to() -> None:
    decoder, session = decoder_of("sliding and full"), Session()
    prompt = [token % 60 + 3 for token in range(100)]
    endless = {"logit_bias": {tokenizer().eos_token_id: -100.0}}
    assert len(said(decoder, prompt, 300, session=session, **endless)) == 300
    [again] = said(decoder, prompt, 1, session=session)
    assert again.reused_tokens == len(prompt) - 17
    assert again.token == fresh_output(decoder.model, prompt, 1)[0]


@pytest.mark.parametrize("kind", ["plain", "sliding and full"])
def test_rejected_branches_leave_nothing_behind_for_the_next_turn(kind: str) -> None:
    decoder, session = Decoder(decoder_of(kind).model, tokenizer()), Session()
    context: list[int] = []
    for turn in range(5):
        prompt = [*context[: len(context) - turn], turn + 5, 9, 12]
        truth = fresh_output(decoder.model, prompt, 15)
        drafter = HostileDrafter(truth, VOCABULARY, 5, seed=turn)
        responses = drafted(decoder, prompt, drafter, max_tokens=15, session=session)
        output = [response.token for response in responses]
        assert_same_output(decoder.model, prompt, truth[: len(output)], output)
        context = prompt + output


def test_samples_and_penalties_see_the_whole_conversation() -> None:
    decoder, session = decoder_of("plain"), Session()
    options = {"temp": 1.0, "seed": 4, "repetition_penalty": 1.5, "repetition_context_size": 0}
    context = [5, 9, 12, 7]
    for _ in range(3):
        context += [5, 8]
        kept = [r.token for r in said(decoder, context, 12, session=session, **options)]
        assert kept == [r.token for r in said(decoder, context, 12, n_draft=0, **options)]
        context += kept


def test_a_quantised_cache_is_what_mlx_lms_own_conversation_makes_it() -> None:
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    wide = replace(ARCHITECTURES["llama3"], config={"head_dim": 32})
    decoder, session = PromptLookupDecoder(wide.model(), tokenizer()), Session()
    theirs = make_prompt_cache(decoder.model)
    context: list[int] = []
    for message in ([5, 9, 12, 7], [6, 6, 30], [41]):
        expected = fresh_output(decoder.model, message, 12, prompt_cache=theirs, **options)
        context += message
        output = [r.token for r in said(decoder, context, 12, session=session, **options)]
        assert output == expected
        context += output


def test_a_bounded_cache_shows_later_turns_what_mlx_lms_shows_token_by_token() -> None:
    decoder, session = decoder_of("plain"), Session()
    theirs = make_prompt_cache(decoder.model, max_kv_size=12)
    context: list[int] = []
    for message in ([5, 9, 12, 7], list(range(6, 40)), [41]):
        # Its mask for several rows would drop the first positions, which the cache keeps.
        expected = fresh_output(decoder.model, message, 9, prompt_cache=theirs, prefill_step_size=1)
        context += message
        output = [r.token for r in said(decoder, context, 9, session=session, max_kv_size=12)]
        assert output == expected
        context += output


def test_other_options_or_another_model_begin_anew() -> None:
    decoder, session = decoder_of("plain"), Session()
    prompt = list(range(3, 30))
    said(decoder, prompt, 3, session=session)
    [bounded] = said(decoder, prompt, 1, session=session, max_kv_size=64)
    [other] = said(decoder_of("latent"), prompt, 1, session=session)
    assert bounded.reused_tokens == other.reused_tokens == 0
    assert other.token == fresh_output(decoder_of("latent").model, prompt, 1)[0]


def test_drafters_of_one_session_may_differ_in_branching() -> None:
    model = ARCHITECTURES["llama3"].model()
    decoder, session = Decoder(model, tokenizer()), Session()
    drafter = PromptLookupDrafter()
    prompt = list(range(3, 30))
    for branching in (False, True, False):
        drafter.branching = branching
        [*_, last] = drafted(decoder, prompt, drafter, max_tokens=4, session=session)
    assert last.reused_tokens == len(prompt) - 1


def test_after_an_interrupt_the_next_turn_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, session = decoder_of("state and full"), Session()
    prompt = list(range(3, 60))
    said(decoder, prompt[:20], 5, session=session)

    def interrupt(done: int, total: int) -> None:
        if 0 < done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        said(decoder, prompt, 3, session=session, prefill_step_size=8, on_progress=interrupt)
    output = [response.token for response in said(decoder, prompt, 9, session=session)]
    assert output == fresh_output(decoder.model, prompt, 9)


def test_after_an_error_of_mlx_nothing_is_kept() -> None:
    decoder, session, prompt = decoder_of("plain"), Session(), [3, 4, 5]

    def breaks(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) == 8:
            assert session._lent
            cache = session._lent[0].cache[0]
            cache.keys = cache.keys + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]
        return logits

    with pytest.raises(RuntimeError, match="failed"):
        said(decoder, prompt, 20, session=session, logits_processors=[breaks])
    assert session.tokens == []
    again = [response.token for response in said(decoder, prompt, 9, session=session)]
    assert again == fresh_output(decoder.model, prompt, 9)


def test_a_second_generation_at_the_same_time_is_refused() -> None:
    decoder, session = decoder_of("plain"), Session()
    first = decoder.stream([5, 6, 7], 20, session=session)
    next(first)
    with pytest.raises(OptionError, match="close that generation"):
        next(decoder.stream([5, 6, 7], 20, session=session))
    first.close()
    assert said(decoder, [5, 6, 7], 2, session=session)


def test_a_session_excludes_a_prompt_cache() -> None:
    decoder = decoder_of("plain")
    cache = make_prompt_cache(decoder.model)
    with pytest.raises(OptionError, match="choose one"):
        decoder.stream([5, 6, 7], session=Session(), prompt_cache=cache)
