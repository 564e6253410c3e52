"""A generation as one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..generation.response import GenerationResult


def json_report(result: GenerationResult, model: str) -> str:
    """One line of JSON: the fields of the result, the derived figures, and the model's name.

    It is ASCII without control characters, so it is right in every encoding and harmless on a
    terminal; a reader gets the text back exactly.
    """
    report = {"model": model, **asdict(result)}
    report["generation_tokens"] = len(result.tokens)
    report["stats"] |= {
        "tokens_per_step": result.stats.tokens_per_step,
        "acceptance_rate": result.stats.acceptance_rate,
    }
    return json.dumps(report).replace("\x7f", "\\u007f")  # DEL is the one that json leaves
