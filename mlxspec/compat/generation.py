"""Generation as functions of a loaded model, with mlx-lm's arguments and responses."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.generate import stream_generate as stream_generate_plainly
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..corpus.memory import Memory
from ..engine.draft_model import DraftModelDrafter, check_vocabularies
from ..engine.target import Progress
from ..errors import OptionError
from ..generation.decoders import AutoDecoder
from ..generation.options import GenerationOptions, Prompt
from ..generation.request import Detokenizer, RecordTime, responses
from ..generation.response import GenerationResponse, SpeculationStats
from ..generation.session import DraftCaches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack


class StreamOptions(GenerationOptions, total=False):
    """What :func:`mlxspec.stream_generate` takes besides model, tokenizer and prompt."""

    max_tokens: int
    draft_model: nn.Module | None
    stream: Any
    num_draft_tokens: int
    prompt_progress_callback: Progress | None
    input_embeddings: mx.array | None


_PLAIN_OPTIONS = signature(generate_step).parameters


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompt: Prompt,
    verbose: bool = False,
    **options: Unpack[StreamOptions],
) -> str:
    """Generate a whole answer.

    Args:
        model, tokenizer: from :func:`mlxspec.load` or ``mlx_lm.load``.
        prompt: text, token ids, or messages, as for :meth:`mlxspec.Decoder.decode`.
        verbose: print the text as it comes, and figures at its end.
        options: those of :func:`stream_generate`.

    Raises:
        PromptError, OptionError, TypeError: as :func:`stream_generate`.
    """
    return joined(stream_generate(model, tokenizer, prompt, **options), verbose)


def joined(responses: Iterable[GenerationResponse], verbose: bool) -> str:
    """The text of the responses; if ``verbose`` printed as it comes, with figures at its end."""
    if verbose:
        print("=" * 10)
    text = ""
    for response in responses:
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print(f"\n{'=' * 10}")
        print(_figures(response) if text else "No text generated for this prompt")
    return text


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompt: Prompt,
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    stream: Any = None,
    *,
    num_draft_tokens: int = 2,
    prompt_progress_callback: Progress | None = None,
    input_embeddings: mx.array | None = None,
    **options: Unpack[GenerationOptions],
) -> Generator[GenerationResponse, None, None]:
    """Generate with the default decoder, one response per token; the text is mlx-lm's.

    The next call with the same model and tokenizer uses what this one has measured of the model
    and remembers of its outputs. mlx-lm's arguments mean what they mean there; they are checked
    at once, not with the first response. Logits processors and samplers of your own are called
    as mlx-lm calls them, without drafts, unless they are marked with :func:`mlxspec.pure`. What a
    sampler draws depends on ``mx.random.seed`` as with mlx-lm, but the samples differ from
    mlx-lm's: random numbers are keyed by position here.

    Args:
        model, tokenizer: from :func:`mlxspec.load` or ``mlx_lm.load``.
        prompt: text, token ids, or messages, as for :meth:`mlxspec.Decoder.decode`.
        max_tokens: how many tokens to generate at most; -1 for no limit.
        draft_model: a small model with the same tokenizer, to draft where no text repeats.
        stream: where mlx-lm would run; everything runs on its ``generation_stream`` here.
        num_draft_tokens: how many tokens ``draft_model`` drafts at most.
        prompt_progress_callback: called with the numbers of prompt tokens done and in all.
        input_embeddings: take the place of the prompt's embeddings. Then mlx-lm generates,
            without drafts, and takes its own kinds of prompts and options only.
        options: how to sample and where to end, the memory of the cache and ``prompt_cache``,
            as in :meth:`mlxspec.Decoder.decode`. With a draft model ``max_kv_size`` is ignored,
            as by mlx-lm.

    Raises:
        PromptError, PromptCacheError, OptionError: as :meth:`mlxspec.Decoder.decode`, or the
            draft model has another vocabulary.
        TypeError: there is no such option.
    """
    if input_embeddings is not None:
        for name in options.keys() - _PLAIN_OPTIONS:
            raise OptionError(
                f"{name} is given with input_embeddings, where mlx-lm generates and does not "
                "know it: leave it out"
            )
        return plainly(
            model,
            tokenizer,
            prompt,
            max_tokens,
            draft_model=draft_model,
            prompt_progress_callback=prompt_progress_callback,
            input_embeddings=input_embeddings,
            **options,
        )
    decoder = decoder_of(model, tokenizer)
    if max_tokens == -1:
        max_tokens = sys.maxsize
    record_time = None
    if prompt_progress_callback is not None:
        progress = _PromptProgress(prompt_progress_callback)
        options["on_progress"], record_time = progress.prefilled, progress.stepped
    if draft_model is None:
        request = decoder.new_request(prompt, max_tokens, options)
        return responses(request, record_time)
    options.pop("max_kv_size", None)
    return stream_with_draft_model(
        decoder, draft_model, prompt, max_tokens, num_draft_tokens, record_time, **options
    )


def stream_with_draft_model(
    decoder: AutoDecoder,
    draft_model: nn.Module,
    prompt: Prompt,
    max_tokens: int,
    num_draft_tokens: int = 2,
    record_time: RecordTime | None = None,
    **options: Unpack[GenerationOptions],
) -> Generator[GenerationResponse, None, None]:
    """Draft from text that repeats where that pays, and with a small model elsewhere.

    In ``prompt_cache`` the draft model's caches may follow the target's, as with mlx-lm.
    """
    check_vocabularies(draft_model, decoder.vocab_size, len(decoder.tokenizer))
    both = options.get("prompt_cache") or []
    drafts_cache = both[len(make_prompt_cache(decoder.model)) :] or None
    drafter = DraftModelDrafter(draft_model, num_draft_tokens, drafts_cache)
    drafting = replace(decoder.drafting, extra=lambda: drafter)
    request = decoder.new_request(prompt, max_tokens, options, partial(drafting.make, decoder))
    if drafter.loan:
        tokens = [*request.prompt]
        request.lease_more = lambda lease: DraftCaches(lease, drafter, tokens)
    return responses(request, record_time)


class _KeptDecoder(AutoDecoder):
    """Is kept as long as its model lives, so it must not keep it alive; writes mlx-lm's text."""

    def new_detokenizer(self) -> Detokenizer:
        return cast(Detokenizer, self.tokenizer.detokenizer)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None  # who generates with it has it
        return model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)


MemoryOf = Callable[[TokenizerWrapper], Memory | None]
"""Says which memory the decoders of a tokenizer share; None is one of each decoder's own."""

_memory_of: list[MemoryOf] = [lambda tokenizer: None]


@contextmanager
def remembering(memory_of: MemoryOf) -> Iterator[None]:
    """Let decoders that :func:`decoder_of` makes meanwhile have a memory of the caller's."""
    _memory_of.append(memory_of)
    try:
        yield
    finally:
        _memory_of.remove(memory_of)


def decoder_of(
    model: nn.Module, tokenizer: TokenizerWrapper | PreTrainedTokenizerBase
) -> AutoDecoder:
    """The default decoder of a model and a tokenizer.

    The same one as long as the model lives, its weights keep their sizes (those of other layers,
    quantised or adapted, have other costs) and no other tokenizer comes in between.
    """
    size = sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))
    with _keeping:
        kept = _kept.get(id(model))
        first = kept is None
        if kept is None or kept.tokenizer is not tokenizer or kept.size != size:
            wrapped = tokenizer
            if not isinstance(wrapped, TokenizerWrapper):
                wrapped = TokenizerWrapper(wrapped)
            decoder = _KeptDecoder(model, wrapped, memory=_memory_of[-1](wrapped))
            kept = _kept[id(model)] = _Kept(tokenizer, size, decoder)
        if first:
            weakref.finalize(model, _kept.pop, id(model))
    return kept.decoder


class _Kept(NamedTuple):
    """A decoder, and what of tokenizer and model it was made for."""

    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase
    size: int
    decoder: AutoDecoder


# By the model's id: a model cannot be hashed, and an attribute of it would go into its copies.
_kept: dict[int, _Kept] = {}
_keeping = threading.Lock()


def plainly(*args: Any, **options: Any) -> Generator[GenerationResponse, None, None]:
    """What mlx-lm's own ``stream_generate`` generates, as responses of plain decoding."""
    for count, response in enumerate(stream_generate_plainly(*args, **options), start=1):
        stats = SpeculationStats(steps=count, rows=count, emitted=count)
        yield GenerationResponse(**vars(response), stats=stats)


class _PromptProgress:
    """Tells a callback of mlx-lm's how far the prompt is.

    mlx-lm counts the prompt's last token too, which belongs to the first step here.
    """

    def __init__(self, callback: Progress) -> None:
        self._callback = callback
        self._total = 0

    def prefilled(self, done: int, total: int) -> None:
        self._total = total + 1
        self._callback(done, self._total)

    def stepped(self, *_: object) -> None:
        """A step has run: the whole prompt is done with the first one."""
        if self._total:
            self._callback(self._total, self._total)
            self._total = 0


def _figures(last: GenerationResponse) -> str:
    """mlx-lm's three lines, and what speculation did."""
    stats = last.stats
    return (
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec\n"
        f"Speculation: {stats.tokens_per_step:.2f} tokens per step, "
        f"{stats.accepted} of {stats.drafted} draft tokens accepted\n"
        f"Peak memory: {last.peak_memory:.3f} GB"
    )
