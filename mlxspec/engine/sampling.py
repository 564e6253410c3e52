"""Random numbers that depend on seed and position alone, not on what was drawn before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields
from types import FunctionType
from typing import Any, Generic, TypeVar, cast

import mlx.core as mx
from mlx_lm import sample_utils
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from ..errors import OptionError


class KeyedRandom:
    """The random numbers of one generation.

    A key of MLX's counter-based generator is two words. The second is a position; the first
    stands for the seed, and differs between the purposes that draw at one position.

    Args:
        seed: None draws one from MLX's random state.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is None:
            high, low = cast(list[int], mx.random.randint(0, 2**31 - 1, (2,)).tolist())
            seed = high << 32 | low
        seed_word = mx.random.split(mx.random.key(seed))[0, 0].item()
        words = mx.random.split(mx.array([seed_word, 0], dtype=mx.uint32)).flatten()
        self._noise_word, self._coin_word, self._state_word, _ = cast(list[int], words.tolist())

    def gumbel(self, positions: Sequence[int], size: int) -> mx.array:
        """Standard Gumbel noise, (rows, size); rows of one position share theirs."""
        return _by_position(
            self._noise_word, positions, lambda key: mx.random.gumbel((size,), key=key)
        )

    def uniform(self, positions: Sequence[int]) -> mx.array:
        """One number between 0 and 1 for each row, (rows, 1), independent of the noise."""
        return _by_position(
            self._coin_word, positions, lambda key: mx.random.uniform(0, 1, (1,), key=key)
        )

    @contextmanager
    def mlx_state(self, position: int) -> Iterator[None]:
        """Key MLX's random state for what is drawn inside, and restore it."""
        with restored_mlx_state():
            mx.random.seed(self._state_word << 32 | position)
            yield


@contextmanager
def restored_mlx_state() -> Iterator[None]:
    """Leave MLX's random state as it is, whatever is drawn inside.

    A compiled function that draws would leave a state that waits for the function's inputs.
    """
    (key,) = cast(Sequence[mx.array], mx.random.state)
    high, low = cast(list[int], key.tolist())
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)


def _by_position(
    word: int, positions: Sequence[int], draw: Callable[[mx.array], mx.array]
) -> mx.array:
    """Stack ``draw(key)`` for each position, one draw for equal ones."""
    distinct = sorted(set(positions))
    keys = mx.array([[word, position] for position in distinct], dtype=mx.uint32)
    drawn = mx.vmap(draw)(keys)
    if distinct == list(positions):
        return drawn
    rank = {position: index for index, position in enumerate(distinct)}
    return drawn[mx.array([rank[position] for position in positions])]


LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""From the context's tokens, (length,), and the logits after it, (1, vocabulary), to logits."""

Sampler = Callable[[mx.array], mx.array]
"""From log-probabilities, (1, vocabulary), to the token, (1,)."""

_Function = TypeVar("_Function", bound=Callable[..., mx.array])

_COLDEST = 1e-30  # what a logit difference is divided by without leaving float32


def pure(function: _Function) -> _Function:
    """Say of a logits processor or a sampler that it depends on its arguments alone.

    Then it may be asked about tokens that turn out to be wrong, and so the output can be
    drafted. What mlx-lm's ``make_logits_processors`` and ``make_sampler`` return is known to be
    pure. A sampler that draws from MLX's random state is pure, too.

    Args:
        function: called with the arguments that it is given; keeps nothing between calls.

    Returns:
        what to pass in its place. ``@mlxspec.pure`` above a function does the same.
    """
    return _Pure(function)  # type: ignore[return-value]


class _Pure(Generic[_Function]):
    # A type, and no attribute of the function: functools.wraps would copy that to a wrapper.

    def __init__(self, function: _Function) -> None:
        self._function = function

    def __call__(self, *args: Any) -> mx.array:
        return self._function(*args)


def _is_pure(function: object) -> bool:
    """Whether a processor or sampler is marked as pure, or made by mlx-lm."""
    if isinstance(function, FunctionType):  # and nothing that forwards a function's attributes
        return function.__globals__ is vars(sample_utils)
    return isinstance(function, _Pure)


@dataclass(frozen=True)
class SamplingParams:
    """How the target picks a token; the names, meanings and order of effects are mlx-lm's.

    The logits after each token go through the logit bias, the penalties and the logits
    processors, become log-probabilities, and above temperature 0 are filtered by top-p, min-p,
    XTC and top-k and divided by the temperature.

    Attributes:
        temp: temperature; 0 takes the most likely token.
        top_p: keep the smallest set of tokens with this much probability; 0 and 1 keep all.
        top_k: keep this many tokens; 0 keeps all.
        min_p: keep tokens with at least this share of the best one's probability; 0 keeps all.
        seed: with the position of a token, determines its random numbers. None draws a seed
            from MLX's random state for each generation.
        min_tokens_to_keep: this many of the best tokens are kept by ``min_p``.
        xtc_probability: how often, from 0 to 1, XTC drops the likeliest tokens.
        xtc_threshold: XTC drops all but the least likely of the tokens with more probability
            than this, 0 to 0.5.
        xtc_special_tokens: ids that XTC never drops, usually line breaks and end tokens.
        logit_bias: by token id, what is added to its logit; minus infinity forbids it.
        repetition_penalty: divides positive logits of tokens that the context holds, multiplies
            negative ones (Keskar et al. 2019, arXiv 1909.05858); None or 0 for none.
        repetition_context_size: how many of the context's last tokens count, prompt included;
            0 for all.
        presence_penalty: subtracted from the logit of each token that the context holds.
        presence_context_size: as ``repetition_context_size``.
        frequency_penalty: subtracted from a token's logit for each time the context holds it.
        frequency_context_size: as ``repetition_context_size``.
        logits_processors: called in order, after bias and penalties, with the context and the
            logits after it. One that counts its calls, or follows a grammar as the output grows,
            is called as mlx-lm calls it, once for each token and in order; so nothing is drafted
            with it. One that depends on its arguments alone is better marked with
            :func:`mlxspec.pure`: then drafts are verified with it, each token of a draft in its
            own context. mlx-lm's own need no mark.
        sampler: picks the token in place of temperature and filters; called and marked like
            processors. What it draws from MLX's random state is keyed by seed and position, and
            the state is as before after it. So ``mx.random.seed`` makes samples repeatable, but
            they are others than mlx-lm draws from that seed.

    Raises:
        OptionError: a value is outside its range, or a sampler comes with what it replaces.
    """

    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = 0
    _: KW_ONLY
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] = ()
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logits_processors: Sequence[LogitsProcessor] | None = None
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        if self.temp != 0 and not _COLDEST <= self.temp < math.inf:
            raise OptionError(
                f"temp is {self.temp}: the temperature is 0 (greedy), or {_COLDEST} and above"
            )
        self._check_range(0, 1, "top_p", "min_p", "xtc_probability")
        self._check_range(0, 0.5, "xtc_threshold")
        if self.top_k < 0:
            raise OptionError(f"top_k is {self.top_k}: keep 1 token or more, or 0 for all")
        if self.min_tokens_to_keep < 1:
            raise OptionError(f"min_tokens_to_keep is {self.min_tokens_to_keep}: choose 1 or more")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise OptionError(f"seed is {self.seed}: choose it between 0 and 2**64 - 1")
        self._check_penalties()
        for token, bias in (self.logit_bias or {}).items():
            if not bias < math.inf:
                raise OptionError(f"logit_bias of token {token} is {bias}: choose a number")
        self._check_sampler()

    @property
    def allows_drafts(self) -> bool:
        """Whether processors and sampler may be asked about tokens that turn out to be wrong."""
        own = [*(self.logits_processors or ()), *filter(None, [self.sampler])]
        return all(map(_is_pure, own))

    def _check_range(self, least: float, most: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not least <= value <= most:
                raise OptionError(f"{name} is {value}: choose it between {least} and {most}")

    def _check_penalties(self) -> None:
        if self.repetition_penalty is not None and not 0 <= self.repetition_penalty < math.inf:
            raise OptionError(
                f"repetition_penalty is {self.repetition_penalty}: choose a number above 1 to "
                "discourage repetition, below 1 to encourage it, or 0 for none"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name) or 0):
                raise OptionError(f"{name} is {getattr(self, name)}: choose a finite number")
        for kind in ("repetition", "presence", "frequency"):
            size = getattr(self, f"{kind}_context_size")
            if size < 0:
                raise OptionError(
                    f"{kind}_context_size is {size}: count 1 token or more, or 0 for all"
                )

    def _check_sampler(self) -> None:
        if self.sampler is None:
            return
        for field in fields(self):
            if field.name in _REPLACED_BY_SAMPLER and getattr(self, field.name) != field.default:
                raise OptionError(
                    f"{field.name} is {getattr(self, field.name)} beside a sampler, which takes "
                    "its place: choose one of them"
                )


_REPLACED_BY_SAMPLER = {
    "temp",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens_to_keep",
    "xtc_probability",
    "xtc_threshold",
    "xtc_special_tokens",
}


def filtered(
    logprobs: mx.array, positions: Sequence[int], params: SamplingParams, random: KeyedRandom
) -> mx.array:
    """Set what the filters drop to minus infinity.

    Args:
        logprobs: (rows, vocabulary).
        positions: per row, the position of the token to be chosen.
        params: which filters there are.
        random: says at which positions XTC drops tokens.
    """
    if 0 < params.top_p < 1:
        logprobs = apply_top_p(logprobs, params.top_p)
    if params.min_p > 0:
        least = min(params.min_tokens_to_keep, logprobs.shape[-1])
        logprobs = apply_min_p(logprobs, params.min_p, least)
    if params.xtc_probability > 0:
        logprobs = _without_top_choices(logprobs, positions, params, random)
    if 0 < params.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, params.top_k)
    return logprobs


def _without_top_choices(
    logprobs: mx.array, positions: Sequence[int], params: SamplingParams, random: KeyedRandom
) -> mx.array:
    """Apply XTC, one coin for each position.

    mlx-lm's function tosses one coin for all rows, from MLX's random state. So it is asked to
    drop tokens always, and the coins are ours.
    """
    with restored_mlx_state():
        dropped = apply_xtc(logprobs, 1.0, params.xtc_threshold, list(params.xtc_special_tokens))
    return mx.where(random.uniform(positions) > params.xtc_probability, logprobs, dropped)
