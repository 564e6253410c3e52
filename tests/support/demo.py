"""The bundled model and a stand-in, each loaded and probed once, with fixed costs."""

from __future__ import annotations

import copy
from functools import cache
from typing import TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec import Decoder
from mlxspec.drafting.cost_file import Calibration, StepTime
from mlxspec.drafting.costs import LiveCosts
from mlxspec.engine.calibration import costs_for
from tests.support.examples import LONG
from tests.support.llamas import repetitive_llama

AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)

FLAT = {1: 1.0, 16: 1.05, 64: 16.0}  # wide steps stay expensive: they are slow in tests, too
LINEAR = {1: 1.0, 64: 64.0}
CHAINS = {1: 1.0, 16: 2.5, 64: 8.0}
"""Rows are cheap enough for chains and too expensive for branches."""


@cache
def demo() -> Decoder:
    """Return a decoder of the bundled model. All tests share the model and the tokenizer."""
    return Decoder("demo")


def demo_decoder(kind: type[AnyDecoder], **options: object) -> AnyDecoder:
    """Return a new decoder of the bundled model."""
    return _decoder_like(demo(), kind, **options)


@cache
def stand_in() -> Decoder:
    """Return a decoder of a small random model that repeats itself, five times as fast as the demo.

    For tests that do not need meaningful text. It has the bundled tokenizer. With
    ``MLXSPEC_LONG=1`` it is the bundled model.
    """
    return demo() if LONG else Decoder(repetitive_llama(), demo().tokenizer)


def stand_in_decoder(kind: type[AnyDecoder], **options: object) -> AnyDecoder:
    """Return a new decoder of the stand-in model."""
    return _decoder_like(stand_in(), kind, **options)


@cache
def endless_tokenizer() -> TokenizerWrapper:
    """Return the bundled tokenizer without EOS tokens."""
    tokenizer = TokenizerWrapper(demo().tokenizer._tokenizer)
    tokenizer.eos_token_ids = set()
    return tokenizer


def _decoder_like(other: Decoder, kind: type[AnyDecoder], **options: object) -> AnyDecoder:
    """Return a decoder with the known capabilities, which would take 200 rows to probe."""
    _ = other.loaded.capability, other.loaded.chain_capability
    return kind(copy.copy(other.loaded), other.tokenizer, **options)


def keep_costs() -> None:
    """Measure and save the bundled model's costs, so that subprocesses need not measure them."""
    costs_for(demo().loaded)


class GivenCosts(LiveCosts):
    """Fixed costs: no step updates them, and no file keeps them."""

    def record(self, rows: int, seconds: float, pipelined: bool) -> None:
        pass


def given_costs(curve: dict[int, float]) -> GivenCosts:
    """Return fixed costs from a map of rows to their cost relative to one row.

    A plain step takes a second, so that the time of planning decides nothing.
    """
    times = [StepTime(rows, cost, 0.001) for rows, cost in curve.items()]
    return GivenCosts({1024: Calibration(times)})
