"""Constrained output with and without drafts of forced tokens, compared with free output.

    python benchmarks/constrained.py [REPEATS] [MODEL]

The constraints are typical of programs: an extraction with long keys, a list of records, a
classification. All decoders take turns in one process. The figures are ratios of medians: tokens
per second relative to free output without drafts, tokens per step, and the share of a step without
drafts that the constraint takes. Constrained outputs are compared token by token.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import mlxspec
from mlxspec import AutoDecoder, Constraint, Decoder, GenerationResponse

_TOKENS = 160
_PERSON = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 20},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
        "is_a_customer": {"type": "boolean"},
    },
    "required": ["full_name", "age_in_years", "favourite_colour", "is_a_customer"],
    "additionalProperties": False,
}
_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "extraction": ("Wendy, 20, likes green. She is a customer. As JSON:", _PERSON),
    "records": (
        "Three people as JSON:",
        {"type": "array", "items": _PERSON, "minItems": 3, "maxItems": 3},
    ),
    "classification": (
        "The delivery was late and the box was open.",
        {
            "type": "object",
            "properties": {
                "sentiment": {"enum": ["positive", "negative", "neutral"]},
                "department": {"enum": ["shipping", "billing", "support"]},
                "needs_an_answer": {"type": "boolean"},
            },
            "required": ["sentiment", "department", "needs_an_answer"],
            "additionalProperties": False,
        },
    ),
}


def main(repeats: int, model: str) -> None:
    plain = Decoder(model)
    auto = AutoDecoder(plain.model, plain.tokenizer, memory_tokens=0)
    _ = auto.costs  # measured before anything is timed
    ways: dict[str, tuple[Any, dict[str, Any], bool]] = {
        "free, plain": (plain, {}, False),
        "free, drafts": (auto, {}, False),
        "constrained, plain": (plain, {}, True),
        "constrained, drafts": (auto, {}, True),
    }
    print(f"{'form':<16}{'way':<32}{'tokens/step':>12}{'tokens/s':>10}{'ratio':>7}")
    for form, (prompt, schema) in _FORMS.items():
        constraint = Constraint.json_schema(schema)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        last: dict[str, list[GenerationResponse]] = {}
        for turn in range(repeats + 1):
            for way, (decoder, options, constrained) in ways.items():
                own = {**options, **({"constraint": constraint} if constrained else {})}
                started = None
                last[way] = []
                for response in decoder.stream(prompt, _TOKENS, temp=0.0, **own):
                    started = started or time.perf_counter()  # without the prompt
                    last[way].append(response)
                seconds = time.perf_counter() - (started or 0.0)
                if turn:  # the first one compiles
                    rates[way].append((len(last[way]) - 1) / seconds)
        base = median(rates["free, plain"])
        for way, responses in last.items():
            stats, rate = responses[-1].stats, median(rates[way])
            print(
                f"{form:<16}{way:<32}{stats.tokens_per_step:>12.2f}{rate:>10.1f}{rate / base:>7.2f}"
            )
        outputs = {way: [r.token for r in responses] for way, responses in last.items()}
        del outputs["free, plain"], outputs["free, drafts"]
        same = len({tuple(tokens) for tokens in outputs.values()}) == 1
        print(f"{form:<16}{'constrained outputs the same' if same else 'OUTPUTS DIFFER'}")
    print(f"mlxspec {mlxspec.__version__}, {model}, {repeats} repeats")


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 5,
        sys.argv[2] if len(sys.argv) > 2 else "demo",
    )
