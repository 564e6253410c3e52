"""The parameters of a generation: sampling, the constraint of the output, limits on its caches.

This module imports neither MLX nor llguidance, so the command line can quickly make its options
from these fields. :mod:`mlxspec.engine.grammar` turns constraints into token masks.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from operator import index
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsFloat, SupportsIndex, TypeVar

from ..errors import OptionError
from .json_schema import enforceable

if TYPE_CHECKING:
    import mlx.core as mx

LogitsProcessor = Callable[["mx.array", "mx.array"], "mx.array"]
"""Maps the context's tokens, (length,), and the logits after it, (1, vocabulary), to new logits."""

Sampler = Callable[["mx.array"], "mx.array"]
"""Maps log-probabilities, (1, vocabulary), to the chosen token, (1,)."""

_Function = TypeVar("_Function", bound="Callable[..., mx.array]")


def pure(function: _Function) -> _Function:
    """Declare that a logits processor or a sampler depends only on its arguments.

    mlxspec may call such a function for draft tokens that turn out to be wrong, so it can draft.
    The results of mlx-lm's ``make_logits_processors`` and ``make_sampler`` need no declaration. A
    sampler that draws from MLX's random state is pure, too.

    Args:
        function: a processor or sampler that keeps no state between calls.

    Returns:
        the function to pass instead. ``@mlxspec.pure`` above a function does the same.
    """
    return _Pure(function)  # type: ignore[return-value]


class _Pure(partial[Any]):
    """A function marked as pure. The mark is not an attribute, since functools.wraps would copy it
    to any wrapper.
    """


def _is_pure(function: object) -> bool:
    """Whether a processor or sampler is marked as pure, or made by mlx-lm."""
    from mlx_lm import sample_utils

    if isinstance(function, FunctionType):  # not an object that just forwards its attributes
        return function.__globals__ is vars(sample_utils)
    return isinstance(function, _Pure)


def _option(default: Any, metavar: str, help: str) -> Any:
    """A field that is also a command-line option; see :mod:`mlxspec.cli.common.options`."""
    return field(default=default, metadata={"metavar": metavar, "help": help})


@dataclass(frozen=True)
class SamplingParams:
    """How the target picks a token. The names, meanings and order of the options are mlx-lm's.

    The logit bias, the penalties and the logits processors change the logits, which are then turned
    into log-probabilities. Above temperature 0, these are filtered by top-p, min-p, XTC and top-k,
    and then divided by the temperature.

    Attributes:
        temp: temperature; 0 takes the most likely token.
        top_p: keep the fewest tokens whose probabilities add up to this; 0 and 1 keep all tokens.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        min_p: keep tokens with at least this share of the likeliest one's probability; 0 keeps all.
        seed: determines a token's random numbers, together with its position. None draws a seed
            from MLX's random state for each generation.
        min_tokens_to_keep: ``min_p`` keeps at least this many of the likeliest tokens.
        xtc_probability: how often XTC drops the likeliest tokens, from 0 to 1.
        xtc_threshold: when XTC drops tokens, it drops all above this probability, 0 to 0.5, except
            the least likely of them.
        xtc_special_tokens: the ids that XTC never drops, usually line breaks and end tokens.
        logit_bias: a number to add to a token's logit, by token id; minus infinity forbids the
            token.
        repetition_penalty: the factor that positive logits of tokens in the context are divided by,
            and negative ones multiplied by (Keskar et al. 2019, arXiv 1909.05858); None or 0 for
            no penalty.
        repetition_context_size: the number of the context's last tokens that count, including
            the prompt's; 0 for all.
        presence_penalty: subtracted once from the logit of each token in the context.
        presence_context_size: as ``repetition_context_size``.
        frequency_penalty: subtracted from a token's logit for each occurrence in the context.
        frequency_context_size: as ``repetition_context_size``.
        logits_processors: functions that are called in this order, after bias and penalties, with
            the context and the logits after it. Like mlx-lm, mlxspec calls a processor once per
            token and in the output's order, so it drafts nothing. If a processor depends only on
            its arguments, mark it with :func:`mlxspec.pure`: it is then also called for draft
            tokens, with the context of each. mlx-lm's own processors need no mark.
        sampler: a function that picks the token; temperature and filters are then ignored. It is
            called and marked like a processor. Its draws from MLX's random state depend only on
            seed and position, and the state is restored afterwards. So ``mx.random.seed`` makes
            samples repeatable, but they differ from mlx-lm's samples for the same seed.

    Raises:
        OptionError: a value is of a wrong type or out of range.
    """

    temp: float = _option(0.0, "T", "Temperature; 0 is greedy.")
    top_p: float = _option(1.0, "P", "Nucleus sampling; 1 keeps all tokens.")
    top_k: int = _option(0, "K", "Keep the K likeliest tokens; 0 keeps all.")
    min_p: float = _option(0.0, "P", "Drop tokens below this share of the highest probability.")
    seed: int | None = _option(0, "N", "The same seed gives the same output.")
    _: KW_ONLY
    min_tokens_to_keep: int = 1
    xtc_probability: float = _option(0.0, "P", "How often XTC drops the likeliest tokens, 0 to 1.")
    xtc_threshold: float = _option(
        0.1, "P", "XTC drops all tokens above this probability except the least likely of them."
    )
    xtc_special_tokens: Sequence[int] = ()
    logit_bias: Mapping[int, float] | None = _option(
        None, "ID=VALUE", "Add VALUE to a token's logit; -inf forbids it; repeatable."
    )
    repetition_penalty: float | None = _option(
        None,
        "F",
        "Divide positive logits of earlier tokens by F, and multiply negative ones; 0 is off.",
    )
    repetition_context_size: int = _option(
        20, "N", "The repetition penalty looks at the last N tokens, prompt included; 0 for all."
    )
    presence_penalty: float | None = _option(
        None, "X", "Subtract X from the logits of the last 20 tokens, prompt included."
    )
    presence_context_size: int = 20
    frequency_penalty: float | None = _option(
        None, "X", "Subtract X from a token's logit for each time that it is among the last 20."
    )
    frequency_context_size: int = 20
    logits_processors: Sequence[LogitsProcessor] | None = None
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "xtc_special_tokens", tuple(self.xtc_special_tokens))
        for processor in self.logits_processors or ():
            if not callable(processor):
                raise OptionError(f"logits_processors has {processor!r}: choose functions")
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(bias, float | SupportsFloat) or not _as_float(bias) < math.inf:
                raise OptionError(f"logit_bias of token {token} is {bias}: choose a number")
        if self.logit_bias:
            biases = {token: float(bias) for token, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", biases)

    @property
    def allows_drafts(self) -> bool:
        """Whether processors and sampler may be called for tokens that turn out to be wrong."""
        functions = [*(self.logits_processors or ()), *filter(None, [self.sampler])]
        return all(map(_is_pure, functions))


def _as_float(number: SupportsFloat) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


_LONGEST_TEXT = 1_000_000  # characters in a schema, regex or grammar


@dataclass(frozen=True)
class Constraint:
    """A constraint that the whole output satisfies.

    Make a constraint with :meth:`json_schema`, :meth:`json_object`, :meth:`regex`, :meth:`grammar`
    or :meth:`choice`. If the library llguidance cannot guarantee it, it is refused when a
    generation starts, not before.

    Attributes:
        kind: the language of ``text``; a "grammar" is Lark or GBNF.
        text: a JSON Schema, a regular expression or a grammar.
        lead: a regular expression for the text that may precede the constrained output.

    Raises:
        OptionError: the text is too long.
    """

    kind: Literal["json_schema", "regex", "grammar", "lark"]
    text: str
    lead: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > _LONGEST_TEXT:
            raise OptionError(
                f"the {self.noun} has {len(self.text):,} characters: use {_LONGEST_TEXT:,} at most"
            )

    @property
    def noun(self) -> str:
        """The constraint's name in messages."""
        return {"json_schema": "JSON schema", "regex": "regex"}.get(self.kind, "grammar")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Constraint:
        """JSON that is valid under a schema, on one line, with separators ``", "`` and ``": "``.

        Formats that llguidance does not know are ignored. The properties of objects are in the
        schema's order. If the schema has the key
        ``x-guidance`` with the value ``{"whitespace_flexible": true}``, the model chooses the white
        space.

        Args:
            schema: a JSON Schema, 2020-12 or older, as a dict or as JSON text.

        Raises:
            OptionError: the schema is not an object, or is too long.
        """
        if isinstance(schema, str):
            cls("json_schema", schema)  # a long text is refused before it is parsed
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps({} if parsed is True else enforceable(parsed), allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise OptionError(f"the JSON schema is not valid JSON ({error}): correct it") from error
        if not text.startswith("{"):
            raise OptionError("the JSON schema must be an object, such as {}")
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that a regular expression matches from beginning to end.

        The syntax is that of Rust's ``regex`` crate, without look-around and back-references.
        """
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """A text that a context-free grammar generates.

        Args:
            text: the grammar, in llguidance's variant of Lark (start symbol ``start``) or in
                llama.cpp's GBNF (start symbol ``root``).
        """
        return cls("grammar", text)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Constraint:
        """One of several texts.

        Raises:
            OptionError: there are no choices, or one of them is not text.
        """
        if not choices or not all(isinstance(text, str) for text in choices):
            raise OptionError("choices must be a list of at least one text")
        return cls.regex("|".join(map(re.escape, choices)))


class Phase(NamedTuple):
    """A part of an output.

    Attributes:
        constraint: the constraint from this phase's start to the output's end; None for free text.
        exits: tokens that start another phase, each with the number of that phase. In free text,
            they may come anywhere; otherwise, only as the phase's first token.
        may_end: for free text, whether the output may end in this phase.
    """

    constraint: Constraint | None = None
    exits: Mapping[int, int] = {}  # a constant
    may_end: bool = True


Phases = tuple[Phase, ...]
"""An output in several phases, such as reasoning before the answer."""


ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class CacheOptions:
    """Limits on the memory of the KV cache and the prefill. Names and meanings are mlx-lm's.

    Attributes:
        kv_bits: the bits of each quantised key or value; None does not quantise.
        kv_group_size: the number of values that share a scale.
        quantized_kv_start: the number of positions that are cached before quantisation begins.
        max_kv_size: the most positions to cache: the first 4 and the latest. As in mlx-lm, models
            that define their own caches (sliding windows, recurrent states) ignore it.
        prefill_step_size: the number of prompt tokens per forward.

    Raises:
        OptionError: a value is out of range.
    """

    kv_bits: int | None = _option(None, "N", "Quantise the KV cache to N bits.")
    kv_group_size: int = _option(64, "N", "Quantise in groups of N values, which share a scale.")
    quantized_kv_start: int = _option(5000, "N", "Start to quantise once N positions are cached.")
    max_kv_size: int | None = _option(
        None,
        "N",
        "Cache at most N positions: the first 4 and the latest. Models with their own kind of "
        "cache ignore it.",
    )
    prefill_step_size: int = 2048

    def __post_init__(self) -> None:
        _check(self)

    @property
    def quantized_at(self) -> int:
        """The prompt length from which mlx-lm quantises the cache during the prefill.

        mlx-lm does so after the first chunk that reaches ``quantized_kv_start``. The caches of
        shorter prompts are quantised at the end of the prompt or later.
        """
        step = self.prefill_step_size
        return max(1, math.ceil(self.quantized_kv_start / step)) * step


_MAX = sys.float_info.max

_LEAST = {
    "min_tokens_to_keep": 1,
    "presence_penalty": -_MAX,
    "frequency_penalty": -_MAX,
    "max_kv_size": 8,  # room for the first 4 positions and some of the latest
    "prefill_step_size": 1,
}
"""The least values of numbers that must not be 0, or that may be negative."""

_MOST = {"top_p": 1, "min_p": 1, "seed": 2**64 - 1, "xtc_probability": 1, "xtc_threshold": 0.5}
_CHOICES = {"kv_bits": (2, 3, 4, 5, 6, 8), "kv_group_size": (32, 64, 128)}


_KINDS: dict[str, tuple[Any, str]] = {
    "int": (SupportsIndex, "a whole number"),
    "float": (SupportsFloat, "a number"),
    "Sequence[int]": (Iterable, "a list of token ids"),
    "Mapping[int, float]": (Mapping, "a dict from token ids to numbers"),
    "Sequence[LogitsProcessor]": (Collection, "a list of functions"),
    "Sampler": (Callable, "a function"),
}
"""For each type, by its spelling: what its values must be, and what messages call them."""


def _check(params: SamplingParams | CacheOptions) -> None:
    """Refuse values of a wrong type or out of range."""
    for declared in fields(params):
        name, value = declared.name, getattr(params, declared.name)
        kind, _, optional = str(declared.type).partition(" | ")
        if kind not in _KINDS or (optional and value is None):
            continue
        needed, noun = _KINDS[kind]
        least, most = _LEAST.get(name, 0), _MOST.get(name, _MAX)
        if not issubclass(type(value), needed):
            wanted = noun
        elif name in _CHOICES and value not in _CHOICES[name]:
            wanted = f"one of {', '.join(map(str, _CHOICES[name]))}"
        elif kind not in ("int", "float"):
            continue
        elif least <= (number := index(value) if kind == "int" else _as_float(value)) <= most:
            object.__setattr__(params, name, number)  # mlx-lm takes no numbers of NumPy
            continue
        elif most < _MAX:
            wanted = f"a value between {least} and {most}"
        else:
            wanted = f"{least} or more" if least > -_MAX else "a finite number"
        raise OptionError(f"{name} is {value!r}: choose {wanted}")
