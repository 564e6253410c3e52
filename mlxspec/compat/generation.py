"""Generation as functions of a loaded model, with mlx-lm's arguments and responses."""

from __future__ import annotations

import copy
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import batch_generate as generate_in_batch
from mlx_lm.generate import generate_step
from mlx_lm.generate import stream_generate as stream_generate_plainly
from mlx_lm.generate_utils import BatchStats
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from ..corpus.memory import Memory
from ..engine.caches import parts
from ..engine.draft_model import DraftModelDrafter, check_vocabularies
from ..engine.joint import JointMode
from ..engine.params import LogitsProcessor, Sampler
from ..engine.target import Capability, Progress
from ..errors import OptionError
from ..generation.decoder import AutoDecoder
from ..generation.engine import Engine, responses
from ..generation.options import GenerationOptions, Prompt
from ..generation.request import RecordTime, Request, hold_at_exit
from ..generation.response import GenerationResponse, GenerationResult, SpeculationStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack

    @dataclass
    class BatchResponse:
        """mlx-lm's, whose types a checker does not find."""

        texts: list[str]
        stats: BatchStats
        caches: list[list[Any] | None] | None
        token_ids: list[list[int]] | None = None
        logprobs: list[list[float]] | None = None

else:
    from mlx_lm.generate import BatchResponse


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
                f"{name} is given with input_embeddings, with which mlx-lm generates and does "
                "not know that option: leave it out"
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
        options["on_progress"], record_time = _prompt_progress(prompt_progress_callback)
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
    """Draft from repeated text when that pays, and with a small model elsewhere.

    In ``prompt_cache`` the draft model's caches may follow the target's, as with mlx-lm.
    """
    check_vocabularies(draft_model, decoder.vocab_size, len(decoder.tokenizer))
    both = options.get("prompt_cache") or []
    drafts_cache = both[len(make_prompt_cache(decoder.model)) :] or None
    drafter = DraftModelDrafter(draft_model, num_draft_tokens, drafts_cache)
    drafting = replace(decoder.drafting, extra=lambda: drafter)
    request = decoder.new_request(prompt, max_tokens, options, partial(drafting.make, decoder))
    request.draft_model = drafter
    return responses(request, record_time)


class _KeptDecoder(AutoDecoder):
    """Is kept as long as its model lives, so it must not keep it alive; writes mlx-lm's text."""

    def new_detokenizer(self) -> StreamingDetokenizer:
        return self.tokenizer.detokenizer

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None  # set before any generation
        return model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)


MemoryOf = Callable[[TokenizerWrapper], Memory | None]
"""Says which memory the decoders of a tokenizer share; None is one of each decoder's own."""

_memory_of: list[MemoryOf] = [lambda tokenizer: None]


@contextmanager
def remembering(memory_of: MemoryOf) -> Iterator[None]:
    """Give decoders that :func:`decoder_of` makes inside the block the caller's memory."""
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
        first = id(model) not in _kept
        made_for, of_size, decoder = _kept.get(id(model), (None, 0, None))
        if decoder is None or made_for is not tokenizer or of_size != size:
            wrapped = tokenizer
            if not isinstance(wrapped, TokenizerWrapper):
                wrapped = TokenizerWrapper(wrapped)
            decoder = _KeptDecoder(model, wrapped, memory=_memory_of[-1](wrapped))
            _kept[id(model)] = tokenizer, size, decoder
        if first:
            weakref.finalize(model, _kept.pop, id(model))
    return decoder


# By the model's id: a model cannot be hashed, and an attribute of it would go into its copies.
_kept: dict[int, tuple[object, int, AutoDecoder]] = {}
"""The tokenizer and the size of the weights that each decoder was made for, and the decoder."""
_keeping = threading.Lock()


def plainly(*args: Any, **options: Any) -> Generator[GenerationResponse, None, None]:
    """What mlx-lm's own ``stream_generate`` generates, as responses of plain decoding."""
    for count, response in enumerate(stream_generate_plainly(*args, **options), start=1):
        stats = SpeculationStats(steps=count, rows=count, emitted=count)
        yield GenerationResponse(**vars(response), stats=stats)


def _prompt_progress(callback: Progress) -> tuple[Progress, RecordTime]:
    """Functions that report the prompt's progress as mlx-lm does.

    mlx-lm counts the prompt's last token too, which belongs to the first step here.
    """
    unfinished: list[int] = []

    def prefilled(done: int, total: int) -> None:
        unfinished[:] = [total + 1]
        callback(done, total + 1)

    def stepped(*_: object) -> None:
        if unfinished:
            total = unfinished.pop()
            callback(total, total)

    return prefilled, stepped


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


_LABEL = "[batch_generate]"
_DECODING = ("sampler", "logits_processors", "prefill_step_size", "max_kv_size")


def batch_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    prompt_caches: Sequence[list[Any] | None] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    completion_batch_size: int = 32,
    prefill_batch_size: int = 8,
    prefill_step_size: int = 2048,
    max_kv_size: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    prompt_progress_callback: Progress | None = None,
    stream: Any = None,
) -> BatchResponse:
    """Answer several prompts at once, with speculation.

    All prompts share each forward, and the rows of drafts go to whichever text is likeliest to
    repeat, as long as that gains more than it costs the others
    (:mod:`mlxspec.drafting.planner`).
    A model whose forwards cannot be shared that way answers in mlx-lm's own batches, without
    drafts, or one prompt in turn with the others where those do not take it.

    Args:
        model, tokenizer: from :func:`mlxspec.load` or ``mlx_lm.load``.
        prompts: token ids, texts, or messages, as for :meth:`mlxspec.Decoder.decode`.
        prompt_caches: mlx-lm's caches of what precedes each prompt; they are not changed.
        max_tokens: how many tokens to generate at most, for all prompts or for each.
        verbose: print progress, and figures at the end.
        return_prompt_caches: return caches that hold each prompt and its answer.
        return_token_ids: return the answers' tokens, without the one that ended an answer.
        return_logprobs: return the log-probability of each of these tokens.
        sampler, logits_processors: as for :func:`mlxspec.stream_generate`. Those that are not
            known to be pure may count their calls, so the prompts go into mlx-lm's batches.
        completion_batch_size: how many prompts are answered at once at most.
        prefill_batch_size: of mlx-lm's batches.
        prefill_step_size, max_kv_size: the memory of prefill and cache. Where the model honours
            ``max_kv_size`` the prompts go into mlx-lm's batches: these drop the first positions,
            too, which a prompt alone keeps.
        chat_template_kwargs: as for :meth:`mlxspec.Decoder.decode`, for all prompts.
        prompt_progress_callback: called with how many tokens of all prompts are done and how many
            there are; at the beginning and the end only where mlx-lm's batches run.
        stream: where mlx-lm's batches run.

    Raises:
        PromptError, PromptCacheError, OptionError: as :func:`mlxspec.stream_generate`, of any
            prompt, before the first one is answered.
        TypeError: there is no such option.
    """
    return prepared(**locals())()


def prepared(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    prompt_caches: Sequence[list[Any] | None] | None = None,
    max_tokens: int | Sequence[int] = 128,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    prompt_progress_callback: Progress | None = None,
    **options: Any,
) -> Callable[[], BatchResponse]:
    """What :func:`batch_generate` runs, once its arguments, which are these, are checked."""
    decoder = decoder_of(model, tokenizer)
    budgets = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    caches = [None] * len(prompts) if prompt_caches is None else list(prompt_caches)
    for name, given in (("max_tokens", budgets), ("prompt_caches", caches)):
        if len(given) != len(prompts):
            raise OptionError(f"{name} are {len(given)} for {len(prompts)} prompts: give one each")
    bound, keeps = options.get("max_kv_size"), options.get("return_prompt_caches", False)
    decoding = {name: options[name] for name in _DECODING if name in options}
    lengths, done = list[int](), [0] * len(prompts)

    def report(index: int, tokens: int, total: int) -> None:
        # A prompt's last token, which comes after the prefill, is not counted separately.
        done[index] = tokens if tokens < total else lengths[index]
        if prompt_progress_callback:
            prompt_progress_callback(sum(done), sum(lengths))

    held: list[list[Any] | None] = []
    answers: dict[Request, GenerationResult] = {}
    for index, (prompt, budget, cache) in enumerate(zip(prompts, budgets, caches, strict=True)):
        fresh = make_prompt_cache(model, bound) if keeps else None
        held.append(fresh if cache is None else copy.deepcopy(cache))
        answer = GenerationResult(logprobs=[] if options.get("return_logprobs") else None)
        own = {
            "chat_template_kwargs": chat_template_kwargs,
            "prompt_cache": held[index],
            "on_progress": partial(report, index),
        }
        every = cast(GenerationOptions, {**decoding, **own})
        request = decoder.new_request(prompt, budget, every, receive=answer.add)
        answers[request] = answer
        lengths.append(len(request.prompt))
    if not _goes_to_mlx_lm(decoder, [*answers], caches, bound):
        return partial(_at_once, decoder, answers, held, **options)
    tokens = [[*request.prompt] for request in answers]
    args = model, decoder.tokenizer, tokens, prompt_caches, budgets
    run = partial(generate_in_batch, *args, **options)
    return partial(_in_mlx_lms_batches, run, prompt_progress_callback, sum(lengths))


def _goes_to_mlx_lm(
    decoder: AutoDecoder,
    requests: Sequence[Request],
    caches: Sequence[list[Any] | None],
    max_kv_size: int | None,
) -> bool:
    """Whether mlx-lm's batches answer, since requests should not share drafted forwards."""
    own = make_prompt_cache(decoder.model, max_kv_size)
    layers = [layer for cache in caches for layer in (own if cache is None else cache)]
    if hasattr(decoder.model, "leader") or not all(hasattr(layer, "merge") for layer in layers):
        return False  # they do not take it
    stateful = any(not request.sampling.allows_drafts for request in requests)
    # In a batch mlx-lm drops the first positions as well, and so gives other answers than one by
    # one.
    keeps_start = any(getattr(part, "keep", 0) for part in parts(layers))
    in_turn = len(requests) > 1 and decoder.joint_mode is JointMode.ALONE
    if not (stateful or keeps_start or in_turn):
        return False
    # A RoPE that depends on a context's length takes no batch, nor do rows that change each other.
    return decoder.chain_capability is not Capability.PLAIN and decoder.draft_end is None


def _at_once(
    decoder: AutoDecoder,
    answers: Mapping[Request, GenerationResult],
    caches: list[list[Any] | None],
    *,
    verbose: bool = False,
    completion_batch_size: int = 32,
    **returns: Any,
) -> BatchResponse:
    """Answer the prompts with speculation.

    Args:
        decoder: their model's.
        answers: the requests, and what collects their responses.
        caches: of each prompt, which the request continues.
        verbose, completion_batch_size: as for :func:`batch_generate`.
        returns: its other options, of which those that say what to return are used.
    """
    engine = Engine(decoder, max_active=completion_batch_size, stall=math.inf)
    engine.add(*answers)
    started = time.perf_counter()
    _run(engine, [*answers], verbose)
    results = list(answers.values())
    stats = BatchStats(
        prompt_tokens=sum(result.prompt_tokens for result in results),
        prompt_time=engine.prefill_seconds,
        generation_tokens=sum(len(result.tokens) for result in results),
        generation_steps=engine.steps,
        wall_time=time.perf_counter() - started,
        peak_memory=max((result.peak_memory for result in results), default=0.0),
    )
    stats.decode_time = stats.generation_time
    if verbose:
        _show_figures(stats, results)
    # mlx-lm returns no token that ended an answer.
    ends = decoder.tokenizer.eos_token_ids
    counts = [len(one.tokens) - (one.tokens[-1] in ends) for one in results]
    tokens = [one.tokens[:count] for one, count in zip(results, counts, strict=True)]
    logprobs = [
        [found.logprob for found in (one.logprobs or [])[:count]]
        for one, count in zip(results, counts, strict=True)
    ]
    return BatchResponse(
        texts=[decoder.tokenizer.decode(answer) for answer in tokens],
        stats=stats,
        caches=caches if returns.get("return_prompt_caches") else None,
        token_ids=tokens if returns.get("return_token_ids") else None,
        logprobs=logprobs if returns.get("return_logprobs") else None,
    )


def _run(engine: Engine, requests: Sequence[Request], verbose: bool) -> None:
    """Run all requests; the first that fails ends them all."""
    shown = -1
    with engine.running():
        going_on = True
        while going_on:
            going_on = engine.turn()
            for request in requests:
                if request.error:
                    raise request.error
            done = sum(request.done for request in requests)
            if verbose and done != shown:
                line = f"{_LABEL} Finished processing {done}/{len(requests)} ..."
                print(line, end="\r", flush=True)
                shown = done


def _in_mlx_lms_batches(
    run: Callable[[], BatchResponse], callback: Progress | None, prompt_tokens: int
) -> BatchResponse:
    """Let mlx-lm answer; its batches report no progress but the beginning and the end."""
    hold_at_exit()
    callback = callback or (lambda done, total: None)
    callback(0, prompt_tokens)
    response = run()
    callback(prompt_tokens, prompt_tokens)
    return response


def _show_figures(stats: BatchStats, ended: Sequence[GenerationResult]) -> None:
    """mlx-lm's lines, and what speculation did."""
    drafted = sum(response.stats.drafted for response in ended)
    accepted = sum(response.stats.accepted for response in ended)
    print(
        f"\n{_LABEL} Prompt: {stats.prompt_tokens} tokens, "
        f"{stats.prompt_tps:.3f} tokens-per-sec\n"
        f"{_LABEL} Generation: {stats.generation_tokens} tokens, "
        f"{stats.generation_tps:.3f} tokens-per-sec\n"
        f"{_LABEL} Speculation: {accepted} of {drafted} draft tokens accepted\n"
        f"{_LABEL} Peak memory: {stats.peak_memory:.3f} GB"
    )
