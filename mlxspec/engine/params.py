"""The parameters of a generation: how to sample, and how much memory its caches may take.

Knows no MLX, so that the command line makes its options from these fields at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, SupportsFloat, SupportsIndex, TypeVar

from ..errors import OptionError

if TYPE_CHECKING:
    import mlx.core as mx

LogitsProcessor = Callable[["mx.array", "mx.array"], "mx.array"]
"""From the context's tokens, (length,), and the logits after it, (1, vocabulary), to logits."""

Sampler = Callable[["mx.array"], "mx.array"]
"""From log-probabilities, (1, vocabulary), to the token, (1,)."""

_Function = TypeVar("_Function", bound="Callable[..., mx.array]")

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
    from mlx_lm import sample_utils

    if isinstance(function, FunctionType):  # and nothing that forwards a function's attributes
        return function.__globals__ is vars(sample_utils)
    return isinstance(function, _Pure)


def _option(default: Any, metavar: str, help: str) -> Any:
    """A field that is an option of the command line, too; see :mod:`mlxspec.cli.common.options`."""
    return field(default=default, metadata={"metavar": metavar, "help": help})


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
        sampler: picks the token instead of temperature and filters; called and marked like
            processors. What it draws from MLX's random state is keyed by seed and position, and
            the state is as before after it. So ``mx.random.seed`` makes samples repeatable, but
            they are others than mlx-lm draws from that seed.

    Raises:
        OptionError: a value is outside its range, or a sampler comes with what it replaces.
    """

    temp: float = _option(0.0, "T", "Temperature; 0 is greedy.")
    top_p: float = _option(1.0, "P", "Nucleus; 1 keeps all.")
    top_k: int = _option(0, "K", "Keep K tokens; 0 keeps all.")
    min_p: float = _option(0.0, "P", "Least share of the best probability.")
    seed: int | None = _option(0, "N", "Same seed, same output.")
    _: KW_ONLY
    min_tokens_to_keep: int = _option(1, "N", "--min-p keeps the best N.")
    xtc_probability: float = _option(0.0, "P", "How often XTC drops the likeliest tokens, 0 to 1.")
    xtc_threshold: float = _option(
        0.1, "P", "XTC drops the tokens above this probability but the least likely of them."
    )
    xtc_special_tokens: Sequence[int] = ()
    logit_bias: Mapping[int, float] | None = _option(
        None, "ID=VALUE", "Add VALUE to a token's logit; -inf forbids it; repeatable."
    )
    repetition_penalty: float | None = _option(
        None,
        "F",
        "Divide positive logits of tokens that occurred by F, multiply negative ones; 0 is off.",
    )
    repetition_context_size: int = _option(
        20, "N", "The repetition penalty counts the last N tokens, prompt included; 0 counts all."
    )
    presence_penalty: float | None = _option(
        None, "X", "Subtract X from the logits of tokens that occurred."
    )
    presence_context_size: int = _option(
        20, "N", "The presence penalty counts the last N tokens, prompt included; 0 counts all."
    )
    frequency_penalty: float | None = _option(
        None, "X", "Subtract X for each time that a token occurred."
    )
    frequency_context_size: int = _option(
        20, "N", "The frequency penalty counts the last N tokens, prompt included; 0 counts all."
    )
    logits_processors: Sequence[LogitsProcessor] | None = None
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        _check(self)
        if self.temp != 0 and not _COLDEST <= self.temp < math.inf:
            raise OptionError(
                f"temp is {self.temp}: choose 0 (greedy), or a finite number from {_COLDEST} on"
            )
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(bias, SupportsFloat) or not float(bias) < math.inf:
                raise OptionError(f"logit_bias of token {token} is {bias}: choose a number")
        if self.sampler is None:
            return
        for own in fields(self):
            value = getattr(self, own.name)
            if own.name in _REPLACED_BY_SAMPLER and value != own.default:
                raise OptionError(
                    f"{own.name} is {value}, but a sampler replaces it: pass one of them"
                )

    @property
    def allows_drafts(self) -> bool:
        """Whether processors and sampler may be asked about tokens that turn out to be wrong."""
        own = [*(self.logits_processors or ()), *filter(None, [self.sampler])]
        return all(map(_is_pure, own))


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


@dataclass(frozen=True)
class CacheOptions:
    """What bounds the memory of KV cache and prefill; the names and meanings are mlx-lm's.

    Attributes:
        kv_bits: bits of a quantised key or value; None does not quantise.
        kv_group_size: how many of them share a scale.
        quantized_kv_start: how many positions are cached before quantisation begins.
        max_kv_size: cache at most this many positions: the first 4 and the latest. Models that
            bring a cache of their own (sliding windows, state) ignore it, as in mlx-lm.
        prefill_step_size: how many prompt tokens are processed at a time.

    Raises:
        OptionError: a value is outside its range.
    """

    kv_bits: int | None = _option(None, "N", "Quantise the KV cache to N bits.")
    kv_group_size: int = _option(64, "N", "Values that share a scale.")
    quantized_kv_start: int = _option(5000, "N", "Quantise once N positions are cached.")
    max_kv_size: int | None = _option(
        None,
        "N",
        "Cache N positions at most, the first 4 and the latest, where the model's own cache has "
        "no bound.",
    )
    prefill_step_size: int = 2048

    def __post_init__(self) -> None:
        _check(self)

    @property
    def quantized_at(self) -> int:
        """The length at which mlx-lm quantises the cache of every prompt at least that long.

        It does so after the first chunk that reaches ``quantized_kv_start``. The caches of shorter
        prompts are quantised at the end of the prompt or later.
        """
        step = self.prefill_step_size
        return max(1, math.ceil(self.quantized_kv_start / step)) * step


_MAX = sys.float_info.max

_RANGES: dict[str, tuple[float, float]] = {
    "top_p": (0, 1),
    "top_k": (0, _MAX),
    "min_p": (0, 1),
    "seed": (0, 2**64 - 1),
    "min_tokens_to_keep": (1, _MAX),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "repetition_penalty": (0, _MAX),
    "repetition_context_size": (0, _MAX),
    "presence_penalty": (-_MAX, _MAX),
    "presence_context_size": (0, _MAX),
    "frequency_penalty": (-_MAX, _MAX),
    "frequency_context_size": (0, _MAX),
    "quantized_kv_start": (0, _MAX),
    "max_kv_size": (8, _MAX),  # the first 4 positions are kept, and some must follow them
    "prefill_step_size": (1, _MAX),
}
_CHOICES = {"kv_bits": (2, 3, 4, 5, 6, 8), "kv_group_size": (32, 64, 128)}


def _check(params: SamplingParams | CacheOptions) -> None:
    """Refuse values of a wrong type, and those outside the range of their field."""
    for own in fields(params):
        value: Any = getattr(params, own.name)
        kind, _, optional = str(own.type).partition(" | ")
        needed = {"int": SupportsIndex, "float": SupportsFloat}.get(kind)
        if not needed or (optional and value is None):
            continue
        bounds, choices = _RANGES.get(own.name), _CHOICES.get(own.name)
        if not issubclass(type(value), needed):
            wanted = "a number" if kind == "float" else "a whole number"
            raise OptionError(f"{own.name} is {value!r}: choose {wanted}")
        if choices and value not in choices:
            wanted = ", ".join(map(str, choices))
            raise OptionError(f"{own.name} is {value}: choose one of {wanted}")
        if bounds and not bounds[0] <= value <= bounds[1]:
            least, most = bounds
            wanted = f"{least} or more" if least > -_MAX else "a finite number"
            wanted = f"it between {least} and {most}" if most < _MAX else wanted
            raise OptionError(f"{own.name} is {value}: choose {wanted}")
