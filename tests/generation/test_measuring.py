"""What decoders measure and when, on the bundled demo model."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlxspec
from mlxspec.compat import stream_generate
from mlxspec.drafting.cost_file import Calibration, CostFile, StepTime
from mlxspec.drafting.costs import LiveCosts
from mlxspec.engine.target import Capability
from mlxspec.errors import MlxspecError
from mlxspec.generation.decoder import Decoder
from tests.support.demo import demo


class Measured(Exception):
    """Raised in place of a measurement."""


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return demo().model, demo().tokenizer


@pytest.fixture
def unmeasured(loaded: tuple, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    def measure(*_: object, **__: object) -> None:
        raise Measured

    monkeypatch.setattr("mlxspec.generation.decoder.costs_for", measure)
    return mlxspec.AutoDecoder(*loaded)


@pytest.mark.slow
def test_a_first_generation_measures(unmeasured: Decoder) -> None:
    with pytest.raises(Measured):
        next(unmeasured.stream("The river", 5, temp=0.5, stop=["x"], stop_tokens=7, kv_bits=8))


def test_for_a_model_that_cannot_verify_drafts_nothing_is_measured(
    unmeasured: Decoder,
) -> None:
    unmeasured.loaded.chain_capability = Capability.PLAIN
    *_, last = unmeasured.stream("The river", 5)
    assert (last.stats.steps, last.stats.drafted) == (5, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temp": -1}, "temp is -1"),
        ({"sampling": mlxspec.SamplingParams(top_k=5), "top_p": 3.0}, "top_p is 3.0"),
        ({"logit_bias": {4096: 1.0}}, "logit_bias contains the token id 4096"),
        ({"stop": ""}, "stop has an empty string"),
        ({"stop": ["end", ""]}, "stop has an empty string"),
        ({"stop": None}, "stop is None: pass a string"),
        ({"stop": ["end", 5]}, r"stop is \['end', 5\]: pass a string"),
        ({"stop_tokens": "two words"}, "the stop token 'two words'"),
        ({"kv_bits": 7}, "kv_bits is 7"),
        ({"kv_bits": 8, "kv_group_size": 128}, "kv_group_size 128 does not suit"),
        ({"prefill_step_size": 0}, "prefill_step_size is 0"),
        ({"prompt_cache": []}, "prompt_cache has 0 caches"),
        ({"prompt_cache": [], "session": mlxspec.Session()}, "session and prompt_cache"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_options_are_refused_before_anything_is_measured(
    unmeasured: Decoder, options: dict, message: str
) -> None:
    with pytest.raises(MlxspecError, match=message) as raised:
        unmeasured.stream(**{"prompt": "The river", **options})
    assert "\n" not in str(raised.value)


def test_a_draft_model_s_generation_is_refused_before_anything_is_measured(
    loaded: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mlxspec.generation.decoder.costs_for", lambda *_, **__: pytest.fail("measured")
    )
    with pytest.raises(MlxspecError, match="temp is -1"):
        stream_generate(*loaded, "The river", 5, draft_model=loaded[0], temp=-1)


def test_what_a_lent_cache_holds_counts_for_the_costs(loaded: tuple) -> None:
    decoder = mlxspec.AutoDecoder(*loaded)
    times = [StepTime(1, 0.01, 0.001), StepTime(16, 0.02, 0.001)]
    decoder.costs = LiveCosts({1024: Calibration(times)})
    moves: list[int] = []
    decoder.costs.move_to = moves.append
    cache = make_prompt_cache(decoder.model)
    decoder.model(mx.array([[5] * 30]), cache=cache)
    list(decoder.stream([6, 7], 3, prompt_cache=cache))
    assert moves[1:] == [33, 34, 35]  # after each step


def test_what_generations_learn_of_costs_is_saved_once_in_a_while(
    loaded: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = mlxspec.AutoDecoder(*loaded)
    times = [StepTime(1, 0.01, 0.001), StepTime(16, 0.02, 0.001)]
    known = {1024: Calibration(times)}
    decoder.costs = LiveCosts(known, CostFile({}, {}), lambda: 0.0)
    saved: list[object] = []
    monkeypatch.setattr(CostFile, "update", lambda *update: saved.append(update))
    for _ in range(3):
        list(decoder.stream("The river", 3))
    assert len(saved) == 1


def test_an_unknown_option_is_refused_before_anything_is_measured(
    unmeasured: Decoder,
) -> None:
    with pytest.raises(TypeError, match="tempp"):
        unmeasured.stream("The river", tempp=0.7)
