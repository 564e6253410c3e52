"""The KV cache options, with mlx-lm's names."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx_lm.generate import generate_step

import mlxspec
from mlxspec.bench.measure import NEAR_TIE_FLOAT32
from mlxspec.cli.main import main
from mlxspec.errors import OptionError
from tests.support.demo import demo_decoder

pytestmark = pytest.mark.slow

PROMPT = '[INST] Repeat the following phrase 3 times: "The red fox sees the river.". [/INST]'
QUANTISED = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 30}


@pytest.fixture(scope="module")
def decoder() -> mlxspec.PromptLookupDecoder:
    return demo_decoder(mlxspec.PromptLookupDecoder)


@pytest.fixture(scope="module")
def mlx_lms_tokens(decoder: mlxspec.PromptLookupDecoder) -> list[int]:
    prompt = mx.array(decoder.tokenizer.encode(PROMPT))
    steps = generate_step(prompt, decoder.model, max_tokens=40, **QUANTISED)
    tokens = []
    for token, logprobs in steps:
        best = mx.sort(logprobs)[-2:]
        # The tests below compare tokens directly, since none is at a near tie.
        assert (best[1] - best[0]).item() > NEAR_TIE_FLOAT32
        tokens.append(token)
        if token in decoder.tokenizer.eos_token_ids:
            break
    return tokens


def test_a_decoder_quantises_as_mlx_lm_does(
    decoder: mlxspec.PromptLookupDecoder, mlx_lms_tokens: list[int]
) -> None:
    responses = list(decoder.stream(PROMPT, 40, **QUANTISED))
    assert [response.token for response in responses] == mlx_lms_tokens
    assert responses[-1].stats.accepted > 5


def test_the_command_line_quantises_as_mlx_lm_does(mlx_lms_tokens: list[int]) -> None:
    arguments = ["generate", "--model", "demo", "--raw", "--prompt", PROMPT, "--json"]
    options = ["--kv-bits", "8", "--quantized-kv-start", "30", "--max-tokens", "40"]
    result = CliRunner().invoke(main, [*arguments, *options, "--decoder", "prompt-lookup"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["tokens"] == mlx_lms_tokens


def test_what_does_not_suit_the_model_is_refused_before_the_first_token(
    decoder: mlxspec.PromptLookupDecoder,
) -> None:
    with pytest.raises(OptionError, match="kv_bits 8 with kv_group_size 128 does not suit"):
        decoder.stream(PROMPT, 40, kv_bits=8, kv_group_size=128)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--kv-bits", "7"], "kv_bits is 7: choose one of"),
        (["--max-kv-size", "3"], "max_kv_size is 3"),
        (["--kv-bits", "8", "--quantized-kv-start", "-1"], "quantized_kv_start is -1"),
    ],
)
def test_a_bad_option_is_one_line_before_any_model_is_loaded(options: list[str], part: str) -> None:
    result = CliRunner().invoke(
        main, ["generate", "--model", "/nowhere", "--prompt", "a", *options]
    )
    assert result.exit_code == 1
    assert part in result.stderr
    assert result.stderr.count("\n") == 1
