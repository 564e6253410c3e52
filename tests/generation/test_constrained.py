"""Constrained output is valid and equals plain constrained decoding, whatever is drafted."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jsonschema
import llguidance
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlxspec
from mlxspec import Constraint, GenerationResponse, SamplingParams
from mlxspec.bench.measure import NEAR_TIE_FLOAT32
from mlxspec.engine.capability import Capability
from mlxspec.engine.compiling import compile_in_subprocess
from mlxspec.engine.grammar import Vocabulary
from mlxspec.engine.sampling import Chooser
from mlxspec.generation.scheduler import Scheduler
from tests.support.demo import FLAT, AnyDecoder, demo, demo_decoder, given_costs
from tests.support.drafters import HostileDrafter
from tests.support.examples import LONG, examples
from tests.support.llamas import repetitive_llama
from tests.support.random_models import random_model
from tests.support.random_schemas import random_object, random_schema
from tests.support.schedulers import submit
from tests.support.tokenizer_kinds import SENTENCEPIECE, byte_level, sentencepiece

PROMPTS = (
    "Describe Alice as JSON:",
    'Repeat: {"name": "Wendy", "age": 20, "colour": "green", "tags": []}\n',
    "def main():\n    return ",
)
TOKENS = 90 if LONG else 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


@cache
def small() -> mlxspec.Decoder:
    """Return a small random model that repeats itself where the constraint allows it."""
    return mlxspec.Decoder(repetitive_llama(), demo().tokenizer)


def small_decoder(kind: type[AnyDecoder], **options: object) -> AnyDecoder:
    """Return a new decoder of the small model."""
    _ = small().loaded.capability, small().loaded.chain_capability
    return kind(copy.copy(small().loaded), small().tokenizer, **options)  # type: ignore[arg-type]


def decoders(make: Any) -> dict[str, tuple[mlxspec.Decoder, dict[str, Any]]]:
    """Return decoders for every drafting method, with their options."""
    auto = make(mlxspec.AutoDecoder, memory_tokens=0)
    auto.costs = given_costs(FLAT)
    return {
        "lookup": (make(mlxspec.PromptLookupDecoder), {}),
        "lookahead": (make(mlxspec.LookaheadDecoder), {"window_size": 3, "ngram_size": 3}),
        "auto": (auto, {}),
    }


def plainly(decoder: mlxspec.Decoder, prompt: Any, **options: Any) -> list[GenerationResponse]:
    return list(decoder.stream(prompt, options.pop("max_tokens", TOKENS), **options))


def assert_same(
    expected: Sequence[GenerationResponse],
    tokens: Sequence[int],
    temp: float = 0.0,
    seed: int = 0,
) -> None:
    """Assert plain decoding's tokens, up to a near tie in its constrained probabilities."""
    plain = [response.token for response in expected]
    if plain == tokens:
        return
    index = next(i for i, (a, b) in enumerate(zip(plain, tokens, strict=False)) if a != b)
    chooser = Chooser(SamplingParams(temp=temp, seed=seed))
    position = expected[0].prompt_tokens + index
    values = chooser.perturb(expected[index].logprobs[None], [position])[0]
    margin = (values[plain[index]] - values[tokens[index]]).item()
    assert abs(margin) < NEAR_TIE_FLOAT32, (index, margin)


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    return bool(checker.is_valid(json.loads(text)))


def text_of(responses: Sequence[GenerationResponse]) -> str:
    return "".join(response.text for response in responses)


def by_brute_force(decoder: mlxspec.Decoder, prompt: str, constraint: Constraint) -> list[int]:
    """Decode token by token with mlx-lm's model, llguidance's masks and argmax."""
    model, tokenizer = decoder.model, decoder.tokenizer
    definition = compile_in_subprocess(
        constraint, {"size": decoder.loaded.vocab_size, "ends": [2], "special": {}}
    )
    vocabulary = Vocabulary.of(tokenizer, decoder.loaded.vocab_size)
    matcher = llguidance.LLMatcher(vocabulary.tokens, definition)
    cache = make_prompt_cache(model)
    rows, output = mx.array(tokenizer.encode(prompt)), []
    while len(output) < TOKENS:
        logits = np.array(model(rows[None], cache=cache)[0, -1].astype(mx.float32))
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: len(logits)].astype(bool)
        token = int(np.where(allowed, logits, -math.inf).argmax())
        output.append(token)
        if token in tokenizer.eos_token_ids:
            break
        assert matcher.consume_token(token)
        rows = mx.array([token])
    return output


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("model", [small_decoder, demo_decoder])
def test_plain_constrained_decoding_is_masks_and_argmax(model: Any) -> None:
    decoder = model(mlxspec.Decoder)
    source = random.Random(1)
    for number in range(examples(3, long=40)):
        constraint = Constraint.json_schema(random_object(source))
        prompt = PROMPTS[number % len(PROMPTS)]
        found = plainly(decoder, prompt, constraint=constraint)
        expected = by_brute_force(decoder, prompt, constraint)
        assert_same(found, expected)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("model", [small_decoder, demo_decoder])
def test_drafts_change_nothing_and_what_has_stopped_is_valid(model: Any) -> None:
    drafting, plain = decoders(model), model(mlxspec.Decoder)
    source = random.Random(2)
    stopped = drafted = 0
    for number in range(examples(3, long=160)):
        schema = random_schema(source)
        prompt = PROMPTS[number % len(PROMPTS)]
        options = {"constraint": Constraint.json_schema(schema), "seed": number}
        temp = options["temp"] = (0.0, 0.7, 1.3)[number % 3]
        expected = plainly(plain, prompt, **options)
        if expected[-1].finish_reason == "stop":
            stopped += 1
            assert is_valid(text_of(expected), schema), (schema, text_of(expected))
        for name, (decoder, how) in drafting.items():
            found = plainly(decoder, prompt, **options, **how)
            assert_same(expected, [r.token for r in found], temp, number)
            assert found[-1].finish_reason == expected[-1].finish_reason, name
            drafted += found[-1].stats.accepted
    assert stopped
    assert drafted


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_drafts_of_ids_that_the_model_lacks_change_nothing(temp: float) -> None:
    constraint = Constraint.json_schema(PERSON)
    options: dict[str, Any] = {"constraint": constraint, "temp": temp, "seed": 6}
    expected = plainly(small_decoder(mlxspec.Decoder), PROMPTS[0], max_tokens=60, **options)
    truth, size = [response.token for response in expected], small().loaded.vocab_size

    def hostile(seed: int) -> HostileDrafter:
        return HostileDrafter(truth, size, 2, seed)

    for seed in range(examples(3)):
        alone = small_decoder(mlxspec.Decoder, drafter=partial(hostile, seed))
        found = plainly(alone, PROMPTS[0], max_tokens=60, **options)
        assert_same(expected, [response.token for response in found], temp, 6)
        assert found[-1].finish_reason == expected[-1].finish_reason
        beside = small_decoder(mlxspec.AutoDecoder, extra_drafter=hostile(seed), memory_tokens=0)
        beside.costs = given_costs(FLAT)
        found = plainly(beside, PROMPTS[0], max_tokens=60, **options)
        assert_same(expected, [response.token for response in found], temp, 6)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_a_prediction_with_a_token_that_the_model_lacks_changes_nothing(together: bool) -> None:
    auto = decoders(small_decoder)["auto"][0]
    constraint = Constraint.regex("[a-z ]{60,90}")
    expected = plainly(small_decoder(mlxspec.Decoder), PROMPTS[2], constraint=constraint)
    prediction = [
        t for one in expected for t in (one.token, small().loaded.vocab_size + 3, one.token)
    ]
    scheduler = Scheduler(auto)
    outputs: list[list[GenerationResponse]] = [[] for _ in range(1 + together)]
    for responses in outputs:
        submit(
            scheduler,
            PROMPTS[2],
            responses.append,
            TOKENS,
            prediction=prediction,
            constraint=constraint,
        )
    scheduler.run()
    for responses in outputs:
        assert_same(expected, [response.token for response in responses])


@pytest.mark.slow
def test_joint_steps_change_nothing() -> None:
    plain, auto = small_decoder(mlxspec.Decoder), decoders(small_decoder)["auto"][0]
    source = random.Random(3)
    for round_ in range(examples(1, long=16)):
        scheduler = Scheduler(auto)
        asked: list[tuple[str, dict[str, Any], list[GenerationResponse]]] = []
        for number in range(4):
            schema = None if number == 2 else random_object(source)
            options = {
                "constraint": None if schema is None else Constraint.json_schema(schema),
                "temp": (0.0, 0.8)[(number + round_) % 2],
                "seed": number,
            }
            responses: list[GenerationResponse] = []
            prompt = PROMPTS[number % len(PROMPTS)]
            submit(scheduler, prompt, responses.append, TOKENS, **options)  # type: ignore[arg-type]
            asked.append((prompt, options, responses))
        scheduler.run()
        for prompt, options, responses in asked:
            expected = plainly(plain, prompt, **options)
            assert_same(expected, [r.token for r in responses], options["temp"], options["seed"])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [Capability.PLAIN, Capability.CHAIN])
def test_models_that_verify_less_follow_constraints_too(capability: Capability) -> None:
    decoder = decoders(small_decoder)["auto"][0]
    decoder.loaded.capability = decoder.loaded.chain_capability = capability
    constraint = Constraint.json_schema(PERSON)
    expected = plainly(
        small_decoder(mlxspec.Decoder), PROMPTS[0], constraint=constraint, max_tokens=60
    )
    found = plainly(decoder, PROMPTS[0], constraint=constraint, max_tokens=60)
    assert_same(expected, [response.token for response in found])
    assert is_valid(text_of(found), PERSON)
    assert (found[-1].stats.drafted > 0) == (capability is Capability.CHAIN)


@pytest.mark.slow
def test_forced_tokens_are_drafted_and_accepted() -> None:
    decoder = decoders(demo_decoder)["auto"][0]
    schema: dict[str, Any] = {
        "const": {"a long and constant key": ["with", "some", "more", "texts", 12345]}
    }
    found = plainly(decoder, PROMPTS[0], constraint=Constraint.json_schema(schema), max_tokens=90)
    assert json.loads(text_of(found)) == schema["const"]
    stats = found[-1].stats
    assert stats.accepted == stats.drafted
    assert stats.emitted > 5 * stats.steps


@pytest.mark.slow
def test_penalties_processors_and_log_probabilities_hold_under_constraints() -> None:
    seen: list[int] = []

    def count(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(len(tokens))
        return logits

    options: dict[str, Any] = {
        "constraint": Constraint.json_schema(PERSON),
        "repetition_penalty": 1.4,
        "logit_bias": {5: -math.inf},
        "temp": 0.6,
        "seed": 4,
    }
    expected = plainly(small_decoder(mlxspec.Decoder), PROMPTS[1], **options)
    drafting = decoders(small_decoder)
    for decoder, how in (drafting["lookup"], drafting["auto"]):
        found = plainly(decoder, PROMPTS[1], **options, **how)
        assert_same(expected, [response.token for response in found], 0.6, 4)
        for response, same in zip(found, expected, strict=True):
            chosen = response.token
            assert math.isfinite(response.logprobs[chosen].item())
            assert abs(response.logprobs[chosen] - same.logprobs[chosen]).item() < 1e-3
    counting = plainly(drafting["auto"][0], PROMPTS[1], **options, logits_processors=[count])
    assert_same(expected, [response.token for response in counting], 0.6, 4)
    assert seen == sorted(set(seen))  # once per token, in order


@pytest.mark.slow
def test_a_bias_cannot_forbid_all_that_a_constraint_allows() -> None:
    decoder = demo_decoder(mlxspec.Decoder)
    everything = dict.fromkeys(range(decoder.loaded.vocab_size), -math.inf)
    found = plainly(decoder, "Say:", constraint=Constraint.choice(["one"]), logit_bias=everything)
    assert text_of(found) == "one"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Constraint.regex(r"(yes|no), [a-f]{3}\d"), r"(yes|no), [a-f]{3}\d"),
        (Constraint.choice(["up (1.0)", "down [x]", "日本"]), r"up \(1\.0\)|down \[x\]|日本"),
        (Constraint.grammar('start: "a" b{2,3} "c"\nb: "x" | "yz"'), r"a(x|yz){2,3}c"),
        (Constraint.grammar('root ::= "a" ("b" | [0-9]) end\nend ::= "."'), r"a(b|[0-9])\."),
        (Constraint.regex(""), ""),
    ],
)
def test_regexes_choices_and_grammars(constraint: Constraint, pattern: str) -> None:
    expected = plainly(small_decoder(mlxspec.Decoder), PROMPTS[2], constraint=constraint)
    assert re.fullmatch(pattern, text_of(expected))
    assert expected[-1].finish_reason == "stop"
    drafting = decoders(small_decoder)
    for decoder, how in (drafting["lookup"], drafting["auto"]):
        found = plainly(decoder, PROMPTS[2], constraint=constraint, **how)
        assert_same(expected, [response.token for response in found])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraint", "named"),
    [
        (Constraint.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Constraint.json_schema({"properties": {"a": {"not": {}}}}), "not"),
        (Constraint.json_schema({"type": "string", "format": "phone"}), "phone"),
        (Constraint.json_schema({"type": "string", "pattern": "("}), "unclosed group"),
        (Constraint.json_schema({"minimum": 5, "maximum": 3, "type": "integer"}), "minimum"),
        (Constraint.json_schema({"type": "integer", "minimum": 10**40}), "1000000"),
        (Constraint.json_schema({"$ref": "http://example.com/schema"}), "example.com"),
        (Constraint.regex("(?=x)y"), "look-around"),
        (Constraint.regex("("), "unclosed group"),
        (Constraint.grammar("start: unknown"), "unknown"),
        (Constraint.grammar("root ::= x("), "x("),
        ({"type": "object"}, "dict"),
        # Compiling these would take minutes or gigabytes.
        (Constraint.json_schema({"items": {"multipleOf": 999983}}), "more than 2 seconds"),
        (
            Constraint.json_schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]}),
            "more than 2 seconds",
        ),
        (Constraint.grammar(r'start: %json {"\u006dultipleOf": 999983}'), "more than 2 seconds"),
        (
            Constraint.json_schema({"patternProperties": {f"^{n}[b-z]*$": {} for n in range(400)}}),
            "more than 2 seconds",
        ),
        (
            Constraint.json_schema(
                {"properties": {f"k{n}": {} for n in range(4000)}, "additionalProperties": False}
            ),
            "too big",
        ),
    ],
)
def test_what_cannot_be_kept_is_named_before_anything_is_generated(
    constraint: Any, named: str
) -> None:
    decoder = demo_decoder(mlxspec.Decoder)
    with pytest.raises(mlxspec.MlxspecError) as caught:
        decoder.stream(PROMPTS[0], 5, constraint=constraint)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_tokenizers_as_mlx_lm_loads_them_have_spaces_and_parts_of_characters() -> None:
    kinds = [sentencepiece(SENTENCEPIECE["demo"]), byte_level()]
    for tokenizer in map(TokenizerWrapper, kinds):
        model = random_model("llama", vocab_size=len(tokenizer) + 30)
        decoder = mlxspec.Decoder(model, tokenizer)
        for text in ("a fine  day", "größe 日本"):
            output = plainly(decoder, "Say:", constraint=Constraint.choice([text]))
            tokens = [response.token for response in output]
            written = tokenizer.decode(tokens, skip_special_tokens=True)
            assert written.strip() == text
            assert output[-1].finish_reason == "stop"


@pytest.mark.parametrize("step", [0.01, 0.25, 60, 1000, 9973, 65536, 100_000, 0.0000001])
def test_usual_multiples_are_kept(step: float) -> None:
    constraint = Constraint.json_schema({"type": "number", "multipleOf": step})
    assert "multipleOf" in compile_in_subprocess(
        constraint, {"size": 300, "ends": [2], "special": {}}
    )


@pytest.mark.parametrize("step", [1e300, 5e-324])
def test_unusual_multiples_are_refused(step: float) -> None:
    constraint = Constraint.json_schema({"type": "number", "multipleOf": step})
    with pytest.raises(mlxspec.OptionError, match="multipleOf"):
        compile_in_subprocess(constraint, {"size": 300, "ends": [2], "special": {}})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constraint.json_schema("{"),
        lambda: Constraint.json_schema("[1]"),
        lambda: Constraint.json_schema(False),
        lambda: Constraint.json_schema({"const": math.nan}),
        lambda: Constraint.regex("a" * 2_000_000),
        lambda: Constraint.choice([]),
        lambda: Constraint.choice(["a"] * 1_000_000),
    ],
)
def test_a_constraint_of_a_wrong_type_is_refused_at_once(make: Any) -> None:
    with pytest.raises(mlxspec.MlxspecError):
        make()
