"""The decoders' public interface, on the bundled demo model where its text matters."""

from __future__ import annotations

import itertools
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest

import mlxspec
from mlxspec import PromptLookupDecoder
from mlxspec.bench.measure import NEAR_TIE_FLOAT32, first_difference
from mlxspec.errors import OptionError, PromptError
from tests.support.demo import demo_decoder, stand_in_decoder
from tests.support.drafters import drafted

pytestmark = pytest.mark.slow

PROMPT = '[INST] Repeat the following phrase 4 times: "The red fox sees the river.". [/INST]'


@pytest.fixture(scope="module")
def decoder() -> PromptLookupDecoder:
    return demo_decoder(PromptLookupDecoder)


@pytest.fixture(scope="module")
def small() -> PromptLookupDecoder:
    return stand_in_decoder(PromptLookupDecoder)


@pytest.mark.compiled
def test_responses_equal_mlx_lm_token_by_token(decoder: PromptLookupDecoder) -> None:
    theirs = list(mlx_lm.stream_generate(decoder.model, decoder.tokenizer, PROMPT, max_tokens=60))
    for n_draft in (0, 10):
        ours = list(decoder.stream(PROMPT, max_tokens=60, n_draft=n_draft))
        tokens = [response.token for response in ours]
        difference = first_difference(
            decoder.model,
            decoder.tokenizer.encode(PROMPT),
            [response.token for response in theirs],
            tokens,
            mlxspec.SamplingParams(),
        )
        assert difference is None or difference.margin < NEAR_TIE_FLOAT32
        if difference:
            continue
        text = "".join(r.text for r in ours)  # with the leading space, which mlx-lm drops
        assert text.removeprefix(" ") == "".join(r.text for r in theirs)
        assert [r.finish_reason for r in ours] == [r.finish_reason for r in theirs]
        assert [r.generation_tokens for r in ours] == list(range(1, len(ours) + 1))
        assert ours[-1].prompt_tokens == theirs[-1].prompt_tokens
        for own, other in zip(ours, theirs, strict=True):
            assert mx.allclose(own.logprobs, other.logprobs, atol=1e-4).item()


def test_figures_add_up(decoder: PromptLookupDecoder) -> None:
    responses = list(decoder.stream(PROMPT, max_tokens=32))
    stats = responses[-1].stats
    assert stats.emitted == len(responses)
    assert stats.accepted == sum(response.from_draft for response in responses)
    assert stats.rows == stats.steps + stats.drafted
    assert stats.tokens_per_step == len(responses) / stats.steps
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert stats.tokens_per_step > 2
    plain = list(decoder.stream(PROMPT, max_tokens=10, n_draft=0))[-1].stats
    assert (plain.steps, plain.drafted, plain.tokens_per_step) == (10, 0, 1)


def test_prompt_lookup_writes_the_text_and_returns_the_result(
    decoder: PromptLookupDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    responses = list(decoder.stream(PROMPT, max_tokens=32))
    result = decoder.prompt_lookup(prompt=PROMPT, max_tokens=32, temp=0.0, seed=0, color=True)
    assert result.tokens == [response.token for response in responses]
    assert result.from_draft == [response.from_draft for response in responses]
    assert result.text == "".join(response.text for response in responses)
    assert result.finish_reason == responses[-1].finish_reason
    assert result.stats == responses[-1].stats
    assert capsys.readouterr().out.strip("\n") == result.text.strip("\n")


def test_token_ids_are_taken_as_they_are(small: PromptLookupDecoder) -> None:
    ids = small.tokenizer.encode(PROMPT)
    expected = [r.token for r in small.stream(PROMPT, max_tokens=12)]
    for prompt in (ids, tuple(ids), mx.array(ids)):
        assert [r.token for r in small.stream(prompt, max_tokens=12)] == expected
    bos_alone = list(small.stream([small.tokenizer.bos_token_id], max_tokens=5))
    assert len(bos_alone) == 5
    assert bos_alone[0].prompt_tokens == 1


def test_a_stop_string_inside_an_accepted_draft_ends_the_text_before_it(
    decoder: PromptLookupDecoder,
) -> None:
    whole = "".join(r.text for r in decoder.stream(PROMPT, max_tokens=32))
    stop = "x sees the r"  # begins and ends inside tokens
    assert whole.count(stop) > 1
    second = whole.index(stop, whole.index(stop) + 1)
    for n_draft in (0, 10):
        responses = list(
            decoder.stream(PROMPT, max_tokens=32, n_draft=n_draft, stop=["never", stop])
        )
        assert "".join(r.text for r in responses) == whole[: whole.index(stop)]
        assert responses[-1].finish_reason == "stop"
    ends_late = list(decoder.stream(PROMPT, max_tokens=32, stop=whole[second - 12 : second + 4]))
    assert any(response.from_draft for response in ends_late)
    assert "".join(r.text for r in ends_late) == whole[: second - 12]


def test_a_closed_or_broken_stream_leaves_the_decoder_usable(
    small: PromptLookupDecoder,
) -> None:
    expected = [r.token for r in small.stream(PROMPT, max_tokens=30)]
    stream = small.stream(PROMPT, max_tokens=30)
    assert [r.token for r in itertools.islice(stream, 7)] == expected[:7]
    stream.close()
    thrown_into = small.stream(PROMPT, max_tokens=30)
    next(thrown_into)
    with pytest.raises(KeyboardInterrupt):
        thrown_into.throw(KeyboardInterrupt)
    assert [r.token for r in small.stream(PROMPT, max_tokens=30)] == expected


def test_two_generations_at_once_do_not_disturb_each_other(small: PromptLookupDecoder) -> None:
    other = PROMPT.replace("red fox", "old bear")
    alone = [[r.token for r in small.stream(p, max_tokens=20)] for p in (PROMPT, other)]
    streams = [small.stream(p, max_tokens=20) for p in (PROMPT, other)]
    together = list(itertools.zip_longest(*streams))
    assert [[r.token for r in column if r] for column in zip(*together, strict=True)] == alone


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt": ""}, PromptError, "prompt is empty"),
        ({"prompt": "a\ud800"}, PromptError, "half a character"),
        ({"prompt": []}, PromptError, "BOS"),
        ({"prompt": [1, 4096]}, PromptError, "the id 4096: pass ids from 0 to 4095"),
        ({"prompt": [-1, 5]}, PromptError, "the id -1"),
        ({"prompt": [1] * 1_000_000}, PromptError, "1000000 tokens, but the model's context"),
        ({"max_tokens": 0}, OptionError, "max_tokens is 0"),
        ({"max_tokens": -1}, OptionError, "max_tokens is -1"),
        ({"n_draft": -1}, OptionError, "n_draft is -1"),
        ({"ngram_min": 4}, OptionError, "ngram_min is 4"),
        ({"temp": -1}, OptionError, "temp is -1"),
        ({"stop": [""]}, OptionError, "empty"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_input_is_refused_in_one_line_before_anything_runs(
    decoder: PromptLookupDecoder, options: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        decoder.stream(**{"prompt": PROMPT, **options})
    assert "\n" not in str(raised.value)


def test_a_loaded_model_needs_its_tokenizer(decoder: PromptLookupDecoder) -> None:
    with pytest.raises(OptionError, match="tokenizer"):
        PromptLookupDecoder(decoder.model)
    again = PromptLookupDecoder(decoder.model, decoder.tokenizer)
    assert len(list(again.stream(PROMPT, max_tokens=3))) == 3


def test_a_drafter_of_ones_own_can_be_passed(small: PromptLookupDecoder) -> None:
    class Guess(mlxspec.Drafter):
        pipelined = False
        branching = True

        def begin(self, prompt: list[int]) -> None:
            self.last = prompt[-1]

        def propose(self, max_depth: int) -> mlxspec.DraftTree:
            return mlxspec.DraftTree.from_branches(self.last, [[7, 8], [9], [7, 10]])

        def observe(self, step: mlxspec.VerifiedStep) -> None:
            self.last = step.tokens[-1]

        def end(self) -> None:
            pass

    expected = [r.token for r in small.stream(PROMPT, max_tokens=20)]
    assert [r.token for r in drafted(small, PROMPT, Guess(), max_tokens=20)] == expected


def test_the_public_names_are_there_and_importing_them_is_cheap() -> None:
    for name in mlxspec.__all__:
        assert getattr(mlxspec, name) is not None
    code = "import mlxspec, sys; print('mlx.core' in sys.modules, 'transformers' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.split() == ["False", "False"]
