"""Checks the prompt and the options that users pass to a generation."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.capability import check_quantization
from ..engine.params import (
    CacheOptions,
    Constraint,
    LogitsProcessor,
    Phase,
    Phases,
    Sampler,
    SamplingParams,
)
from ..engine.target import Progress
from ..errors import OptionError, PromptError, whole
from ..models.chat_template import Message
from ..models.model import encode_prompt
from .chat_prompt import conversation_prompt
from .session import Session

if TYPE_CHECKING:
    from ..engine.grammar import Grammar


Prompt = str | Sequence[int] | mx.array | Sequence[Message]
"""Text or token ids, used unchanged, or a conversation's messages, which the model's chat template
turns into token ids.
"""


def prompt_ids(
    prompt: Prompt,
    tokenizer: TokenizerWrapper,
    vocab_size: int,
    longest: int | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Turn a prompt into token ids.

    Args:
        prompt: text, token ids, or messages, as for :func:`.conversation_prompt`.
        tokenizer: the model's tokenizer.
        vocab_size: the number of token ids that the model knows.
        longest: the model's context in tokens, if known.
        chat_template_kwargs: arguments of the chat template besides the messages.

    Raises:
        PromptError: the prompt is of another type, is empty or longer than the context, or has an
            unknown id; or the model has no chat template, or its template fails with the messages.
        OptionError: ``chat_template_kwargs`` are given without messages, or the template
            fails with them.
    """
    conversation = (
        isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    )
    if chat_template_kwargs is not None and not conversation:
        raise OptionError(
            "chat_template_kwargs work only with messages: leave them out, or pass messages"
        )
    if conversation:
        messages = cast(Sequence[Message], prompt)
        chat = conversation_prompt(tokenizer, messages, chat_template_kwargs or {})
        tokens = chat.tokens(tokenizer)
    elif isinstance(prompt, str):
        if not prompt:
            raise PromptError("the prompt is empty: write a text, or pass the BOS id alone")
        tokens = encode_prompt(tokenizer, prompt)
    else:
        ids: Any = prompt.tolist() if isinstance(prompt, mx.array) else prompt
        try:
            tokens = [operator.index(token) for token in ids]
        except TypeError as error:
            raise PromptError(
                f"the prompt must be a text, token ids or messages ({error}): pass a text, "
                "a list of integers, or a list of messages"
            ) from error
    if not tokens:
        raise PromptError("the prompt has no tokens: pass at least the BOS id, or a message")
    if unknown := [token for token in tokens if not 0 <= token < vocab_size]:
        from ..models.tokenizer import token_name

        name = token_name(tokenizer, unknown[0])
        if name and (conversation or isinstance(prompt, str)):
            raise PromptError(f"the prompt contains {name}, which the model lacks: leave it out")
        raise PromptError(
            f"the prompt contains the id {unknown[0]}: pass ids from 0 to {vocab_size - 1}"
        )
    if longest is not None and len(tokens) > longest:
        raise PromptError(
            f"the prompt has {len(tokens)} tokens, but the model's context is {longest}: shorten "
            "the prompt"
        )
    return tokens


def stop_token_ids(
    extra: int | str | Collection[int | str], tokenizer: TokenizerWrapper, vocab_size: int
) -> set[int]:
    """The ids of the tokenizer's end tokens and of the ``extra`` ones.

    Args:
        extra: token ids, or texts that are a single token: as spelled in the vocabulary
            (``</s>``, ``▁river``), or as plain text.
        tokenizer: the model's tokenizer.
        vocab_size: the number of token ids that the model knows.

    Raises:
        OptionError: one of ``extra`` is not a single token of the model.
    """
    ids = set(tokenizer.eos_token_ids)
    for token in [extra] if isinstance(extra, str) or not isinstance(extra, Iterable) else extra:
        token_id: Any = token
        if isinstance(token, str):
            token_id = tokenizer.get_vocab().get(token)
            encoded = tokenizer.encode(token, add_special_tokens=False)
            if token_id is None and len(encoded) == 1 and encoded[0] != tokenizer.unk_token_id:
                token_id = encoded[0]
        if not _is_token(token_id, vocab_size):
            raise OptionError(
                f"the stop token {token!r} is not a token of the model: give an id from 0 to "
                f"{vocab_size - 1}, the text of one token, or use a stop string"
            )
        ids.add(int(token_id))
    return ids


class DraftingParameters(TypedDict, total=False):
    """Options that only some decoders have; their classes describe them.

    They are the fields of :class:`.drafter_factories.DrafterFactory`'s subclasses that each
    generation may set, and their short names.
    """

    n_draft: int
    ngram_max: int
    ngram_min: int
    window_size: int
    ngram_size: int
    guess_set_size: int
    pool_from_prompt: bool
    W: int
    N: int
    G: int
    prediction: Sequence[int]


class GenerationOptions(DraftingParameters, total=False):
    """The options of every decoder's ``stream``; :meth:`mlxspec.Decoder.stream` describes them.

    Use it to annotate your own functions that pass options on::

        def ask(question: str, **options: Unpack[GenerationOptions]) -> str: ...
    """

    sampling: SamplingParams | None
    temp: float
    seed: int | None
    top_p: float
    top_k: int
    min_p: float
    min_tokens_to_keep: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: Sequence[int]
    logit_bias: Mapping[int, float] | None
    repetition_penalty: float | None
    repetition_context_size: int
    presence_penalty: float | None
    presence_context_size: int
    frequency_penalty: float | None
    frequency_context_size: int
    logits_processors: Sequence[LogitsProcessor] | None
    sampler: Sampler | None
    constraint: Constraint | Phases | Grammar | None
    stop: str | Sequence[str]
    stop_tokens: int | str | Collection[int | str]
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    max_kv_size: int | None
    prefill_step_size: int
    chat_template_kwargs: Mapping[str, Any] | None
    on_progress: Progress | None
    session: Session | None
    prompt_cache: list[Any] | None


_SAMPLING = {field.name for field in fields(SamplingParams)}
_CACHE = {field.name for field in fields(CacheOptions)}


def check_names(options: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown option."""
    known = GenerationOptions.__annotations__.keys() - DraftingParameters.__annotations__.keys()
    for name in options.keys() - known:
        similar = get_close_matches(name, sorted({"max_tokens", *known}), 1)
        meant = f"did you mean {similar[0]}" if similar else "see mlxspec.Decoder.stream for all"
        raise TypeError(f"there is no option {name!r}: {meant}")


def checked_max_tokens(max_tokens: object) -> int:
    """Return ``max_tokens`` as an int; raise OptionError unless it is a positive whole number."""
    number = whole("max_tokens", max_tokens)
    if number < 1:
        raise OptionError(f"max_tokens is {number}: generate at least 1 token")
    return number


def stop_texts(stop: str | Iterable[str]) -> tuple[str, ...]:
    """The option ``stop`` as a tuple; raise OptionError unless it has only non-empty strings."""
    several = isinstance(stop, Iterable) and not isinstance(stop, str)
    texts = tuple(stop) if several else (stop,)
    if not all(isinstance(text, str) for text in texts):
        raise OptionError(f"stop is {stop!r}: pass a string or a list of strings")
    if not all(texts):
        raise OptionError("stop has an empty string, which would end every output: leave it out")
    return cast(tuple[str, ...], texts)


def sampling_from(options: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """The option ``sampling``, updated with the fields that are given by name.

    Raises:
        OptionError: as :class:`mlxspec.SamplingParams`, or the model lacks one of the tokens.
    """
    given = {name: options[name] for name in _SAMPLING & options.keys()}
    params: SamplingParams | None = options.get("sampling")
    if given.get("sampler") is greedy_sampler:  # make_sampler's result at temperature 0
        given["sampler"] = None
    if params is None and given.get("sampler") is not None:
        # With a sampler, repeated calls should differ, as with mlx-lm.
        params = SamplingParams(seed=None)
    params = replace(params or SamplingParams(), **given)
    for name in ("logit_bias", "xtc_special_tokens"):
        for token in getattr(params, name) or ():
            if not _is_token(token, vocab_size):
                raise OptionError(
                    f"{name} contains the token id {token!r}: pass ids from 0 to {vocab_size - 1}"
                )
    return params


def _is_token(token: object, vocab_size: int) -> bool:
    return isinstance(token, int | SupportsIndex) and 0 <= operator.index(token) < vocab_size


def cache_options_from(options: Mapping[str, Any], model: nn.Module) -> CacheOptions:
    """The options that limit the memory of cache and prefill.

    Raises:
        OptionError: as :class:`mlxspec.engine.params.CacheOptions`, or the model's cache cannot be
            quantised as requested.
    """
    cache = CacheOptions(**{name: options[name] for name in _CACHE & options.keys()})
    check_quantization(model, cache)
    return cache


def grammar_of(
    constraint: Constraint | Phases | Grammar | None, tokenizer: TokenizerWrapper, vocab_size: int
) -> Grammar | None:
    """Compile a constraint for a model's tokens, which can take a few seconds.

    Args:
        constraint: what the output must match, compiled or not; None allows anything.
        tokenizer: the model's tokenizer.
        vocab_size: the number of token ids that the model knows.

    Raises:
        OptionError: it is not a constraint, or cannot be enforced.
    """
    if constraint is None:
        return None
    from ..engine.grammar import Grammar, Vocabulary

    phases = (Phase(constraint),) if isinstance(constraint, Constraint) else constraint
    if phases and isinstance(phases, tuple) and all(isinstance(phase, Phase) for phase in phases):
        return Grammar(phases, Vocabulary.of(tokenizer, vocab_size))
    if not isinstance(constraint, Grammar):
        raise OptionError(
            f"constraint is of type {type(constraint).__name__}: make one with "
            "mlxspec.Constraint.json_schema, regex, grammar or choice"
        )
    return constraint
