"""The lookahead decoder, with fixed costs."""

from __future__ import annotations

from functools import cache

import pytest

import mlxspec
from mlxspec import LookaheadDecoder
from mlxspec.bench.measure import NEAR_TIE_FLOAT32, first_difference
from mlxspec.drafting.drafter import NoDraft
from mlxspec.engine.capability import Capability
from mlxspec.errors import OptionError, PromptError
from tests.support.demo import stand_in, stand_in_decoder
from tests.support.drafters import drafted

pytestmark = pytest.mark.slow

PROMPT = '[INST] Repeat the following phrase 8 times: "The red fox sees the river.". [/INST]'


FREE = "The history of the"


def make() -> LookaheadDecoder:
    return stand_in_decoder(LookaheadDecoder)


@cache
def plain(prompt: str, **sampling: float) -> list[int]:
    stream = drafted(stand_in(), prompt, NoDraft(), max_tokens=24, **sampling)
    return [response.token for response in stream]


@pytest.mark.parametrize("window_size", [7, 3, 0])
def test_output_is_plain_decodings_sampling_included(window_size: int) -> None:
    expected = plain(FREE, temp=0.9, seed=5)
    assert expected != plain(FREE)
    stream = make().stream(FREE, 24, window_size=window_size, ngram_size=4, temp=0.9, seed=5)
    actual = [response.token for response in stream]
    sampling = mlxspec.SamplingParams(temp=0.9, seed=5)
    prompt = stand_in().tokenizer.encode(FREE)
    difference = first_difference(stand_in().model, prompt, expected, actual, sampling)
    assert difference is None or difference.margin < NEAR_TIE_FLOAT32


def test_lookahead_writes_the_text_and_returns_the_result(capsys) -> None:
    own = {"pool_from_prompt": False, "max_tokens": 30}
    responses = list(make().stream(PROMPT, window_size=3, ngram_size=3, guess_set_size=4, **own))
    result = make().lookahead(prompt=PROMPT, W=3, N=3, G=4, temp=0.0, seed=0, color=True, **own)
    assert result.tokens == [response.token for response in responses]
    assert result.stats == responses[-1].stats
    assert result.stats.tokens_per_step > 1.2
    assert capsys.readouterr().out.strip() == result.text.strip()


def test_the_default_runs_the_reference_s_window_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "mlxspec.generation.decoder.costs_for", lambda *_, **__: pytest.fail("measured")
    )
    *_, default = make().stream(FREE, 30)
    *_, given = make().stream(FREE, 30, W=7, N=5, G=7)
    *_, none = make().stream(FREE, 30, W=0)
    assert default.stats == given.stats
    assert default.stats.rows / default.stats.steps > 20 > none.stats.rows / none.stats.steps


def test_a_model_that_cannot_verify_drafts_is_decoded_plainly(monkeypatch) -> None:
    decoder = make()
    decoder.loaded.chain_capability = Capability.PLAIN
    *_, last = decoder.stream(PROMPT, 20)
    assert (last.stats.steps, last.stats.drafted) == (20, 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt": ""}, PromptError, "prompt is empty"),
        ({"window_size": -1}, OptionError, "window_size is -1"),
        ({"window_size": "auto"}, OptionError, "window_size is 'auto': choose a whole number"),
        ({"W": None}, OptionError, "window_size is None: choose a whole number"),
        ({"W": 7, "window_size": 7}, OptionError, "W and window_size are the same option"),
        ({"N": 5, "ngram_size": 4}, OptionError, "N and ngram_size are the same option"),
        ({"G": -3}, OptionError, "guess_set_size is -3"),
        ({"ngram_size": 1}, OptionError, "ngram_size is 1"),
        ({"ngram_size": 0, "window_size": 4}, OptionError, "ngram_size is 0"),
        ({"guess_set_size": 0}, OptionError, "guess_set_size is 0"),
        ({"guess_set_size": -3, "window_size": 4}, OptionError, "guess_set_size is -3"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_input_is_refused_in_one_line_before_anything_runs(
    options: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        make().stream(**{"prompt": PROMPT, **options})
    assert "\n" not in str(raised.value)
