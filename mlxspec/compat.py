"""Generation as functions of a loaded model, with mlx-lm's arguments and responses.

:func:`augment` lets programs that call mlx-lm's own functions speculate, without changing them.
"""

from __future__ import annotations

import copy
import math
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchResponse
from mlx_lm.generate import batch_generate as generate_in_batch
from mlx_lm.generate import stream_generate as stream_generate_plainly
from mlx_lm.generate_utils import BatchStats
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from .corpus.answer_index import AnswerIndex
from .engine.draft_model import DraftModel
from .engine.loaded_model import LoadedModel
from .engine.target import Progress
from .errors import OptionError
from .generation.decoder import AutoDecoder
from .generation.options import GenerationOptions, Prompt
from .generation.request import Request
from .generation.response import GenerationResponse, GenerationResult, SpeculationStats
from .generation.scheduler import Scheduler, responses
from .models.model import load
from .models.model_files import DEMO
from .terminal import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompt: Prompt,
    verbose: bool = False,
    **options: Any,
) -> str:
    """Generate a whole answer.

    Args:
        model, tokenizer: from :func:`mlxspec.load` or ``mlx_lm.load``.
        prompt: text, token ids, or messages, as for :meth:`mlxspec.Decoder.stream`.
        verbose: print the text as it is generated, then figures.
        options: the options of :func:`stream_generate`.

    Raises:
        PromptError, OptionError, TypeError: as for :func:`stream_generate`.
    """
    return joined(stream_generate(model, tokenizer, prompt, **options), verbose)


def joined(responses: Iterable[GenerationResponse], verbose: bool) -> str:
    """The text of the responses; if ``verbose``, print it as it is generated, then figures."""
    if verbose:
        print("=" * 10)
    text = ""
    for response in responses:
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print(f"\n{'=' * 10}")
        if text:
            stats = response.stats
            accepted = f"{stats.accepted} of {stats.drafted}"
            _show_figures(response, f"{stats.tokens_per_step:.2f} tokens per step, {accepted}")
        else:
            print("No text generated for this prompt")
    return text


def _show_figures(figures: GenerationResponse | BatchStats, drafted: str, label: str = "") -> None:
    """Print mlx-lm's figures, and a line about speculation."""
    lines = (
        f"Prompt: {figures.prompt_tokens} tokens, {figures.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {figures.generation_tokens} tokens, "
        f"{figures.generation_tps:.3f} tokens-per-sec",
        f"Speculation: {drafted} draft tokens accepted",
        f"Peak memory: {figures.peak_memory:.3f} GB",
    )
    print("\n".join(label + line for line in lines))


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
    """Generate with the default decoder, and yield a response per token; the text is mlx-lm's.

    Later calls with the same model and tokenizer reuse this call's measurements of the model, and
    draft from this call's output. mlx-lm's arguments have the same meaning here. They are checked
    when this function is called, not when the first response is read. Your own logits processors
    and samplers are called as in mlx-lm, and turn drafts off unless you mark them with
    :func:`mlxspec.pure`. Samples depend on ``mx.random.seed`` as in mlx-lm. They differ from
    mlx-lm's, since each position has its own random numbers here.

    Args:
        model, tokenizer: from :func:`mlxspec.load` or ``mlx_lm.load``.
        prompt: text, token ids, or messages, as for :meth:`mlxspec.Decoder.stream`.
        max_tokens: the most tokens to generate; -1 for no limit.
        draft_model: a small model with the same tokenizer, which drafts where text drafts are
            unlikely to be right, if that pays for its time.
        stream: ignored; everything runs on mlx-lm's ``generation_stream``.
        num_draft_tokens: the most tokens that ``draft_model`` drafts.
        prompt_progress_callback: called with the number of prompt tokens processed, and their
            total.
        input_embeddings: embeddings in place of the prompt's. mlx-lm then generates without drafts,
            and accepts only its own kinds of prompts and options.
        options: options for sampling, stopping and the cache, and ``prompt_cache``, as in
            :meth:`mlxspec.Decoder.stream`. With a draft model, ``max_kv_size`` is ignored, as in
            mlx-lm, and the draft model's caches in ``prompt_cache`` are not changed.

    Raises:
        PromptError, FileError, OptionError: as for :meth:`mlxspec.Decoder.stream`; OptionError also
            if the draft model has another vocabulary.
        TypeError: an option does not exist.
    """
    if input_embeddings is not None:
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
    if prompt_progress_callback is not None:
        options["on_progress"] = partial(_progress, prompt_progress_callback)
    factory = decoder.drafter_factory
    if draft_model is not None:
        options.pop("max_kv_size", None)
        wrapped = DraftModel(draft_model, num_draft_tokens)
        wrapped.check_vocabulary(decoder.loaded.vocab_size, len(decoder.tokenizer))
        factory = replace(factory, draft_model=wrapped)
    return _responses(model, decoder.new_request(prompt, max_tokens, options, factory))


def _responses(model: nn.Module, request: Request) -> Generator[GenerationResponse, None, None]:
    """Run a request; its decoder does not keep the model alive, but this generator does."""
    yield from responses(request)


def _progress(callback: Progress, done: int, total: int) -> None:
    """Report progress as mlx-lm does, which counts the prompt's last token, too.

    In mlxspec, that token runs in the first step.
    """
    callback(done + 1 if done == total else done, total + 1)


class _KeptDecoder(AutoDecoder):
    """A decoder that yields mlx-lm's text."""

    def new_detokenizer(self) -> StreamingDetokenizer:
        return self.tokenizer.detokenizer


class _WeaklyLoadedModel(LoadedModel):
    """A loaded model that does not keep mlx-lm's alive."""

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None  # whoever runs a generation holds it
        return model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)


MemoryOf = Callable[[TokenizerWrapper], AnswerIndex | None]
"""Returns the memory that a tokenizer's decoders share; None if each has its own."""

_remembered: list[tuple[MemoryOf, bool]] = [(lambda tokenizer: None, True)]


@contextmanager
def remembering(memory_of: MemoryOf, keeps: bool) -> Iterator[None]:
    """In the ``with`` block, give decoders that :func:`decoder_of` makes the caller's memory.

    Args:
        keeps: whether what they learn about drafts is kept.
    """
    _remembered.append((memory_of, keeps))
    try:
        yield
    finally:
        _remembered.remove((memory_of, keeps))


def decoder_of(
    model: nn.Module, tokenizer: TokenizerWrapper | PreTrainedTokenizerBase
) -> AutoDecoder:
    """The default decoder of a model and a tokenizer.

    Calls return the same decoder until the model is deleted, its weights change in size, or another
    tokenizer is used. (Quantising a model or adding adapters changes the size, and also the costs
    of steps, so the costs must be measured again.)
    """
    size = sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))
    with _keeping:
        made_for, of_size, decoder = _kept.get(id(model), (None, 0, None))
        if decoder is None or made_for is not tokenizer or of_size != size:
            known = isinstance(tokenizer, TokenizerWrapper)
            wrapped = tokenizer if known else TokenizerWrapper(tokenizer)
            memory_of, keeps = _remembered[-1]
            decoder = _KeptDecoder(_WeaklyLoadedModel(model), wrapped, memory=memory_of(wrapped))
            decoder.keeps_experience &= keeps
            _kept[id(model)] = tokenizer, size, decoder
            weakref.finalize(model, _kept.pop, id(model), None)
    return decoder


# Models are not hashable, and an attribute of a model would be copied with it.
_kept: dict[int, tuple[object, int, AutoDecoder]] = {}
"""By the model's id: the tokenizer, the size of the weights, and the decoder made for them."""
_keeping = threading.Lock()


def plainly(*args: Any, **options: Any) -> Generator[GenerationResponse, None, None]:
    """The output of mlx-lm's own ``stream_generate``, as responses of plain decoding."""
    for count, response in enumerate(stream_generate_plainly(*args, **options), start=1):
        stats = SpeculationStats(steps=count, rows=count, emitted=count)
        yield GenerationResponse(**vars(response), stats=stats)


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
    completion_batch_size: int = 32,
    prefill_batch_size: int = 8,
    prompt_progress_callback: Progress | None = None,
    stream: Any = None,
    **options: Unpack[GenerationOptions],
) -> BatchResponse:
    """Answer several prompts at once, with speculation.

    The prompts' sequences share each forward, or take turns if the model does not allow that. Draft
    rows go to the sequences whose drafts are likeliest to be right, as long as these rows gain more
    than they cost the others (:mod:`mlxspec.drafting.planner`).

    Args:
        model, tokenizer: from :func:`mlxspec.load` or ``mlx_lm.load``.
        prompts: token ids, texts, or messages, as for :meth:`mlxspec.Decoder.stream`.
        prompt_caches: for each prompt, mlx-lm's caches of the text before it; they are not changed.
        max_tokens: the most tokens to generate: one number for all prompts, or one for each.
        verbose: print figures at the end, but no progress.
        return_prompt_caches: return caches that hold each prompt and its answer.
        return_token_ids: return the answers' tokens, without end tokens.
        return_logprobs: return the log-probability of each token of the answers.
        completion_batch_size: the most prompts that are answered at once.
        prefill_batch_size, stream: ignored; they do not change the answers.
        prompt_progress_callback: called with the number of tokens processed and the total, both
            over all prompts.
        options: for all prompts, as for :func:`mlxspec.stream_generate`. When the context exceeds
            ``max_kv_size``, the first 4 positions are kept, unlike in mlx-lm's batches.

    Raises:
        PromptError, FileError, OptionError: as for :func:`mlxspec.stream_generate`. A wrong prompt
            is refused before any prompt is answered.
        TypeError: an option does not exist.
    """
    of_all = {"on_progress": "prompt_progress_callback", "prompt_cache": "prompt_caches"}
    for name in of_all.keys() & options:
        raise OptionError(f"{name} is for one prompt: pass {of_all[name]}")
    decoder = decoder_of(model, tokenizer)
    budgets = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    given = [None] * len(prompts) if prompt_caches is None else prompt_caches
    for name, values in (("max_tokens", budgets), ("prompt_caches", given)):
        if len(values) != len(prompts):
            raise OptionError(f"{name}: {len(values)} for {len(prompts)} prompts; give one each")
    caches = [copy.deepcopy(cache) for cache in given]
    if return_prompt_caches:
        size = options.get("max_kv_size")
        caches = [cache or make_prompt_cache(model, size) for cache in caches]
    results = [GenerationResult(logprobs=[] if return_logprobs else None) for _ in prompts]
    lengths, done = list[int](), [0] * len(prompts)

    def report(index: int, tokens: int, total: int) -> None:
        # The first step runs a prompt's last token; it counts as done when the prefill ends.
        done[index] = tokens if tokens < total else lengths[index]
        if prompt_progress_callback:
            prompt_progress_callback(sum(done), sum(lengths))

    requests = []
    for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        request_options: GenerationOptions = {
            **options,
            "prompt_cache": caches[index],
            "on_progress": partial(report, index),
        }
        request = decoder.new_request(prompt, budget, request_options, receive=results[index].add)
        requests.append(request)
        lengths.append(len(request.prompt))
    stats = _run(decoder, requests, results, completion_batch_size, verbose)
    logprobs = [[entry.logprob for entry in (r.logprobs or [])[: len(r.tokens)]] for r in results]
    return BatchResponse(
        texts=[
            result.text if request.output.stop_string else decoder.tokenizer.decode(result.tokens)
            for request, result in zip(requests, results, strict=True)
        ],
        stats=stats,
        caches=caches if return_prompt_caches else None,
        token_ids=[result.tokens for result in results] if return_token_ids else None,
        logprobs=logprobs if return_logprobs else None,
    )


def _run(
    decoder: AutoDecoder,
    requests: Sequence[Request],
    results: Sequence[GenerationResult],
    max_active: int,
    verbose: bool,
) -> BatchStats:
    """Run the requests until all have their results; return the figures, printed if ``verbose``."""
    scheduler = Scheduler(decoder, max_active=max_active, stall=math.inf)
    started = time.perf_counter()
    scheduler.add(*requests)
    scheduler.run()
    for error in (request.error for request in requests if request.error):
        raise error
    stats = BatchStats(
        prompt_tokens=sum(result.prompt_tokens for result in results),
        prompt_time=scheduler.prefill_seconds,
        generation_tokens=sum(len(result.tokens) for result in results),
        generation_steps=scheduler.steps,
        wall_time=time.perf_counter() - started,
        peak_memory=max((result.peak_memory for result in results), default=0.0),
    )
    stats.decode_time = stats.generation_time
    if verbose:
        sums = sum((result.stats for result in results), SpeculationStats())
        _show_figures(stats, f"{sums.accepted} of {sums.drafted}", "[batch_generate] ")
    for request, result in zip(requests, results, strict=True):
        if result.tokens[-1] in request.stop_tokens:  # mlx-lm does not return it
            result.tokens.pop()
    return stats


# --- augment ---

_mlx_lm = import_module("mlx_lm.generate")  # mlx_lm.generate is a function
_its_load = _mlx_lm.load  # the original, even after it is replaced
_PACKAGE = __name__.partition(".")[0]

_active: list[Augmentation] = []
_warned: set[str] = set()


def augment() -> Augmentation:
    """Make mlx-lm's ``generate``, ``stream_generate`` and ``batch_generate`` speculate.

    The functions are replaced in all imported modules, whatever their names there, and in mlx-lm
    itself for modules that are imported later. Their output stays the same. ``load`` also accepts
    "demo", the bundled model. If mlxspec does not support a call's arguments or model, mlx-lm's own
    function runs instead, and a warning says why, once for each reason.

    References outside modules (in a class, in ``partial``) are not replaced, nor are
    ``generate_step`` and ``BatchGenerator``. So ``mlx_lm.server`` only speculates for requests that
    it does not batch: requests with a seed, ``--kv-bits`` or a draft model, and all requests to a
    model whose caches cannot be batched.

    Returns:
        a handle that undoes the replacement; it is also a context manager. After several calls of
        :func:`augment`, mlx-lm's functions are restored once every handle has been undone.
    """
    handle = Augmentation()
    if not _active:
        _exchange(_STAND_INS)
    _active.append(handle)
    return handle


class Augmentation(AbstractContextManager["Augmentation"]):
    """A handle to undo :func:`augment`."""

    def undo(self) -> None:
        """Restore mlx-lm's functions, unless another augmentation is still active."""
        if self in _active:
            _active.remove(self)
            if not _active:
                _exchange({ours: theirs for theirs, ours in _STAND_INS.items()})

    def __exit__(self, *_: object) -> None:
        self.undo()


def _exchange(replacements: Mapping[Any, Any]) -> None:
    """Replace functions in all modules except mlxspec's own."""
    by_identity = {id(old): new for old, new in replacements.items()}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == _PACKAGE:
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in by_identity:
                setattr(module, name, by_identity[id(value)])


@wraps(_mlx_lm.stream_generate)
def _stream_generate(*args: Any, **options: Any) -> Generator[GenerationResponse, None, None]:
    responses = None
    with _warned_if_it_fails():
        responses = stream_generate(*args, **options)
    yield from responses or plainly(*args, **options)


@wraps(_mlx_lm.generate)
def _generate(
    model: Any, tokenizer: Any, prompt: Any, verbose: bool = False, **options: Any
) -> str:
    return joined(_stream_generate(model, tokenizer, prompt, **options), verbose)


@wraps(_mlx_lm.batch_generate)
def _batch_generate(*args: Any, **options: Any) -> Any:
    response = None
    with _warned_if_it_fails():
        response = batch_generate(*args, **options)
    return response or generate_in_batch(*args, **options)


@wraps(_its_load)
def _load(path_or_hf_repo: str, *args: Any, **options: Any) -> Any:
    is_demo = path_or_hf_repo == DEMO and not Path(DEMO).is_dir()
    return (load if is_demo else _its_load)(path_or_hf_repo, *args, **options)


_STAND_INS = {
    _its_load: _load,
    _mlx_lm.stream_generate: _stream_generate,
    _mlx_lm.generate: _generate,
    _mlx_lm.batch_generate: _batch_generate,
}


@contextmanager
def _warned_if_it_fails() -> Iterator[None]:
    """Turn an error into a warning, once for each reason. The caller then calls mlx-lm instead."""
    try:
        if mx.distributed.init().size() > 1:
            raise OptionError("the model is split over several machines: use mlxspec generate")
        yield
    except Exception as error:  # mlx-lm may support the model or argument that caused it
        reason = one_line(error) or type(error).__name__
        kind = re.sub(r"\d+", "#", reason)
        if kind not in _warned:
            _warned.add(kind)
            warnings.warn(f"mlx-lm generates without speculation: {reason}", stacklevel=2)
