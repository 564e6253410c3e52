"""The bundled model and a stand-in, each tried once for what it verifies, with given costs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec import Decoder
from mlxspec.drafting.costs import KnownTime
from mlxspec.drafting.learned import CostCache, CostKey, KnownTimes
from mlxspec.engine.costs import KeptCosts, costs_for
from tests.support.examples import LONG
from tests.support.llamas import repetitive_llama

AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)

FLAT = {1: 1.0, 16: 1.05, 64: 16.0}  # wider steps would take their time here, too
LINEAR = {1: 1.0, 64: 64.0}
CHAINS = {1: 1.0, 16: 2.5, 64: 8.0}
"""Rows that are cheap enough for drafts, and too dear for branches."""


@cache
def demo() -> Decoder:
    """A decoder of the bundled model, which is the same for all tests, as is its tokenizer."""
    return Decoder("demo")


def demo_decoder(kind: type[AnyDecoder], **options: object) -> AnyDecoder:
    """A new decoder of this kind."""
    return _decoder_like(demo(), kind, **options)


@cache
def stand_in() -> Decoder:
    """A small random model that repeats itself, with the bundled tokenizer, in a fifth of the time.

    For tests that need no sense in the text. In the long form it is the bundled model after all.
    """
    return demo() if LONG else Decoder(repetitive_llama(), demo().tokenizer)


def stand_in_decoder(kind: type[AnyDecoder], **options: object) -> AnyDecoder:
    """A new decoder of this kind."""
    return _decoder_like(stand_in(), kind, **options)


@cache
def endless_tokenizer() -> TokenizerWrapper:
    """The bundled tokenizer without a token that ends the output."""
    tokenizer = TokenizerWrapper(demo().tokenizer._tokenizer)
    tokenizer.eos_token_ids = set()
    return tokenizer


def _decoder_like(other: Decoder, kind: type[AnyDecoder], **options: object) -> AnyDecoder:
    """Without the 200 rows that it takes to find the capabilities."""
    _ = other.loaded.capability, other.loaded.chain_capability
    return kind(copy.copy(other.loaded), other.tokenizer, **options)


def keep_costs() -> None:
    """Measure what steps of the bundled model cost, or processes that load it would do so."""
    costs_for(demo().loaded)


class GivenCosts(KeptCosts):
    """Costs that no step corrects and no file keeps, nor those of joint steps."""

    def record(self, rows: int, seconds: float, pipelined: bool, head: float = 0.0) -> None:
        pass

    def end(self) -> None:
        pass

    def _begun_with(self, known: Mapping[int, list[KnownTime]], count: int) -> GivenCosts:
        found = {context: KnownTimes(times, "test") for context, times in known.items()}
        return GivenCosts(self._cache, self._key, found)


def given_costs(curve: dict[int, float]) -> GivenCosts:
    """Costs of so many rows, relative to those of one row."""
    times = [KnownTime(rows, 0.01 * cost, 0.001) for rows, cost in curve.items()]
    found = {1024: KnownTimes(times, "test")}
    return GivenCosts(CostCache(Path("nowhere")), CostKey({}, {}), found)
